// A linear layer for few tokens, compiled once for each instruction set (WINDLASS_SET).
//
// At few tokens its time is that of reading the weights. So they are read once: each vector of them is
// multiplied with all tokens while it is at hand, and asked for before that. Each sum is made in one
// order at any number of tokens and of threads, so the result of a token does not depend on the other
// tokens of the pass.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

constexpr int STREAMS = 4;  // of weights that a thread reads at once
constexpr int LINE = 64;    // bytes of a cache line
#if defined(__AVX512F__)
constexpr int SOON = 1024;  // bytes of a stream by which it is prefetched ahead
#else
constexpr int SOON = 640;
#endif

// Sums stay in registers only where each of them has a name: all loops over them are unrolled.
#define UNROLLED _Pragma("GCC unroll 16")

// Calls `add(i)` for each full step of some rows of `lines` lines, each of `steps` steps. The rows are `apart` bytes from each
// other, and each of them goes on in the next row. They are prefetched if they are read for the first time (`is_first`).
// Where nothing reads them again (`is_once`), their lines pass by the second and third cache, which keep what other code reads.
template <int ROWS_HERE, class Add>
inline void stream(const std::uint8_t *rows, std::int64_t apart, int lines, int steps, bool is_first, bool is_once, Add add) {
    for (int line = 0; line < lines; ++line) {
        const std::uint8_t *ahead = rows + std::int64_t(line) * LINE + SOON;
        if (is_first && is_once)
            for (int r = 0; r < ROWS_HERE; ++r) __builtin_prefetch(ahead + r * apart, 0, 0);
        else if (is_first)
            for (int r = 0; r < ROWS_HERE; ++r) __builtin_prefetch(ahead + r * apart);
        for (int step = 0; step < steps; ++step) add(line * steps + step);
    }
}

// All outputs of all tokens, by `kernel.outputs<rows, tokens>(row, token, rows from one to the next)`. Rows are far from each
// other, so that each of them is a stream that goes on.
template <class Kernel, int R>
inline void outputs_of(Kernel &kernel, const Linear &call, int row, int apart) {
    constexpr int T = Kernel::TOKENS;
    int token = 0;
    for (; token + T <= call.tokens; token += T) kernel.template outputs<R, T>(row, token, apart);
    for (; token < call.tokens; ++token) kernel.template outputs<R, 1>(row, token, apart);
}
template <class Kernel>
inline void all_outputs(Kernel &kernel, const Linear &call) {
    const std::int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int first = int(call.out * thread / threads), last = int(call.out * (thread + 1) / threads);
    const int apart = (last - first) / STREAMS;
    for (int row = first; row < first + apart; ++row) outputs_of<Kernel, STREAMS>(kernel, call, row, apart);
    for (int row = first + STREAMS * apart; row < last; ++row) outputs_of<Kernel, 1>(kernel, call, row, 1);
}

inline float scale_of(const Linear &call, int row) { return number(call.scale_format, call.scales, row); }

inline void put_result(const Linear &call, int row, int token, float sum) {
    if (call.bias) sum += number(call.float_format, call.bias, row);
    const std::int64_t at = std::int64_t(token) * call.out + row;
    put(call.float_format, call.result, at, sum);
    if (call.added) {
        sum = number(call.float_format, call.result, at) + number(call.float_format, call.added, at);
        put(call.float_format, call.result, at, sum);
    }
}

