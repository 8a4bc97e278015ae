// Decode attention over slots, compiled once for each instruction set (WINDLASS_SET).
//
// A piece of work is a range of slots of one row, with all its heads, so that a block of the sin and
// cos table is read once for all of them. Per block of slots and kv head: rotate the keys, multiply
// them with the queries that share them, update the running softmax, add the values. The partial
// results of the pieces are joined at the end, and masses are computed from the stored logits.
// Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867). Splitting over keys: FlashDecoding, Dao et
// al. 2023.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

#include "mask_block.hpp"
#include "products.hpp"
#include "online_softmax.hpp"
#include "rotate.hpp"
#include "turned_keys.hpp"
#include "narrow.hpp"
#include "float_tiles.hpp"
#include "tiles.hpp"
#include "value_digits.hpp"
#include "mean_key_cosine.hpp"
#include "encode.hpp"
#include "value_sums.hpp"

// Buffers of one thread.
struct ThreadBuffers {
    float *rotated, *near, *far, *tables, *far_tables;
    float *steady, *bases, *turned;  // rows of the tables for slots that follow each other, and queries rotated for these
    bool has_steady;                 // whether all slots of the block do
    std::uint32_t *tiles;            // of a block's keys, then of its values: pairs of bfloat16, or float32
};

template <Format F>
class Kernel {
  public:
    Kernel(const Attend &call, const Scratch &sizes, float *scratch, int threads)
        : call(call), sizes(sizes), sums(call, sizes.partial_width) {
        queries = scratch;
        unrounded = queries + sizes.queries;
        turned = unrounded + sizes.unrounded;
        partials = turned + sizes.turned;
        totals = partials + sizes.partials;
        logits = totals + sizes.summed;
        buffers = logits + sizes.logits;
        tiles = buffers + sizes.keys_rotated + sizes.probabilities + sizes.tables;
        rotated_size = sizes.keys_rotated / threads;
        logits_size = sizes.probabilities / threads / 2;
        tables_size = sizes.tables / threads;
        turned_size = sizes.turned / threads;
        tiles_size = sizes.tiles / threads;
        is_narrow = has_narrow_keys(), is_laid = has_laid_tables();
        is_steady = (is_laid || has_turned_keys()) && call.has_steady_keys() && !call.query_gain;
    }

    void run(int threads) {
        const int splits = pieces(call), parts = call.has_many_queries() ? call.kv_heads : 1, items = call.batch * splits * parts;
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int i = 0; i < call.batch * call.heads; ++i) rotate_queries(i / call.heads, i % call.heads);
            const ThreadBuffers own = buffers_of(thread());
            for (int i = 0; is_steady && i < STEADY; ++i)
                lay_row<F>(i, call.pairs, call.cos, call.sin, own.steady + i * 2 * call.pairs);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < items; ++i) {
                const int part = i % parts, heads = call.kv_heads / parts;
                attend_piece(i / parts / splits, i / parts % splits, part * heads, heads, buffers_of(thread()));
            }
