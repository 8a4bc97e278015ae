// Decode attention over slots, compiled once for each instruction set (WINDLASS_SET).
//
// A piece of work is a range of slots of one row, with all its heads, so that a block of the sin and
// cos table is read once for all of them. Per block of slots and kv head: rotate the keys, multiply
// them with the queries that share them, update the running softmax, add the values. The partial
// results of the pieces are joined at the end, and masses follow from the logits that are kept.
// Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); splitting over keys,
// FlashDecoding, Dao et al. 2023.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

#include "mask_block.hpp"
#include "products.hpp"
#include "online_softmax.hpp"
#include "rotate.hpp"
#include "narrow.hpp"
#include "mean_key_cosine.hpp"
#include "encode.hpp"

// Buffers of one thread.
struct ThreadBuffers {
    float *rotated, *near, *far, *tables, *far_tables;
};

template <Format F>
class Kernel {
  public:
    Kernel(const Attend &call, const Scratch &sizes, float *scratch, int threads) : call(call), sizes(sizes) {
        queries = scratch;
        partials = queries + sizes.queries;
        totals = partials + sizes.partials;
        logits = totals + sizes.summed;
        buffers = logits + sizes.logits;
        rotated_size = sizes.keys_rotated / threads;
        logits_size = sizes.probabilities / threads / 2;
        tables_size = sizes.tables / threads;
        is_narrow = has_narrow_keys(), is_split = has_split_tables();
    }

    void run(int threads) {
        const int splits = pieces(call.slots), items = call.batch * splits;
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int i = 0; i < call.batch * call.heads; ++i) rotate_queries(i / call.heads, i % call.heads);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < items; ++i) attend_piece(i / splits, i % splits, buffers_of(thread()));
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
    float *queries, *partials, *totals, *logits, *buffers;
    std::size_t rotated_size, logits_size, tables_size;
    bool is_narrow, is_split;

    static int thread() { return omp_get_thread_num(); }

    ThreadBuffers buffers_of(int thread_number) const {
        float *start = buffers + thread_number * (rotated_size + 2 * logits_size + tables_size);
        float *near = start + rotated_size, *tables = near + 2 * logits_size;
        return {start, near, near + logits_size, tables, tables + tables_size / 2};
    }
    std::size_t query_at(int row, int head, bool is_far) const {
        return ((std::size_t(row) * (call.has_far() ? 2 : 1) + is_far) * call.heads + head) * call.tokens *
               sizes.key_width;
    }
    float *partial_of(int row, int split, int head) const {
        return partials + ((std::size_t(row) * pieces(call.slots) + split) * call.heads + head) *
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
                for (std::size_t i = 0; i < sizes.key_width; ++i)
                    to[i] =
                        int(i) < call.keys.channels ? number(call.float_format, from, i) * call.scale : 0.0f;
                if (branch.keys) rotate_query(branch, row, score_head, t, to);
                for (int i = 0; call.query_gain && i < call.keys.channels; ++i) to[i] *= call.query_gain[i];
#if defined(__AVX512BF16__)
                if (is_split) split_query(to, 2 * call.pairs);
                if (is_narrow)  // in place: they take half the room
                    for (std::size_t i = 0; i < sizes.key_width; i += 16)
                        store_half((std::uint16_t *)to + i, load<Floats>(to + i));
#endif
            }
        }
    }

    void rotate_query(const Branch &branch, int row, int score_head, int token, float *to) const {
        const std::int64_t at =
            branch.queries[(std::int64_t(row) * call.score_heads + score_head) * call.tokens + token];
        const float *cos = call.cos + at * call.pairs, *sin = call.sin + at * call.pairs;
        for (int i = 0; i < call.pairs; ++i) {
            const float a = to[i], b = to[i + call.pairs];
            to[i] = a * cos[i] - b * sin[i];
            to[i + call.pairs] = b * cos[i] + a * sin[i];
        }
    }

    void attend_piece(int row, int split, ThreadBuffers buffers) {
        const std::size_t states = std::size_t(call.heads) * call.tokens;
        float *states_of = partial_of(row, split, 0);
        for (std::size_t i = 0; i < states; ++i) {
            float *state = states_of + i * sizes.partial_width;
            for (std::size_t j = 0; j < sizes.partial_width; ++j) state[j] = 0;
            state[0] = HIDDEN;
        }
        const int start = split * piece(call.slots),
                  end = start + piece(call.slots) < call.slots ? start + piece(call.slots) : call.slots;
        BlockMask mask;
        for (int at = start; at < end; at += BLOCK) {
            const int count = at + BLOCK < end ? BLOCK : end - at;
            for (int head = 0; head < call.kv_heads; ++head) {
                if (head == 0 || call.score_heads > 1) {
                    mask_block(call, row, score_head_of(head), at, count, mask);
#if defined(__AVX512BF16__)
                    if (is_split) lay_tables(call.near, row, head, at, count, buffers.tables);
                    if (is_split && call.has_far()) lay_tables(call.far, row, head, at, count, buffers.far_tables);
#endif
                }
                attend_block(row, head, split, at, count, mask, buffers);
            }
        }
    }

