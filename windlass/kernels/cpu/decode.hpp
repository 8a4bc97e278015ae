// A decode step of one layer: the new token of each row is written, its query reads the slots, and rows over budget
// evict. Positions and state are read, and go to other memory: what they were stays.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.hpp"
#include "instruction_sets.hpp"
#include "retain.hpp"
#include "slots.hpp"

namespace windlass {

// What stays the same from one step to the next; the addresses are those of tensors that Python keeps alive.
class Decode {
  public:
    // Of both calls all but what a step gives is set; `retain.ranking` says nothing where `is_retaining` is false.
    Decode(const Attend &call, const Retain &retain, bool is_retaining, const Kernels &kernels)
        : call(call),
          retain(retain),
          is_retaining(is_retaining),
          kernels(kernels),
          query_positions(std::size_t(call.batch) * call.score_heads),
          orders(std::size_t(call.batch) * call.score_heads),
          observed(call.batch) {
        this->call.observed = observed.data();
        this->retain.orders = orders.data();
    }

    // New keys and values, (batch, kv_heads, 1, channels), with the strides of batch and heads in bytes.
    struct New {
        const std::uint8_t *states;
        std::int64_t row_stride, head_stride;
    };
    // A tensor (batch, score_heads, slots) of before the step, and the memory of the one after it.
    template <class Number>
    struct Copy {
        const Number *from;
        Number *to;
    };
    // Slots of each row and head, and what stood there: negative where the slot is not to be freed.
    struct Released {
        const std::int64_t *slots;
        const std::int32_t *positions;
        std::int64_t count;
    };

    // What is given for one step: `positions` (batch) are negative for padding; `mass` may be null.
    struct Given {
        const std::uint8_t *queries;
        std::int64_t query_strides[2];  // of batch and heads, in numbers
        New keys, values;
        const std::int64_t *positions, *next_positions;
        Copy<std::int32_t> slot_positions;
        std::vector<Copy<float>> state;
        std::int64_t *written;  // (batch, score_heads)
        std::uint8_t *out;
        float *mass;
        std::int64_t *evicted;  // null where nothing is to be evicted
        std::int32_t *evicted_positions;
        std::vector<Released> released;
    };

    // Floats of scratch that a step needs.
    std::size_t scratch(const Given &given, int threads) const {
        return kernel_scratch(given, threads) + key_positions() + own_mass(given) + cosines(given) +
               (is_retaining ? retain.scratch() + scratch_size(mean_key_cosine()) : 0);
    }

    void step(const Given &given, float *scratch, int threads) {
        const std::int64_t rows = std::int64_t(call.batch) * call.score_heads, slots = call.slots;
        std::int32_t *slot_positions = given.slot_positions.to;
        copy(given.slot_positions, rows * slots);
        for (const auto &tensor : given.state) copy(tensor, rows * slots);
        first_free(slot_positions, rows, slots, 1, given.written);
        put(given, given.keys, call.keys);
        put(given, given.values, call.values);
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t at = row * slots + given.written[row], position = given.positions[row / call.score_heads];
            slot_positions[at] = std::int32_t(position);
            for (const auto &tensor : given.state) tensor.to[at] = 0;
            query_positions[row] = position < 0 ? 0 : position;
        }
        for (int row = 0; row < call.batch; ++row) observed[row] = given.positions[row] < 0 ? -1 : 0;
        float *rest = scratch + kernel_scratch(given, threads);
        Attend now = call;
        if (call.pairs) {  // free slots are read nowhere, but have a row of the table
            auto *keys = reinterpret_cast<std::int32_t *>(rest);
            for (std::int64_t i = 0; i < rows * slots; ++i) keys[i] = std::max(slot_positions[i], 0);
            now.near = {query_positions.data(), keys};
        }
        rest += key_positions();
        now.slot_positions = slot_positions;
        now.queries = given.queries;
        now.query_strides[0] = given.query_strides[0], now.query_strides[1] = given.query_strides[1];
        now.query_positions = given.positions;
        now.out = given.out;
        now.mass_rows = given.mass;
        if (own_mass(given)) now.mass_rows = rest;
        rest += own_mass(given);
        now.observations = now.mass_rows ? 1 : 0;
        kernels.attend(now, scratch, threads);
        if (is_retaining) observe_and_evict(given, now.mass_rows, rest, threads);
        for (const Released &each : given.released)
            for (std::int64_t i = 0; i < rows * each.count; ++i)
                if (each.positions[i] >= 0) slot_positions[i / each.count * slots + each.slots[i]] = -1;
    }

  private:
    Attend call;
    Retain retain;
    bool is_retaining;
    const Kernels &kernels;
    std::vector<std::int64_t> query_positions;
    std::vector<TextOrder> orders;
    std::vector<std::int64_t> observed;

    std::size_t key_positions() const {
        return call.pairs ? std::size_t(call.batch) * call.score_heads * call.slots : 0;
    }
    bool is_weighed(const Given &given) const {
        return given.mass || (is_retaining && retain.ranking.observed != Observed::nothing);
    }
    std::size_t masses() const { return std::size_t(call.batch) * call.kv_heads * call.slots; }
    // Floats for a mass that nobody asked to be shown.
    std::size_t own_mass(const Given &given) const { return is_weighed(given) && !given.mass ? masses() : 0; }
    std::size_t cosines(const Given &given) const {
        return is_retaining && given.evicted && retain.ranking.score == Score::novelty ? masses() : 0;
    }
    std::size_t kernel_scratch(const Given &given, int threads) const {
        Attend sizes = call;
        float mass = 0;  // its address says that there is any
        sizes.mass_rows = is_weighed(given) ? &mass : nullptr;
        return Scratch(sizes, threads).total();
    }
    MeanKeyCosine mean_key_cosine() const {
        return {call.batch, call.kv_heads, call.score_heads, call.slots, call.format, call.keys, nullptr, nullptr};
    }

    void observe_and_evict(const Given &given, const float *mass, float *scratch, int threads) {
        Retain now = retain;
        now.is_evicting = given.evicted;
        now.query_positions = given.positions, now.next_positions = given.next_positions;
        now.mass = mass;
        now.state = given.state.empty() ? nullptr : given.state[0].to;
        now.positions = given.slot_positions.to;
        now.evicted = given.evicted, now.evicted_positions = given.evicted_positions;
        if (cosines(given)) {
            MeanKeyCosine compared = mean_key_cosine();
            compared.positions = given.slot_positions.to, compared.out = scratch;
            kernels.mean_key_cosine(compared, scratch + masses(), threads);
            now.cosines = scratch;
            scratch += masses() + scratch_size(compared);
        }
        kernels.retain(now, scratch);
    }

    template <class Number>
    static void copy(const Copy<Number> &tensor, std::int64_t count) {
        std::memcpy(tensor.to, tensor.from, count * sizeof(Number));
    }

    void put(const Given &given, const New &from, const PackedStates &to) const {
        write({call.batch, call.kv_heads, call.score_heads, 1, call.slots, std::int64_t(to.row_bytes),
               {from.row_stride, from.head_stride, 0}, given.written},
              from.states, const_cast<std::uint8_t *>(to.data));
    }
};

}  // namespace windlass
