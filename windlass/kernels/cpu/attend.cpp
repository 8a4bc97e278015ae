// Decode attention over slots, compiled once for each instruction set (WINDLASS_SET).
//
// A piece of work is a range of slots of one row, with all its heads, so that a block of the sin and
// cos table is read once for all of them. Per block of slots and kv head: turn the keys, multiply
// them with the queries that share them, update the running softmax, add the values. The partial
// results of the pieces are joined at the end, and masses follow from the logits kept.
// Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); splitting over keys,
// FlashDecoding, Dao et al. 2023.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

constexpr float NONE = -INFINITY;
constexpr int MOST_NARROW = 1024;  // channels of a key

// Which of a block's slots each query sees, and how.
struct Sight {
    float mask[MOST_TOKENS][BLOCK];         // 0, or -inf where hidden
    std::int32_t is_far[MOST_TOKENS][BLOCK];
    bool is_seen[BLOCK / LANES], has_near[BLOCK / LANES], has_far[BLOCK / LANES];
    bool is_empty;
};

void look(const Attend &call, int row, int rank, int start, int count, Sight &sight) {
    const std::int32_t *slots = call.slot_positions + (std::int64_t(row) * call.ranked + rank) * call.slots + start;
    std::int32_t held[BLOCK];
    for (int j = 0; j < BLOCK; ++j) held[j] = j < count ? slots[j] : -1;
    std::int32_t seen[BLOCK] = {}, near[BLOCK] = {}, far[BLOCK] = {};
    const std::int32_t near_window = call.has_far() ? call.near_window : INT32_MAX;
    for (int t = 0; t < call.tokens; ++t) {
        const std::int32_t query = std::int32_t(call.query_positions[std::int64_t(row) * call.tokens + t]);
        for (int j = 0; j < BLOCK; ++j) {
            const std::int32_t distance = query - held[j];
            const std::int32_t is_visible = (held[j] >= 0) & (distance >= 0) & (distance < call.sliding_window) &
                                            ((distance < call.reach) | (held[j] < call.sinks));
            const std::int32_t is_far = distance >= near_window;
            sight.mask[t][j] = is_visible ? 0.0f : NONE;
            sight.is_far[t][j] = is_far ? -1 : 0;
            seen[j] |= is_visible;
            near[j] |= is_visible & ~is_far;
            far[j] |= is_visible & is_far;
        }
    }
    sight.is_empty = true;
    for (int part = 0; part < BLOCK / LANES; ++part) {
        std::int32_t any = 0, any_near = 0, any_far = 0;
        for (int j = part * LANES; j < (part + 1) * LANES; ++j) any |= seen[j], any_near |= near[j], any_far |= far[j];
        sight.is_seen[part] = any != 0;
        sight.has_near[part] = (any_near & 1) != 0;
        sight.has_far[part] = any_far != 0;
        sight.is_empty &= any == 0;
    }
}

// The numbers of one slot, from channel i on.
template <Format F> struct Slot {
    const std::uint8_t *row;
    int channels;
    float scale;
    const float *centres;

    Floats lanes(int i) const {
        Floats v = Row<F>::lanes(row, i, channels);
        if constexpr (F == Format::int8 || F == Format::int4) v = centres ? v * scale + load<Floats>(centres + i) : v * scale;
        return v;
    }
    float one(int i) const {
        float x = Row<F>::one(row, i, channels);
        if constexpr (F == Format::int8 || F == Format::int4) x = centres ? x * scale + centres[i] : x * scale;
        return x;
    }
};

template <Format F> inline Slot<F> slot_of(const Held &held, std::size_t place, int head) {
    return {held.codes + place * held.row_bytes, held.channels, held.scales ? from_half(held.scales[place]) : 1.0f,
            held.centres ? held.centres + std::size_t(head) * held.channels : nullptr};
}

template <Format F> inline Slot<F> exact_of(const Held &held, std::size_t index, int place) {
    const std::size_t bytes = held.channels * (F == Format::float32 ? 4 : 2);
    return {held.exact + (index * held.exact_places + place) * bytes, held.channels, 1.0f, nullptr};
}