#pragma omp for schedule(static)
            for (int i = 0; i < call.batch * call.heads; ++i) join(i / call.heads, i % call.heads);
            if (call.has_mass()) {
#pragma omp for schedule(static)
                for (int i = 0; i < call.batch * call.kv_heads; ++i)
                    weigh(i / call.kv_heads, i % call.kv_heads);
            }
        }
    }

  private:
    const Attend &call;
    const Scratch &sizes;
    ValueSums<F> sums;
    float *queries, *unrounded, *turned, *partials, *totals, *logits, *buffers, *tiles;
    std::size_t rotated_size, logits_size, tables_size, turned_size, tiles_size;
    bool is_narrow, is_laid, is_steady;

    static constexpr float UNWRITTEN = -1;  // in place of the sum of a piece whose slots are all free

    static int thread() { return omp_get_thread_num(); }

    ThreadBuffers buffers_of(int thread_number) const {
        float *start = buffers + thread_number * (rotated_size + 2 * logits_size + tables_size);
        float *near = start + rotated_size, *tables = near + 2 * logits_size;
        const std::size_t row = 2 * call.pairs;
        float *far_tables = tables + BLOCK * row, *steady = far_tables + BLOCK * row;
        return {start, near, near + logits_size, tables, far_tables, steady, steady + STEADY * row, turned + thread_number * turned_size, false,
                (std::uint32_t *)(tiles + thread_number * tiles_size)};
    }
    std::size_t query_at(int row, int head, bool is_far) const {
        return ((std::size_t(row) * (call.has_far() ? 2 : 1) + is_far) * call.heads + head) * call.tokens *
               sizes.key_width;
    }
    float *unrounded_at(int row, int head) const {
        return unrounded + (std::size_t(row) * call.heads + head) * call.tokens * sizes.key_width;
    }
    float *partial_of(int row, int split, int head) const {
        return partials + ((std::size_t(row) * pieces(call) + split) * call.heads + head) *
                              call.tokens * sizes.partial_width;
    }
    int score_head_of(int kv_head) const { return call.score_heads == 1 ? 0 : kv_head; }

    void rotate_queries(int row, int head) {
        const std::int64_t *strides = call.query_strides;
        const std::int64_t bytes = call.float_format == Format::float32 ? 4 : 2;
        const int score_head = score_head_of(head / call.group());
        for (int is_far = 0; is_far <= int(call.has_far()); ++is_far) {
            const Branch &branch = is_far ? call.far : call.near;
            for (int t = 0; t < call.tokens; ++t) {
                const std::uint8_t *from =
                    call.queries + bytes * (row * strides[0] + head * strides[1] + t * strides[2]);
                float *to = queries + query_at(row, head, is_far) + t * sizes.key_width;
                read_row(call.float_format, from, call.keys.channels, to);
                for (int i = 0; i < call.keys.channels; ++i) to[i] *= call.scale;
                for (std::size_t i = call.keys.channels; i < sizes.key_width; ++i) to[i] = 0;
                if (branch.keys) rotate_query(branch, row, score_head, t, to);
                for (int i = 0; call.query_gain && i < call.keys.channels; ++i) to[i] *= call.query_gain[i];
                if (is_steady && !is_far) {
                    float *unturned = unrounded_at(row, head) + t * sizes.key_width;
                    __builtin_memcpy(unturned, to, sizes.key_width * 4);
                    if (F == Format::bfloat16) part_row(unturned, 2 * call.pairs);
                }
#if defined(__AVX512BF16__)
                if (is_laid && F == Format::bfloat16) part_row(to, 2 * call.pairs);
                if (is_narrow)  // in place: they take half the room
                    for (std::size_t i = 0; i < sizes.key_width; i += 16)
                        store_half((std::uint16_t *)to + i, load<Floats>(to + i));
                if (is_narrow)  // keys are padded to whole vectors, and their zeros must meet finite numbers
                    for (std::size_t i = sizes.key_width; i < narrow_width(call.keys.channels); ++i) ((std::uint16_t *)to)[i] = 0;
#endif
            }
        }
    }

    void rotate_query(const Branch &branch, int row, int score_head, int token, float *to) const {
        const std::int64_t at =
            branch.queries[(std::int64_t(row) * call.score_heads + score_head) * call.row_tokens + token];
        const float *cos = call.cos + at * call.pairs, *sin = call.sin + at * call.pairs;
        for (int i = 0; i < call.pairs; ++i) {
            const float a = to[i], b = to[i + call.pairs];
            to[i] = a * cos[i] - b * sin[i];
            to[i + call.pairs] = b * cos[i] + a * sin[i];
        }
    }

    // Of so many kv heads from `first` on.
    void attend_piece(int row, int split, int first, int heads, ThreadBuffers buffers) {
        const std::size_t states = std::size_t(heads) * call.group() * call.tokens;
        float *states_of = partial_of(row, split, first * call.group());
        for (std::size_t i = 0; i < states; ++i) states_of[i * sizes.partial_width] = HIDDEN, states_of[i * sizes.partial_width + 1] = UNWRITTEN;
        bool is_written = false;
        const int slots = call.has_mass() ? call.slots : std::min(call.used, call.slots);  // each slot has a mass
        const int start = split * piece(call), end = std::min(start + piece(call), slots);
        BlockMask mask;
        for (int at = start; at < end; at += BLOCK) {
            const int count = at + BLOCK < end ? BLOCK : end - at;
            for (int head = first; head < first + heads; ++head) {
                if (head == first || call.score_heads > 1) {
                    mask_block(call, row, score_head_of(head), at, count, mask);
                    if (!mask.is_empty) lay_block(row, head, at, count, buffers);
                }
                if (!mask.is_empty && !is_written) {
                    for (std::size_t i = 0; i < states; ++i) std::fill_n(states_of + i * sizes.partial_width + 1, sizes.partial_width - 1, 0.0f);
                    is_written = true;
                }
                attend_block(row, head, split, at, count, mask, buffers);
            }
        }
    }

    // Lays out the tables by which all heads rotate a block, its keys or the queries back.
    void lay_block(int row, int head, int at, int count, ThreadBuffers &buffers) const {
        buffers.has_steady = is_steady && follows(row, head, at, count);
        if (buffers.has_steady) lay_bases(row, head, at, count, buffers);
        else if (is_laid) lay_tables(call.near, row, head, at, count, buffers.tables);
        if (is_laid && call.has_far()) lay_tables(call.far, row, head, at, count, buffers.far_tables);
    }
    void lay_tables(const Branch &branch, int row, int head, int at, int count, float *out) const {
        const std::int32_t *positions = rotary_positions(branch, row, head, at);
        for (int j = 0; j < count; ++j)
            lay_row<F>(positions[j], call.pairs, call.cos, call.sin, out + j * 2 * call.pairs);
    }
    // Whether slots are at positions that follow each other, STEADY of them at least.
    bool follows(int row, int head, int at, int count) const {
        const std::int32_t *positions = rotary_positions(call.near, row, head, at);
        std::int32_t others = 0;
        for (int from = 0; from < count; from += STEADY)
            for (int j = from, end = std::min(from + STEADY, count); j < end; ++j) others |= positions[j] ^ (positions[from] + j - from);
        return others == 0;
    }
    // The rows of the tables by which queries are rotated back for every STEADY slots. Their first row has the scale of the
    // tables, which counts once.
    void lay_bases(int row, int head, int at, int count, ThreadBuffers buffers) const {
        const std::int32_t *positions = rotary_positions(call.near, row, head, at);
        for (int j = 0; j < count; j += STEADY) {
            float *base = buffers.bases + j / STEADY * 2 * call.pairs;
            lay_row<F>(positions[j], call.pairs, call.cos, call.sin, base);
            for (int i = 0; i < call.pairs; i += LAID)
                for (int lane = 0; lane < LAID; lane += LANES) {
                    const Floats scale = load<Floats>(buffers.steady + 2 * i + lane);
                    for (float *half : {base + 2 * i + lane, base + 2 * i + LAID + lane}) store(half, load<Floats>(half) / scale);
                }
        }
    }

    float *logits_at(int row, int kv_head, int shared, int at) const {
        const std::size_t index =
            (std::size_t(row) * call.kv_heads + kv_head) * call.group() * call.tokens + shared;
        return call.has_mass() ? logits + index * sizes.slot_width + at : nullptr;
    }

    void attend_block(int row, int head, int split, int at, int count, const BlockMask &mask,
                      ThreadBuffers buffers) {
        const int shared = call.group() * call.tokens;
        if (mask.is_empty) {
            for (int q = 0; q < shared && call.has_mass(); ++q)
                for (int j = 0; j < count; ++j) logits_at(row, head, q, at)[j] = HIDDEN;
            return;
        }
        const std::size_t place = (std::size_t(row) * call.kv_heads + head) * call.slots + at;
        // The next read: this block of the next head, or the next block of the first head.
        const std::ptrdiff_t ahead = call.has_many_queries()     ? BLOCK
                                     : head + 1 < call.kv_heads ? call.slots
                                                                 : BLOCK - std::ptrdiff_t(head) * call.slots;
        const bool is_tiled = has_tiles(), has_far = !is_tiled && multiply_runs(row, head, at, place, count, mask, ahead, buffers);
#if defined(__AVX512BF16__)
        if (is_tiled) multiply_tiles(row, head, at, place, count, mask, buffers);
#endif
        float *states = partial_of(row, split, head * call.group());
        float padded_counts[BLOCK] = {};
        if (call.log_counts) {
            const float *counts = call.log_counts +
                                  (std::size_t(row) * call.score_heads + score_head_of(head)) * call.slots +
                                  at;
            for (int j = 0; j < count; ++j) padded_counts[j] = counts[j];
        }
        for (int q = 0; q < shared; q += 4) {
            const int some = q + 4 < shared ? 4 : shared - q;
            float highest[4];
            for (int i = 0; i < some; ++i) {
                float *logits = buffers.near + (q + i) * BLOCK;
                highest[i] = finish_logits(call, mask, (q + i) % call.tokens, logits, has_far ? buffers.far + (q + i) * BLOCK : nullptr,
                                           call.log_counts ? padded_counts : nullptr);
                if (call.has_mass()) __builtin_memcpy(logits_at(row, head, q + i, at), logits, count * sizeof(float));
            }
            float *logits = buffers.near + q * BLOCK, *first = states + q * sizes.partial_width;
            const auto advance = [&](auto queries) { advance_softmax<queries.value>(highest, logits, first, sizes.partial_width, sizes.value_width); };
            if (some == 4) advance(std::integral_constant<int, 4>{});
            if (some == 3) advance(std::integral_constant<int, 3>{});
            if (some == 2) advance(std::integral_constant<int, 2>{});
            if (some == 1) advance(std::integral_constant<int, 1>{});
        }
#if defined(__AVX512BF16__)
        if (is_tiled) return add_tiles(place, count, mask, shared, buffers, states);
#endif
        if (call.has_many_queries() && !sums.is_narrow())
            return sums.add_tiles(row, head, place, count, mask, shared, buffers.near, states, (float *)buffers.tiles);
        sums.add(row, head, place, count, mask, shared, ahead, buffers.near, buffers.far, states);
    }

    // Products of a block's keys. Returns whether some count as far.
    bool multiply_runs(int row, int head, int at, std::size_t place, int count, const BlockMask &mask, std::ptrdiff_t ahead,
                       ThreadBuffers buffers) {
        const int shared = call.group() * call.tokens;
        bool has_far = false;
        // Runs of parts that are seen alike.
        for (int part = 0, next = 0; part < BLOCK / LANES; part = next) {
            const bool is_seen = mask.is_seen[part], is_near = is_seen && (mask.has_near[part] || !call.has_far()),
                       is_far = is_seen && mask.has_far[part];
            const auto is_alike = [&](int other) {
                return mask.is_seen[other] == is_seen && mask.has_near[other] == mask.has_near[part] && mask.has_far[other] == mask.has_far[part];
            };
            for (next = part + 1; next < BLOCK / LANES && is_alike(next); ++next) {}
            const int first = part * LANES, keys = (next * LANES < count ? next * LANES : count) - first;
            if (is_near)
                multiply_run(call.near, row, head, at + first, place + first, keys, ahead, buffers, buffers.near + first);
            else
                for (int q = 0; q < shared; ++q)
                    for (int j = first; j < next * LANES; j += LANES) store(buffers.near + q * BLOCK + j, Floats{});
            if (!is_far) continue;
            has_far = true;
            multiply_run(call.far, row, head, at + first, place + first, keys, ahead, buffers, buffers.far + first);
        }
        return has_far;
    }

    // Whether keys are rounded to bfloat16 once they are rotated, as the queries are.
    bool has_narrow_keys() const {
#if defined(__AVX512BF16__)
        return (F == Format::bfloat16 || F == Format::int8 || F == Format::int4) &&
               call.float_format == Format::bfloat16 && call.keys.channels % 16 == 0 &&
               (!call.near.keys || call.pairs % 16 == 0);
#else
        return false;
#endif
    }
    // Whether these are rotated by tables that are laid out for all heads.
    bool has_laid_tables() const {
        const PackedStates &keys = call.keys;
        const int width = keys.channels;
        if (!has_narrow_keys() || !call.near.keys || call.pairs % 32 || width % 32) return false;
        if (F == Format::int4 && keys.group_bits != 4) return false;
        return F == Format::bfloat16 || (2 * call.pairs == width && keys.held == width && (width == 64 || width == 128));
    }
    // Whether keys of consecutive slots are multiplied as they are rotated, in float32. Products of two rows of the tables are
    // less exact than the row itself, which float32 stores would show.
    bool has_turned_keys() const {
        const PackedStates &keys = call.keys;
        const int width = keys.channels;
        return !is_narrow && F != Format::float32 && F != Format::int4 && call.near.keys && !keys.full_precision && 2 * call.pairs == width &&
               keys.held == width && (width == 64 || width == 128) && call.group() * call.tokens <= 4;
    }
    // Whether blocks are laid out in tiles that all queries read.
    bool has_tiles() const {
        return F == Format::bfloat16 && call.has_many_queries() && !call.has_far() && is_narrow && sums.is_narrow();
    }

    const std::int32_t *rotary_positions(const Branch &branch, int row, int head, int at) const {
        if (!branch.keys) return nullptr;
        return branch.keys + (std::int64_t(row) * call.score_heads + score_head_of(head)) * call.slots + at;
    }

    // Products of all queries that share a kv head with the keys of `count` slots, rotated.
    void multiply_run(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                      std::ptrdiff_t ahead, ThreadBuffers buffers, float *out) {
        const float *from = queries + query_at(row, head * call.group(), &branch == &call.far);
        const int shared = call.group() * call.tokens;
#if defined(__AVX512BF16__)
        if (is_narrow) return multiply_narrow_run(branch, row, head, at, place, count, ahead, buffers, (const std::uint16_t *)from, out);
#endif
        if constexpr (F != Format::float32 && F != Format::int4)
            if (buffers.has_steady && &branch == &call.near) return multiply_steady_run(row, head, at, place, count, ahead, buffers, out);
        constexpr int VECTORS = FloatTile::VECTORS;
        const int width = int(sizes.key_width);
        auto *tile = (float *)buffers.tiles;
        for (int first = 0, some; first < count; first += some * LANES) {
            some = call.has_many_queries() && count - first > (VECTORS - 1) * LANES ? VECTORS : 1;
            for (int v = 0; v < some; ++v) {
                const int j = first + v * LANES;
                rotate_keys(branch, row, head, at + j, place + j, std::min(LANES, count - j), ahead, buffers.rotated);
                if (call.has_many_queries()) lay_columns(buffers.rotated, sizes.key_width, width, some * LANES, tile + v * LANES);
            }
            if (!call.has_many_queries()) multiply_all(from, shared, buffers.rotated, width, out + first);
            else if (some == 1) multiply_tile<FloatTile, 1, false>(shared, from, width, tile, LANES, width, out + first, BLOCK);
            else multiply_tile<FloatTile, VECTORS, false>(shared, from, width, tile, FloatTile::COLUMNS, width, out + first, BLOCK);
        }
    }

    // The same of slots at positions that follow each other: the first rows of the tables rotate their keys.
    void multiply_steady_run(int row, int head, int at, std::size_t place, int count, std::ptrdiff_t ahead, ThreadBuffers buffers, float *out) const {
        const int shared = call.group() * call.tokens, first = at % BLOCK;
        const auto next = [&](const PackedStates &packed, int j) {
            return Ahead{packed.data + (std::ptrdiff_t(place) + j + ahead) * std::ptrdiff_t(packed.row_bytes), packed.row_bytes};
        };
        for (int j = 0, some; j < count; j += some) {  // as many as share a row
            const int lane = (first + j) % STEADY;
            some = std::min(STEADY - lane, count - j);
            turn_queries(row, head, (first + j) / STEADY, buffers);
            const auto multiply = [&](auto width, auto queries) {
                multiply_turned<F, width.value, queries.value>(call.keys, place + j, head, some, buffers.steady + lane * width.value,
                                                               buffers.turned, next(call.keys, j), next(call.values, j), out + j);
            };
            const auto multiply_queries = [&](auto width) {
                if (shared == 1) multiply(width, std::integral_constant<int, 1>{});
                if (shared == 2) multiply(width, std::integral_constant<int, 2>{});
                if (shared == 3) multiply(width, std::integral_constant<int, 3>{});
                if (shared == 4) multiply(width, std::integral_constant<int, 4>{});
            };
            if (call.keys.channels == 64) multiply_queries(std::integral_constant<int, 64>{});
            else multiply_queries(std::integral_constant<int, 128>{});
        }
    }
    // The queries of a kv head, rotated back by base number `base`, in bfloat16 where keys are.
    void turn_queries(int row, int head, int base, ThreadBuffers buffers) const {
        const float *from = unrounded_at(row, head * call.group()), *table = buffers.bases + base * 2 * call.pairs;
        for (int q = 0; q < call.group() * call.tokens; ++q, from += sizes.key_width) {
            float *to = buffers.turned + q * sizes.key_width;  // as wide as keys, which are rotated whole where they are not narrow
#if defined(__AVX512BF16__)
            if (is_narrow) {
                auto *out = (std::uint16_t *)to;
                turn_back(from, table, call.pairs, [&](int i, Floats a, Floats b) { _mm512_storeu_si512(out + i, rounded(a, b)); });
                for (std::size_t i = 2 * call.pairs; i < sizes.key_width; i += 16) store_half(out + i, load<Floats>(from + i));
                continue;
            }
#endif
            turn_back(from, table, call.pairs, [&](int i, Floats a, Floats b) { store(to + i, a), store(to + i + LANES, b); });
        }
    }

