// How badly a combination of the other keys replaces each key: see `policies.leverage`.
#pragma once
#include <cstddef>
#include <cstdint>

#include "call.hpp"

namespace windlass {

struct Leverage {
    int heads, slots, channels, width;  // heads over all rows
    Format format;
    const std::uint8_t *keys;  // (heads, slots, channels)
    const bool *is_counted;    // (heads, slots)
    const double *projection;  // (channels, width) (null: keys are not projected, and width is channels)
    double ridge;
    double *out;  // (heads, slots): 0 where a slot is not counted

    static constexpr int BLOCK = 2 * MAX_LANES;  // tokens at once
    std::size_t tokens() const { return (std::size_t(slots) + BLOCK - 1) / BLOCK * BLOCK; }
    // Floats of a thread, two for each number: keys by channel, projected keys by channel, their products, a key.
    std::size_t scratch() const {
        const std::size_t projected = projection ? width * tokens() : 0;
        return 2 * (channels * tokens() + projected + std::size_t(width) * width + padded(channels));
    }
};

}  // namespace windlass
