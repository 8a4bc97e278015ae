// Linear layers of 8-bit weights in whole numbers, for inputs of bfloat16. Included by `linear.cpp`.

#if defined(__AVX512VNNI__)
// A token's inputs are rounded to whole numbers, of which the largest is 127 * 256, and cut into two signed digits:
// x = (d0 * 256 + d1) * unit. Products of digits and codes add up without rounding. The instruction takes one factor
// without sign: 128 is added to the codes, and the excess of the result is computed from the sum of the digits.
class DigitLinear {
    static constexpr int DIGITS = 2;
    static constexpr float LARGEST = 127 * 256;   // whole number
    static constexpr float SMALLEST = 0x1p-100f;  // largest input of a token below which all count as zeros

  public:
    static constexpr int MOST = 32768;  // inputs whose products add up within 32 bits
    static constexpr int TOKENS = 3;

    DigitLinear(const Linear &call, float *scratch)
        : call(call),
          in(call.in),
          stride((in + LINE - 1) / LINE * LINE),
          units(scratch),
          sums_of_digits(reinterpret_cast<std::int32_t *>(units + call.tokens)),
          digits(reinterpret_cast<std::int8_t *>(scratch) + LINE * std::int64_t(call.tokens)) {}

    void run() {
#pragma omp for schedule(static)
        for (int token = 0; token < call.tokens; ++token) cut(token);
        all_outputs(*this, call);
    }

    template <int R, int T>
    void outputs(int row, int token, int apart) {
        const std::int64_t row_bytes = apart * in;
        const std::uint8_t *weights = call.weights + row * in;
        const std::int8_t *from = digits + token * stride * DIGITS;
        __m512i sums_of[DIGITS][R * T];
        UNROLLED for (int d = 0; d < DIGITS; ++d)
            UNROLLED for (int i = 0; i < R * T; ++i) sums_of[d][i] = _mm512_setzero_si512();
        const int lines = int(in / LINE);
        stream<R>(weights, row_bytes, lines, 1, token == 0, token + T == call.tokens, [&](int line) __attribute__((always_inline)) {
            const std::int64_t i = std::int64_t(line) * LINE;
            UNROLLED for (int r = 0; r < R; ++r) {
                const __m512i codes =
                    _mm512_xor_si512(_mm512_loadu_si512(weights + r * row_bytes + i), _mm512_set1_epi8(char(0x80)));
                UNROLLED for (int t = 0; t < T; ++t)
                    UNROLLED for (int d = 0; d < DIGITS; ++d)
                        sums_of[d][t * R + r] =
                            _mm512_dpbusd_epi32(sums_of[d][t * R + r], codes,
                                                _mm512_loadu_si512(from + (t * DIGITS + d) * stride + i));
            }
        });
        alignas(LINE) __m512i held[DIGITS * R * T];
        UNROLLED for (int d = 0; d < DIGITS; ++d)
            UNROLLED for (int i = 0; i < R * T; ++i) held[d * R * T + i] = sums_of[d][i];
        std::int32_t totals[DIGITS * R * T];
        add_lanes<DIGITS * R * T>(held, totals);
        for (int r = 0; r < R; ++r)
            for (std::int64_t i = std::int64_t(lines) * LINE; i < in; ++i) {
                const int code = (std::int8_t(weights[r * row_bytes + i])) + 128;
                for (int t = 0; t < T; ++t)
                    for (int d = 0; d < DIGITS; ++d)
                        totals[(d * T + t) * R + r] += code * from[(t * DIGITS + d) * stride + i];
            }
        for (int t = 0; t < T; ++t) {
            const std::int32_t *added = sums_of_digits + (token + t) * DIGITS;
            const double unit = units[token + t];
            for (int r = 0; r < R; ++r) {
                double total = 0;
                for (int d = 0; d < DIGITS; ++d)
                    total = total * 256 + double(totals[(d * T + t) * R + r] - 128 * std::int64_t(added[d]));
                put_result(call, row + r * apart, token + t, float(total * scale_of(call, row + r * apart) * unit));
            }
        }
    }

