// Attention mass of a chunk of a prompt, compiled once for each instruction set (WINDLASS_SET).
//
// A piece of work is a block of slots of one kv head. Its keys are laid out by channel, so that a vector
// holds the products of one query with many slots and nothing has to be summed across lanes. Each query's
// probabilities, which its log-sum-exp gives, are added to the row of the result that it belongs to.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

constexpr int VECTORS = LANES == 16 ? 4 : 2;
constexpr int SLOTS = VECTORS * LANES;  // of a block
constexpr int QUERIES = 4;              // whose sums the registers hold
constexpr float UNSEEN = -1e30f;

// Channels are taken one by one, in float32...
template <bool IN_PAIRS>
struct Channels {
    typedef float Item;
    static int count(int channels) { return channels; }
    static Item of(Format format, const std::uint8_t *row, int i) { return number(format, row, i); }
    static Floats add(Floats sum, Item query, const Item *keys) { return sum + query * load<Floats>(keys); }
};
// ...or in pairs of bfloat16.
#if defined(__AVX512BF16__)
template <>
struct Channels<true> {
    typedef std::uint32_t Item;
    static int count(int channels) { return channels / 2; }
    static Item of(Format, const std::uint8_t *row, int i) {
        Item pair;
        __builtin_memcpy(&pair, row + 4 * i, 4);
        return pair;
    }
    static Floats add(Floats sum, Item query, const Item *keys) {
        return dot(sum, (__m512bh)_mm512_set1_epi32(int(query)), (__m512bh)_mm512_loadu_si512(keys));
    }
};
#endif

template <bool IN_PAIRS>
class MassKernel {
    typedef Channels<IN_PAIRS> C;
    typedef typename C::Item Item;

  public:
    explicit MassKernel(const QueryMass &call) : call(call), width(C::count(call.channels)) {}

    void run(int threads) {
        const int blocks = (call.used + SLOTS - 1) / SLOTS, items = call.batch * call.kv_heads * blocks;
#pragma omp parallel num_threads(threads)
        {
            std::vector<Item> keys(std::size_t(width) * SLOTS), queries(std::size_t(width) * QUERIES);
            std::vector<float> sums(std::size_t(call.outputs) * SLOTS);
#pragma omp for schedule(dynamic, 1)
            for (int item = 0; item < items; ++item)
                block(item / blocks / call.kv_heads, item / blocks % call.kv_heads, item % blocks * SLOTS,
                      keys.data(), queries.data(), sums.data());
        }
    }

  private:
    const QueryMass &call;
    const int width;

    std::int64_t bytes() const { return call.format == Format::float32 ? 4 : 2; }

    void block(int row, int head, int first, Item *keys, Item *queries, float *sums) const {
        const int count = std::min(SLOTS, call.used - first), group = call.heads / call.kv_heads;
        const std::int64_t kv_head = std::int64_t(row) * call.kv_heads + head;
        for (int j = 0; j < SLOTS; ++j) {
            const std::int64_t slot = kv_head * call.key_slots + first + std::min(j, count - 1);
            const std::uint8_t *from = call.keys + slot * call.channels * bytes();
            for (int i = 0; i < width; ++i) keys[i * SLOTS + j] = C::of(call.format, from, i);
        }
        std::fill(sums, sums + std::size_t(call.outputs) * SLOTS, 0.0f);
        for (int member = head * group; member < (head + 1) * group; ++member)
            for (int token = 0; token < call.tokens; token += QUERIES)
                add(row, head, member, token, first, count, keys, queries, sums);
        for (int output = 0; output < call.outputs; ++output) {
            float *to = call.mass + (kv_head * call.outputs + output) * call.slots + first;
            for (int j = 0; j < count; ++j) to[j] += sums[output * SLOTS + j];
        }
    }

    void add(int row, int head, int member, int token, int first, int count, const Item *keys, Item *queries,
             float *sums) const {
        const std::int32_t *targets = call.targets + std::int64_t(row) * call.tokens;
        const int most = std::min(QUERIES, call.tokens - token);
        if (std::all_of(targets + token, targets + token + most, [](std::int32_t t) { return t < 0; })) return;
        const std::int64_t query = (std::int64_t(row) * call.heads + member) * call.tokens + token;
        for (int q = 0; q < QUERIES; ++q) {
            const std::uint8_t *from = call.queries + (query + std::min(q, most - 1)) * call.channels * bytes();
            for (int i = 0; i < width; ++i) queries[i * QUERIES + q] = C::of(call.format, from, i);
        }
        Floats products[QUERIES][VECTORS] = {};
        for (int i = 0; i < width; ++i)
            for (int q = 0; q < QUERIES; ++q)
                for (int v = 0; v < VECTORS; ++v)
                    products[q][v] =
                        C::add(products[q][v], queries[i * QUERIES + q], keys + i * SLOTS + v * LANES);
        for (int q = 0; q < most; ++q)
            if (targets[token + q] >= 0)
                add_probabilities(row, head, query + q, token + q, first, count, products[q],
                                  sums + std::int64_t(targets[token + q]) * SLOTS);
    }

    void add_probabilities(int row, int head, std::int64_t query, int token, int first, int count,
                           const Floats *products, float *sum) const {
        const int mask_head = call.mask_heads == 1 ? 0 : head;
        const std::int64_t at = std::int64_t(row) * call.mask_heads + mask_head;
        const bool *seen = call.mask + (at * call.tokens + token) * call.used + first;
        bool padded_mask[SLOTS] = {};
        float counts[SLOTS] = {};
        if (count < SLOTS) {
            std::copy(seen, seen + count, padded_mask);
            seen = padded_mask;
        }
        if (call.log_counts) std::copy_n(call.log_counts + at * call.used + first, count, counts);
        const float lse = call.lse[query];
        for (int v = 0; v < VECTORS; ++v) {
            Floats x = products[v] * call.scale - lse;
            if (call.log_counts) x = x + load<Floats>(counts + v * LANES);
            x = x < all(0.0f) ? x : all(0.0f);  // but for rounding it is
            x = wide_bytes(seen + v * LANES) != Ints{} ? x : all(UNSEEN);
            store(sum + v * LANES, load<Floats>(sum + v * LANES) + exponential(x));
        }
    }
};

}  // namespace

void query_mass(const QueryMass &call, int threads) {
#if defined(__AVX512BF16__)
    if (call.format == Format::bfloat16 && call.channels % 2 == 0) return MassKernel<true>(call).run(threads);
#endif
    MassKernel<false>(call).run(threads);
}

}  // namespace windlass::WINDLASS_SET
