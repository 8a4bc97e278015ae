// How much each key is like the other keys held: see `policies.r_kv`.
#pragma once
#include <cstddef>
#include <cstdint>

#include "call.hpp"

namespace windlass {

struct Redundancy {
    int batch, kv_heads, slots;
    Format format;
    PackedStates keys;
    const std::int32_t *positions;  // (batch, kv_heads, slots)
    const std::int64_t *order;      // (batch, kv_heads, slots): in the order of the text, free ones last
    float threshold;
    float *out;  // (batch, kv_heads, slots): sums of cosines

    std::size_t tokens() const { return padded(slots); }
    // Floats of a thread: directions by token and by channel, and their sum.
    std::size_t scratch() const { return 2 * tokens() * padded(keys.channels) + padded(keys.channels); }
};

}  // namespace windlass
