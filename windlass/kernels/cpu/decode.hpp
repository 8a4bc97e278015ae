// A decode step of one layer: the new token of each row is written, its query reads the slots, and rows over budget
// evict. Positions and state go to the memory that a step gives for them, which may be where they are. Tokens
// of a recall store are put into free slots first, which are free again afterwards.
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

// Facts that stay the same from one step to the next. The addresses belong to tensors that Python keeps alive.
class Decode {
  public:
    // Both calls are complete except for the fields of a step. `retain.ranking` is unset where `is_retaining` is false,
    // and there is no recall store where `recall` has no pieces.
    Decode(const Attend &call, const ReadRule &rule, const Retain &retain, bool is_retaining, Recall recall, const Kernels &kernels)
        : call(call),
          retain(retain),
          is_retaining(is_retaining),
          store(std::move(recall)),
          kernels(kernels),
          reads(rule, std::size_t(call.batch) * call.kv_heads),
          codes(std::size_t(call.batch) * call.kv_heads * std::max(call.keys.row_bytes, call.values.row_bytes)),
          scales(std::size_t(call.batch) * call.kv_heads * std::max(call.keys.slot_scales(), call.values.slot_scales())),
          free(std::size_t(call.batch) * call.score_heads * store.count * RECALL_PAGE),
          orders(std::size_t(call.batch) * call.score_heads),
          observed(call.batch) {
        this->call.observed = observed.data();
        this->retain.orders = orders.data();
    }

    // A tensor (batch, score_heads, slots) of before the step, and the memory of the one after it: perhaps the same.
    template <class Number>
    struct Copy {
        const Number *from;
        Number *to;
    };
    // Slots of each row and head, and their old positions: negative where the slot is not to be freed.
    struct Released {
        const std::int64_t *slots;
        const std::int32_t *positions;
        std::int64_t count;
    };

    // The arguments of one step. `positions` (batch) are negative for padding. `mass` may be null.
    struct Given {
        const std::uint8_t *queries;
        std::int64_t query_strides[2];  // of batch and heads, in numbers
        NewStates keys, values;
        const std::int64_t *positions, *next_positions;
        Copy<std::int32_t> slot_positions;
        std::vector<Copy<float>> state;
        std::int64_t *written;  // (batch, score_heads)
        std::uint8_t *out;
        float *mass;
        std::int64_t *evicted;  // null where nothing is to be evicted
        std::int32_t *evicted_positions;
        std::vector<Released> released;
        const std::int64_t *starts;  // (batch): tokens of each row in the recall store (null where there is none)
        bool is_recalling;           // whether any of them was evicted
        const std::int64_t *row_sinks;  // see `Retain`
        Pins pins;
        std::int64_t used = INT32_MAX;  // slots from here on are free, and stay free
    };

    // Floats of scratch that a step needs.
    std::size_t scratch(const Given &given, int threads) const {
        return kernel_scratch(given, threads) + 2 * key_positions(given) + own_mass(given) + cosines(given) +
               (is_retaining ? retain.scratch() + scratch_size(mean_key_cosine()) : 0);
    }