// Calls `use` with the slot at `place`, of the row and head number `index`: its exact copy if it has one.
template <Format F, class Use> inline void with_slot(const Held &held, std::size_t index, std::size_t place, int head, Use use) {
    const int exact = held.place(place);
    if (exact < 0) return use(slot_of<F>(held, place, head));
    switch (held.exact_number) {
        case Format::bfloat16: return use(exact_of<Format::bfloat16>(held, index, exact));
        case Format::float16: return use(exact_of<Format::float16>(held, index, exact));
        default: return use(exact_of<Format::float32>(held, index, exact));
    }
}

// One slot's numbers as float32, each pair (i, i + pairs) turned by its angle.
template <class S> inline void turn(const S &slot, int pairs, const float *cos, const float *sin, float *out) {
    int i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        Floats a = slot.lanes(i), b = slot.lanes(i + pairs);
        Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        store(out + i, a * c - b * s);
        store(out + i + pairs, b * c + a * s);
    }
    for (; i < pairs; ++i) {
        float a = slot.one(i), b = slot.one(i + pairs);
        out[i] = a * cos[i] - b * sin[i];
        out[i + pairs] = b * cos[i] + a * sin[i];
    }
    for (i = 2 * pairs; i + LANES <= slot.channels; i += LANES) store(out + i, slot.lanes(i));
    for (; i < slot.channels; ++i) out[i] = slot.one(i);
}

#if defined(__AVX512BF16__)
// As `turn`, rounded to bfloat16: for each vector of pairs their first channels, then their second.
template <class S> inline void turn_narrow(const S &slot, int pairs, const float *cos, const float *sin, std::uint16_t *out) {
    for (int i = 0; i < pairs; i += LANES) {
        Floats a = slot.lanes(i), b = slot.lanes(i + pairs);
        Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        store_narrow(out + 2 * i, a * c - b * s, b * c + a * s);
    }
    for (int i = 2 * pairs; i < slot.channels; i += 2 * LANES)
        store_narrow(out + i, slot.lanes(i), slot.lanes(i + LANES));
}

// As `multiply`, of bfloat16 queries and keys in the order of `turn_narrow`.
template <int QUERIES>
void multiply_narrow(const std::uint16_t *queries, int stride, const std::uint16_t *keys, int width, float *out) {
    constexpr int KEYS = LANES / QUERIES;
    for (int first = 0; first < LANES; first += KEYS) {
        Floats products[LANES] = {};
        for (int i = 0; i < width; i += 2 * LANES) {
            __m512bh key[KEYS];
            for (int k = 0; k < KEYS; ++k) key[k] = load_narrow(keys + (first + k) * width + i);
            for (int q = 0; q < QUERIES; ++q) {
                const __m512bh query = load_narrow(queries + q * stride + i);
                for (int k = 0; k < KEYS; ++k) products[q * KEYS + k] = dot(products[q * KEYS + k], query, key[k]);
            }
        }
        Floats summed = sums(products);
        for (int q = 0; q < QUERIES; ++q) __builtin_memcpy(out + q * BLOCK + first, (float *)&summed + q * KEYS, KEYS * 4);
    }
}
void multiply_all_narrow(const std::uint16_t *queries, int stride, int count, const std::uint16_t *keys, int width, float *out) {
    int q = 0;
    for (; q + 4 <= count; q += 4) multiply_narrow<4>(queries + q * stride, stride, keys, width, out + q * BLOCK);
    for (; q + 2 <= count; q += 2) multiply_narrow<2>(queries + q * stride, stride, keys, width, out + q * BLOCK);
    for (; q < count; ++q) multiply_narrow<1>(queries + q * stride, stride, keys, width, out + q * BLOCK);
}

