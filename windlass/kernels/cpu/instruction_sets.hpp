// The kernels of each instruction set, and which of these the CPU runs.
#pragma once
#include <string>

#include "call.hpp"
#include "expected.hpp"
#include "leverage.hpp"
#include "redundancy.hpp"
#include "retain.hpp"

namespace windlass {

// The kernels of one instruction set, each compiled in a namespace of its own.
struct Kernels {
    void (*attend)(const Attend &call, float *scratch, int threads);
    void (*rotate)(const Rotate &call, int threads);
    void (*encode)(const Encode &call, int threads);
    void (*mean_key_cosine)(const MeanKeyCosine &call, float *scratch, int threads);
    void (*linear)(const Linear &call, float *scratch, int threads);
    void (*decode_weights)(const Linear &call, int first, int threads);
    void (*decode_outputs)(const Linear &call, const std::int64_t *outputs);
    void (*norm_tokens)(const Norm &norm, Format format, std::int64_t tokens, const std::uint8_t *from, std::uint8_t *to, int threads);
    void (*query_mass)(const QueryMass &call, int threads);
    void (*before_attention)(const DecoderLayer &layer, const BeforeAttention &call, float *scratch, int threads);
    void (*after_attention)(const DecoderLayer &layer, const AfterAttention &call, float *scratch, int threads);
    void (*gate_rows)(const DecoderLayer &layer, std::uint8_t *gate, const std::uint8_t *up, std::int64_t count, int threads);
    void (*retain)(const Retain &call, float *scratch);
    void (*best_pages)(const BestPages &call, float *scratch, int threads);
    void (*read_tokens)(const ReadTokens &call, int threads);
    void (*remember)(const RecallStep &call, const Recall &store);
    void (*recall)(const RecallStep &call, const Recall &store, float *scratch, int threads);
    void (*redundancy)(const Redundancy &call, float *scratch, int threads);
    void (*expected)(const Expected &call, float *scratch, int threads);
    void (*leverage)(const Leverage &call, float *scratch, int threads);
};

}  // namespace windlass

#define WINDLASS_DECLARE(set)                                                                              \
    namespace windlass::set {                                                                              \
    void attend(const Attend &call, float *scratch, int threads);                                          \
    void rotate(const Rotate &call, int threads);                                                          \
    void encode(const Encode &call, int threads);                                                          \
    void mean_key_cosine(const MeanKeyCosine &call, float *scratch, int threads);                          \
    void linear(const Linear &call, float *scratch, int threads);                                          \
    void decode_weights(const Linear &call, int first, int threads);                                       \
    void decode_outputs(const Linear &call, const std::int64_t *outputs);                                  \
    void norm_tokens(const Norm &norm, Format format, std::int64_t tokens, const std::uint8_t *from, std::uint8_t *to, int threads); \
    void query_mass(const QueryMass &call, int threads);                                                   \
    void retain(const Retain &call, float *scratch);                                                       \
    void best_pages(const BestPages &call, float *scratch, int threads);                                   \
    void read_tokens(const ReadTokens &call, int threads);                                                 \
    void remember(const RecallStep &call, const Recall &store);                                            \
    void recall(const RecallStep &call, const Recall &store, float *scratch, int threads);                 \
    void redundancy(const Redundancy &call, float *scratch, int threads);                                  \
    void expected(const Expected &call, float *scratch, int threads);                                      \
    void leverage(const Leverage &call, float *scratch, int threads);                                      \
    void before_attention(const DecoderLayer &layer, const BeforeAttention &call, float *scratch, int threads); \
    void after_attention(const DecoderLayer &layer, const AfterAttention &call, float *scratch, int threads);   \
    void gate_rows(const DecoderLayer &layer, std::uint8_t *gate, const std::uint8_t *up, std::int64_t count, int threads);       \
    constexpr Kernels kernels{&attend, &rotate,     &encode,           &mean_key_cosine,                    \
                              &linear, &decode_weights, &decode_outputs, &norm_tokens, &query_mass, &before_attention, &after_attention, &gate_rows, &retain, \
                              &best_pages, &read_tokens, &remember, &recall, &redundancy, &expected, &leverage};       \
    }
WINDLASS_DECLARE(plain)
#ifdef WINDLASS_X86
WINDLASS_DECLARE(avx2)
WINDLASS_DECLARE(avx512)
WINDLASS_DECLARE(avx512_bf16)
#endif

namespace windlass {

inline bool has_avx512() {
#ifdef WINDLASS_X86
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}
inline bool has_bf16() {
#ifdef WINDLASS_X86
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi");
#else
    return false;
#endif
}
inline bool has_avx2() {
#ifdef WINDLASS_X86
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

// The instruction sets that this CPU runs, best first.
inline std::string instruction_sets() {
    std::string sets;
    if (has_bf16()) sets += "avx512_bf16 ";
    if (has_avx512()) sets += "avx512 ";
    if (has_avx2()) sets += "avx2 ";
    return sets + "plain";
}

inline const Kernels &kernels_of(const std::string &instruction_set) {
#ifdef WINDLASS_X86
    if (instruction_set == "avx512_bf16") return avx512_bf16::kernels;
    if (instruction_set == "avx512") return avx512::kernels;
    if (instruction_set == "avx2") return avx2::kernels;
#endif
    return plain::kernels;
}

}  // namespace windlass
