// Linear layers, and decoder layers made of them, as Python sees them. See `module.cpp`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call.hpp"
#include "decode.hpp"
#include "instruction_sets.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace windlass;

namespace {

using Groups = std::tuple<Address, int, int, int, int, bool, int, Address>;
using LinearArguments = std::tuple<int, int, int, Address, Address, int, Groups, Address>;

Linear linear_layer(const LinearArguments &from, Format float_format) {
    const auto &[in, out, format, weights, scales, scale_format, groups, bias] = from;
    const auto [pairs, group, block, pair_format, columns, is_by_block, middle, supers] = groups;
    return {0,
            in,
            out,
            Format(format),
            float_format,
            nullptr,
            at<const std::uint8_t>(weights),
            Format(scale_format),
            at<const std::uint8_t>(scales),
            at<const std::uint8_t>(bias),
            nullptr,
            at<const std::uint8_t>(pairs),
            group,
            block,
            Format(pair_format),
            columns,
            is_by_block,
            middle,
            at<const std::uint8_t>(supers)};
}

void linear(const LinearArguments &layer, int tokens, int float_format, Address inputs, Address result,
            const std::string &instruction_set, int threads) {
    Linear call = linear_layer(layer, Format(float_format));
    call.tokens = tokens;
    call.inputs = at<const std::uint8_t>(inputs), call.result = at<std::uint8_t>(result);
    float *scratch = scratch_of(call.scratch());
    nb::gil_scoped_release released;
    kernels_of(instruction_set).linear(call, scratch, threads);
}

void decode_weights(const LinearArguments &layer, int first, int count, int float_format, Address result,
                    const std::string &instruction_set, int threads) {
    Linear call = linear_layer(layer, Format(float_format));
    call.tokens = count, call.result = at<std::uint8_t>(result);
    nb::gil_scoped_release released;
    kernels_of(instruction_set).decode_weights(call, first, threads);
}

// Returns false, and writes nothing, for an output that is not there.
bool decode_outputs(const LinearArguments &layer, Address outputs, int count, int float_format, Address result,
                    const std::string &instruction_set) {
    Linear call = linear_layer(layer, Format(float_format));
    call.tokens = count, call.result = at<std::uint8_t>(result);
    const auto *wanted = at<const std::int64_t>(outputs);
    if (std::any_of(wanted, wanted + count, [&](std::int64_t output) { return output < 0 || output >= call.out; })) return false;
    nb::gil_scoped_release released;
    kernels_of(instruction_set).decode_outputs(call, wanted);
    return true;
}

using NormArguments = std::tuple<Address, int, float, int>;

Norm norm(const NormArguments &from) {
    const auto &[weights, width, epsilon, kind] = from;
    return {at<const std::uint8_t>(weights), width, epsilon, Norm::Kind(kind)};
}

void norm_tokens(const NormArguments &from, int tokens, int float_format, Address inputs, Address result,
                 const std::string &instruction_set) {
    kernels_of(instruction_set)
        .norm_tokens(norm(from), Format(float_format), tokens, at<const std::uint8_t>(inputs), at<std::uint8_t>(result), 1);
}

// A decoder layer and the kernels that serve it.
struct BoundLayer {
    DecoderLayer layer;
    const Kernels &kernels;
};

using States = std::tuple<Address, Address, Address>;  // queries, keys, values

BeforeAttention before_call(int tokens, Address hidden, States to) {
    const auto [queries, keys, values] = to;
    return {tokens, at<const std::uint8_t>(hidden), at<std::uint8_t>(queries), at<std::uint8_t>(keys),
            at<std::uint8_t>(values)};
}
AfterAttention after_call(int tokens, Address hidden, Address attended, Address result) {
    return {tokens, at<const std::uint8_t>(hidden), at<const std::uint8_t>(attended), at<std::uint8_t>(result)};
}

void before(const BoundLayer &bound, int tokens, Address hidden, States to, int threads) {
    float *scratch = scratch_of(bound.layer.scratch(tokens));
    nb::gil_scoped_release released;
    bound.kernels.before_attention(bound.layer, before_call(tokens, hidden, to), scratch, threads);
}

void after(const BoundLayer &bound, int tokens, Address hidden, Address attended, Address result, int threads) {
    float *scratch = scratch_of(bound.layer.scratch(tokens));
    nb::gil_scoped_release released;
    bound.kernels.after_attention(bound.layer, after_call(tokens, hidden, attended, result), scratch, threads);
}

// Norm number `which` of a layer, of so many rows.
void norm_states(const BoundLayer &bound, int which, std::int64_t count, Address from, Address to, int threads) {
    const Norm *norms[] = {&bound.layer.first, &bound.layer.second, &bound.layer.of_queries, &bound.layer.of_keys};
    nb::gil_scoped_release released;
    bound.kernels.norm_tokens(*norms[which], bound.layer.float_format, count, at<const std::uint8_t>(from), at<std::uint8_t>(to), threads);
}
void gate_rows(const BoundLayer &bound, std::int64_t count, Address gate, Address up, int threads) {
    nb::gil_scoped_release released;
    bound.kernels.gate_rows(bound.layer, at<std::uint8_t>(gate), at<const std::uint8_t>(up), count, threads);
}

// All layers of a decoder, and their slots, in steps of one token per row. A step changes positions and state in place,
// and notes in memory of its own how it is undone: which slots it wrote and evicted, and state that it observed.
class DecoderSteps {
    static constexpr std::int32_t EMPTY = -1, RESERVED = -2;