// As `add_values`, two slots at a time; weights are bfloat16 pairs.
template <int QUERIES, int VECTORS>
void add_narrow(const float *weights, const std::uint8_t *values, std::size_t row_bytes, int count,
                const bool *is_seen, int first, float *sum, std::size_t sum_stride) {
    Floats low[QUERIES][VECTORS], high[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) load_interleaved(sum + q * sum_stride + first + v * 32, low[q][v], high[q][v]);
    for (int j = 0; j < count; j += 2) {
        if (!is_seen[j / LANES]) continue;
        const std::uint8_t *row = values + j * row_bytes + 2 * first, *next = j + 1 < count ? row + row_bytes : row;
        __m512bh a[VECTORS], b[VECTORS];
        for (int v = 0; v < VECTORS; ++v) interleave(row + v * 64, next + v * 64, a[v], b[v]);
        for (int q = 0; q < QUERIES; ++q) {
            const __m512bh weight = (__m512bh)all(weights[q * BLOCK / 2 + j / 2]);
            for (int v = 0; v < VECTORS; ++v) {
                low[q][v] = dot(low[q][v], weight, a[v]);
                high[q][v] = dot(high[q][v], weight, b[v]);
            }
        }
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) store_interleaved(sum + q * sum_stride + first + v * 32, low[q][v], high[q][v]);
}
template <int QUERIES>
void add_narrow(const float *weights, const std::uint8_t *values, std::size_t row_bytes, int channels, int count,
                const bool *is_seen, float *sum, std::size_t sum_stride) {
    int i = 0;
    for (; i + 64 <= channels; i += 64) add_narrow<QUERIES, 2>(weights, values, row_bytes, count, is_seen, i, sum, sum_stride);
    for (; i < channels; i += 32) add_narrow<QUERIES, 1>(weights, values, row_bytes, count, is_seen, i, sum, sum_stride);
}
void add_all_narrow(float *weights, int queries, const std::uint8_t *values, std::size_t row_bytes, int channels,
                    int count, const bool *is_seen, float *sum, std::size_t sum_stride) {
    for (int at = 0; at < queries * BLOCK; at += 32)  // in place: pairs take half the room
        store_narrow(weights + at / 2, load<Floats>(weights + at), load<Floats>(weights + at + 16));
    int q = 0;
    for (; q + 4 <= queries; q += 4) add_narrow<4>(weights + q * BLOCK / 2, values, row_bytes, channels, count, is_seen, sum + q * sum_stride, sum_stride);
    for (; q + 2 <= queries; q += 2) add_narrow<2>(weights + q * BLOCK / 2, values, row_bytes, channels, count, is_seen, sum + q * sum_stride, sum_stride);
    for (; q < queries; ++q) add_narrow<1>(weights + q * BLOCK / 2, values, row_bytes, channels, count, is_seen, sum + q * sum_stride, sum_stride);
}
#endif

// Asks for a row that will be read soon: the heads of a block are too short for the CPU to see it coming.
inline void fetch(const std::uint8_t *row, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);  // as far as the second cache
}

// Products of QUERIES queries with LANES keys; the result of query q stands at out + q * BLOCK.
template <int QUERIES> void multiply(const float *queries, const float *keys, int width, float *out) {
    constexpr int KEYS = LANES / QUERIES;
    for (int first = 0; first < LANES; first += KEYS) {
        Floats products[LANES] = {};
        for (int i = 0; i < width; i += LANES) {
            Floats key[KEYS];
            for (int k = 0; k < KEYS; ++k) key[k] = load<Floats>(keys + (first + k) * width + i);
            for (int q = 0; q < QUERIES; ++q) {
                Floats query = load<Floats>(queries + q * width + i);
                for (int k = 0; k < KEYS; ++k) products[q * KEYS + k] += query * key[k];
            }
        }
        Floats summed = sums(products);
        for (int q = 0; q < QUERIES; ++q) __builtin_memcpy(out + q * BLOCK + first, (float *)&summed + q * KEYS, KEYS * 4);
    }
}
void multiply_all(const float *queries, int count, const float *keys, int width, float *out) {
    int q = 0;
    for (; q + 4 <= count; q += 4) multiply<4>(queries + q * width, keys, width, out + q * BLOCK);
    for (; q + 2 <= count; q += 2) multiply<2>(queries + q * width, keys, width, out + q * BLOCK);
    for (; q < count; ++q) multiply<1>(queries + q * width, keys, width, out + q * BLOCK);
}