  private:
    const Linear &call;
    const std::int64_t in, stride;  // of a digit of a token
    float *units;                  // (tokens)
    std::int32_t *sums_of_digits;  // (tokens, DIGITS)
    std::int8_t *digits;           // (tokens, DIGITS, stride)

    // The sums of the lanes of COUNT vectors. Apart from the loop, whose sums would leave their registers.
    template <int COUNT>
    __attribute__((noinline)) static void add_lanes(const __m512i *v, std::int32_t *to) {
        int i = 0;
        for (; i + 8 <= COUNT; i += 8, v += 8) {
            __m512i a[4], b[2];
            UNROLLED for (int j = 0; j < 4; ++j)
                a[j] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[j], v[j + 4]), _mm512_unpackhi_epi32(v[j], v[j + 4]));
            UNROLLED for (int j = 0; j < 2; ++j)
                b[j] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[j], a[j + 2]), _mm512_unpackhi_epi64(a[j], a[j + 2]));
            // Each quarter of b[j] has sums of v[j], v[j + 4], v[j + 2] and v[j + 6], in this order.
            const __m512i quarters = _mm512_add_epi32(_mm512_shuffle_i64x2(b[0], b[1], 0x44),
                                                      _mm512_shuffle_i64x2(b[0], b[1], 0xee));
            const __m256i low = _mm512_castsi512_si256(_mm512_shuffle_i64x2(quarters, quarters, 0x88));
            const __m256i high = _mm512_castsi512_si256(_mm512_shuffle_i64x2(quarters, quarters, 0xdd));
            const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
            _mm256_storeu_si256((__m256i *)(to + i), _mm256_permutevar8x32_epi32(_mm256_add_epi32(low, high), order));
        }
        for (; i < COUNT; ++i, ++v) to[i] = _mm512_reduce_add_epi32(*v);
    }

    // LANES inputs of a token from `i` on, with zeros behind the last one.
    Floats inputs(int token, std::int64_t i) const {
        const std::uint8_t *from = call.inputs + (token * in + i) * 2;
        if (i + LANES <= in) return Row<Format::bfloat16>::lanes(from, 0, 0);
        std::uint8_t last[LANES * 2] = {};
        if (i < in) std::memcpy(last, from, (in - i) * 2);
        return Row<Format::bfloat16>::lanes(last, 0, 0);
    }

    void cut(int token) {
        Words most{};  // as whole numbers, floats without sign keep their order, with NaN last
        for (std::int64_t i = 0; i < in; i += LANES) {
            const Words size = (Words)inputs(token, i) & 0x7fffffffu;
            most = (Words)_mm512_max_epu32((__m512i)most, (__m512i)size);
        }
        const std::uint32_t top = _mm512_reduce_max_epu32((__m512i)most);
        const bool is_finite = top < 0x7f800000u;
        float largest;
        std::memcpy(&largest, &top, 4);
        const bool is_zero = largest < SMALLEST;
        units[token] = !is_finite ? NAN : is_zero ? 0.0f : largest / LARGEST;
        const float by = is_finite && !is_zero ? LARGEST / largest : 0.0f;
        std::int8_t *to = digits + token * stride * DIGITS;
        Ints added[DIGITS] = {};
        for (std::int64_t i = 0; i < stride; i += LANES) {
            // Rounds to the nearest whole number.
            Ints whole = (Ints)_mm512_cvtps_epi32((__m512)(inputs(token, i) * by));
            for (int d = DIGITS; d-- > 0;) {
                const Ints digit = (whole << 24) >> 24;
                _mm_storeu_si128((__m128i *)(to + d * stride + i), _mm512_cvtepi32_epi8((__m512i)digit));
                added[d] += digit;
                whole = (whole - digit) >> 8;
            }
        }
        for (int d = 0; d < DIGITS; ++d) sums_of_digits[token * DIGITS + d] = _mm512_reduce_add_epi32((__m512i)added[d]);
    }
};
#endif