  public:
    // `held`: the most tokens of a row. `budget`: the most of them between steps, negative without a limit. In a layer
    // that recalls, `recall_positions` (batch, `recall_tokens`) are the positions of the store's tokens. Kv heads with
    // slots of their own are several of these, one after the other, each with its `heads` (empty: all of them).
    struct Layer {
        const BoundLayer *bound;
        Decode *decode;
        std::int32_t *positions;
        std::vector<float *> state;
        std::int64_t rows, slots;  // rows: batch * score_heads
        std::int64_t budget, held;
        bool has_evicted, is_observed;
        std::int32_t *recall_positions;
        std::int64_t recall_tokens;
        std::vector<int> heads;
        bool is_first, is_last;  // of those of one decoder layer
        std::int64_t at = 0, state_at = 0, mass_at = 0, heads_at = 0;  // where its part of a step's memory begins
        std::int64_t used = 0;                                         // slots of any row from here on are free

        // Looks at some slots at once: the compiler makes vectors of a loop that has no other end.
        void count_used() {
            constexpr std::int64_t AT_ONCE = 64;
            for (const std::int32_t *row = positions; row < positions + rows * slots; row += slots)
                for (std::int64_t end = slots; end > used; end -= AT_ONCE) {
                    std::int32_t all = EMPTY;
                    for (std::int64_t slot = std::max<std::int64_t>(end - AT_ONCE, 0); slot < end; ++slot) all &= row[slot];
                    if (all != EMPTY) used = end;
                }
        }
    };
    struct Sizes {
        int batch, heads, kv_heads, head_dim, width, number_bytes;  // width: numbers of `hidden`
    };
    // Memory of a step, for all layers one after the other (null where it is not wanted).
    struct Undo {
        std::int64_t *written, *evicted;
        std::int32_t *evicted_positions;
        float *state, *mass;
        std::uint8_t *queries, *keys;
    };
    // Slots that an earlier step evicted, and that are free from now on.
    using Released = std::vector<std::pair<const std::int64_t *, const std::int32_t *>>;
    struct Given {
        const std::uint8_t *hidden;
        std::uint8_t *result;
        const std::int64_t *positions, *next_positions, *starts, *row_sinks;
        Pins pins;
        int longest;  // tokens of any row at most: 1, or 0
    };

    DecoderSteps(Sizes sizes, std::vector<Layer> held_layers) : sizes(sizes), layers(std::move(held_layers)) {
        for (Layer &layer : layers) layer.count_used();
        for (std::size_t i = 1; i < layers.size(); ++i) {
            const Layer &before = layers[i - 1];
            layers[i].at = before.at + before.rows;
            layers[i].state_at = before.state_at + (before.is_observed ? before.rows * before.slots : 0);
            layers[i].mass_at = before.mass_at + std::int64_t(sizes.batch) * kv_heads(before) * before.slots;
            layers[i].heads_at = before.heads_at + kv_heads(before);
        }
        own.resize(2 * states_bytes() + 2 * hidden_bytes());
    }