// Adds to each query's sum the values of a block, weighted.
template <Format F, int QUERIES, int VECTORS>
void add_values(const float *weights, const std::uint8_t *values, std::size_t row_bytes, int channels, int count,
                const bool *is_seen, int first, float *sum, std::size_t sum_stride) {
    Floats sums_of[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) sums_of[q][v] = load<Floats>(sum + q * sum_stride + first + v * LANES);
    for (int start = 0; start < count; start += LANES) {
        if (!is_seen[start / LANES]) continue;
        const int end = start + LANES < count ? start + LANES : count;
        for (int j = start; j < end; ++j) {
            Floats value[VECTORS];
            for (int v = 0; v < VECTORS; ++v) value[v] = Row<F>::lanes(values + j * row_bytes, first + v * LANES, channels);
            for (int q = 0; q < QUERIES; ++q)
                for (int v = 0; v < VECTORS; ++v) sums_of[q][v] += weights[q * BLOCK + j] * value[v];
        }
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) store(sum + q * sum_stride + first + v * LANES, sums_of[q][v]);
}
template <Format F, int QUERIES>
void add_values(const float *weights, const std::uint8_t *values, std::size_t row_bytes, int channels, int count,
                const bool *is_seen, float *sum, std::size_t sum_stride) {
    constexpr int MOST = LANES == 16 ? 4 : 2;  // what the registers hold
    int i = 0;
    for (; i + MOST * LANES <= channels; i += MOST * LANES)
        add_values<F, QUERIES, MOST>(weights, values, row_bytes, channels, count, is_seen, i, sum, sum_stride);
    for (; i + LANES <= channels; i += LANES)
        add_values<F, QUERIES, 1>(weights, values, row_bytes, channels, count, is_seen, i, sum, sum_stride);
    for (; i < channels; ++i)
        for (int q = 0; q < QUERIES; ++q) {
            float total = 0;
            for (int j = 0; j < count; ++j)
                if (is_seen[j / LANES]) total += weights[q * BLOCK + j] * Row<F>::one(values + j * row_bytes, i, channels);
            sum[q * sum_stride + i] += total;
        }
}
template <Format F>
void add_all_values(const float *weights, int queries, const std::uint8_t *values, std::size_t row_bytes, int channels,
                    int count, const bool *is_seen, float *sum, std::size_t sum_stride) {
    int q = 0;
    for (; q + 4 <= queries; q += 4)
        add_values<F, 4>(weights + q * BLOCK, values, row_bytes, channels, count, is_seen, sum + q * sum_stride, sum_stride);
    for (; q + 2 <= queries; q += 2)
        add_values<F, 2>(weights + q * BLOCK, values, row_bytes, channels, count, is_seen, sum + q * sum_stride, sum_stride);
    for (; q < queries; ++q)
        add_values<F, 1>(weights + q * BLOCK, values, row_bytes, channels, count, is_seen, sum + q * sum_stride, sum_stride);
}

Floats capped(Floats x, float cap) {
    Floats scaled = x * (1.0f / cap), size = scaled > 0.0f ? scaled : -scaled;
    Floats e = exponential(size * -2.0f), t = (1.0f - e) / (1.0f + e) * cap;
    return scaled > 0.0f ? t : -t;
}

// The logits of one query over a block become weights, relative to the running maximum in state[0];
// state[1] is the running sum, `sum` the running weighted values.
void soften(const Attend &call, const Sight &sight, int token, float *logits, const float *far, const float *counts,
            float *state, float *sum, std::size_t width, float *kept, int count) {
    Floats top = all(NONE);
    for (int j = 0; j < BLOCK; j += LANES) {
        Floats x = load<Floats>(logits + j);
        if (far) x = load<Ints>(sight.is_far[token] + j) ? load<Floats>(far + j) : x;
        if (call.softcap > 0) x = capped(x, call.softcap);
        if (counts) x += load<Floats>(counts + j);
        Floats mask = load<Floats>(sight.mask[token] + j);
        x = mask == 0.0f ? x : mask;
        store(logits + j, x);
        top = larger(x, top);
    }
    if (kept) __builtin_memcpy(kept, logits, count * sizeof(float));
    const float highest = top_of(top);
    if (highest == NONE) {
        for (int j = 0; j < BLOCK; ++j) logits[j] = 0;
        return;
    }
    if (highest > state[0]) {
        const float shrink = state[0] == NONE ? 0.0f : std::exp(state[0] - highest);
        state[0] = highest;
        state[1] *= shrink;
        for (std::size_t i = 0; i < width; i += LANES) store(sum + i, load<Floats>(sum + i) * shrink);
    }
    Floats total{};
    for (int j = 0; j < BLOCK; j += LANES) {
        Floats weight = exponential(load<Floats>(logits + j) - state[0]);
        store(logits + j, weight);
        total += weight;
    }
    state[1] += sum_of(total);
}

// Buffers of one thread.
struct Own {
    float *turned, *near, *far;
};

