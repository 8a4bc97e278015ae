// A linear layer for few tokens, compiled once for each instruction set (WINDLASS_SET).
//
// At few tokens its time is that of reading the weights. So they are read once: each vector of them is
// multiplied with all tokens while it is at hand, and asked for before that. Each sum is made in one
// order whatever the number of tokens and of threads, so the result of a token does not depend on what
// else is in the pass.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

constexpr int ROWS = 8;   // of weights, side by side: streams that the memory serves at once
constexpr int LINE = 64;  // bytes of a cache line
constexpr int AHEAD = 4;  // lines of a row that are asked for before they are read

// Sums stay in registers only where each of them has a name: all loops over them are unrolled.
#define UNROLLED _Pragma("GCC unroll 16")

// Calls `add(i)` for each full step of a row of `lines` lines, each of `steps` steps; rows lie one after the
// other. At the end of these rows the first lines of the next ones are asked for.
template <int ROWS_HERE, class Add>
inline void stream(const std::uint8_t *rows, std::int64_t row_bytes, int lines, int steps, Add add) {
    for (int line = 0; line < lines; ++line) {
        const int next = line + AHEAD;
        const std::uint8_t *ahead = next < lines ? rows + std::int64_t(next) * LINE
                                                 : rows + std::int64_t(next - lines) * LINE + ROWS_HERE * row_bytes;
        for (int r = 0; r < ROWS_HERE; ++r) __builtin_prefetch(ahead + r * row_bytes);
        for (int step = 0; step < steps; ++step) add(line * steps + step);
    }
}

// All outputs of all tokens, by `kernel.outputs<rows, tokens>(row, token)`.
template <class Kernel, int R>
inline void outputs_of(Kernel &kernel, const Linear &call, int row) {
    constexpr int T = Kernel::TOKENS, HALF = R > 1 ? R / 2 : 1;
    int token = 0;
    for (; token + T <= call.tokens; token += T)
        for (int r = 0; r < R; r += HALF) kernel.template outputs<HALF, T>(row + r, token);
    for (; token < call.tokens; ++token) kernel.template outputs<R, 1>(row, token);
}
template <class Kernel>
inline void all_outputs(Kernel &kernel, const Linear &call, int threads) {
    const int blocks = (call.out + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int block = 0; block < blocks; ++block) {
        const int first = block * ROWS;
        if (first + ROWS <= call.out)
            outputs_of<Kernel, ROWS>(kernel, call, first);
        else
            for (int row = first; row < call.out; ++row) outputs_of<Kernel, 1>(kernel, call, row);
    }
}

inline void put_result(const Linear &call, int row, int token, float sum) {
    if (call.bias) sum += number(call.float_format, call.bias, row);
    put(call.float_format, call.result, std::int64_t(token) * call.out + row, sum);
}

// A vector of weights times one of inputs, in float32...
template <Format F, bool IN_PAIRS>
struct Product {
    typedef float Input;
    static constexpr int WIDTH = LANES;
    static constexpr int BYTES = F == Format::float32 ? 4 : F == Format::int8 ? 1 : 2;
    static Floats add(Floats sum, const std::uint8_t *weights, const Input *inputs) {
        return sum + Row<F>::lanes(weights, 0, 0) * load<Floats>(inputs);
    }
    static float one(const std::uint8_t *weights, const Input *input) { return Row<F>::one(weights, 0, 0) * *input; }
};
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
    static constexpr int TOKENS = LANES / 4;  // whose sums, with half of ROWS, the registers hold

    FloatLinear(const Linear &call, const Input *inputs) : call(call), inputs(inputs), in(call.in) {}

    void run(int threads) { all_outputs(*this, call, threads); }

    template <int R, int T>
    void outputs(int row, int token) {
        const std::int64_t row_bytes = in * P::BYTES;
        const std::uint8_t *weights = call.weights + row * row_bytes;
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
        stream<R>(weights, row_bytes, lines, STEPS, add);
        for (int step = lines * STEPS; step < steps; ++step) add(step);
        float results[R][T];
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int t = 0; t < T; ++t) results[r][t] = sum_of(sums_of[r][t]);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) {
                float sum = results[r][t];
                for (std::int64_t i = std::int64_t(steps) * P::WIDTH; i < in; ++i)
                    sum += P::one(weights + r * row_bytes + i * P::BYTES, from + t * in + i);
                put_result(call, row + r, token + t, F == Format::int8 ? sum * call.scales[row + r] : sum);
            }
    }

  private:
    const Linear &call;
    const Input *inputs;
    const std::int64_t in;
};

#if defined(__AVX512VNNI__)
// int8 weights in whole numbers, for inputs of 16 bits. A token's inputs are rounded to 22 bits below the largest of
// them, and cut into three signed digits: x = (d0 * 65536 + d1 * 256 + d2) * 2^exponent. Products of digits and codes add up without
// rounding. The instruction takes one factor without sign: 128 is added to the codes, and the sum of the digits tells
// what that adds to the result.
class DigitLinear {
    static constexpr int DIGITS = 3, BITS = 22;
    static constexpr int SMALLEST = -100;  // exponent of the largest input below which all count as zeros
    static constexpr int NOT_A_NUMBER = 1 << 20;

  public:
    static constexpr int MOST = 32768;  // inputs whose products add up within 32 bits
    static constexpr int TOKENS = 2;

    DigitLinear(const Linear &call, float *scratch)
        : call(call),
          in(call.in),
          exponents(reinterpret_cast<std::int32_t *>(scratch)),
          sums_of_digits(exponents + call.tokens),
          digits(reinterpret_cast<std::int8_t *>(sums_of_digits + DIGITS * call.tokens)) {}