#if defined(__AVX512BF16__)
    void multiply_narrow_run(const Branch &branch, int row, int head, int at, std::size_t place, int count, std::ptrdiff_t ahead,
                             ThreadBuffers buffers, const std::uint16_t *from, float *out) const {
        const PackedStates &packed = call.keys, &values = call.values;
        const int channels = packed.channels, pairs = branch.keys ? call.pairs : 0;
        const std::size_t width = narrow_width(channels);
        const std::uint8_t *keys = packed.data + place * packed.row_bytes;
        const Next next{{values.data + place * values.row_bytes, values.row_bytes},
                        {keys + ahead * std::ptrdiff_t(packed.row_bytes), packed.row_bytes}};
        if (is_laid && !has_full_precision(packed, place, count)) {
            const bool is_far = &branch == &call.far, has_steady = buffers.has_steady && !is_far;
            const int first = at % BLOCK;
            if (!has_steady) {
                const float *tables = (is_far ? buffers.far_tables : buffers.tables) + first * 2 * pairs;
                return with_turned_keys(place, count, head, tables, [&](auto turned) { multiply_keys(turned, from, count, next, buffers, out); });
            }
            for (int j = 0, some; j < count; j += some) {  // as many as share a row
                const int lane = (first + j) % STEADY;
                some = STEADY - lane < count - j ? STEADY - lane : count - j;
                turn_queries(row, head, (first + j) / STEADY, buffers);
                with_turned_keys(place + j, some, head, buffers.steady + lane * 2 * pairs, [&](auto turned) {
                    multiply_keys(turned, (const std::uint16_t *)buffers.turned, some, next.from(j), buffers, out + j);
                });
            }
        } else if (F == Format::bfloat16 && !pairs && !packed.full_precision && channels % 32 == 0) {
            with_row_keys(keys, packed.row_bytes, width, 2 * sizes.key_width, [&](auto rows) { multiply_keys(rows, from, count, next, buffers, out); });
        } else {
            std::uint16_t *rows = (std::uint16_t *)buffers.rotated;
            for (int j = 0; j < count; j += 16) {
                rotate_rows(branch, row, head, at + j, place + j, j + 16 < count ? 16 : count - j, rows);
                with_row_keys((const std::uint8_t *)rows, 2 * width, width, 2 * sizes.key_width, [&](auto laid) { multiply_keys(laid, from, 16, next.from(j), buffers, out + j); });
            }
        }
    }

    // Products of all queries that share a kv head with a block's keys, in tiles.
    void multiply_tiles(int row, int head, int at, std::size_t place, int count, const BlockMask &mask, ThreadBuffers buffers) const {
        const int pairs = int(narrow_width(call.keys.channels) / 2);
        const auto *from = (const std::uint32_t *)(queries + query_at(row, head * call.group(), false));
        std::uint16_t *rows = (std::uint16_t *)buffers.rotated;
        for (int first = 0; first < count; first += COLUMNS) {
            if (!is_seen_in_tile(mask, first)) continue;
            for (int j = first; j < first + COLUMNS; j += 16) {
                const int some = std::clamp(count - j, 0, 16);
                const float *tables = buffers.tables + j * 2 * call.pairs;
                if (is_laid)
                    with_turned_keys(place + j, some, head, tables, [&](auto turned) { lay_rows(turned, some, rows); });
                else
                    rotate_rows(call.near, row, head, at + j, place + j, some, rows);
                lay_keys(rows, 2 * pairs, j - first, buffers.tiles);
            }
            multiply_tile<PairTile, 4, false>(call.group() * call.tokens, from, sizes.key_width, buffers.tiles, COLUMNS, pairs, buffers.near + first, BLOCK);
        }
    }
    // Adds a block's weighted values. Overwrites the weights.
    void add_tiles(std::size_t place, int count, const BlockMask &mask, int shared, ThreadBuffers buffers, float *states) const {
        const PackedStates &packed = call.values;
        const NarrowValues values{packed.data + place * packed.row_bytes, packed.row_bytes, packed.first, packed.held, count, mask.is_seen};
        for (int at = 0; at < shared * BLOCK; at += 32)  // in place: pairs take half the room
            store_narrow(buffers.near + at / 2, load<Floats>(buffers.near + at), load<Floats>(buffers.near + at + 16));
        for (int first = 0; first < count; first += COLUMNS) {
            if (!is_seen_in_tile(mask, first)) continue;
            const auto *weights = (const std::uint32_t *)buffers.near + first / 2;
            for (int i = 0; i < packed.channels; i += COLUMNS) {
                lay_values(values, first, i, packed.channels, buffers.tiles);
                float *sums = states + MAX_LANES + i;
                if (packed.channels - i >= COLUMNS)
                    multiply_tile<PairTile, 4, true>(shared, weights, BLOCK / 2, buffers.tiles, COLUMNS, COLUMNS / 2, sums, sizes.partial_width);
                else
                    multiply_tile<PairTile, 2, true>(shared, weights, BLOCK / 2, buffers.tiles, COLUMNS, COLUMNS / 2, sums, sizes.partial_width);
            }
        }
    }
    static bool is_seen_in_tile(const BlockMask &mask, int first) {
        bool is_seen = false;
        for (int part = first / LANES; part < (first + COLUMNS) / LANES; ++part) is_seen |= mask.is_seen[part];
        return is_seen;
    }

    static bool has_full_precision(const PackedStates &packed, std::size_t place, int count) {
        for (int j = 0; packed.full_precision && j < count; ++j)
            if (packed.ring_index[place + j] >= 0) return true;
        return false;
    }

    // `count` numbers of float16.
    static float *widened(const std::uint16_t *from, int count, float *to) {
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, Row<Format::float16>::lanes((const std::uint8_t *)(from + i), 0, 0));
        for (; i < count; ++i) to[i] = from_half(from[i]);
        return to;
    }

    template <class Use>
    void with_turned_keys(std::size_t place, int count, int head, const float *tables, Use use) const {
        if constexpr (F != Format::float32 && F != Format::float16) {
            const PackedStates &packed = call.keys;
            const std::uint8_t *rows = packed.data + place * packed.row_bytes;
            const std::uint16_t *held = packed.scales ? packed.scales + place * packed.slot_scales() : nullptr;
            const float *means = packed.means ? packed.means + std::size_t(head) * packed.held : nullptr;
            const int width = packed.channels;
            alignas(64) float wide[F == Format::int4 ? BLOCK * 16 : 1];  // pairs of all slots, 8 groups of 16 channels at most
            const auto scales = [&] {
                if constexpr (F == Format::int4) return (const float *)widened(held, count * int(packed.slot_scales()), wide);
                else return held;
            }();
            const bool is_whole = 2 * call.pairs == width && packed.held == width;
            if (is_whole && width == 64) return use(TurnedKeys<F, 64>{rows, packed.row_bytes, width, call.pairs, tables, scales, means});
            if (is_whole && width == 128) return use(TurnedKeys<F, 128>{rows, packed.row_bytes, width, call.pairs, tables, scales, means});
            if constexpr (F == Format::bfloat16) use(TurnedKeys<F, 0>{rows, packed.row_bytes, width, call.pairs, tables, scales, means});
        }
    }

    // Whole parts of keys are multiplied as they are read, if all queries are at once.
    template <class Keys>
    void multiply_keys(const Keys &keys, const std::uint16_t *from, int count, Next next, ThreadBuffers buffers, float *out) const {
        const int shared = call.group() * call.tokens;
        const std::size_t stride = 2 * sizes.key_width;
        const int whole = Keys::IS_TURNED && shared > 4 ? 0 : count / 16 * 16;
        if (whole) multiply_all_narrow(from, stride, shared, keys, whole, next, out);
        std::uint16_t *rows = (std::uint16_t *)buffers.rotated;
        for (int j = whole; j < count; j += 16) {
            lay_rows(keys.from(j), j + 16 < count ? 16 : count - j, rows);
            with_row_keys((const std::uint8_t *)rows, 2 * keys.width(), keys.width(), stride,
                          [&](auto laid) { multiply_all_narrow(from, stride, shared, laid, 16, next.from(j), out + j); });
        }
    }

    // Keys of any kind, rotated, in rows of bfloat16.
    void rotate_rows(const Branch &branch, int row, int head, int at, std::size_t place, int count, std::uint16_t *rows) const {
        const PackedStates &packed = call.keys;
        const int channels = packed.channels, pairs = branch.keys ? call.pairs : 0;
        const std::size_t width = narrow_width(channels);
        const std::int32_t *positions = rotary_positions(branch, row, head, at);
        for (int j = 0; j < count; ++j) {
            const std::int64_t angle = pairs ? std::int64_t(positions[j]) * pairs : 0;
            with_slot<F>(packed, std::size_t(row) * call.kv_heads + head, place + j, head, [&](auto slot) {
                rotate_narrow(slot, pairs, call.cos + angle, call.sin + angle, rows + j * width);
            });
            for (std::size_t i = channels; i < width; ++i) rows[j * width + i] = 0;
        }
        for (std::size_t i = count * width; i < 16 * width; i += 32) _mm512_storeu_si512(rows + i, __m512i{});
    }
