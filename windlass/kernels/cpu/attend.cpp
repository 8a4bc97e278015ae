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
#include <type_traits>
#include <utility>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

#include "look.hpp"
#include "products.hpp"
#include "soften.hpp"
#include "turn.hpp"
#include "typicality.hpp"

// Buffers of one thread.
struct Own {
    float *turned, *near, *far;
};

template <Format F>
class Kernel {
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
                for (int i = 0; i < call.batch * call.kv_heads; ++i)
                    weigh(i / call.kv_heads, i % call.kv_heads);
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
        return ((std::size_t(row) * (call.has_far() ? 2 : 1) + is_far) * call.heads + head) * call.tokens *
               sizes.key_width;
    }
    float *partial_of(int row, int split, int head) const {
        return partials + ((std::size_t(row) * pieces(call.slots) + split) * call.heads + head) *
                              call.tokens * sizes.partial_width;
    }
    int rank_of(int kv_head) const { return call.ranked == 1 ? 0 : kv_head; }

    void turn_queries(int row, int head) {
        const std::int64_t *strides = call.query_strides;
        const std::int64_t bytes = call.number == Format::float32 ? 4 : 2;
        const int rank = rank_of(head / call.group());
        for (int is_far = 0; is_far <= int(call.has_far()); ++is_far) {
            const Branch &branch = is_far ? call.far : call.near;
            for (int t = 0; t < call.tokens; ++t) {
                const std::uint8_t *from =
                    call.queries + bytes * (row * strides[0] + head * strides[1] + t * strides[2]);
                float *to = queries + query_at(row, head, is_far) + t * sizes.key_width;
                for (std::size_t i = 0; i < sizes.key_width; ++i)
                    to[i] = int(i) < call.keys.channels ? number(call.number, from, i) * call.scale : 0.0f;
                if (branch.keys) turn_query(branch, row, rank, t, to);
            }
        }
    }

    void turn_query(const Branch &branch, int row, int rank, int token, float *to) const {
        const std::int64_t at =
            branch.queries[(std::int64_t(row) * call.ranked + rank) * call.tokens + token];
        const float *cos = call.cos + at * call.pairs, *sin = call.sin + at * call.pairs;
        for (int i = 0; i < call.pairs; ++i) {
            const float a = to[i], b = to[i + call.pairs];
            to[i] = a * cos[i] - b * sin[i];
            to[i + call.pairs] = b * cos[i] + a * sin[i];
        }
    }

    void attend_piece(int row, int split, Own mine) {
        const std::size_t states = std::size_t(call.heads) * call.tokens;
        float *states_of = partial_of(row, split, 0);
        for (std::size_t i = 0; i < states; ++i) {
            float *state = states_of + i * sizes.partial_width;
            for (std::size_t j = 0; j < sizes.partial_width; ++j) state[j] = 0;
            state[0] = NONE;
        }
        const int start = split * piece(call.slots),
                  end = start + piece(call.slots) < call.slots ? start + piece(call.slots) : call.slots;
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
        const std::size_t index =
            (std::size_t(row) * call.kv_heads + kv_head) * call.group() * call.tokens + shared;
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
        const std::ptrdiff_t ahead =
            head + 1 < call.kv_heads ? call.slots : BLOCK - std::ptrdiff_t(head) * call.slots;
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
            const float *counts =
                call.log_counts + (std::size_t(row) * call.ranked + rank_of(head)) * call.slots + at;
            for (int j = 0; j < count; ++j) padded_counts[j] = counts[j];
        }
        for (int q = 0; q < shared; ++q) {
            float *state = states + q * sizes.partial_width;
            soften(call, sight, q % call.tokens, mine.near + q * BLOCK,
                   has_far ? mine.far + q * BLOCK : nullptr, call.log_counts ? padded_counts : nullptr, state,
                   state + MOST_LANES, sizes.value_width, kept_logits(row, head, q, at), count);
        }
        add_block(row, head, place, count, sight, shared, mine, states);
    }

    void turn_keys(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                   std::ptrdiff_t ahead, float *out) {
        const int pairs = branch.keys ? call.pairs : 0;
        if (!call.keys.exact && 2 * pairs == call.keys.channels && pairs == 2 * LANES)
            turn_keys<2>(branch, row, head, at, place, count, ahead, out);
        else if (!call.keys.exact && 2 * pairs == call.keys.channels && pairs == 4 * LANES)
            turn_keys<4>(branch, row, head, at, place, count, ahead, out);
        else
            turn_keys<0>(branch, row, head, at, place, count, ahead, out);
        if (count < LANES || call.keys.channels < int(sizes.key_width))
            for (int j = 0; j < LANES; ++j)
                for (std::size_t i = j < count ? call.keys.channels : 0; i < sizes.key_width; ++i)
                    out[j * sizes.key_width + i] = 0;
    }

    // VECTORS: as many vectors of pairs as fill the channels of keys that have no exact copies; 0: not so.
    template <int VECTORS>
    void turn_keys(const Branch &branch, int row, int head, int at, std::size_t place, int count,
                   std::ptrdiff_t ahead, float *out) {
        const std::int32_t *positions =
            branch.keys ? branch.keys + (std::int64_t(row) * call.ranked + rank_of(head)) * call.slots + at
                        : nullptr;
        const Held held = call.keys, values = call.values;  // copies, which a store to `out` cannot change
        const float *table_cos = call.cos, *table_sin = call.sin;
        const int pairs = positions ? call.pairs : 0;
        const std::size_t width = sizes.key_width;
        for (int j = 0; j < count; ++j) {
            fetch(held.codes + (place + ahead + j) * held.row_bytes, held.row_bytes);
            fetch(values.codes + (place + ahead + j) * values.row_bytes, values.row_bytes);
            const std::int64_t angle = positions ? std::int64_t(positions[j]) * pairs : 0;
            const float *cos = table_cos + angle, *sin = table_sin + angle;
            float *to = out + j * width;
            if constexpr (VECTORS > 0)
                turn_vectors<VECTORS>(slot_of<F>(held, place + j, head), cos, sin, to);
            else
                with_slot<F>(held, std::size_t(row) * call.kv_heads + head, place + j, head,
                             [&](auto key) { turn(key, pairs, cos, sin, to); });
        }
    }

    // Products of all queries that share a kv head with LANES turned keys.
    void multiply_keys(int row, int query_head, bool is_far, const float *turned, float *out) const {
        const float *from = queries + query_at(row, query_head, is_far);
        const int shared = call.group() * call.tokens, width = int(sizes.key_width);
        multiply_all(from, shared, turned, width, out);
    }

    void add_block(int row, int head, std::size_t place, int count, const Sight &sight, int shared, Own mine,
                   float *states) {
        const Held &held = call.values;
        if (held.exact) add_exact(row, head, place, count, shared, mine, states);
        if (held.scales)  // a value is code * scale: weigh the codes by weight * scale
            for (int q = 0; q < shared; ++q)
                for (int j = 0; j < count; ++j) mine.near[q * BLOCK + j] *= from_half(held.scales[place + j]);
#if defined(__AVX512BF16__)
        if (F == Format::bfloat16 && call.number == Format::bfloat16 && held.channels % 32 == 0)
            return add_all_narrow(mine.near, shared, held.codes + place * held.row_bytes, held.row_bytes,
                                  held.channels, count, sight.is_seen, states + MOST_LANES,
                                  sizes.partial_width);
#endif
        add_all_values<F>(mine.near, shared, held.codes + place * held.row_bytes, held.row_bytes,
                          held.channels, count, sight.is_seen, states + MOST_LANES, sizes.partial_width);
    }

    // Adds the values that are held exactly, and takes their weights away.
    void add_exact(int row, int head, std::size_t place, int count, int shared, Own mine, float *states) {
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        for (int j = 0; j < count; ++j) {
            if (call.values.place(place + j) < 0) continue;
            with_slot<F>(call.values, index, place + j, head, [&](auto value) {
                for (int q = 0; q < shared; ++q) {
                    float &weight = mine.near[q * BLOCK + j],
                          *sum = states + q * sizes.partial_width + MOST_LANES;
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
            for (int i = 0; i < channels; ++i)
                put(call.number, call.out, at + i, first[MOST_LANES + i] * inverse);
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
            const float *total =
                totals +
                ((std::size_t(row) * call.heads + head * call.group() + g) * call.tokens + token) * 2;
            if (total[0] == NONE) continue;
            const float *from = kept_logits(row, head, g * call.tokens + token, 0);
            int j = 0;
            for (; j + LANES <= call.slots; j += LANES)
                store(out + j,
                      load<Floats>(out + j) + exponential(load<Floats>(from + j) - total[0]) * total[1]);
            for (; j < call.slots; ++j)
                out[j] += from[j] == NONE ? 0.0f : std::exp(from[j] - total[0]) * total[1];
        }
    }
};

// Calls `use` with a format as a type of its own.
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

void turn(const Turn &call, int threads) {
    with_format(call.format, [&](auto f) { turn_slots<f.value>(call, threads); });
}

void typicality(const Typicality &call, float *scratch, int threads) {
    with_format(call.format, [&](auto f) { Typical<f.value>(call, scratch).run(threads); });
}

}  // namespace windlass::WINDLASS_SET