    void run(int threads) {
#pragma omp parallel for schedule(static) num_threads(call.tokens < threads ? call.tokens : threads)
        for (int token = 0; token < call.tokens; ++token) cut(token);
        all_outputs(*this, call, threads);
    }

    template <int R, int T>
    void outputs(int row, int token) {
        const std::uint8_t *weights = call.weights + row * in;
        const std::int8_t *from = digits + token * in * DIGITS;
        const __m512i to_unsigned = _mm512_set1_epi8(char(0x80));
        __m512i sums_of[R][T][DIGITS];
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int t = 0; t < T; ++t)
                UNROLLED for (int d = 0; d < DIGITS; ++d) sums_of[r][t][d] = _mm512_setzero_si512();
        const int lines = int(in / LINE);
        stream<R>(weights, in, lines, 1, [&](int line) __attribute__((always_inline)) {
            const std::int64_t i = std::int64_t(line) * LINE;
            UNROLLED for (int r = 0; r < R; ++r) {
                const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(weights + r * in + i), to_unsigned);
                UNROLLED for (int t = 0; t < T; ++t)
                    UNROLLED for (int d = 0; d < DIGITS; ++d)
                        sums_of[r][t][d] = _mm512_dpbusd_epi32(sums_of[r][t][d], codes,
                                                               _mm512_loadu_si512(from + (t * DIGITS + d) * in + i));
            }
        });
        std::int32_t results[R][T][DIGITS];
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int t = 0; t < T; ++t)
                UNROLLED for (int d = 0; d < DIGITS; ++d) results[r][t][d] = _mm512_reduce_add_epi32(sums_of[r][t][d]);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) {
                std::int64_t total = 0;
                for (int d = 0; d < DIGITS; ++d) {
                    std::int64_t sum = results[r][t][d];
                    for (std::int64_t i = std::int64_t(lines) * LINE; i < in; ++i)
                        sum += (std::int8_t(weights[r * in + i]) + 128) * from[(t * DIGITS + d) * in + i];
                    total = total * 256 + sum - 128 * std::int64_t(sums_of_digits[(token + t) * DIGITS + d]);
                }
                const int exponent = exponents[token + t];
                put_result(call, row + r, token + t,
                           exponent == NOT_A_NUMBER
                               ? NAN
                               : float(std::ldexp(double(total) * call.scales[row + r], exponent)));
            }
    }

  private:
    const Linear &call;
    const std::int64_t in;
    std::int32_t *exponents, *sums_of_digits;  // (tokens), (tokens, DIGITS)
    std::int8_t *digits;                       // (tokens, DIGITS, in)

    void cut(int token) {
        const std::int64_t first = token * in;
        float largest = 0;
        for (std::int64_t i = 0; i < in; ++i) {
            const float x = std::fabs(number(call.float_format, call.inputs, first + i));
            largest = !(x <= largest) && !std::isnan(largest) ? x : largest;
        }
        int exponent = 0;
        std::frexp(largest, &exponent);
        exponent = exponent < SMALLEST ? SMALLEST : exponent;
        exponents[token] = std::isfinite(largest) ? exponent - BITS : NOT_A_NUMBER;
        if (!std::isfinite(largest)) exponent = 0;
        const float by = std::ldexp(1.0f, BITS - exponent);
        std::int8_t *to = digits + first * DIGITS;
        std::int32_t sums_here[DIGITS] = {};
        for (std::int64_t i = 0; i < in; ++i) {
            // The last bits of this sum are the whole number nearest to the scaled input.
            const float shifted = number(call.float_format, call.inputs, first + i) * by + 12582912.0f;
            std::int32_t whole;
            std::memcpy(&whole, &shifted, 4);
            whole -= 0x4b400000;
            for (int d = DIGITS; d-- > 0;) {
                const std::int8_t digit = std::int8_t(whole);
                to[d * in + i] = digit, sums_here[d] += digit;
                whole = (whole - digit) >> 8;
            }
        }
        std::memcpy(sums_of_digits + token * DIGITS, sums_here, sizeof sums_here);
    }
};
#endif

}  // namespace

void linear(const Linear &call, float *scratch, int threads) {
#if defined(__AVX512BF16__)
    if (call.format == Format::bfloat16 && call.float_format == Format::bfloat16)
        return FloatLinear<Format::bfloat16, true>(call, reinterpret_cast<const std::uint16_t *>(call.inputs))
            .run(threads);
#endif
#if defined(__AVX512VNNI__)
    if (call.format == Format::int8 && call.float_format != Format::float32 && call.in <= DigitLinear::MOST)
        return DigitLinear(call, scratch).run(threads);
#endif
    const float *inputs = reinterpret_cast<const float *>(call.inputs);
    if (call.float_format != Format::float32) {
        const std::int64_t count = std::int64_t(call.tokens) * call.in;
        for (std::int64_t i = 0; i < count; ++i) scratch[i] = number(call.float_format, call.inputs, i);
        inputs = scratch;
    }
    switch (call.format) {
        case Format::float32:
            return FloatLinear<Format::float32, false>(call, inputs).run(threads);
        case Format::bfloat16:
            return FloatLinear<Format::bfloat16, false>(call, inputs).run(threads);
        case Format::float16:
            return FloatLinear<Format::float16, false>(call, inputs).run(threads);
        default:
            return FloatLinear<Format::int8, false>(call, inputs).run(threads);
    }
}

}  // namespace windlass::WINDLASS_SET
