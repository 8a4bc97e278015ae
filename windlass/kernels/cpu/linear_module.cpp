// Linear layers, and decoder layers made of them, as Python sees them; see `module.cpp`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "call.hpp"
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

    void before(int tokens, Address hidden, std::tuple<Address, Address, Address> to, int threads) const {
        const auto [queries, keys, values] = to;
        const BeforeAttention call{tokens, at<const std::uint8_t>(hidden), at<std::uint8_t>(queries),
                                   at<std::uint8_t>(keys), at<std::uint8_t>(values)};
        float *scratch = scratch_of(layer.scratch(tokens));
        nb::gil_scoped_release released;
        kernels.before_attention(layer, call, scratch, threads);
    }
    void after(int tokens, Address hidden, Address attended, Address result, int threads) const {
        const AfterAttention call{tokens, at<const std::uint8_t>(hidden), at<const std::uint8_t>(attended),
                                  at<std::uint8_t>(result)};
        float *scratch = scratch_of(layer.scratch(tokens));
        nb::gil_scoped_release released;
        kernels.after_attention(layer, call, scratch, threads);
    }
};

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
        .def("before", &BoundLayer::before)
        .def("after", &BoundLayer::after);
}