#if defined(__AVX512BF16__)
    void lay_tables(const Branch &branch, int row, int head, int at, int count, float *out) const {
        split_tables(rotary_positions(branch, row, head, at), count, call.pairs, call.cos, call.sin, out);
    }
#endif

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
        // What comes next: this block of the next head, or the next block of the first.
        const std::ptrdiff_t ahead =
            head + 1 < call.kv_heads ? call.slots : BLOCK - std::ptrdiff_t(head) * call.slots;
        bool has_far = false;
        for (int part = 0; part < BLOCK / LANES; ++part) {
            const int first = part * LANES;
            if (!mask.is_seen[part]) {
                for (int q = 0; q < shared; ++q) store(buffers.near + q * BLOCK + first, Floats{});
                continue;
            }
            const int keys = first + LANES < count ? LANES : count - first;
            if (mask.has_near[part] || !call.has_far())
                multiply_part(call.near, row, head, at + first, place + first, keys, ahead, buffers,
                              buffers.near + first);
            else
                for (int q = 0; q < shared; ++q) store(buffers.near + q * BLOCK + first, Floats{});
            if (mask.has_far[part]) {
                has_far = true;
                multiply_part(call.far, row, head, at + first, place + first, keys, ahead, buffers,
                              buffers.far + first);
            }
        }
        float *states = partial_of(row, split, head * call.group());
        float padded_counts[BLOCK] = {};
        if (call.log_counts) {
            const float *counts = call.log_counts +
                                  (std::size_t(row) * call.score_heads + score_head_of(head)) * call.slots +
                                  at;
            for (int j = 0; j < count; ++j) padded_counts[j] = counts[j];
        }
        for (int q = 0; q < shared; ++q) {
            float *state = states + q * sizes.partial_width;
            online_softmax(call, mask, q % call.tokens, buffers.near + q * BLOCK,
                           has_far ? buffers.far + q * BLOCK : nullptr,
                           call.log_counts ? padded_counts : nullptr, state, state + MAX_LANES,
                           sizes.value_width, logits_at(row, head, q, at), count);
        }
        add_block(row, head, place, count, mask, shared, ahead, buffers, states);
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
    // Whether these are rotated by `lay_split`, once its tables are laid out for all heads.
    bool has_split_tables() const {
        return F == Format::bfloat16 && has_narrow_keys() && call.near.keys && !call.keys.full_precision &&
               call.pairs % 32 == 0 && call.keys.channels % 32 == 0;
    }
    // Whether values are added up as products in bfloat16.
    bool has_narrow_values() const {
#if defined(__AVX512BF16__)
        const PackedStates &values = call.values;
        const int whole = F == Format::int4 ? 64 : 32;  // the two halves of a row of int4 lie in one another
        return (F == Format::bfloat16 || F == Format::int8 || F == Format::int4) &&
               call.float_format == Format::bfloat16 && values.channels % 32 == 0 && values.held % whole == 0;
#else
        return false;
#endif
    }

    const std::int32_t *rotary_positions(const Branch &branch, int row, int head, int at) const {
        if (!branch.keys) return nullptr;
        return branch.keys + (std::int64_t(row) * call.score_heads + score_head_of(head)) * call.slots + at;
    }

    // Products of all queries that share a kv head with the keys of up to LANES slots, rotated.
    void multiply_part(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                       std::ptrdiff_t ahead, ThreadBuffers buffers, float *out) {
        const float *from = queries + query_at(row, head * call.group(), &branch == &call.far);
        const int shared = call.group() * call.tokens;
#if defined(__AVX512BF16__)
        if (is_narrow) {
            KeyTile *tiles = (KeyTile *)buffers.rotated;
            lay_keys(branch, row, head, at, place, count, ahead, buffers, tiles);
            return multiply_all_narrow((const std::uint16_t *)from, 2 * sizes.key_width, shared, tiles,
                                       narrow_width(call.keys.channels), out);
        }
#endif
        rotate_keys(branch, row, head, at, place, count, ahead, buffers.rotated);
        multiply_all(from, shared, buffers.rotated, int(sizes.key_width), out);
    }

