// Whether rotary positions are angles that grow by the same step from each row of a table to the next.
#pragma once
#include <cmath>
#include <cstdint>

#include "call.hpp"

namespace windlass {

// Whether row p + step is row p, rotated by row `step`. The scale of the rows is that of row 0.
inline bool turns_by(const float *cos, const float *sin, std::int64_t rows, int pairs, std::int64_t step) {
    // Angles are products in float32 of a position, at most `rows`, and a frequency of at most 1.
    const float tolerance = 1e-5f + float(rows) * 0x1p-22f;
    const float *step_cos = cos + step * pairs, *step_sin = sin + step * pairs;
    for (std::int64_t row = 0; row + step < rows; ++row) {
        const float *c = cos + row * pairs, *s = sin + row * pairs;
        const float *next_cos = c + step * pairs, *next_sin = s + step * pairs;
        bool is_steady = true;
        for (int i = 0; i < pairs; ++i) {
            const float scale = cos[i], allowed = tolerance * scale * scale;
            is_steady &= std::abs(c[i] * step_cos[i] - s[i] * step_sin[i] - next_cos[i] * scale) <= allowed;
            is_steady &= std::abs(s[i] * step_cos[i] + c[i] * step_sin[i] - next_sin[i] * scale) <= allowed;
        }
        if (!is_steady) return false;
    }
    return true;
}

// Whether keys at positions that follow each other, up to STEADY of them, may be rotated by the first rows of the table
// and queries back by one. Steps of 1 and of STEADY are looked at, so that no small step adds up.
inline bool is_steady(const float *cos, const float *sin, std::int64_t rows, int pairs) {
    if (rows < STEADY) return false;
    for (int i = 0; i < pairs; ++i)
        if (!(cos[i] > 0) || sin[i] != 0) return false;
    return turns_by(cos, sin, rows, pairs, 1) && turns_by(cos, sin, rows, pairs, STEADY);
}

}  // namespace windlass