// A vector of weights times one of inputs, in float32...
template <Format F, bool IN_PAIRS>
struct Product {
    typedef float Input;
    static constexpr bool HAS_PARTS = false;
    static constexpr int WIDTH = LANES;
    static constexpr int BYTES = F == Format::float32 ? 4 : F == Format::int8 ? 1 : 2;
    static Floats add(Floats sum, const std::uint8_t *weights, const Input *inputs) {
        return sum + Row<F>::lanes(weights, 0, 0) * load<Floats>(inputs);
    }
    static float one(const std::uint8_t *weights, const Input *input) { return Row<F>::one(weights, 0, 0) * *input; }
};
// ...or two vectors of them, where inputs are parted as bfloat16 is without a shuffle...
#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
struct Product<Format::bfloat16, false> {
    typedef float Input;
    static constexpr bool HAS_PARTS = true;
    static constexpr int WIDTH = 2 * LANES, BYTES = 2;
    static Floats add(Floats sum, const std::uint8_t *weights, const Input *inputs) {
        Floats even, odd;
        load_parted(weights, even, odd);
        return sum + even * load<Floats>(inputs) + odd * load<Floats>(inputs + LANES);
    }
    static float one(const std::uint8_t *weights, const Input *input) { return Row<Format::bfloat16>::one(weights, 0, 0) * *input; }
};
#endif
// ...or in pairs of bfloat16.
#if defined(__AVX512BF16__)
template <>
struct Product<Format::bfloat16, true> {
    typedef std::uint16_t Input;
    static constexpr int WIDTH = 32, BYTES = 2;
    static Floats add(Floats sum, const std::uint8_t *weights, const Input *inputs) {
        return dot(sum, (__m512bh)_mm512_loadu_si512(weights), (__m512bh)_mm512_loadu_si512(inputs));
    }
    static float one(const std::uint8_t *weights, const Input *input) {
        return Row<Format::bfloat16>::one(weights, 0, 0) * from_brain(*input);
    }
};
#endif

template <Format F, bool IN_PAIRS>
class FloatLinear {
    typedef Product<F, IN_PAIRS> P;
    typedef typename P::Input Input;
    static constexpr int STEPS = P::WIDTH * P::BYTES < LINE ? LINE / (P::WIDTH * P::BYTES) : 1;

  public:
    static constexpr int TOKENS = LANES / 4;  // whose sums, with STREAMS rows, the registers hold

    FloatLinear(const Linear &call, const Input *inputs) : call(call), inputs(inputs), in(call.in) {}

    void run() {
        all_outputs(*this, call);
    }

    template <int R, int T>
    void outputs(int row, int token, int apart) {
        const std::int64_t row_bytes = apart * in * P::BYTES;
        const std::uint8_t *weights = call.weights + row * in * P::BYTES;
        const Input *from = inputs + token * in;
        Floats sums_of[R][T];
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int t = 0; t < T; ++t) sums_of[r][t] = Floats{};
        auto add = [&](int step) __attribute__((always_inline)) {
            const std::int64_t i = std::int64_t(step) * P::WIDTH;
            UNROLLED for (int r = 0; r < R; ++r)
                UNROLLED for (int t = 0; t < T; ++t)
                    sums_of[r][t] = P::add(sums_of[r][t], weights + r * row_bytes + i * P::BYTES, from + t * in + i);
        };
        const int steps = int(in / P::WIDTH), lines = steps / STEPS;
        stream<R>(weights, row_bytes, lines, STEPS, token == 0, token + T == call.tokens, add);
        for (int step = lines * STEPS; step < steps; ++step) add(step);
        float results[R][T];
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int t = 0; t < T; ++t) results[r][t] = sum_of(sums_of[r][t]);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) {
                float sum = results[r][t];
                for (std::int64_t i = std::int64_t(steps) * P::WIDTH; i < in; ++i)
                    sum += P::one(weights + r * row_bytes + i * P::BYTES, from + t * in + i);
                put_result(call, row + r * apart, token + t, F == Format::int8 ? sum * scale_of(call, row + r * apart) : sum);
            }
    }

  private:
    const Linear &call;
    const Input *inputs;
    const std::int64_t in;
};

#include "float_tiles.hpp"
#include "linear_int8.hpp"
#include "linear_groups.hpp"
#include "linear_panels.hpp"