// DOTS: multiply in bfloat16 pairs, where the model's own numbers are bfloat16.
template <Format F, bool DOTS> class Kernel {
  public:
    Kernel(const Attend &call, const Scratch &sizes, float *scratch, int threads) : call(call), sizes(sizes) {
        queries = scratch;
        partials = queries + sizes.queries;
        totals = partials + sizes.partials;
        logits = totals + sizes.summed;
        own = logits + sizes.logits;
        own_turned = sizes.keys_turned / threads;
        own_logits = sizes.probabilities / threads / 2;
    }

    void run(int threads) {
        const int splits = pieces(call.slots), items = call.batch * splits;
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int i = 0; i < call.batch * call.heads; ++i) turn_queries(i / call.heads, i % call.heads);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < items; ++i) attend_piece(i / splits, i % splits, own_of(thread()));
#pragma omp for schedule(static)
            for (int i = 0; i < call.batch * call.heads; ++i) join(i / call.heads, i % call.heads);
            if (call.has_mass()) {
#pragma omp for schedule(static)
                for (int i = 0; i < call.batch * call.kv_heads; ++i) weigh(i / call.kv_heads, i % call.kv_heads);
            }
        }
    }

  private:
    const Attend &call;
    const Scratch &sizes;
    float *queries, *partials, *totals, *logits, *own;
    std::size_t own_turned, own_logits;

    static int thread() { return omp_get_thread_num(); }

    Own own_of(int number) const {
        float *start = own + number * (own_turned + 2 * own_logits);
        return {start, start + own_turned, start + own_turned + own_logits};
    }
    std::size_t query_at(int row, int head, bool is_far) const {
        return ((std::size_t(row) * (call.has_far() ? 2 : 1) + is_far) * call.heads + head) * call.tokens * sizes.key_width;
    }
    float *partial_of(int row, int split, int head) const {
        return partials + ((std::size_t(row) * pieces(call.slots) + split) * call.heads + head) * call.tokens * sizes.partial_width;
    }
    int rank_of(int kv_head) const { return call.ranked == 1 ? 0 : kv_head; }

    void turn_queries(int row, int head) {
        const std::int64_t *strides = call.query_strides;
        const std::int64_t bytes = call.number == Format::float32 ? 4 : 2;
        const int rank = rank_of(head / call.group());
        for (int is_far = 0; is_far <= int(call.has_far()); ++is_far) {
            const Branch &branch = is_far ? call.far : call.near;
            for (int t = 0; t < call.tokens; ++t) {
                const std::uint8_t *from = call.queries + bytes * (row * strides[0] + head * strides[1] + t * strides[2]);
                float *to = queries + query_at(row, head, is_far) + t * sizes.key_width;
                for (std::size_t i = 0; i < sizes.key_width; ++i)
                    to[i] = int(i) < call.keys.channels ? number(call.number, from, i) * call.scale : 0.0f;
                if (branch.keys) turn_query(branch, row, rank, t, to);
                if constexpr (DOTS) narrow_query(branch.keys ? call.pairs : 0, to);
            }
        }
    }

    void turn_query(const Branch &branch, int row, int rank, int token, float *to) const {
        const std::int64_t at = branch.queries[(std::int64_t(row) * call.ranked + rank) * call.tokens + token];
        const float *cos = call.cos + at * call.pairs, *sin = call.sin + at * call.pairs;
        for (int i = 0; i < call.pairs; ++i) {
            const float a = to[i], b = to[i + call.pairs];
            to[i] = a * cos[i] - b * sin[i];
            to[i + call.pairs] = b * cos[i] + a * sin[i];
        }
    }

    // In place, to the order of `turn_narrow`; the second half of the room is left unused.
    void narrow_query(int pairs, float *query) const {
#if defined(__AVX512BF16__)
        alignas(64) std::uint16_t narrow[MOST_NARROW];
        for (int i = 0; i < pairs; i += LANES)
            store_narrow(narrow + 2 * i, load<Floats>(query + i), load<Floats>(query + i + pairs));
        for (int i = 2 * pairs; i < call.keys.channels; i += 2 * LANES)
            store_narrow(narrow + i, load<Floats>(query + i), load<Floats>(query + i + LANES));
        __builtin_memcpy(query, narrow, call.keys.channels * sizeof *narrow);
#endif
    }

    void attend_piece(int row, int split, Own mine) {
        const std::size_t states = std::size_t(call.heads) * call.tokens;
        float *states_of = partial_of(row, split, 0);
        for (std::size_t i = 0; i < states; ++i) {
            float *state = states_of + i * sizes.partial_width;
            for (std::size_t j = 0; j < sizes.partial_width; ++j) state[j] = 0;
            state[0] = NONE;
        }
        const int start = split * piece(call.slots), end = start + piece(call.slots) < call.slots ? start + piece(call.slots) : call.slots;
        Sight sight;
        for (int at = start; at < end; at += BLOCK) {
            const int count = at + BLOCK < end ? BLOCK : end - at;
            for (int head = 0; head < call.kv_heads; ++head) {
                if (head == 0 || call.ranked > 1) look(call, row, rank_of(head), at, count, sight);
                attend_block(row, head, split, at, count, sight, mine);
            }
        }
    }

    float *kept_logits(int row, int kv_head, int shared, int at) const {
        const std::size_t index = (std::size_t(row) * call.kv_heads + kv_head) * call.group() * call.tokens + shared;
        return call.has_mass() ? logits + index * sizes.slot_width + at : nullptr;
    }

    void attend_block(int row, int head, int split, int at, int count, const Sight &sight, Own mine) {
        const int shared = call.group() * call.tokens;
        if (sight.is_empty) {
            for (int q = 0; q < shared && call.has_mass(); ++q)
                for (int j = 0; j < count; ++j) kept_logits(row, head, q, at)[j] = NONE;
            return;
        }
        const std::size_t place = (std::size_t(row) * call.kv_heads + head) * call.slots + at;
        // What comes next: this block of the next head, or the next block of the first.
        const std::ptrdiff_t ahead = head + 1 < call.kv_heads ? call.slots : BLOCK - std::ptrdiff_t(head) * call.slots;
        bool has_far = false;
        for (int part = 0; part < BLOCK / LANES; ++part) {
            const int first = part * LANES;
            if (!sight.is_seen[part]) {
                for (int q = 0; q < shared; ++q) store(mine.near + q * BLOCK + first, Floats{});
                continue;
            }
            const int keys = first + LANES < count ? LANES : count - first;
            const int query_head = head * call.group();
            if (sight.has_near[part] || !call.has_far()) {
                turn_keys(call.near, row, head, at + first, place + first, keys, ahead, mine.turned);
                multiply_keys(row, query_head, false, mine.turned, mine.near + first);
            } else {
                for (int q = 0; q < shared; ++q) store(mine.near + q * BLOCK + first, Floats{});
            }
            if (sight.has_far[part]) {
                has_far = true;
                turn_keys(call.far, row, head, at + first, place + first, keys, ahead, mine.turned);
                multiply_keys(row, query_head, true, mine.turned, mine.far + first);
            }
        }
        float *states = partial_of(row, split, head * call.group());
        float padded_counts[BLOCK] = {};
        if (call.log_counts) {
            const float *counts = call.log_counts + (std::size_t(row) * call.ranked + rank_of(head)) * call.slots + at;
            for (int j = 0; j < count; ++j) padded_counts[j] = counts[j];
        }
        for (int q = 0; q < shared; ++q) {
            float *state = states + q * sizes.partial_width;
            soften(call, sight, q % call.tokens, mine.near + q * BLOCK, has_far ? mine.far + q * BLOCK : nullptr,
                   call.log_counts ? padded_counts : nullptr, state, state + MOST_LANES, sizes.value_width,
                   kept_logits(row, head, q, at), count);
        }
        add_block(row, head, place, count, sight, shared, mine, states);
    }

    void turn_keys(const Branch &branch, int row, int head, int at, std::size_t place, int count, std::ptrdiff_t ahead, float *out) {
        const std::int32_t *positions =
            branch.keys ? branch.keys + (std::int64_t(row) * call.ranked + rank_of(head)) * call.slots + at : nullptr;
        const int pairs = positions ? call.pairs : 0;
        for (int j = 0; j < count; ++j) {
            fetch(call.keys.codes + (place + ahead + j) * call.keys.row_bytes, call.keys.row_bytes);
            fetch(call.values.codes + (place + ahead + j) * call.values.row_bytes, call.values.row_bytes);
            const std::int64_t angle = positions ? std::int64_t(positions[j]) * pairs : 0;
            const float *cos = call.cos + angle, *sin = call.sin + angle;
            with_slot<F>(call.keys, std::size_t(row) * call.kv_heads + head, place + j, head, [&](auto key) {
#if defined(__AVX512BF16__)
                if constexpr (DOTS) return turn_narrow(key, pairs, cos, sin, (std::uint16_t *)out + j * key.channels);
#endif
                turn(key, pairs, cos, sin, out + j * sizes.key_width);
            });
        }
        if constexpr (DOTS) {
            __builtin_memset((std::uint16_t *)out + count * call.keys.channels, 0, (LANES - count) * call.keys.channels * 2);
            return;
        }
        for (int j = 0; j < LANES; ++j)
            for (std::size_t i = j < count ? call.keys.channels : 0; i < sizes.key_width; ++i) out[j * sizes.key_width + i] = 0;
    }

    // Products of all queries that share a kv head with LANES turned keys.
    void multiply_keys(int row, int query_head, bool is_far, const float *turned, float *out) const {
        const float *from = queries + query_at(row, query_head, is_far);
        const int shared = call.group() * call.tokens, width = int(sizes.key_width);
#if defined(__AVX512BF16__)
        if constexpr (DOTS)
            return multiply_all_narrow((const std::uint16_t *)from, 2 * width, shared, (const std::uint16_t *)turned, call.keys.channels, out);
#endif
        multiply_all(from, shared, turned, width, out);
    }

    void add_block(int row, int head, std::size_t place, int count, const Sight &sight, int shared, Own mine, float *states) {
        const Held &held = call.values;
        if (held.exact) add_exact(row, head, place, count, shared, mine, states);
        if (held.scales)  // a value is code * scale: weigh the codes by weight * scale
            for (int q = 0; q < shared; ++q)
                for (int j = 0; j < count; ++j) mine.near[q * BLOCK + j] *= from_half(held.scales[place + j]);
#if defined(__AVX512BF16__)
        if (DOTS && F == Format::bfloat16 && held.channels % 32 == 0)
            return add_all_narrow(mine.near, shared, held.codes + place * held.row_bytes, held.row_bytes, held.channels, count,
                                  sight.is_seen, states + MOST_LANES, sizes.partial_width);
#endif
        add_all_values<F>(mine.near, shared, held.codes + place * held.row_bytes, held.row_bytes, held.channels, count,
                          sight.is_seen, states + MOST_LANES, sizes.partial_width);
    }

    // Adds the values that are held exactly, and takes their weights away.
    void add_exact(int row, int head, std::size_t place, int count, int shared, Own mine, float *states) {
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        for (int j = 0; j < count; ++j) {
            if (call.values.place(place + j) < 0) continue;
            with_slot<F>(call.values, index, place + j, head, [&](auto value) {
                for (int q = 0; q < shared; ++q) {
                    float &weight = mine.near[q * BLOCK + j], *sum = states + q * sizes.partial_width + MOST_LANES;
                    for (int i = 0; i < value.channels; ++i) sum[i] += weight * value.one(i);
                    weight = 0;
                }
            });
        }
    }

    // The pieces of one head become its result; its maximum and divisor stay for the masses.
    void join(int row, int head) {
        const int splits = pieces(call.slots), channels = call.values.channels;
        for (int t = 0; t < call.tokens; ++t) {
            float top = call.sink_logits ? call.sink_logits[head] : NONE, divisor = 0;
            for (int split = 0; split < splits; ++split) {
                const float highest = partial_of(row, split, head)[t * sizes.partial_width];
                top = highest > top ? highest : top;
            }
            float *first = partial_of(row, 0, head) + t * sizes.partial_width;
            for (int split = 0; split < splits; ++split) {
                float *state = partial_of(row, split, head) + t * sizes.partial_width;
                const float share = state[0] == NONE ? 0.0f : std::exp(state[0] - top);
                divisor += share * state[1];
                for (int i = 0; i < channels; ++i) {
                    const float so_far = split ? first[MOST_LANES + i] : 0.0f;
                    first[MOST_LANES + i] = so_far + share * state[MOST_LANES + i];
                }
            }
            if (call.sink_logits) divisor += std::exp(call.sink_logits[head] - top);
            const float inverse = divisor > 0 ? 1.0f / divisor : 0.0f;
            const std::int64_t at = ((std::int64_t(row) * call.tokens + t) * call.heads + head) * channels;
            for (int i = 0; i < channels; ++i) put(call.number, call.out, at + i, first[MOST_LANES + i] * inverse);
            float *total = totals + ((std::size_t(row) * call.heads + head) * call.tokens + t) * 2;
            total[0] = top, total[1] = inverse;
        }
    }

    void weigh(int row, int head) {
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        const std::int64_t *observed = call.observed + std::int64_t(row) * call.observations;
        bool is_observed[MOST_TOKENS] = {};
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
            const float *total = totals + ((std::size_t(row) * call.heads + head * call.group() + g) * call.tokens + token) * 2;
            if (total[0] == NONE) continue;
            const float *from = kept_logits(row, head, g * call.tokens + token, 0);
            int j = 0;
            for (; j + LANES <= call.slots; j += LANES)
                store(out + j, load<Floats>(out + j) + exponential(load<Floats>(from + j) - total[0]) * total[1]);
            for (; j < call.slots; ++j) out[j] += from[j] == NONE ? 0.0f : std::exp(from[j] - total[0]) * total[1];
        }
    }
};

