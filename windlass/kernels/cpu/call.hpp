// What Python hands to a kernel. All pointers are to tensors that Python keeps alive and has checked.
#pragma once
#include <cstddef>
#include <cstdint>

namespace windlass {

enum class Format : int { float32, bfloat16, float16, int8, int4 };

// The keys or the values of a layer, (batch, kv_heads, slots, row_bytes), contiguous.
// A low-bit code stands for code * scale + centre: one scale per slot and kv head, one centre per channel.
struct Held {
    const std::uint8_t *codes;
    const std::uint16_t *scales;  // float16; null unless low-bit
    const float *centres;         // (kv_heads, channels); null where all are 0
    int channels;
    std::size_t row_bytes;
    // Some slots are held a second time, as they were: slot s at place places[s], -1 for none.
    const std::uint8_t *exact;   // (batch, kv_heads, exact_places, channels) in `exact_number`; may be null
    const std::int32_t *places;  // (batch, kv_heads, slots)
    int exact_places;
    Format exact_number;

    std::int32_t place(std::size_t slot) const { return exact ? places[slot] : -1; }
};

// Rotary positions of one set of logits; no rotation where `keys` is null.
struct Branch {
    const std::int64_t *queries;  // (batch, ranked, tokens)
    const std::int32_t *keys;     // (batch, ranked, slots)
};

struct Attend {
    int batch, heads, kv_heads, ranked, tokens, slots;
    Format format;  // of keys and values
    Format number;  // of queries and the result
    Held keys, values;
    const std::uint8_t *queries;          // innermost dimension contiguous
    std::int64_t query_strides[3];        // of batch, heads, tokens; in numbers
    std::uint8_t *out;                    // (batch, tokens, heads, value channels)
    const std::int32_t *slot_positions;   // (batch, ranked, slots)
    const std::int64_t *query_positions;  // (batch, tokens)
    Branch near, far;                     // `far` beyond `near_window`; its `keys` null: near everywhere
    int near_window;
    const float *cos, *sin;  // (length, pairs)
    int pairs;
    float scale, softcap;              // softcap 0: none
    int sliding_window, reach, sinks;  // window and reach: INT32_MAX for none
    const float *sink_logits;          // (heads); may be null
    const float *log_counts;           // (batch, ranked, slots); may be null
    const std::int64_t *observed;      // (batch, observations) columns or -1
    int observations;
    float *mass_rows;  // (batch, kv_heads, observations, slots); may be null
    float *mass_rest;  // (batch, kv_heads, slots); may be null

    int group() const { return heads / kv_heads; }
    bool has_far() const { return far.keys != nullptr; }
    bool has_mass() const { return mass_rows != nullptr || mass_rest != nullptr; }
};

// Keys turned to rotary positions, or values as they are, of the first `used` slots.
struct Turn {
    int batch, kv_heads, ranked, slots, used;
    Format format, number;  // of what is held and of the result
    Held held;
    const std::int32_t *positions;  // (batch, ranked, slots); null: no rotation
    const float *cos, *sin;         // (length, pairs)
    int pairs;
    std::uint8_t *out;  // (batch, kv_heads, used, channels)
};

// How like the mean direction of its row and head each held key is.
struct Typicality {
    int batch, kv_heads, ranked, slots;
    Format format;
    Held keys;
    const std::int32_t *positions;  // (batch, ranked, slots)
    float *out;                     // (batch, kv_heads, slots)
};

inline constexpr int BLOCK = 32;        // slots whose logits are alive at once
inline constexpr int MOST_TOKENS = 16;  // queries per row
inline constexpr int MOST_CHANNELS = 1024;
inline constexpr int MOST_LANES = 16;  // of any instruction set

// Slots that one piece of work covers: by the number of slots alone, so that the number of threads
// never changes a result.
inline int piece(int slots) {
    int blocks = (slots + BLOCK - 1) / BLOCK;
    int wanted = (blocks + 15) / 16;
    return BLOCK * (wanted < 1 ? 1 : wanted > 16 ? 16 : wanted);
}
inline int pieces(int slots) { return (slots + piece(slots) - 1) / piece(slots); }
inline std::size_t padded(int count) {
    return (count + MOST_LANES - 1) / MOST_LANES * std::size_t(MOST_LANES);
}

// Floats of scratch that a call needs: one sum of keys for each piece.
inline std::size_t scratch_size(const Typicality &call) {
    return std::size_t(call.batch) * call.kv_heads * pieces(call.slots) * padded(call.keys.channels);
}

// Floats of scratch that a call needs, by part.
struct Scratch {
    std::size_t queries, partials, summed, logits, keys_turned, probabilities;
    std::size_t key_width, value_width, partial_width, slot_width;

    Scratch(const Attend &call, int threads) {
        key_width = padded(call.keys.channels);
        value_width = padded(call.values.channels);
        partial_width = value_width + MOST_LANES;  // its maximum and its sum stand in front
        slot_width = padded(call.slots);
        std::size_t rows = std::size_t(call.batch) * call.heads * call.tokens;
        std::size_t shared = std::size_t(call.group()) * call.tokens;
        queries = rows * key_width * (call.has_far() ? 2 : 1);
        partials = rows * pieces(call.slots) * partial_width;
        summed = padded(int(rows * 2));
        logits = call.has_mass() ? rows * slot_width : 0;
        keys_turned = threads * std::size_t(BLOCK) * (key_width > value_width ? key_width : value_width);
        probabilities = threads * 2 * shared * BLOCK;
    }
    std::size_t total() const { return queries + partials + summed + logits + keys_turned + probabilities; }
};

}  // namespace windlass