// One thread's part of a linear layer. All threads of a parallel region call it, and must meet after it.
void linear_part(const Linear &call, float *scratch) {
    constexpr int FEWEST = 17;  // tokens for which a tile is worth its making, beyond MAX_ROWS of Python
#if defined(__AVX2__) && !defined(__AVX512F__)
    const bool has_digits = call.pairs && call.format == Format::int4 && call.float_format == Format::bfloat16;
    if (!has_digits && call.tokens >= FEWEST) return PanelLinear<FloatPanels>(call, scratch).run();
#endif
    if (call.pairs) switch (call.float_format) {
            case Format::bfloat16:
                return linear_groups<Format::bfloat16>(call, scratch);
            case Format::float16:
                return linear_groups<Format::float16>(call, scratch);
            default:
                return linear_groups<Format::float32>(call, scratch);
        }
#if defined(__AVX512BF16__)
    const bool has_pairs = call.format == Format::bfloat16 && call.float_format == Format::bfloat16;
    if (has_pairs && call.tokens >= FEWEST && call.in % 2 == 0) return PanelLinear<PairPanels>(call, scratch).run();
    if (has_pairs)
        return FloatLinear<Format::bfloat16, true>(call, reinterpret_cast<const std::uint16_t *>(call.inputs)).run();
#endif
#if defined(__AVX512VNNI__)
    if (call.format == Format::int8 && call.float_format == Format::bfloat16 && call.in <= DigitLinear::MOST) return DigitLinear(call, scratch).run();
#endif
    const float *inputs = reinterpret_cast<const float *>(call.inputs);
    if (call.float_format != Format::float32) {
        constexpr int SOME = 64;
        const int chunks = (call.in + SOME - 1) / SOME;
#pragma omp for schedule(static)
        for (int item = 0; item < call.tokens * chunks; ++item) {
            const int first = item % chunks * SOME, count = std::min(SOME, call.in - first);
            const std::int64_t at = std::int64_t(item / chunks) * call.in + first;
            read_row(call.float_format, call.inputs + 2 * at, count, scratch + at);
            if (call.format == Format::bfloat16 && Product<Format::bfloat16, false>::HAS_PARTS) part_row(scratch + at, count);
        }
        inputs = scratch;
    }
    switch (call.format) {
        case Format::float32:
            return FloatLinear<Format::float32, false>(call, inputs).run();
        case Format::bfloat16:
            return FloatLinear<Format::bfloat16, false>(call, inputs).run();
        case Format::float16:
            return FloatLinear<Format::float16, false>(call, inputs).run();
        default:
            return FloatLinear<Format::int8, false>(call, inputs).run();
    }
}

#include "decoder_layer.hpp"

}  // namespace

void linear(const Linear &call, float *scratch, int threads) {
#pragma omp parallel num_threads(threads)
    linear_part(call, scratch);
}

// `call.result` is (call.tokens, call.in): the weights of so many outputs, from the block `first` on.
void decode_weights(const Linear &call, int first, int threads) {
    const std::int64_t bytes = std::int64_t(call.in) * (call.float_format == Format::float32 ? 4 : 2);
    const int blocks = (call.tokens + call.block - 1) / call.block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int i = 0; i < blocks; ++i) {
        std::uint8_t *to = call.result + i * call.block * bytes;
        if (call.format == Format::int4)
            decode_block<Format::int4>(call, first + i, to);
        else
            decode_block<Format::int8>(call, first + i, to);
    }
}

// Calls `use` with the format of a layer's hidden states as a compile-time constant.
template <class Use>
static void with_float_format(Format format, Use use) {
    if (format == Format::bfloat16) return use(std::integral_constant<Format, Format::bfloat16>{});
    if (format == Format::float16) return use(std::integral_constant<Format, Format::float16>{});
    use(std::integral_constant<Format, Format::float32>{});
}

// `call.result` is (call.tokens, call.in): the weights of these outputs.
void decode_outputs(const Linear &call, const std::int64_t *outputs) {
    const std::int64_t bytes = std::int64_t(call.in) * (call.float_format == Format::float32 ? 4 : 2);
    for (int i = 0; i < call.tokens; ++i)
        if (call.format == Format::int4)
            decode_output<Format::int4>(call, outputs[i], call.result + i * bytes);
        else
            decode_output<Format::int8>(call, outputs[i], call.result + i * bytes);
}

void before_attention(const DecoderLayer &layer, const BeforeAttention &call, float *scratch, int threads) {
    with_float_format(layer.float_format, [&](auto f) { before_attention<f.value>(layer, call, scratch, threads); });
}
void after_attention(const DecoderLayer &layer, const AfterAttention &call, float *scratch, int threads) {
    with_float_format(layer.float_format, [&](auto f) { after_attention<f.value>(layer, call, scratch, threads); });
}
void norm_tokens(const Norm &norm, Format format, std::int64_t tokens, const std::uint8_t *from, std::uint8_t *to, int threads) {
    with_float_format(format, [&](auto f) { norm_tokens<f.value>(norm, from, to, tokens, threads); });
}
void gate_rows(const DecoderLayer &layer, std::uint8_t *gate, const std::uint8_t *up, std::int64_t count, int threads) {
    with_float_format(layer.float_format, [&](auto f) { gate_rows<f.value>(layer.activation, gate, up, count, threads); });
}

}  // namespace windlass::WINDLASS_SET