#if defined(__AVX512BF16__)
    void lay_keys(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                  std::ptrdiff_t ahead, ThreadBuffers buffers, KeyTile *tiles) const {
        const PackedStates &packed = call.keys, &values = call.values;
        const int channels = packed.channels, pairs = branch.keys ? call.pairs : 0;
        const std::size_t width = narrow_width(channels);
        const std::uint8_t *first = packed.data + place * packed.row_bytes;
        const std::int32_t *positions = rotary_positions(branch, row, head, at);
        const bool is_whole = F != Format::bfloat16 && !packed.full_precision && 2 * pairs == channels;
        const Next next{{values.data + place * values.row_bytes, values.row_bytes},
                        {first + ahead * std::ptrdiff_t(packed.row_bytes), packed.row_bytes}};
        if (is_split) {
            const float *tables = (&branch == &call.far ? buffers.far_tables : buffers.tables) + at % BLOCK * 2 * pairs;
            lay_split(first, packed.row_bytes, count, pairs, tables, next, tiles);
            if (2 * pairs < channels)
                lay_rows(first + 4 * pairs, packed.row_bytes, count, channels - 2 * pairs, Next{}, tiles + pairs / 16);
        } else if (F == Format::bfloat16 && !pairs && !packed.full_precision && channels % 32 == 0) {
            lay_rows(first, packed.row_bytes, count, width, next, tiles);
        } else if (is_whole && pairs == 32) {
            lay_rotated<F, 32>(packed, place, head, positions, count, call.cos, call.sin, next, tiles);
        } else if (is_whole && pairs == 64) {
            lay_rotated<F, 64>(packed, place, head, positions, count, call.cos, call.sin, next, tiles);
        } else {
            std::uint16_t *rows = (std::uint16_t *)(tiles + width / 32);
            for (int j = 0; j < count; ++j) {
                const std::int64_t angle = pairs ? std::int64_t(positions[j]) * pairs : 0;
                with_slot<F>(packed, std::size_t(row) * call.kv_heads + head, place + j, head, [&](auto slot) {
                    rotate_narrow(slot, pairs, call.cos + angle, call.sin + angle, rows + j * width);
                });
                for (std::size_t i = channels; i < width; ++i) rows[j * width + i] = 0;
            }
            lay_rows((const std::uint8_t *)rows, 2 * width, count, width, next, tiles);
        }
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

    // VECTORS: as many vectors of pairs as fill the channels of keys of which none is held at full precision;
    // 0: any other case.
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

    void add_block(int row, int head, std::size_t place, int count, const BlockMask &mask, int shared,
                   std::ptrdiff_t ahead, ThreadBuffers buffers, float *states) {
        const PackedStates &packed = call.values;
        if (packed.full_precision) add_full_precision(row, head, place, count, shared, buffers, states);
        if (packed.scales)  // a value is code * scale: the codes are weighed by weight * scale
            weigh_scales(packed.scales + place, count, shared, buffers.near);
#if defined(__AVX512BF16__)
        if constexpr (F != Format::float32 && F != Format::float16)
            if (has_narrow_values()) {
                const PackedStates &keys = call.keys;
                const NarrowValues values{packed.data + place * packed.row_bytes, packed.row_bytes, packed.first,
                                          packed.held, count, mask.is_seen};
                const Ahead next{keys.data + (std::ptrdiff_t(place) + ahead) * keys.row_bytes, keys.row_bytes};
                return add_all_narrow<F>(buffers.near, shared, values, packed.channels, next, states + MAX_LANES,
                                         sizes.partial_width);
            }
#endif
        add_all_values<F>(buffers.near, shared, packed.data + place * packed.row_bytes, packed.row_bytes,
                          packed.first, packed.held, count, mask.is_seen, states + MAX_LANES, sizes.partial_width);
    }

    static void weigh_scales(const std::uint16_t *scales, int count, int shared, float *weights) {
        float wide[BLOCK] = {};
        for (int j = 0; j < count; ++j) wide[j] = from_half(scales[j]);
        for (int q = 0; q < shared; ++q)
            for (int j = 0; j < BLOCK; j += LANES)
                store(weights + q * BLOCK + j, load<Floats>(weights + q * BLOCK + j) * load<Floats>(wide + j));
    }

    // Of a head's values, those that are meant; null where all are 0.
    const float *value_means(int head) const {
        const PackedStates &packed = call.values;
        return packed.means ? packed.means + std::size_t(head) * packed.held + packed.first : nullptr;
    }

    // Adds the values that are held at full precision, without the mean that `join` adds to all, and sets their
    // weights to 0.
    void add_full_precision(int row, int head, std::size_t place, int count, int shared,
                            ThreadBuffers buffers, float *states) {
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        const float *means = value_means(head);
        for (int j = 0; j < count; ++j) {
            if (call.values.ring_entry(place + j) < 0) continue;
            with_slot<F>(call.values, index, place + j, head, [&](auto value) {
                for (int q = 0; q < shared; ++q) {
                    float &weight = buffers.near[q * BLOCK + j],
                          *sum = states + q * sizes.partial_width + MAX_LANES;
                    for (int i = 0; i < value.channels; ++i)
                        sum[i] += weight * (value.one(i) - (means ? means[i] : 0.0f));
                    weight = 0;
                }
            });
        }
    }

    // The pieces of one head become its result; its maximum and the inverse of its sum stay for the masses.
    void join(int row, int head) {
        const int splits = pieces(call.slots), channels = call.values.channels;
        for (int t = 0; t < call.tokens; ++t) {
            float top = call.sink_logits ? call.sink_logits[head] : HIDDEN, sum_exp = 0;
            for (int split = 0; split < splits; ++split) {
                const float highest = partial_of(row, split, head)[t * sizes.partial_width];
                top = highest > top ? highest : top;
            }
            float *first = partial_of(row, 0, head) + t * sizes.partial_width;
            for (int split = 0; split < splits; ++split) {
                float *state = partial_of(row, split, head) + t * sizes.partial_width;
                const float share = state[0] == HIDDEN ? 0.0f : std::exp(state[0] - top);
                sum_exp += share * state[1];
                for (int i = 0; i < channels; ++i) {
                    const float so_far = split ? first[MAX_LANES + i] : 0.0f;
                    first[MAX_LANES + i] = so_far + share * state[MAX_LANES + i];
                }
            }
            if (const float *means = value_means(head / call.group()))
                for (int i = 0; i < channels; ++i) first[MAX_LANES + i] += means[i] * sum_exp;
            if (call.sink_logits) sum_exp += std::exp(call.sink_logits[head] - top);
            const float inverse = sum_exp > 0 ? 1.0f / sum_exp : 0.0f;
            const std::int64_t at = ((std::int64_t(row) * call.tokens + t) * call.heads + head) * channels;
            for (int i = 0; i < channels; ++i)
                put(call.float_format, call.out, at + i, first[MAX_LANES + i] * inverse);
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

// Calls `use` with the format as a compile-time constant.
template <class Use>
void with_format(Format format, Use use) {
    switch (format) {
        case Format::float32:
            return use(std::integral_constant<Format, Format::float32>{});
        case Format::bfloat16:
            return use(std::integral_constant<Format, Format::bfloat16>{});
        case Format::float16:
            return use(std::integral_constant<Format, Format::float16>{});
        case Format::int8:
            return use(std::integral_constant<Format, Format::int8>{});
        case Format::int4:
            return use(std::integral_constant<Format, Format::int4>{});
    }
}

}  // namespace

void attend(const Attend &call, float *scratch, int threads) {
    const Scratch sizes(call, threads);
    with_format(call.format, [&](auto f) { Kernel<f.value>(call, sizes, scratch, threads).run(threads); });
}

void rotate(const Rotate &call, int threads) {
    with_format(call.format, [&](auto f) { rotate_slots<f.value>(call, threads); });
}

void encode(const Encode &call, int threads) { encode_rows(call, threads); }

void mean_key_cosine(const MeanKeyCosine &call, float *scratch, int threads) {
    with_format(call.format, [&](auto f) { MeanKeyCosineKernel<f.value>(call, scratch).run(threads); });
}

}  // namespace windlass::WINDLASS_SET