    void step(const Given &given, const Undo &undo, const Released &released, int threads) {
        std::vector<Decode::Given> steps;
        std::size_t floats = 0;
        for (std::size_t i = 0; i < layers.size(); ++i) {
            steps.push_back(given_of(i, given, undo, released));
            floats = std::max({floats, layers[i].bound->layer.scratch(sizes.batch), layers[i].decode->scratch(steps[i], threads)});
        }
        float *scratch = scratch_of(floats);
        nb::gil_scoped_release unlocked;
        const std::uint8_t *hidden = given.hidden;
        int decoder_layers = 0;
        for (std::size_t i = 0; i < layers.size(); ++i) {
            Layer &layer = layers[i];
            const BoundLayer &bound = *layer.bound;
            const Decode::Given &now = steps[i];
            const bool has_all = layer.heads.empty();
            const auto part = [](const void *states) { return const_cast<std::uint8_t *>(static_cast<const std::uint8_t *>(states)); };
            if (undo.state && layer.is_observed && !layer.state.empty())
                std::memcpy(undo.state + layer.state_at, layer.state[0], layer.rows * layer.slots * sizeof(float));
            if (!now.evicted) std::fill_n(undo.evicted_positions + layer.at, layer.rows, -1);
            const BeforeAttention states{sizes.batch, hidden, part(now.queries), part(now.keys.states), part(now.values.states)};
            const BeforeAttention joined{sizes.batch, hidden, states_of(true).queries, states_of(true).keys, states_of(true).values};
            if (layer.is_first) bound.kernels.before_attention(bound.layer, has_all ? states : joined, scratch, threads);
            if (!has_all) {
                const auto take = [](std::uint8_t *all, std::uint8_t *some, std::size_t size) { std::memcpy(some, all, size); };
                each_head(layer, sizes.heads / sizes.kv_heads, joined.queries, states.queries, take);
                each_head(layer, 1, joined.keys, states.keys, take);
                each_head(layer, 1, joined.values, states.values, take);
            }
            layer.decode->step(now, scratch, threads);
            if (!has_all)
                each_head(layer, sizes.heads / sizes.kv_heads, states_of(true).out, now.out,
                          [](std::uint8_t *all, std::uint8_t *some, std::size_t size) { std::memcpy(all, some, size); });
            if (layer.is_last) {
                auto *result = i + 1 == layers.size() ? given.result : scratch_hidden(decoder_layers++ % 2);
                const std::uint8_t *attended = has_all ? now.out : states_of(true).out;
                bound.kernels.after_attention(bound.layer, {sizes.batch, hidden, attended, result}, scratch, threads);
                hidden = result;
            }
            if (layer.recall_positions)
                for (int row = 0; row < sizes.batch; ++row)
                    if (given.positions[row] >= 0)
                        layer.recall_positions[row * layer.recall_tokens + given.starts[row]] = std::int32_t(given.positions[row]);
        }
        before.clear();
        for (std::size_t i = 0; i < layers.size(); ++i) {
            Layer &layer = layers[i];
            before.emplace_back(layer.held, layer.has_evicted);
            layer.held += given.longest - (steps[i].evicted ? 1 : 0);
            layer.has_evicted |= steps[i].evicted != nullptr;
            for (std::int64_t row = 0; row < layer.rows; ++row) layer.used = std::max(layer.used, steps[i].written[row] + 1);
        }
        ++count;
    }

    // Lets all be as before the latest step, whose memory and given tensors these are.
    void take_back(const Given &given, const Undo &undo, const Released &released) {
        for (std::size_t i = 0; i < layers.size(); ++i) {
            Layer &layer = layers[i];
            for (std::int64_t row = 0; row < layer.rows; ++row) {
                std::int32_t *positions = layer.positions + row * layer.slots;
                const std::int64_t at = layer.at + row;
                for (const auto &[slots, stood] : released)
                    if (stood[at] >= 0) positions[slots[at]] = RESERVED;
                if (undo.evicted_positions[at] >= 0) positions[undo.evicted[at]] = undo.evicted_positions[at];
                positions[undo.written[at]] = EMPTY;
            }
            if (undo.state && layer.is_observed && !layer.state.empty())
                std::memcpy(layer.state[0], undo.state + layer.state_at, layer.rows * layer.slots * sizeof(float));
            if (layer.recall_positions)
                for (int row = 0; row < sizes.batch; ++row)
                    if (given.positions[row] >= 0) layer.recall_positions[row * layer.recall_tokens + given.starts[row]] = EMPTY;
            std::tie(layer.held, layer.has_evicted) = before[i];
        }
        --count;
    }

    void free(const Released &released) const {
        for (const Layer &layer : layers)
            for (const auto &[slots, stood] : released)
                for (std::int64_t row = 0; row < layer.rows; ++row)
                    if (stood[layer.at + row] >= 0) layer.positions[row * layer.slots + slots[layer.at + row]] = EMPTY;
    }

    std::int64_t count = 0;  // steps that were taken, and not taken back

  private:
    Sizes sizes;
    std::vector<Layer> layers;
    std::vector<std::pair<std::int64_t, bool>> before;  // `held` and `has_evicted` of each layer before the latest step
    std::vector<std::uint8_t> own;                      // states of some heads, of all heads, and two of `hidden`