template <Format F> void turn_slots(const Turn &call, int threads) {
    const std::int64_t heads = std::int64_t(call.batch) * call.kv_heads, items = heads * pieces(call.used);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t item = 0; item < items; ++item) {
        const int row = int(item / pieces(call.used) / call.kv_heads), head = int(item / pieces(call.used) % call.kv_heads);
        const int start = int(item % pieces(call.used)) * piece(call.used);
        const int end = start + piece(call.used) < call.used ? start + piece(call.used) : call.used;
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        const std::int32_t *positions =
            call.positions ? call.positions + (std::size_t(row) * call.ranked + (call.ranked == 1 ? 0 : head)) * call.slots : nullptr;
        float turned[MOST_NARROW];
        for (int j = start; j < end; ++j) {
            const std::int64_t angle = positions ? std::int64_t(positions[j]) * call.pairs : 0;
            with_slot<F>(call.held, index, index * call.slots + j, head, [&](auto slot) {
                turn(slot, positions ? call.pairs : 0, call.cos + angle, call.sin + angle, turned);
            });
            const int channels = call.held.channels;
            std::uint8_t *out = call.out + (index * call.used + j) * channels * (call.number == Format::float32 ? 4 : 2);
            if (call.number == Format::bfloat16) {
                std::uint16_t narrow[MOST_NARROW];
                for (int i = 0; i < channels; ++i) narrow[i] = to_brain(turned[i]);
                __builtin_memcpy(out, narrow, channels * 2);
            } else
                for (int i = 0; i < channels; ++i) put(call.number, out, i, turned[i]);
        }
    }
}

