// The rotary positions at which the newest token of each row reads its slots: see `core.positions.ReadRule`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace windlass {

// The slots of one row and head in the order of their text. Of equal positions the lower slot comes first.
class TextOrder {
  public:
    // Few tokens have come or gone since the last call: the others are still in order.
    void update(const std::int32_t *positions, int slots) {
        is_known.assign(slots, 0);
        int count = 0;
        for (const Entry entry : entries) {
            const auto [position, slot] = entry;
            if (slot >= slots || positions[slot] != position) continue;
            entries[count++] = entry, is_known[slot] = 1;
        }
        entries.resize(count);
        for (int slot = 0; slot < slots; ++slot)
            if (positions[slot] >= 0 && !is_known[slot]) entries.emplace_back(positions[slot], slot);
        const auto first = entries.begin() + count;
        std::sort(first, entries.end());
        if (count && first != entries.end() && *first < first[-1]) std::inplace_merge(entries.begin(), first, entries.end());
    }
    int size() const { return int(entries.size()); }
    int operator[](int rank) const { return entries[rank].second; }

  private:
    using Entry = std::pair<std::int32_t, std::int32_t>;  // position and slot
    std::vector<Entry> entries;
    std::vector<std::uint8_t> is_known;
};

// All but `ranked_from` and `trained` are at least 1, and `limit` is negative and `trained` 0 where there is none.
struct ReadRule {
    std::int32_t ranked_from, group, near, limit, trained;

    // The least power of two times `group` that brings `place` below the trained length.
    std::int32_t group_at(std::int64_t place) const {
        std::int64_t size = group;
        while (trained && place >= size * (trained - near + near / size)) size *= 2;
        return std::int32_t(size);
    }
};

class ReadPositions {
  public:
    ReadPositions(const ReadRule &rule, std::size_t rows) : rule(rule), found(rows), orders(rows) {}

    const std::int64_t *queries() const { return found.data(); }

    // For queries at `positions`, negative for padding, and slots (batch, heads, slots): `keys` (batch, heads, slots), and
    // `queries` (batch, heads). Only the first `used` slots of a head are read, and have keys. Free ones of them have a row
    // of the table, too.
    void find(const std::int64_t *positions, int batch, int heads, int slots, int used, const std::int32_t *slot_positions,
              std::int32_t *keys) {
        for (int row = 0; row < batch; ++row) {
            const bool is_ranked = positions[row] >= rule.ranked_from;
            const std::int64_t first = std::int64_t(row) * heads;
            std::int64_t most = 0;
            for (std::int64_t head = first; head < first + heads; ++head) {
                const std::int32_t *held = slot_positions + head * slots;
                if (is_ranked) rank(orders[head], held, used, keys + head * slots);
                found[head] = is_ranked ? orders[head].size() - 1 : std::max<std::int64_t>(positions[row], 0);
                most = std::max(most, found[head]);
            }
            const Steps steps = steps_of(rule.group_at(most));
            for (std::int64_t head = first; head < first + heads; ++head) {
                const std::int32_t *held = slot_positions + head * slots;
                read(steps, std::int32_t(std::max<std::int64_t>(positions[row], 0)), held, is_ranked ? keys + head * slots : held, used,
                     found[head], keys + head * slots);
            }
        }
    }

  private:
    // Places in steps of `group`: a shift where that is a power of two.
    struct Steps {
        std::int32_t group, shift;
        std::int32_t of(std::int32_t place) const { return shift < 0 ? place / group : place >> shift; }
    };

    ReadRule rule;
    std::vector<std::int64_t> found;
    std::vector<TextOrder> orders;

    static Steps steps_of(std::int32_t group) {
        for (std::int32_t shift = 0; shift < 31; ++shift)
            if (group == std::int32_t(1) << shift) return {group, shift};
        return {group, -1};
    }

    static void rank(TextOrder &order, const std::int32_t *positions, int slots, std::int32_t *ranks) {
        order.update(positions, slots);
        std::fill_n(ranks, slots, 0);
        for (int i = 0; i < order.size(); ++i) ranks[order[i]] = i;
    }

    // From the places of one head's slots, which may be in `keys`, and of its query, which becomes its rotary position.
    void read(const Steps steps, std::int32_t at, const std::int32_t *positions, const std::int32_t *places, int slots, std::int64_t &query,
              std::int32_t *keys) const {
        const std::int32_t own = std::int32_t(query), near = rule.near, last = rule.trained ? rule.trained - 1 : INT32_MAX;
        const std::int32_t far = rule.limit >= 0 ? rule.limit : steps.of(own) + (near - steps.of(near));
        query = std::min(far, last);
        if (rule.limit < 0 && steps.group == 1) {  // each token at its place
            for (int i = 0; i < slots; ++i) keys[i] = std::clamp(places[i], 0, last);
            return;
        }
        for (int i = 0; i < slots; ++i) {
            const std::int32_t place = std::max(places[i], 0), distance = at - std::max(positions[i], 0);
            const std::int32_t key = distance < near ? far - std::max(own - place, 0) : steps.of(place);
            keys[i] = std::clamp(key, 0, last);
        }
    }
};

}  // namespace windlass