    void step(const Given &given, float *scratch, int threads) {
        const std::int64_t rows = std::int64_t(call.batch) * call.score_heads, slots = call.slots;
        std::int32_t *slot_positions = given.slot_positions.to;
        copy(given.slot_positions, rows * slots);
        for (const auto &tensor : given.state) copy(tensor, rows * slots);
        first_free(slot_positions, rows, slots, 1, given.written);
        put(given, given.keys, call.keys, threads);
        put(given, given.values, call.values, threads);
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t at = row * slots + given.written[row], position = given.positions[row / call.score_heads];
            slot_positions[at] = std::int32_t(position);
            for (const auto &tensor : given.state) tensor.to[at] = 0;
        }
        for (int row = 0; row < call.batch; ++row) observed[row] = given.positions[row] < 0 ? -1 : 0;
        float *rest = scratch + kernel_scratch(given, threads);
        Attend now = call;
        now.slot_positions = slot_positions;
        if (given.starts) recall(given, now, rest, scratch, threads);
        // Slots of a block are read together. Recalled tokens may be in any free slot.
        now.used = given.is_recalling ? call.slots : int(std::min<std::int64_t>((given.used + BLOCK - 1) / BLOCK * BLOCK, call.slots));
        if (call.pairs) {
            auto *keys = reinterpret_cast<std::int32_t *>(rest + key_positions(given));
            reads.find(given.positions, now.batch, now.score_heads, now.slots, now.used, now.slot_positions, keys);
            now.near = {reads.queries(), keys};
        }
        rest += 2 * key_positions(given);
        now.queries = given.queries;
        now.query_strides[0] = given.query_strides[0], now.query_strides[1] = given.query_strides[1];
        now.query_positions = given.positions;
        now.out = given.out;
        now.mass_rows = given.mass;
        if (own_mass(given)) now.mass_rows = rest;
        rest += own_mass(given);
        now.observations = now.mass_rows ? 1 : 0;
        kernels.attend(now, scratch, threads);
        if (given.is_recalling && now.mass_rows) forget_mass(now.mass_rows);
        if (is_retaining) observe_and_evict(given, now.mass_rows, rest, threads);
        for (const Released &each : given.released)
            for (std::int64_t i = 0; i < rows * each.count; ++i)
                if (each.positions[i] >= 0) slot_positions[i / each.count * slots + each.slots[i]] = -1;
    }

  private:
    Attend call;
    Retain retain;
    bool is_retaining;
    Recall store;
    const Kernels &kernels;
    ReadPositions reads;
    std::vector<std::uint8_t> codes;    // of new keys, and then of new values
    std::vector<std::uint16_t> scales;  // as well
    std::vector<std::int64_t> free;
    std::vector<TextOrder> orders;
    std::vector<std::int64_t> observed;

    // Positions of slots, once as they are read and once as their keys are rotated.
    std::size_t key_positions(const Given &given) const {
        const std::size_t heads = given.is_recalling ? call.kv_heads : call.score_heads;
        return call.pairs || given.is_recalling ? call.batch * heads * call.slots : 0;
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
        const std::size_t floats = Scratch(sizes, threads).total();
        return given.is_recalling ? std::max(floats, scratch_size(recall_step(given), store)) : floats;
    }

    RecallStep recall_step(const Given &given) const {
        RecallStep step{};
        step.batch = call.batch, step.heads = call.heads, step.kv_heads = call.kv_heads;
        step.score_heads = call.score_heads, step.slots = call.slots;
        step.float_format = call.float_format, step.slot_format = call.format, step.scale = call.scale;
        step.queries = given.queries;
        step.query_strides[0] = given.query_strides[0], step.query_strides[1] = given.query_strides[1];
        step.keys = given.keys, step.values = given.values;
        step.positions = given.positions, step.starts = given.starts;
        return step;
    }

    // Notes the new tokens, and lets attention read recalled tokens, by positions in the memory of `rest`.
    void recall(const Given &given, Attend &now, float *rest, float *scratch, int threads) {
        RecallStep step = recall_step(given);
        float *numbers = given.state[store.state].to;
        for (std::int64_t row = 0; row < std::int64_t(call.batch) * call.score_heads; ++row)
            numbers[row * call.slots + given.written[row]] = float(given.starts[row / call.score_heads]);
        kernels.remember(step, store);
        if (!given.is_recalling) return;
        first_free(now.slot_positions, std::int64_t(call.batch) * call.score_heads, call.slots, store.count * RECALL_PAGE, free.data());
        step.kept = numbers, step.slot_positions = now.slot_positions, step.free = free.data();
        step.slot_keys = call.keys, step.slot_values = call.values;
        step.read_positions = reinterpret_cast<std::int32_t *>(rest);
        kernels.recall(step, store, scratch, threads);
        now.score_heads = call.kv_heads, now.slot_positions = step.read_positions;
    }

    // Recalled tokens are no longer in their slots.
    void forget_mass(float *mass) const {
        const std::int64_t count = store.count * RECALL_PAGE;
        for (int row = 0; row < call.batch * call.kv_heads; ++row) {
            const int own = call.score_heads == 1 ? row / call.kv_heads : row;
            for (std::int64_t i = 0; i < count; ++i) mass[std::int64_t(row) * call.slots + free[own * count + i]] = 0;
        }
    }
    MeanKeyCosine mean_key_cosine() const {
        return {call.batch, call.kv_heads, call.score_heads, call.slots, call.format, call.keys, nullptr, nullptr};
    }

    void observe_and_evict(const Given &given, const float *mass, float *scratch, int threads) {
        Retain now = retain;
        now.is_evicting = given.evicted;
        now.query_positions = given.positions, now.next_positions = given.next_positions;
        now.row_sinks = given.row_sinks, now.pins = given.pins;
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
        if (tensor.to != tensor.from) std::memcpy(tensor.to, tensor.from, count * sizeof(Number));
    }

    // Writes new states as the slots hold theirs: their bytes, or codes and scales.
    void put(const Given &given, const NewStates &from, const PackedStates &to, int threads) {
        if (!to.scales) return put_bytes(given, from, to.row_bytes, to.data);
        const std::int64_t size = call.float_format == Format::float32 ? 4 : 2;
        kernels.encode({call.batch, call.kv_heads, 1, to.held, to.group_bits ? 1 << to.group_bits : 0, call.float_format,
                        from.states, {from.row_stride / size, from.head_stride / size, 0}, to.means, codes.data(), scales.data()},
                       threads);
        const auto put_all = [&](const void *rows, std::size_t bytes, const void *slots) {
            const std::int64_t stride = std::int64_t(bytes);
            put_bytes(given, {static_cast<const std::uint8_t *>(rows), stride * call.kv_heads, stride}, bytes, slots);
        };
        put_all(codes.data(), to.row_bytes, to.data);
        put_all(scales.data(), to.slot_scales() * sizeof(std::uint16_t), to.scales);
        if (to.ring_index) leave_ring(given, const_cast<std::int32_t *>(to.ring_index));
    }
    // The slots that are written held tokens at full precision once, which are gone.
    void leave_ring(const Given &given, std::int32_t *ring_index) const {
        for (int index = 0; index < call.batch * call.kv_heads; ++index) {
            const std::int64_t own = call.score_heads == 1 ? index / call.kv_heads : index;
            ring_index[std::int64_t(index) * call.slots + given.written[own]] = -1;
        }
    }
    void put_bytes(const Given &given, const NewStates &from, std::size_t bytes, const void *slots) const {
        write({call.batch, call.kv_heads, call.score_heads, 1, call.slots, std::int64_t(bytes),
               {from.row_stride, from.head_stride, 0}, given.written},
              from.states, static_cast<std::uint8_t *>(const_cast<void *>(slots)));
    }
};

}  // namespace windlass
