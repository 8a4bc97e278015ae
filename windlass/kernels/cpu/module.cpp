// The kernels as Python sees them. Tensors come as addresses: `__init__.py`, the only caller, makes
// sure that they have the types and shapes of `call.hpp`. Reading an address is much cheaper than an
// exchange of array objects, of which a decode step would need hundreds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <dlfcn.h>
#endif

#include <optional>
#include <string>
#include <tuple>

#include "call.hpp"
#include "decode.hpp"
#include "instruction_sets.hpp"
#include "module.hpp"
#include "slots.hpp"
#include "steady.hpp"

namespace nb = nanobind;
using namespace windlass;

namespace {

using PackedArguments = std::tuple<Address, Address, Address, int, int, int, std::size_t, Address, Address, int,
                                   int, int>;

PackedStates packed_states(const PackedArguments &from) {
    const auto &[data, scales, means, channels, first, held, row_bytes, full_precision, ring_index,
                 ring_entries, ring_format, group_bits] = from;
    return {at<const std::uint8_t>(data),
            at<const std::uint16_t>(scales),
            at<const float>(means),
            channels,
            first,
            held,
            row_bytes,
            at<const std::uint8_t>(full_precision),
            at<const std::int32_t>(ring_index),
            ring_entries,
            Format(ring_format),
            group_bits};
}

void rotate(std::tuple<int, int, int, int, int> sizes, int format, int float_format, PackedArguments from,
            Address positions, std::tuple<Address, Address, int> tables, Address out,
            const std::string &instruction_set, int threads) {
    const auto [batch, kv_heads, score_heads, slots, used] = sizes;
    const auto [cos, sin, pairs] = tables;
    const Rotate call{batch,
                      kv_heads,
                      score_heads,
                      slots,
                      used,
                      Format(format),
                      Format(float_format),
                      packed_states(from),
                      at<const std::int32_t>(positions),
                      at<const float>(cos),
                      at<const float>(sin),
                      pairs,
                      at<std::uint8_t>(out)};
    nb::gil_scoped_release released;
    kernels_of(instruction_set).rotate(call, threads);
}

void encode(std::tuple<int, int, int, int, int> sizes, int float_format, Address states,
            std::tuple<std::int64_t, std::int64_t, std::int64_t> strides, Address means, Address codes, Address scales,
            const std::string &instruction_set, int threads) {
    const auto [batch, kv_heads, tokens, width, group] = sizes;
    const Encode call{batch,
                      kv_heads,
                      tokens,
                      width,
                      group,
                      Format(float_format),
                      at<const std::uint8_t>(states),
                      {std::get<0>(strides), std::get<1>(strides), std::get<2>(strides)},
                      at<const float>(means),
                      at<std::uint8_t>(codes),
                      at<std::uint16_t>(scales)};
    nb::gil_scoped_release released;
    kernels_of(instruction_set).encode(call, threads);
}

void mean_key_cosine(std::tuple<int, int, int, int> sizes, int format, PackedArguments keys,
                     Address positions, Address out, const std::string &instruction_set, int threads) {
    const auto [batch, kv_heads, score_heads, slots] = sizes;
    const MeanKeyCosine call{batch,
                             kv_heads,
                             score_heads,
                             slots,
                             Format(format),
                             packed_states(keys),
                             at<const std::int32_t>(positions),
                             at<float>(out)};
    float *scratch = scratch_of(scratch_size(call));
    nb::gil_scoped_release released;
    kernels_of(instruction_set).mean_key_cosine(call, scratch, threads);
}

void redundancy(std::tuple<int, int, int> sizes, int format, PackedArguments keys, Address positions, Address order, float threshold,
                Address out, const std::string &instruction_set, int threads) {
    const auto [batch, kv_heads, slots] = sizes;
    const Redundancy call{batch,
                          kv_heads,
                          slots,
                          Format(format),
                          packed_states(keys),
                          at<const std::int32_t>(positions),
                          at<const std::int64_t>(order),
                          threshold,
                          at<float>(out)};
    float *scratch = scratch_of(threads * call.scratch());
    nb::gil_scoped_release released;
    kernels_of(instruction_set).redundancy(call, scratch, threads);
}

void expected(std::tuple<int, int, int, int, int, int> sizes, Address keys, Address means, Address covariances,
              std::pair<Address, Address> turn, Address out, const std::string &instruction_set, int threads) {
    const auto [batch, kv_heads, group, slots, channels, pairs] = sizes;
    const Expected call{batch,
                        kv_heads,
                        group,
                        slots,
                        channels,
                        pairs,
                        at<const float>(keys),
                        at<const float>(means),
                        at<const float>(covariances),
                        at<const float>(turn.first),
                        at<const float>(turn.second),
                        at<float>(out)};
    float *scratch = scratch_of(threads * call.scratch());
    nb::gil_scoped_release released;
    kernels_of(instruction_set).expected(call, scratch, threads);
}

void leverage(std::tuple<int, int, int, int> sizes, int format, Address keys, Address is_counted, Address projection,
              double ridge, Address out, const std::string &instruction_set, int threads) {
    const auto [heads, slots, channels, width] = sizes;
    const Leverage call{heads,
                        slots,
                        channels,
                        width,
                        Format(format),
                        at<const std::uint8_t>(keys),
                        at<const bool>(is_counted),
                        at<const double>(projection),
                        ridge,
                        at<double>(out)};
    float *scratch = scratch_of(threads * call.scratch());
    nb::gil_scoped_release released;
    kernels_of(instruction_set).leverage(call, scratch, threads);
}

using DigestArguments = std::tuple<Address, Address, Address, Address, int>;

BestPages::Digests digests_of(const DigestArguments &from) {
    const auto &[largest, largest_scales, least, least_scales, tiles] = from;
    return {{at<const std::uint32_t>(largest), at<const std::uint16_t>(largest_scales), tiles},
            {at<const std::uint32_t>(least), at<const std::uint16_t>(least_scales), tiles}};
}

void best_pages(std::tuple<int, int, int, int, int, int, int, int, int> sizes, std::pair<int, int> format,
                std::pair<Address, Address> queries,
                const std::vector<std::tuple<Address, Address, int>> &pieces,
                const std::vector<DigestArguments> &digests, int candidates,
                std::pair<Address, Address> kept, std::pair<Address, Address> best,
                const std::string &instruction_set, int threads) {
    BestPages call{};
    std::tie(call.batch, call.kv_heads, call.score_heads, call.queries_per_head, call.tokens, call.channels, call.words,
             call.kept, call.count) = sizes;
    call.format = Format(format.first), call.group_bits = format.second;
    call.queries = at<const float>(queries.first), call.is_query = at<const bool>(queries.second);
    for (const auto &[keys, scales, tiles] : pieces)
        call.pieces.push_back({at<const std::uint32_t>(keys), at<const std::uint16_t>(scales), tiles});
    for (const DigestArguments &each : digests) call.digests.push_back(digests_of(each));
    call.candidates = candidates;
    call.positions = at<const std::int32_t>(kept.first), call.kept_index = at<const float>(kept.second);
    call.best = at<std::int64_t>(best.first), call.is_read = at<std::uint8_t>(best.second);
    float *scratch = scratch_of(call.scratch());
    nb::gil_scoped_release released;
    kernels_of(instruction_set).best_pages(call, scratch, threads);
}

void read_tokens(std::tuple<std::int64_t, std::int64_t, std::int64_t, bool> sizes,
                 const std::vector<std::pair<Address, std::int64_t>> &pieces, Address index, Address out,
                 const std::string &instruction_set, int threads) {
    ReadTokens call{};
    std::tie(call.rows, call.tokens, call.row_bytes, call.is_tiled) = sizes;
    for (const auto &[data, tokens] : pieces) call.pieces.push_back({at<const std::uint8_t>(data), tokens});
    call.index = at<const std::int64_t>(index), call.out = at<std::uint8_t>(out);
    nb::gil_scoped_release released;
    kernels_of(instruction_set).read_tokens(call, threads);
}

// The common fields of a call of `attend` and a decode step.
Attend attend_call(std::tuple<int, int, int, int, int, int> sizes, int format, int float_format, PackedArguments keys,
                   PackedArguments values, Address slot_positions, std::tuple<Address, Address, int, bool> tables,
                   float scale, float softcap, std::tuple<int, int, int, int> visibility) {
    Attend call{};
    std::tie(call.batch, call.heads, call.kv_heads, call.score_heads, call.tokens, call.slots) = sizes;
    call.row_tokens = call.tokens, call.row_heads = call.heads, call.some = call.tokens;
    call.format = Format(format), call.float_format = Format(float_format);
    call.keys = packed_states(keys), call.values = packed_states(values);
    call.slot_positions = at<const std::int32_t>(slot_positions);
    call.cos = at<const float>(std::get<0>(tables)), call.sin = at<const float>(std::get<1>(tables));
    call.pairs = std::get<2>(tables), call.is_steady = std::get<3>(tables);
    call.scale = scale, call.softcap = softcap;
    std::tie(call.sliding_window, call.reach, call.sinks, call.attention_chunk) = visibility;
    return call;
}

void attend(std::tuple<int, int, int, int, int, int> sizes, int format, int float_format, Address queries,
            std::tuple<std::int64_t, std::int64_t, std::int64_t> strides, PackedArguments keys,
            PackedArguments values, Address slot_positions, Address query_positions,
            std::tuple<Address, Address, Address, Address, int> rotary_index,
            std::tuple<Address, Address, int, bool> tables, Address query_gain, float scale, float softcap,
            std::tuple<int, int, int, int> visibility, Address sink_logits, Address log_counts,
            std::tuple<Address, int, Address, Address> mass, Address out, int some,
            const std::string &instruction_set, int threads) {
    Attend call = attend_call(sizes, format, float_format, keys, values, slot_positions, tables, scale, softcap,
                              visibility);
    call.queries = at<const std::uint8_t>(queries);
    std::tie(call.query_strides[0], call.query_strides[1], call.query_strides[2]) = strides;
    call.query_positions = at<const std::int64_t>(query_positions);
    call.near = Branch{at<const std::int64_t>(std::get<0>(rotary_index)),
                       at<const std::int32_t>(std::get<1>(rotary_index))};
    call.far = Branch{at<const std::int64_t>(std::get<2>(rotary_index)),
                      at<const std::int32_t>(std::get<3>(rotary_index))};
    call.near_window = std::get<4>(rotary_index);
    call.query_gain = at<const float>(query_gain);
    call.sink_logits = at<const float>(sink_logits), call.log_counts = at<const float>(log_counts);
    call.observed = at<const std::int64_t>(std::get<0>(mass)), call.observations = std::get<1>(mass);
    call.mass_rows = at<float>(std::get<2>(mass)), call.mass_rest = at<float>(std::get<3>(mass));
    call.out = at<std::uint8_t>(out);
    call.some = some;
    float *scratch = scratch_of(part_scratch(call, threads) * (call.has_many_parts() ? threads : 1));
    nb::gil_scoped_release released;
    kernels_of(instruction_set).attend(call, scratch, threads);
}

using NewArguments = std::tuple<Address, std::int64_t, std::int64_t>;
using RetainArguments = std::tuple<int, int, float, int, bool, int, int, int>;

NewStates new_states(NewArguments from) {
    return {at<const std::uint8_t>(std::get<0>(from)), std::get<1>(from), std::get<2>(from)};
}

Retain retain_call(const Attend &call, RetainArguments from) {
    const auto [observed, score, share, pool, is_mean, budget, sinks, window] = from;
    Retain retain{};
    retain.batch = call.batch, retain.kv_heads = call.kv_heads;
    retain.score_heads = call.score_heads, retain.slots = call.slots;
    retain.ranking = {Observed(observed), Score(score), share, pool, is_mean};
    retain.budget = budget, retain.sinks = sinks, retain.window = window;
    retain.sliding_window = call.sliding_window, retain.attention_chunk = call.attention_chunk;
    return retain;
}

using RecallArguments =
    std::tuple<std::tuple<int, int, int, int, int, int, int>, Address, std::vector<std::tuple<Address, Address, Address, Address, int>>,
               std::pair<std::vector<DigestArguments>, int>, std::tuple<Address, std::int64_t, Address>,
               std::tuple<Address, Address, int>, std::pair<int, int>>;

Recall recall_store(const RecallArguments &from) {
    const auto &[sizes, means, pieces, digests, positions, turn, chosen] = from;
    int format;
    Recall store{};
    std::tie(store.words, store.channels, store.value_bytes, store.value_channels, format, store.key_group_bits,
             store.value_group_bits) = sizes;
    store.format = Format(format), store.means = at<const float>(means);
    for (const auto &[keys, key_scales, values, value_scales, tiles] : pieces)
        store.pieces.push_back({at<std::uint32_t>(keys), at<std::uint16_t>(key_scales), at<std::uint8_t>(values),
                                at<std::uint16_t>(value_scales), tiles});
    for (const DigestArguments &each : digests.first) store.digests.push_back(digests_of(each));
    store.candidates = digests.second;
    store.positions = at<const std::int32_t>(std::get<0>(positions)), store.tokens = std::get<1>(positions);
    store.last_recalled = at<std::int32_t>(std::get<2>(positions));
    store.cos = at<const float>(std::get<0>(turn)), store.sin = at<const float>(std::get<1>(turn));
    store.pairs = std::get<2>(turn);
    std::tie(store.count, store.state) = chosen;
    return store;
}

Decode::Given decode_given(NewArguments queries, NewArguments keys, NewArguments values, std::pair<Address, Address> positions,
                           std::pair<Address, Address> slot_positions,
                           const std::vector<std::pair<Address, Address>> &state, Address written, Address out,
                           Address mass, std::pair<Address, Address> evicted,
                           const std::vector<std::tuple<Address, Address, std::int64_t>> &released,
                           std::pair<Address, bool> recall, Address row_sinks, std::pair<Address, int> pins) {
    Decode::Given given{at<const std::uint8_t>(std::get<0>(queries)),
                        {std::get<1>(queries), std::get<2>(queries)},
                        new_states(keys),
                        new_states(values),
                        at<const std::int64_t>(positions.first),
                        at<const std::int64_t>(positions.second),
                        {at<const std::int32_t>(slot_positions.first), at<std::int32_t>(slot_positions.second)},
                        {},
                        at<std::int64_t>(written),
                        at<std::uint8_t>(out),
                        at<float>(mass),
                        at<std::int64_t>(evicted.first),
                        at<std::int32_t>(evicted.second),
                        {},
                        at<const std::int64_t>(recall.first),
                        recall.second,
                        at<const std::int64_t>(row_sinks),
                        {at<const std::int64_t>(pins.first), pins.second}};
    for (const auto &[from, to] : state) given.state.push_back({at<const float>(from), at<float>(to)});
    for (const auto &[slots, stood, count] : released)
        given.released.push_back({at<const std::int64_t>(slots), at<const std::int32_t>(stood), count});
    return given;
}

void decode(Decode &decode, const Decode::Given &given, int threads) {
    float *scratch = scratch_of(decode.scratch(given, threads));
    nb::gil_scoped_release unlocked;
    decode.step(given, scratch, threads);
}

void query_mass(std::tuple<int, int, int, int, int, int, int> sizes, std::tuple<int, int, int> room, int format,
                Address queries, Address keys, Address mask, Address log_counts, Address lse, Address targets,
                float scale, Address mass, const std::string &instruction_set, int threads) {
    const auto [batch, heads, kv_heads, mask_heads, tokens, used, channels] = sizes;
    const auto [key_slots, slots, outputs] = room;
    const QueryMass call{batch,
                         heads,
                         kv_heads,
                         mask_heads,
                         tokens,
                         used,
                         channels,
                         key_slots,
                         slots,
                         outputs,
                         Format(format),
                         at<const std::uint8_t>(queries),
                         at<const std::uint8_t>(keys),
                         at<const bool>(mask),
                         at<const float>(log_counts),
                         at<const float>(lse),
                         at<const std::int32_t>(targets),
                         scale,
                         at<float>(mass)};
    nb::gil_scoped_release released;
    kernels_of(instruction_set).query_mass(call, threads);
}

// GNU's OpenMP counts the threads of all pools. Where they are more than the CPUs, one that waits
// at a barrier sleeps at once, which costs 60 us, and it never learns that a pool lies idle. The
// function is looked up, as not all libraries of that name have it.
void end_pool() {
#if defined(__linux__)
    using Pause = int (*)(int);
    constexpr int SOFT = 1;
    static const Pause pause = [] {
        void *library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
        return library ? reinterpret_cast<Pause>(dlsym(library, "omp_pause_resource_all")) : nullptr;
    }();
    if (pause) pause(SOFT);  // of the calling thread alone
#endif
}

}  // namespace

