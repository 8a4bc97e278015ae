// Observation and eviction of a decode step, compiled once for each instruction set (WINDLASS_SET).
// Loops over slots are plain: the compiler makes vectors of them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "retain.hpp"

namespace windlass::WINDLASS_SET {
namespace {

constexpr std::int32_t EMPTY = -1, RESERVED = -2;
constexpr float LEAST = std::numeric_limits<float>::lowest(), MOST = std::numeric_limits<float>::max();
constexpr float INFINITE = std::numeric_limits<float>::infinity();

std::int32_t clamped(std::int64_t position) {
    return std::int32_t(std::clamp<std::int64_t>(position, 0, std::numeric_limits<std::int32_t>::max()));
}

// One row and head, or one row where its heads hold the same tokens.
class Row {
  public:
    Row(const Retain &call, int index, float *scratch)
        : call(call), slots(call.slots), index(index), row(index / call.score_heads), scores(scratch),
          pooled(scratch + slots), ranks(reinterpret_cast<std::int32_t *>(scratch + 2 * std::size_t(slots))), positions(call.positions + std::size_t(index) * slots),
          state(call.state ? call.state + std::size_t(index) * slots : nullptr) {}

    void observe() const {
        if (call.ranking.observed == Observed::nothing || call.query_positions[row] < 0) return;
        const int group = call.kv_heads / call.score_heads;
        const float *mass = call.mass + std::size_t(index) * group * slots, share = call.ranking.share;
        switch (call.ranking.observed) {
            case Observed::sum:
                for (int i = 0; i < slots; ++i) state[i] += mass[i];
                break;
            case Observed::last:
                for (int i = 0; i < slots; ++i) state[i] = mass[i];
                for (int head = 1; head < group; ++head)
                    for (int i = 0; i < slots; ++i) state[i] += mass[std::size_t(head) * slots + i];
                break;
            case Observed::fade:
                for (int i = 0; i < slots; ++i) state[i] = std::fma(mass[i], share, state[i] * (1 - share));
                break;
            case Observed::nothing: break;
        }
    }

    void evict() const {
        int held = 0;
        for (int i = 0; i < slots; ++i) held += positions[i] >= 0;
        call.evicted[index] = 0, call.evicted_positions[index] = EMPTY;
        if (held <= call.budget) return;
        score(held);
        const int slot = lowest();
        call.evicted[index] = slot, call.evicted_positions[index] = positions[slot];
        positions[slot] = RESERVED;
    }

  private:
    const Retain &call;
    const int slots, index, row;
    float *scores, *pooled;
    std::int32_t *ranks, *positions;
    float *state;

    std::int64_t end() const { return call.next_positions[row]; }

    void score(int held) const {
        const float *cosines = call.cosines ? call.cosines + std::size_t(index) * slots : nullptr;
        switch (call.ranking.score) {
            case Score::position:
                for (int i = 0; i < slots; ++i) scores[i] = float(positions[i]);
                break;
            case Score::state:
                for (int i = 0; i < slots; ++i) scores[i] = state[i];
                break;
            case Score::novelty:
                for (int i = 0; i < slots; ++i) scores[i] = -std::nearbyint(cosines[i] * 65536.0f);
                break;
            case Score::pooled: pool(held); break;
        }
    }

    // The first slot by `ranking.total_order` that holds a token: by score, position, slot.
    int lowest() const {
        const std::int32_t window = clamped(end() - call.window);
        const std::int32_t sinks = call.row_sinks ? clamped(call.row_sinks[row]) : call.sinks;
        const std::int64_t chunk = end() - end() % call.attention_chunk;
        const std::int32_t unseen = clamped(std::max(end() - call.sliding_window + 1, chunk));
        constexpr std::int32_t none = std::numeric_limits<std::int32_t>::max();
        if (call.pins.ranges) raise_pinned();
        std::int32_t least = none, oldest = none;
        for (int i = 0; i < slots; ++i) {
            const std::int32_t position = positions[i];
            float value = scores[i] >= LEAST ? scores[i] : LEAST;  // of NaN, too
            value = value < MOST ? value : MOST;
            value = (position >= window) | (position < sinks) ? INFINITE : value;
            value = (position < unseen ? LEAST : value) + 0.0f;  // there is no -0.0 then
            std::int32_t bits;
            __builtin_memcpy(&bits, &value, 4);
            bits ^= (bits >> 31) & 0x7fffffff;  // compares as the float does
            ranks[i] = position < 0 ? none : bits;
            least = std::min(least, ranks[i]);
        }
        for (int i = 0; i < slots; ++i) oldest = std::min(oldest, ranks[i] == least ? positions[i] : none);
        int slot = 0;  // tokens may share a position
        while (positions[slot] != oldest || ranks[slot] != least) ++slot;
        return slot;
    }

    // Pinned tokens rank above all others but sinks and the window.
    void raise_pinned() const {
        constexpr float highest = MOST / 2;
        for (int i = 0; i < slots; ++i) scores[i] = scores[i] < highest ? scores[i] : scores[i] >= highest ? highest : LEAST;  // of NaN, too
        const std::int64_t *bounds = call.pins.bounds + std::size_t(row) * call.pins.ranges * 2;
        for (int range = 0; range < call.pins.ranges; ++range) {
            const std::int32_t start = clamped(bounds[2 * range]), stop = clamped(bounds[2 * range + 1]);
            for (int i = 0; i < slots; ++i) scores[i] = (positions[i] >= start) & (positions[i] < stop) ? MOST : scores[i];
        }
    }

    // The state of each slot that holds a token, pooled over its neighbours in the text.
    void pool(int held) const {
        TextOrder &order = call.orders[index];
        order.update(positions, slots);
        const std::int32_t window = clamped(end() - call.window);
        for (int i = 0; i < held; ++i) {
            const int slot = order[i];
            pooled[i] = positions[slot] < window ? state[slot] : 0.0f;
        }
        const int reach = call.ranking.pool / 2;
        for (int i = 0; i < held; ++i) {
            // Behind the last token stand free slots, which count as 0.
            const int first = std::max(i - reach, 0), last = std::min(i + reach, held - 1);
            float value = call.ranking.is_mean || last < i + reach ? 0.0f : pooled[first];
            for (int j = first; j <= last; ++j)
                value = call.ranking.is_mean ? value + pooled[j] : std::max(value, pooled[j]);
            scores[order[i]] = call.ranking.is_mean ? value / float(call.ranking.pool) : value;
        }
    }
};

}  // namespace

void retain(const Retain &call, float *scratch) {
    for (int index = 0; index < call.batch * call.score_heads; ++index) {
        const Row row(call, index, scratch);
        row.observe();
        if (call.is_evicting) row.evict();
    }
}

}  // namespace windlass::WINDLASS_SET