    std::size_t bytes(int heads) const { return std::size_t(sizes.batch) * heads * sizes.head_dim * sizes.number_bytes; }
    std::size_t hidden_bytes() const { return std::size_t(sizes.batch) * sizes.width * sizes.number_bytes; }
    std::size_t states_bytes() const { return 2 * bytes(sizes.heads) + 2 * bytes(sizes.kv_heads); }
    std::uint8_t *scratch_hidden(std::size_t number) { return own.data() + 2 * states_bytes() + number * hidden_bytes(); }
    int kv_heads(const Layer &layer) const { return layer.heads.empty() ? sizes.kv_heads : int(layer.heads.size()); }

    struct OwnStates {
        std::uint8_t *queries, *out, *keys, *values;
    };
    // Memory for the states of the heads of a `Layer`, or, joined, of all heads of a decoder layer.
    OwnStates states_of(bool is_joined) {
        std::uint8_t *first = own.data() + (is_joined ? states_bytes() : 0);
        const std::size_t query = bytes(sizes.heads), key = bytes(sizes.kv_heads);
        return {first, first + query, first + 2 * query, first + 2 * query + key};
    }
    // Copies between all heads and those of a layer, of which each kv head has `count`, in every row.
    template <class Copy>
    void each_head(const Layer &layer, int count, std::uint8_t *all, std::uint8_t *some, const Copy &copy) const {
        const std::size_t size = std::size_t(count) * sizes.head_dim * sizes.number_bytes;
        for (int row = 0; row < sizes.batch; ++row)
            for (std::size_t i = 0; i < layer.heads.size(); ++i)
                copy(all + (std::size_t(row) * sizes.kv_heads + layer.heads[i]) * size, some + (row * layer.heads.size() + i) * size, size);
    }

    Decode::Given given_of(std::size_t number, const Given &given, const Undo &undo, const Released &released) {
        Layer &layer = layers[number];
        const OwnStates states = states_of(false);
        const int group = sizes.heads / sizes.kv_heads;
        const std::uint8_t *queries = undo.queries ? undo.queries + layer.heads_at * bytes(group) : states.queries;
        const std::uint8_t *keys = undo.keys ? undo.keys + layer.heads_at * bytes(1) : states.keys;
        const std::int64_t kv_row = std::int64_t(kv_heads(layer)) * sizes.head_dim, row = group * kv_row;
        const std::int64_t head_bytes = std::int64_t(sizes.head_dim) * sizes.number_bytes;
        const bool is_evicting = layer.budget >= 0 && layer.held + given.longest > layer.budget;
        Decode::Given step{queries,
                           {row, sizes.head_dim},
                           {keys, kv_row * sizes.number_bytes, head_bytes},
                           {states.values, kv_row * sizes.number_bytes, head_bytes},
                           given.positions,
                           given.next_positions,
                           {layer.positions, layer.positions},
                           {},
                           undo.written + layer.at,
                           states.out,
                           undo.mass && layer.is_observed ? undo.mass + layer.mass_at : nullptr,
                           is_evicting ? undo.evicted + layer.at : nullptr,
                           undo.evicted_positions + layer.at,
                           {},
                           layer.recall_positions ? given.starts : nullptr,
                           layer.recall_positions && layer.has_evicted,
                           given.row_sinks,
                           given.pins,
                           layer.used + 1};  // the lowest free slot is written
        for (float *state : layer.state) step.state.push_back({state, state});
        for (const auto &[slots, stood] : released) step.released.push_back({slots + layer.at, stood + layer.at, 1});
        return step;
    }
};

using LayerArguments = std::tuple<const BoundLayer *, Decode *, std::pair<Address, std::vector<Address>>,
                                  std::tuple<std::int64_t, std::int64_t>, std::tuple<std::int64_t, std::int64_t, bool>, bool,
                                  std::pair<Address, std::int64_t>, std::tuple<std::vector<int>, bool, bool>>;
using GivenArguments = std::tuple<Address, Address, Address, Address, Address, Address, std::pair<Address, int>, int>;
using UndoArguments = std::tuple<Address, Address, Address, Address, Address, Address, Address>;
using ReleasedArguments = std::vector<std::pair<Address, Address>>;

DecoderSteps::Layer layer_of(const LayerArguments &from) {
    const auto &[bound, decode, slots, sizes, bounds, is_observed, recall, heads] = from;
    DecoderSteps::Layer layer{bound, decode, at<std::int32_t>(slots.first), {}, std::get<0>(sizes), std::get<1>(sizes),
                              std::get<0>(bounds), std::get<1>(bounds), std::get<2>(bounds), is_observed,
                              at<std::int32_t>(recall.first), recall.second, std::get<0>(heads), std::get<1>(heads),
                              std::get<2>(heads)};
    for (const Address state : slots.second) layer.state.push_back(at<float>(state));
    return layer;
}
DecoderSteps::Given given_of(const GivenArguments &from) {
    const auto [hidden, result, positions, next_positions, starts, row_sinks, pins, longest] = from;
    return {at<const std::uint8_t>(hidden), at<std::uint8_t>(result), at<const std::int64_t>(positions),
            at<const std::int64_t>(next_positions), at<const std::int64_t>(starts), at<const std::int64_t>(row_sinks),
            {at<const std::int64_t>(pins.first), pins.second}, longest};
}
DecoderSteps::Undo undo_of(const UndoArguments &from) {
    const auto [written, evicted, evicted_positions, state, mass, queries, keys] = from;
    return {at<std::int64_t>(written), at<std::int64_t>(evicted), at<std::int32_t>(evicted_positions), at<float>(state),
            at<float>(mass), at<std::uint8_t>(queries), at<std::uint8_t>(keys)};
}
DecoderSteps::Released released_of(const ReleasedArguments &from) {
    DecoderSteps::Released released;
    for (const auto &[slots, stood] : from) released.emplace_back(at<const std::int64_t>(slots), at<const std::int32_t>(stood));
    return released;
}

}  // namespace

