// A decode step of one layer: the new token of each row is written, and its query reads the slots.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "call.hpp"
#include "slots.hpp"

namespace windlass {

// What stays the same from one step to the next; the addresses are those of tensors that Python keeps alive.
class Decode {
  public:
    using Kernel = void (*)(const Attend &call, float *scratch, int threads);
    // A tensor (batch, score_heads, slots) of float32, and what new tokens start with.
    using State = std::pair<std::uintptr_t, float>;

    // Of `call` all but what a step gives is set; its slot positions are written, too.
    Decode(const Attend &call, std::vector<State> state, Kernel kernel)
        : call(call),
          state(std::move(state)),
          kernel(kernel),
          query_positions(std::size_t(call.batch) * call.score_heads),
          observed(call.batch) {
        this->call.observed = observed.data();
    }

    // New keys and values, (batch, kv_heads, 1, channels), with the strides of batch and heads in bytes.
    struct New {
        const std::uint8_t *states;
        std::int64_t row_stride, head_stride;
    };

    // What is given for one step: `positions` (batch) are negative for padding; `mass` may be null.
    struct Given {
        const std::uint8_t *queries;
        std::int64_t query_strides[2];  // of batch and heads, in numbers
        New keys, values;
        const std::int64_t *positions;
        std::int64_t *written;  // (batch, score_heads)
        std::uint8_t *out;
        float *mass;
    };

    // Floats of scratch that a step needs, with the mass of its queries or without; first those of the kernel.
    std::size_t scratch(bool has_mass, int threads) const { return kernel_scratch(has_mass, threads) + key_positions(); }

    void step(const Given &given, float *scratch, int threads) {
        const std::int64_t rows = std::int64_t(call.batch) * call.score_heads, slots = call.slots;
        auto *slot_positions = const_cast<std::int32_t *>(call.slot_positions);
        first_free(slot_positions, rows, slots, 1, given.written);
        put(given, given.keys, call.keys);
        put(given, given.values, call.values);
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t at = row * slots + given.written[row], position = given.positions[row / call.score_heads];
            slot_positions[at] = std::int32_t(position);
            for (const auto &[tensor, initial] : state) reinterpret_cast<float *>(tensor)[at] = initial;
            query_positions[row] = position < 0 ? 0 : position;
        }
        for (int row = 0; row < call.batch; ++row) observed[row] = given.positions[row] < 0 ? -1 : 0;
        Attend now = call;
        if (call.pairs) {  // free slots are read nowhere, but have a row of the table
            auto *keys = reinterpret_cast<std::int32_t *>(scratch + kernel_scratch(given.mass, threads));
            for (std::int64_t i = 0; i < rows * slots; ++i) keys[i] = std::max(slot_positions[i], 0);
            now.near = {query_positions.data(), keys};
        }
        now.queries = given.queries;
        now.query_strides[0] = given.query_strides[0], now.query_strides[1] = given.query_strides[1];
        now.query_positions = given.positions;
        now.out = given.out;
        now.mass_rows = given.mass, now.observations = given.mass ? 1 : 0;
        kernel(now, scratch, threads);
    }

  private:
    Attend call;
    std::vector<State> state;
    Kernel kernel;
    std::vector<std::int64_t> query_positions;
    std::vector<std::int64_t> observed;

    std::size_t key_positions() const {
        return call.pairs ? std::size_t(call.batch) * call.score_heads * call.slots : 0;
    }
    std::size_t kernel_scratch(bool has_mass, int threads) const {
        Attend sizes = call;
        float mass = 0;  // its address says that there is any
        sizes.mass_rows = has_mass ? &mass : nullptr;
        return Scratch(sizes, threads).total();
    }

    void put(const Given &given, const New &from, const PackedStates &to) const {
        write({call.batch, call.kv_heads, call.score_heads, 1, call.slots, std::int64_t(to.row_bytes),
               {from.row_stride, from.head_stride, 0}, given.written},
              from.states, const_cast<std::uint8_t *>(to.data));
    }
};

}  // namespace windlass