template <Format F> void run(const Attend &call, float *scratch, int threads) {
    const Scratch sizes(call, threads);
    const int turned = call.near.keys ? call.pairs : 0, channels = call.keys.channels;
    const bool has_pairs = channels % 32 == 0 && turned % 16 == 0 && channels <= MOST_NARROW;
    if (HAS_DOTS && F != Format::float32 && call.number == Format::bfloat16 && has_pairs)
        Kernel<F, HAS_DOTS>(call, sizes, scratch, threads).run(threads);
    else
        Kernel<F, false>(call, sizes, scratch, threads).run(threads);
}

}  // namespace

void attend(const Attend &call, float *scratch, int threads) {
    switch (call.format) {
        case Format::float32: return run<Format::float32>(call, scratch, threads);
        case Format::bfloat16: return run<Format::bfloat16>(call, scratch, threads);
        case Format::float16: return run<Format::float16>(call, scratch, threads);
        case Format::int8: return run<Format::int8>(call, scratch, threads);
        case Format::int4: return run<Format::int4>(call, scratch, threads);
    }
}

void turn(const Turn &call, int threads) {
    switch (call.format) {
        case Format::float32: return turn_slots<Format::float32>(call, threads);
        case Format::bfloat16: return turn_slots<Format::bfloat16>(call, threads);
        case Format::float16: return turn_slots<Format::float16>(call, threads);
        case Format::int8: return turn_slots<Format::int8>(call, threads);
        case Format::int4: return turn_slots<Format::int4>(call, threads);
    }
}

}  // namespace windlass::WINDLASS_SET
