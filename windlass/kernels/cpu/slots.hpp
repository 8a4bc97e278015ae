// Book-keeping of slots: which are free, which go, and putting new tokens into them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace windlass {

constexpr std::int64_t PARALLEL = 32768;  // slots below which waking threads costs more than they save

// For each of `rows` rows of `positions`: its first `count` EMPTY slots, then the first other slots.
inline void first_free(const std::int32_t *positions, std::int64_t rows, std::int64_t slots,
                       std::int64_t count, std::int64_t *out) {
    constexpr std::int32_t EMPTY = -1;
    for (std::int64_t row = 0; row < rows; ++row, positions += slots, out += count) {
        std::int64_t found = 0;
        for (std::int64_t slot = 0; slot < slots && found < count; ++slot)
            if (positions[slot] == EMPTY) out[found++] = slot;
        for (std::int64_t slot = 0; slot < slots && found < count; ++slot)
            if (positions[slot] != EMPTY) out[found++] = slot;
    }
}

struct Eviction {
    std::int64_t batch, score_heads, slots;
    const float *scores;                         // (batch, score_heads, slots)
    const std::int32_t *positions;               // (batch, score_heads, slots)
    const std::int64_t *next_positions;          // (batch)
    std::int64_t sinks, window, sliding_window;  // sliding_window 0: none
    std::int64_t attention_chunk;                // INT32_MAX for none
    const std::int64_t *row_sinks;               // (batch), or null: all rows have `sinks`
};

// One slot's key in `ranking.total_order`.
inline std::int64_t rank_of(const Eviction &call, float score, std::int64_t position, std::int64_t end,
                            std::int64_t sinks) {
    constexpr float least = std::numeric_limits<float>::lowest(), most = std::numeric_limits<float>::max();
    constexpr float infinity = std::numeric_limits<float>::infinity();
    score = std::isnan(score) ? least : std::clamp(score, least, most);
    if (position >= end - call.window || position < sinks) score = infinity;
    if (call.sliding_window && position <= end - call.sliding_window) score = least;
    if (position < end - end % call.attention_chunk) score = least;
    if (position < 0) score = -infinity;
    score += 0.0f;  // there is no -0.0 then
    std::int32_t bits;
    std::memcpy(&bits, &score, 4);
    bits ^= (bits >> 31) & 0x7fffffff;  // compares as the float does
    return std::int64_t(bits) * (std::int64_t(1) << 32) + position;
}

// For each row and head, the `count` slots that rank lowest, in any order.
inline void lowest(const Eviction &call, std::int64_t count, std::int64_t *out, int threads) {
    const std::int64_t rows = call.batch * call.score_heads, slots = call.slots;
    if (count == 0) return;
    // Slots come out of order: where scores fall along the text, each would be lower than all before it.
    const std::int64_t stride = (slots % 7919 ? 7919 : 7907) % slots;  // of primes: every slot comes once
#pragma omp parallel for num_threads(threads) if (rows * slots >= PARALLEL)
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t sinks = call.row_sinks ? call.row_sinks[row / call.score_heads] : call.sinks;
        const std::int64_t end = call.next_positions[row / call.score_heads];
        std::vector<std::int64_t> ranks(slots);
        for (std::int64_t slot = 0; slot < slots; ++slot)
            ranks[slot] =
                rank_of(call, call.scores[row * slots + slot], call.positions[row * slots + slot], end, sinks);
        std::vector<std::pair<std::int64_t, std::int64_t>> found;
        found.reserve(slots);
        // A heap of the lowest, the highest of them in front, is faster than a selection while few are
        // wanted.
        const bool is_heap = count * 8 <= slots;
        for (std::int64_t i = 0, slot = 0; i < slots; ++i, slot += stride, slot -= slot < slots ? 0 : slots) {
            if (!is_heap || i < count)
                found.emplace_back(ranks[slot], slot);
            else if (std::pair(ranks[slot], slot) < found.front()) {  // of equal ranks the lower slot
                std::pop_heap(found.begin(), found.end());
                found.back() = {ranks[slot], slot};
            } else
                continue;
            if (is_heap) std::push_heap(found.begin(), found.end());
        }
        if (!is_heap) std::nth_element(found.begin(), found.begin() + count - 1, found.end());
        for (std::int64_t i = 0; i < count; ++i) out[row * count + i] = found[i].second;
    }
}

// For each of `rows` rows, its slots in the order of their positions, free ones last: a radix sort,
// since a sort by comparison would take longer than attention.
inline void argsort_positions(const std::int32_t *positions, std::int64_t rows, std::int64_t slots,
                              std::int64_t *out, int threads) {
    constexpr int BITS = 11, DIGITS = 3, SIZE = 1 << BITS;
#pragma omp parallel for num_threads(threads) if (rows * slots >= PARALLEL)
    for (std::int64_t row = 0; row < rows; ++row) {
        struct Entry {
            std::uint32_t key, slot;
        };
        std::vector<Entry> entries(slots), sorted(slots);
        std::vector<std::uint32_t> counts(DIGITS * SIZE);
        const std::int32_t *first = positions + row * slots;
        const std::uint32_t beyond = std::uint32_t(std::max(*std::max_element(first, first + slots), 0)) + 1;
        for (std::int64_t slot = 0; slot < slots; ++slot) {
            const std::uint32_t key = first[slot] < 0 ? beyond : std::uint32_t(first[slot]);
            entries[slot] = {key, std::uint32_t(slot)};
            for (int digit = 0; digit < DIGITS; ++digit)
                ++counts[digit * SIZE + (key >> (digit * BITS)) % SIZE];
        }
        for (int digit = 0; digit < DIGITS; ++digit) {
            std::uint32_t *starts = counts.data() + digit * SIZE, start = 0;
            if (starts[(entries[0].key >> (digit * BITS)) % SIZE] == slots) continue;  // all alike
            for (int i = 0; i < SIZE; ++i) start += std::exchange(starts[i], start);
            for (const Entry entry : entries) sorted[starts[(entry.key >> (digit * BITS)) % SIZE]++] = entry;
            std::swap(entries, sorted);
        }
        for (std::int64_t i = 0; i < slots; ++i) out[row * slots + i] = entries[i].slot;
    }
}

struct Write {
    std::int64_t batch, kv_heads, score_heads, tokens, slots, bytes;  // bytes of one token and head
    std::int64_t strides[3];    // of the source, in bytes: batch, kv_heads, tokens
    const std::int64_t *index;  // (batch, score_heads, tokens)
};

// Copies each new token's bytes into its slot. Other slots are not touched.
inline void write(const Write &call, const std::uint8_t *source, std::uint8_t *target) {
    for (std::int64_t row = 0; row < call.batch; ++row)
        for (std::int64_t head = 0; head < call.kv_heads; ++head) {
            const std::int64_t *index =
                call.index + (row * call.score_heads + (call.score_heads == 1 ? 0 : head)) * call.tokens;
            for (std::int64_t token = 0; token < call.tokens; ++token)
                std::memcpy(target + ((row * call.kv_heads + head) * call.slots + index[token]) * call.bytes,
                            source + row * call.strides[0] + head * call.strides[1] + token * call.strides[2],
                            call.bytes);
        }
}

}  // namespace windlass
