// Linear layers, and decoder layers made of them, as Python sees them; see `module.cpp`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "call.hpp"
#include "decode.hpp"
#include "instruction_sets.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace windlass;

namespace {

using LinearArguments = std::tuple<int, int, int, Address, Address, int, std::tuple<Address, int, int>, Address>;

Linear linear_layer(const LinearArguments &from, Format float_format) {
    const auto &[in, out, format, weights, scales, scale_format, groups, bias] = from;
    const auto [pairs, group, block] = groups;
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
            block};
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

using NormArguments = std::tuple<Address, int, float, int>;

Norm norm(const NormArguments &from) {
    const auto &[weights, width, epsilon, kind] = from;
    return {at<const std::uint8_t>(weights), width, epsilon, Norm::Kind(kind)};
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

// Layers one after the other, with their steps in the cache: each result is the next one's `hidden`.
using LayerStep = std::tuple<const BoundLayer *, States, Decode *, const Decode::Given *, Address>;

void decode_layers(const std::vector<LayerStep> &layers, int tokens, Address hidden, int threads) {
    std::size_t floats = 0;
    for (const auto &[bound, states, decode, given, result] : layers)
        floats = std::max({floats, bound->layer.scratch(tokens), decode->scratch(*given, threads)});
    float *scratch = scratch_of(floats);
    nb::gil_scoped_release released;
    for (const auto &[bound, states, decode, given, result] : layers) {
        const auto attended = reinterpret_cast<Address>(given->out);
        bound->kernels.before_attention(bound->layer, before_call(tokens, hidden, states), scratch, threads);
        decode->step(*given, scratch, threads);
        bound->kernels.after_attention(bound->layer, after_call(tokens, hidden, attended, result), scratch, threads);
        hidden = result;
    }
}

}  // namespace

void windlass::bind_linear(nb::module_ &module) {
    using namespace nb::literals;
    module.def("linear", &linear, "layer"_a, "tokens"_a, "float_format"_a, "inputs"_a, "result"_a,
               "instruction_set"_a, "threads"_a);
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
        .def("after", &after);
    module.def("decode_layers", &decode_layers, "layers"_a, "tokens"_a, "hidden"_a, "threads"_a);
}
