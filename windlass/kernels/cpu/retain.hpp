// The end of a decode step, after attention: masses are observed, and rows over budget evict.
#pragma once
#include <cstddef>
#include <cstdint>

#include "read_positions.hpp"

namespace windlass {

// See `core.decode.Ranking`.
enum class Observed : int { nothing, sum, last, fade };
enum class Score : int { position, state, pooled, novelty };

struct Ranking {
    Observed observed;
    Score score;
    float share;
    int pool;
    bool is_mean;
};

// Ranges [start, stop) of positions that each row never evicts, (batch, ranges, 2). An empty range pins nothing.
struct Pins {
    const std::int64_t *bounds;
    int ranges;  // 0: no row has any
};

struct Retain {
    int batch, kv_heads, score_heads, slots;
    Ranking ranking;
    int budget, sinks, window, sliding_window, attention_chunk;  // the last two INT32_MAX for none
    bool is_evicting;
    const std::int64_t *query_positions;  // (batch), negative for padding
    const std::int64_t *next_positions;   // (batch)
    const std::int64_t *row_sinks;        // (batch), or null: all rows have `sinks`
    Pins pins;
    const float *mass;                    // (batch, kv_heads, slots), null where nothing is observed
    const float *cosines;                 // (batch, kv_heads, slots), for `novelty` (else null)
    float *state;                         // (batch, score_heads, slots), null where nothing is kept
    std::int32_t *positions;              // (batch, score_heads, slots), in which evicted tokens are marked
    std::int64_t *evicted;                // (batch, score_heads)
    std::int32_t *evicted_positions;      // (batch, score_heads), -1 where nothing was evicted
    TextOrder *orders;                    // (batch, score_heads), of `pooled`

    std::size_t scratch() const { return 3 * std::size_t(slots); }
};

}  // namespace windlass