#endif

    void rotate_keys(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                     std::ptrdiff_t ahead, float *out) {
        const int pairs = branch.keys ? call.pairs : 0;
        if (!call.keys.full_precision && 2 * pairs == call.keys.channels && pairs == 2 * LANES)
            rotate_keys<2>(branch, row, head, at, place, count, ahead, out);
        else if (!call.keys.full_precision && 2 * pairs == call.keys.channels && pairs == 4 * LANES)
            rotate_keys<4>(branch, row, head, at, place, count, ahead, out);
        else
            rotate_keys<0>(branch, row, head, at, place, count, ahead, out);
        if (count < LANES || call.keys.channels < int(sizes.key_width))
            for (int j = 0; j < LANES; ++j)
                for (std::size_t i = j < count ? call.keys.channels : 0; i < sizes.key_width; ++i)
                    out[j * sizes.key_width + i] = 0;
    }

    // VECTORS: number of vectors of pairs that fill the keys' channels if no key is held at full precision. 0: any
    // other case.
    template <int VECTORS>
    void rotate_keys(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                     std::ptrdiff_t ahead, float *out) {
        const std::int32_t *positions = rotary_positions(branch, row, head, at);
        const PackedStates packed = call.keys,
                           values = call.values;  // copies, which a store to `out` cannot change
        const float *table_cos = call.cos, *table_sin = call.sin;
        const int pairs = positions ? call.pairs : 0;
        const std::size_t width = sizes.key_width;
        for (int j = 0; j < count; ++j) {
            fetch(packed.data + (place + ahead + j) * packed.row_bytes, packed.row_bytes);
            fetch(values.data + (place + ahead + j) * values.row_bytes, values.row_bytes);
            const std::int64_t angle = positions ? std::int64_t(positions[j]) * pairs : 0;
            const float *cos = table_cos + angle, *sin = table_sin + angle;
            float *to = out + j * width;
            if constexpr (VECTORS > 0)
                rotate_vectors<VECTORS>(slot_of<F>(packed, place + j, head), cos, sin, to);
            else
                with_slot<F>(packed, std::size_t(row) * call.kv_heads + head, place + j, head,
                             [&](auto key) { rotate(key, pairs, cos, sin, to); });
        }
    }

    // The pieces of one head become its result. Its maximum and the inverse of its sum are kept for the masses.
    void join(int row, int head) {
        const int splits = pieces(call), channels = call.values.channels;
        for (int t = 0; t < call.tokens; ++t) {
            float top = call.sink_logits ? call.sink_logits[head] : HIDDEN, sum_exp = 0;
            for (int split = 0; split < splits; ++split) {
                const float highest = partial_of(row, split, head)[t * sizes.partial_width];
                top = highest > top ? highest : top;
            }
            float *first = partial_of(row, 0, head) + t * sizes.partial_width;
            if (first[1] == UNWRITTEN) std::fill_n(first + MAX_LANES, sizes.value_width, 0.0f);
            for (int split = 0; split < splits; ++split) {
                float *state = partial_of(row, split, head) + t * sizes.partial_width;
                if (state[1] == UNWRITTEN) continue;
                const float share = state[0] == HIDDEN ? 0.0f : std::exp(state[0] - top);
                sum_exp += share * state[1];
                float *sum = first + MAX_LANES;  // as many lanes as there is room for
                const float *some = state + MAX_LANES;
                for (std::size_t i = 0; i < sizes.value_width; i += LANES)
                    store(sum + i, (split ? load<Floats>(sum + i) : Floats{}) + share * load<Floats>(some + i));
            }
            if (const float *means = sums.means(head / call.group()))
                for (int i = 0; i < channels; ++i) first[MAX_LANES + i] += means[i] * sum_exp;
            if (call.sink_logits) sum_exp += std::exp(call.sink_logits[head] - top);
            const float inverse = sum_exp > 0 ? 1.0f / sum_exp : 0.0f;
            const std::int64_t at = ((std::int64_t(row) * call.row_tokens + t) * call.row_heads + head) * channels;
            for (int i = 0; i < channels; ++i) first[MAX_LANES + i] *= inverse;
            put_row(call.float_format, call.out + at * (call.float_format == Format::float32 ? 4 : 2), first + MAX_LANES, channels);
            float *total = totals + ((std::size_t(row) * call.heads + head) * call.tokens + t) * 2;
            total[0] = top, total[1] = inverse;
        }
    }

    void weigh(int row, int head) {
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        const std::int64_t *observed = call.observed + std::int64_t(row) * call.observations;
        bool is_observed[MAX_TOKENS] = {};
        for (int o = 0; o < call.observations; ++o) {
            float *out = call.mass_rows + (index * call.observations + o) * call.slots;
            for (int j = 0; j < call.slots; ++j) out[j] = 0;
            if (observed[o] < 0) continue;
            is_observed[observed[o]] = true;
            add_mass(row, head, int(observed[o]), out);
        }
        if (!call.mass_rest) return;
        float *rest = call.mass_rest + index * call.slots;
        for (int j = 0; j < call.slots; ++j) rest[j] = 0;
        for (int t = 0; t < call.tokens; ++t)
            if (!is_observed[t]) add_mass(row, head, t, rest);
    }

    void add_mass(int row, int head, int token, float *out) {
        for (int g = 0; g < call.group(); ++g) {
            const float *total =
                totals +
                ((std::size_t(row) * call.heads + head * call.group() + g) * call.tokens + token) * 2;
            if (total[0] == HIDDEN) continue;
            const float *from = logits_at(row, head, g * call.tokens + token, 0);
            int j = 0;
            for (; j + LANES <= call.slots; j += LANES)
                store(out + j,
                      load<Floats>(out + j) + exponential(load<Floats>(from + j) - total[0]) * total[1]);
            for (; j < call.slots; ++j)
                out[j] += from[j] == HIDDEN ? 0.0f : std::exp(from[j] - total[0]) * total[1];
        }
    }
};

}  // namespace

void attend(const Attend &call, float *scratch, int threads) {
    const auto run = [](const Attend &part, float *own, int team) {
        const Scratch sizes(part, team);
        with_format(part.format, [&](auto f) { Kernel<f.value>(part, sizes, own, team).run(team); });
    };
    if (!call.has_many_parts()) {
        for (int part = 0; part < call.parts(); ++part) run(call.part(part), scratch, threads);
        return;
    }
    const std::size_t size = part_scratch(call, 1);
    const int heads = call.batch * call.kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int i = call.parts() * heads - 1; i >= 0; --i) {  // the last part sees most
        const int head = i % heads;
        run(call.head(head / call.kv_heads, head % call.kv_heads).part(i / heads), scratch + omp_get_thread_num() * size, 1);
    }
}

void rotate(const Rotate &call, int threads) {
    with_format(call.format, [&](auto f) { rotate_slots<f.value>(call, threads); });
}

void encode(const Encode &call, int threads) { encode_rows(call, threads); }

void mean_key_cosine(const MeanKeyCosine &call, float *scratch, int threads) {
    with_format(call.format, [&](auto f) { MeanKeyCosineKernel<f.value>(call, scratch).run(threads); });
}

}  // namespace windlass::WINDLASS_SET
