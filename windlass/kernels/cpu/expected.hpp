// The attention that queries of a normal distribution pay to keys: see `policies.expected_attention`.
#pragma once
#include <cstddef>

#include "call.hpp"

namespace windlass {

struct Expected {
    int batch, kv_heads, group, slots, channels, pairs;
    const float *keys;         // (batch, kv_heads, slots, channels), rotated
    const float *means;        // (batch, kv_heads, group, channels), of queries
    const float *covariances;  // (batch, kv_heads, group, channels, channels)
    const float *cos, *sin;    // (batch, pairs): rotates both to the next positions
    float *out;                // (batch, kv_heads, group, slots): logits

    static constexpr int BLOCK = 4 * MAX_LANES;  // slots that are read at once
    // Floats of a thread: a block of keys by channel, and of each query head the mean and the covariance.
    std::size_t scratch() const { return std::size_t(channels) * BLOCK + std::size_t(group) * channels * (channels + 1); }
};

}  // namespace windlass