NB_MODULE(_native, module) {
    using namespace nb::literals;
    nb::set_leak_warnings(false);  // a cache that lives until the process ends is no leak
    module.def("instruction_sets", &instruction_sets);
    module.def("end_pool", &end_pool);
    module.def("attend", &attend, "sizes"_a, "format"_a, "float_format"_a, "queries"_a, "strides"_a, "keys"_a,
               "values"_a, "slot_positions"_a, "query_positions"_a, "rotary_index"_a, "tables"_a,
               "query_gain"_a, "scale"_a, "softcap"_a, "visibility"_a, "sink_logits"_a, "log_counts"_a, "mass"_a, "out"_a,
               "some"_a, "instruction_set"_a, "threads"_a);
    nb::class_<Decode::Given>(module, "DecodeStep")
        .def("__init__", [](Decode::Given *self, NewArguments queries, NewArguments keys, NewArguments values,
                            std::pair<Address, Address> positions, std::pair<Address, Address> slot_positions,
                            const std::vector<std::pair<Address, Address>> &state, Address written, Address out,
                            Address mass, std::pair<Address, Address> evicted,
                            const std::vector<std::tuple<Address, Address, std::int64_t>> &released,
                            std::pair<Address, bool> recall, Address row_sinks, std::pair<Address, int> pins) {
            new (self) Decode::Given(decode_given(queries, keys, values, positions, slot_positions, state, written,
                                                  out, mass, evicted, released, recall, row_sinks, pins));
        });
    nb::class_<Decode>(module, "Decode")
        .def("__init__",
             [](Decode *self, std::tuple<int, int, int, int, int, int> sizes, int format, int float_format,
                PackedArguments keys, PackedArguments values, std::tuple<Address, Address, int, bool> tables,
                std::tuple<int, int, int, int, int> rule, float scale, float softcap, std::tuple<int, int, int, int> visibility,
                std::optional<RetainArguments> retention,
                const std::optional<RecallArguments> &recall, const std::string &instruction_set) {
                 const Attend call = attend_call(sizes, format, float_format, keys, values, 0, tables, scale, softcap,
                                                 visibility);
                 const Retain retain = retain_call(call, retention.value_or(RetainArguments{}));
                 const auto [ranked_from, group, near, limit, trained] = rule;
                 new (self) Decode(call, {ranked_from, group, near, limit, trained}, retain, retention.has_value(),
                                   recall ? recall_store(*recall) : Recall{}, kernels_of(instruction_set));
             })
        .def("step", &decode);
    module.def("rotate", &rotate, "sizes"_a, "format"_a, "float_format"_a, "states"_a, "positions"_a,
               "tables"_a, "out"_a, "instruction_set"_a, "threads"_a);
    module.def("is_steady", [](Address cos, Address sin, std::int64_t rows, int pairs) {
        return is_steady(at<const float>(cos), at<const float>(sin), rows, pairs);
    });
    module.def("encode", &encode, "sizes"_a, "float_format"_a, "states"_a, "strides"_a, "means"_a, "codes"_a,
               "scales"_a, "instruction_set"_a, "threads"_a);
    module.def("mean_key_cosine", &mean_key_cosine, "sizes"_a, "format"_a, "keys"_a, "positions"_a, "out"_a,
               "instruction_set"_a, "threads"_a);
    module.def("expected", &expected, "sizes"_a, "keys"_a, "means"_a, "covariances"_a, "turn"_a, "out"_a,
               "instruction_set"_a, "threads"_a);
    module.def("leverage", &leverage, "sizes"_a, "format"_a, "keys"_a, "is_counted"_a, "projection"_a, "ridge"_a,
               "out"_a, "instruction_set"_a, "threads"_a);
    module.def("redundancy", &redundancy, "sizes"_a, "format"_a, "keys"_a, "positions"_a, "order"_a, "threshold"_a,
               "out"_a, "instruction_set"_a, "threads"_a);
    module.def("best_pages", &best_pages, "sizes"_a, "format"_a, "queries"_a, "pieces"_a, "digests"_a,
               "candidates"_a, "kept"_a, "best"_a,
               "instruction_set"_a, "threads"_a);
    module.def("read_tokens", &read_tokens, "sizes"_a, "pieces"_a, "index"_a, "out"_a, "instruction_set"_a,
               "threads"_a);
    bind_linear(module);
    bind_watch(module);
    module.def("query_mass", &query_mass, "sizes"_a, "room"_a, "format"_a, "queries"_a, "keys"_a, "mask"_a,
               "log_counts"_a, "lse"_a, "targets"_a, "scale"_a, "mass"_a, "instruction_set"_a, "threads"_a);
    module.def("first_free",
               [](Address positions, std::int64_t rows, std::int64_t slots, std::int64_t count, Address out) {
                   first_free(at<const std::int32_t>(positions), rows, slots, count, at<std::int64_t>(out));
               });
    module.def("argsort_positions", [](Address positions, std::int64_t rows, std::int64_t slots, Address out,
                                       int threads) {
        argsort_positions(at<const std::int32_t>(positions), rows, slots, at<std::int64_t>(out), threads);
    });
    module.def("lowest", [](std::tuple<std::int64_t, std::int64_t, std::int64_t> sizes, Address scores,
                            Address positions, Address next_positions,
                            std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> limits,
                            Address row_sinks, std::int64_t count, Address out, int threads) {
        lowest({std::get<0>(sizes), std::get<1>(sizes), std::get<2>(sizes), at<const float>(scores),
                at<const std::int32_t>(positions), at<const std::int64_t>(next_positions),
                std::get<0>(limits), std::get<1>(limits), std::get<2>(limits), std::get<3>(limits),
                at<const std::int64_t>(row_sinks)},
               count, at<std::int64_t>(out), threads);
    });
    module.def(
        "write",
        [](std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>
               sizes,
           std::tuple<std::int64_t, std::int64_t, std::int64_t> strides, Address index, Address source,
           Address target) {
            const auto [batch, kv_heads, score_heads, tokens, slots, bytes] = sizes;
            write({batch,
                   kv_heads,
                   score_heads,
                   tokens,
                   slots,
                   bytes,
                   {std::get<0>(strides), std::get<1>(strides), std::get<2>(strides)},
                   at<const std::int64_t>(index)},
                  at<const std::uint8_t>(source), at<std::uint8_t>(target));
        });
}