void windlass::bind_linear(nb::module_ &module) {
    using namespace nb::literals;
    module.def("linear", &linear, "layer"_a, "tokens"_a, "float_format"_a, "inputs"_a, "result"_a,
               "instruction_set"_a, "threads"_a);
    module.def("decode_weights", &decode_weights, "layer"_a, "first"_a, "count"_a, "float_format"_a, "result"_a,
               "instruction_set"_a, "threads"_a);
    module.def("decode_outputs", &decode_outputs, "layer"_a, "outputs"_a, "count"_a, "float_format"_a, "result"_a,
               "instruction_set"_a);
    module.def("norm_tokens", &norm_tokens, "norm"_a, "tokens"_a, "float_format"_a, "inputs"_a, "result"_a,
               "instruction_set"_a);
    using Norms = std::tuple<NormArguments, NormArguments, NormArguments, NormArguments>;
    using Linears = std::tuple<LinearArguments, LinearArguments, LinearArguments, LinearArguments, LinearArguments,
                               LinearArguments, LinearArguments>;
    nb::class_<BoundLayer>(module, "DecoderLayer")
        .def("__init__",
             [](BoundLayer *self, int float_format, const Norms &norms, const Linears &linears, int activation,
                const std::string &instruction_set) {
                 const Format format = Format(float_format);
                 const auto of = [&](const LinearArguments &from) { return linear_layer(from, format); };
                 new (self) BoundLayer{
                     {format, norm(std::get<0>(norms)), norm(std::get<1>(norms)), norm(std::get<2>(norms)),
                      norm(std::get<3>(norms)), of(std::get<0>(linears)), of(std::get<1>(linears)),
                      of(std::get<2>(linears)), of(std::get<3>(linears)), of(std::get<4>(linears)),
                      of(std::get<5>(linears)), of(std::get<6>(linears)), DecoderLayer::Activation(activation)},
                     kernels_of(instruction_set)};
             })
        .def("before", &before)
        .def("after", &after)
        .def("norm", &norm_states)
        .def("gate", &gate_rows);
    nb::class_<DecoderSteps>(module, "DecoderSteps")
        .def("__init__",
             [](DecoderSteps *self, std::tuple<int, int, int, int, int, int> sizes, const std::vector<LayerArguments> &layers) {
                 const auto [batch, heads, kv_heads, head_dim, width, number_bytes] = sizes;
                 std::vector<DecoderSteps::Layer> held;
                 for (const LayerArguments &each : layers) held.push_back(layer_of(each));
                 new (self) DecoderSteps({batch, heads, kv_heads, head_dim, width, number_bytes}, std::move(held));
             })
        .def("step",
             [](DecoderSteps &self, const GivenArguments &given, const UndoArguments &undo, const ReleasedArguments &released,
                int threads) { self.step(given_of(given), undo_of(undo), released_of(released), threads); })
        .def("take_back",
             [](DecoderSteps &self, const GivenArguments &given, const UndoArguments &undo, const ReleasedArguments &released) {
                 self.take_back(given_of(given), undo_of(undo), released_of(released));
             })
        .def("free", [](const DecoderSteps &self, const ReleasedArguments &released) { self.free(released_of(released)); })
        .def_ro("count", &DecoderSteps::count);
}
