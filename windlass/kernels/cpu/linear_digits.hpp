// Linear layers of codes in groups, see `linear_groups.hpp`, in whole numbers, for inputs of bfloat16. Included by
// `linear.cpp`.
//
// Each run of a token's inputs, 32 or 16 of one group, shares a scale, by which the largest of them is 127 * 256. Its
// inputs are rounded to whole numbers, which is finer than bfloat16 but for those far below the largest. Products of
// codes and inputs add up without rounding.

constexpr int RUN = 32;  // most inputs that share a scale
inline int run_of(const Linear &call) { return call.group % RUN ? RUN / 2 : RUN; }

// Writes `sums`: inputs of T tokens in a run times the codes of a block. Codes of 4 bits count from 0.
// A token has `stride` inputs: as `wholes`, and as `digits` of 8 bits, all high ones (x + 128 >> 8) before all low ones.
// `totals`: the sums of each token's inputs.
struct RunInputs {
    const std::int16_t *wholes;
    const std::int8_t *digits;
    std::int64_t stride;
    const std::int32_t *totals;
};
template <Format CODES, int BLOCK>
struct RunSums;
template <int BLOCK>
struct RunSums<Format::int4, BLOCK> {
    static constexpr int ROW_BYTES = BLOCK / 2;
#if defined(__AVX2__)
    static constexpr int CHUNK = 16, PARTS = 2;  // bytes at once, codes of a byte

    // Two inputs of an output stand in a lane.
    template <int T>
    __attribute__((always_inline)) static void multiply(const std::uint8_t *codes, const RunInputs &inputs, int run,
                                                        Ints (&sums)[T][BLOCK / LANES]) {
        UNROLLED for (int chunk = 0; chunk < ROW_BYTES; chunk += CHUNK) {
            __m256i own[T][PARTS][2];
            UNROLLED for (int t = 0; t < T; ++t)
                UNROLLED for (int part = 0; part < PARTS; ++part) own[t][part][0] = own[t][part][1] = _mm256_setzero_si256();
            for (int k = 0; k < run; k += 2) {
                const std::uint8_t *row = codes + k * ROW_BYTES + chunk;
                __builtin_prefetch(row + 1024);
                const __m256i a = wide(row), b = wide(row + ROW_BYTES);
                const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
                UNROLLED for (int t = 0; t < T; ++t) {
                    int two;
                    __builtin_memcpy(&two, inputs.wholes + t * inputs.stride + k, 4);
                    const __m256i x = _mm256_set1_epi32(two);
                    UNROLLED for (int part = 0; part < PARTS; ++part) {
                        own[t][part][0] = _mm256_add_epi32(own[t][part][0], _mm256_madd_epi16(code(low, part), x));
                        own[t][part][1] = _mm256_add_epi32(own[t][part][1], _mm256_madd_epi16(code(high, part), x));
                    }
                }
            }
            UNROLLED for (int t = 0; t < T; ++t)
                UNROLLED for (int part = 0; part < PARTS; ++part) {
                    const __m256i first = _mm256_permute2x128_si256(own[t][part][0], own[t][part][1], 0x20);
                    const __m256i second = _mm256_permute2x128_si256(own[t][part][0], own[t][part][1], 0x31);
                    put(sums[t], (part * (BLOCK / 2) + chunk) / LANES, first, second);
                }
        }
    }

  private:
    static __m256i wide(const std::uint8_t *from) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from)); }
    static __m256i code(__m256i words, int part) {
        return _mm256_and_si256(part ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi16(15));
    }
    static void put(Ints *to, int at, __m256i first, __m256i second) {
#if defined(__AVX512F__)
        to[at] = (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
#else
        to[at] = (Ints)first, to[at + 1] = (Ints)second;
#endif
    }
#else
    template <int T>
    __attribute__((always_inline)) static void multiply(const std::uint8_t *codes, const RunInputs &inputs, int run,
                                                        Ints (&sums)[T][BLOCK / LANES]) {
        std::int32_t own[T][BLOCK] = {};
        for (int k = 0; k < run; ++k) {
            const std::uint8_t *row = codes + k * ROW_BYTES;
            for (int t = 0; t < T; ++t) {
                const std::int32_t x = inputs.wholes[t * inputs.stride + k];
                for (int n = 0; n < ROW_BYTES; ++n)
                    own[t][n] += (row[n] & 15) * x, own[t][n + ROW_BYTES] += (row[n] >> 4) * x;
            }
        }
        __builtin_memcpy(sums, own, sizeof own);
    }
#endif
};

#if defined(__AVX512VNNI__)
// Four inputs of an output stand in a lane.
template <Format CODES>
struct RunSumsOf64 {
    static constexpr int BLOCK = 64, ROW_BYTES = CODES == Format::int4 ? BLOCK / 2 : BLOCK, VECTORS = 4;
    // Bytes of codes that are asked for before they are read: into the nearest cache, and into the next one.
    static constexpr int SOON = 512, LATER = 8192;

    template <int T>
    __attribute__((noinline)) static void multiply(const std::uint8_t *codes, const RunInputs &inputs, int run,
                                                   Ints (&sums)[T][VECTORS]) {
        __m512i high[T][VECTORS], low[T][VECTORS];
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) high[t][i] = low[t][i] = _mm512_setzero_si512();
        for (int k = 0; k < run; k += 4) {
            const std::uint8_t *row = codes + k * ROW_BYTES;
            UNROLLED for (int line = 0; line < 4 * ROW_BYTES; line += LINE)
                __builtin_prefetch(row + SOON + line), __builtin_prefetch(row + LATER + line, 0, 2);
            __m512i quads[VECTORS];
            read(row, quads);
            UNROLLED for (int t = 0; t < T; ++t) {
                const std::int8_t *digits = inputs.digits + 2 * t * inputs.stride + k;
                const __m512i x = four(digits), y = four(digits + inputs.stride);
                UNROLLED for (int i = 0; i < VECTORS; ++i) {
                    add_products(high[t][i], quads[i], x);
                    add_products(low[t][i], quads[i], y);
                }
            }
        }
        UNROLLED for (int t = 0; t < T; ++t) {
            __m512i own[VECTORS];
            UNROLLED for (int i = 0; i < VECTORS; ++i) own[i] = _mm512_add_epi32(_mm512_slli_epi32(high[t][i], 8), low[t][i]);
            if constexpr (CODES == Format::int8) in_order(own, inputs.totals[t]);
            UNROLLED for (int i = 0; i < VECTORS; ++i) sums[t][i] = (Ints)own[i];
        }
    }

    // Codes of a run as the instruction takes them, for many tokens.
    static void unpack(const std::uint8_t *codes, int run, __m512i (*quads)[VECTORS]) {
        for (int k = 0; k < run; k += 4) {
            const std::uint8_t *row = codes + k * ROW_BYTES;
            UNROLLED for (int line = 0; line < 4 * ROW_BYTES; line += LINE)
                __builtin_prefetch(row + SOON + line), __builtin_prefetch(row + LATER + line, 0, 2);
            read(row, quads[k / 4]);
        }
    }
    // As `multiply`, of unpacked codes: all high digits first, so that a token needs one sum for each of its outputs.
    template <int T>
    __attribute__((always_inline)) static void multiply_unpacked(const __m512i (*quads)[VECTORS], const RunInputs &inputs, int run,
                                                                 Ints (&sums)[T][VECTORS]) {
        __m512i own[T][VECTORS];
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) own[t][i] = _mm512_setzero_si512();
        const auto add = [&](const std::int8_t *digits) __attribute__((always_inline)) {
            for (int k = 0; k < run; k += 4)
                UNROLLED for (int t = 0; t < T; ++t) {
                    const __m512i x = four(digits + 2 * t * inputs.stride + k);
                    UNROLLED for (int i = 0; i < VECTORS; ++i) add_products(own[t][i], quads[k / 4][i], x);
                }
        };
        add(inputs.digits);
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) own[t][i] = _mm512_slli_epi32(own[t][i], 8);
        add(inputs.digits + inputs.stride);
        UNROLLED for (int t = 0; t < T; ++t) {
            if constexpr (CODES == Format::int8) in_order(own[t], inputs.totals[t]);
            UNROLLED for (int i = 0; i < VECTORS; ++i) sums[t][i] = (Ints)own[t][i];
        }
    }

  private:
    // Not by the intrinsic, for which GCC 12 copies each sum twice.
    __attribute__((always_inline)) static void add_products(__m512i &sum, __m512i codes, __m512i x) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    }
    __attribute__((always_inline)) static __m512i four(const std::int8_t *digits) {
        int word;
        __builtin_memcpy(&word, digits, 4);
        return _mm512_set1_epi32(word);
    }
    __attribute__((always_inline)) static void read(const std::uint8_t *row, __m512i (&quads)[VECTORS]) {
        if constexpr (CODES == Format::int4) {
            alignas(LINE) static const std::uint8_t TWO_ROWS[64] = {
                0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51, 4,  36, 5,  37, 6,  38,
                7,  39, 20, 52, 21, 53, 22, 54, 23, 55, 8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57,
                26, 58, 27, 59, 12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};
            const __m512i order = _mm512_load_si512(TWO_ROWS), nibble = _mm512_set1_epi8(15);
            const __m512i a = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(row));
            const __m512i b = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(row + LINE));
            const __m512i first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
            quads[0] = _mm512_and_si512(first, nibble), quads[1] = _mm512_and_si512(second, nibble);
            quads[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble);
            quads[3] = _mm512_and_si512(_mm512_srli_epi16(second, 4), nibble);
        } else {
            const __m512i sign = _mm512_set1_epi8(char(0x80));  // the instruction takes codes without sign: 128 is added
            __m512i rows[4];
            UNROLLED for (int i = 0; i < 4; ++i) rows[i] = _mm512_xor_si512(_mm512_loadu_si512(row + i * ROW_BYTES), sign);
            const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpacklo_epi8(rows[2], rows[3]);
            const __m512i c = _mm512_unpackhi_epi8(rows[0], rows[1]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
            quads[0] = _mm512_unpacklo_epi16(a, b), quads[1] = _mm512_unpackhi_epi16(a, b);
            quads[2] = _mm512_unpacklo_epi16(c, d), quads[3] = _mm512_unpackhi_epi16(c, d);
        }
    }
    // Of codes of 8 bits, quarter q of vector i has the outputs from 16 * q + 4 * i on.
    static void in_order(__m512i *v, std::int32_t total) {
        const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
        v[0] = _mm512_shuffle_i32x4(a, b, 0x88), v[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
        v[2] = _mm512_shuffle_i32x4(c, d, 0x88), v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
        UNROLLED for (int i = 0; i < VECTORS; ++i) v[i] = _mm512_sub_epi32(v[i], _mm512_set1_epi32(128 * total));
    }
};
template <>
struct RunSums<Format::int4, 64> : RunSumsOf64<Format::int4> {};
template <>
struct RunSums<Format::int8, 64> : RunSumsOf64<Format::int8> {};
#endif

template <Format CODES, int BLOCK>
class DigitGroups {
    static constexpr std::uint32_t INFINITE = 0x7f800000u;
    static constexpr float SMALLEST = 0x1p-100f, LARGEST = 127 * 256;  // of a run's largest input, before and after rounding
    static constexpr float ROUNDER = 0x1.8p23f;  // added to a small float, it leaves a whole number in the last bits
    static constexpr int ROW_BYTES = RunSums<CODES, BLOCK>::ROW_BYTES, VECTORS = BLOCK / LANES;
    static constexpr int AHEAD_GROUPS = 8;  // whose scales are decoded at once

  public:
    DigitGroups(const Linear &call, float *scratch)
        : shared(call, scratch),
          call(call),
          length(run_of(call)),
          runs(call.in / length),
          scales(shared.rest()),
          totals(reinterpret_cast<std::int32_t *>(scales + std::int64_t(call.tokens) * runs)),
          wholes(reinterpret_cast<std::int16_t *>(totals + std::int64_t(call.tokens) * runs)),
          digits(reinterpret_cast<std::int8_t *>(wholes + std::int64_t(call.tokens) * call.in)) {}

    void run() {
#pragma omp for schedule(static)
        for (int token = 0; token < call.tokens; ++token) round(token);
#if defined(__AVX512VNNI__)
        if constexpr (BLOCK == 64)
            if (call.tokens > FEW) {
#pragma omp for schedule(static) nowait
                for (int block = 0; block < blocks_of(call); ++block)
                    for (int token = 0; token < call.tokens; token += MOST)
                        outputs_of_many(block, token, std::min(MOST, call.tokens - token));
                return;
            }
#endif
        Grouped<Format::bfloat16>::all_blocks(*this, call);
    }

    template <int T>
    void outputs(int block, int token) {
        Floats results[T][VECTORS];
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) results[t][i] = Floats{};
        alignas(LINE) float pairs[AHEAD_GROUPS][2][BLOCK];
        for (int g = 0; g < shared.groups; ++g) {
            if (g % AHEAD_GROUPS == 0) read_pairs_of(block, g, pairs);
            const auto &[group_scales, zeros] = pairs[g % AHEAD_GROUPS];
            if (call.columns == 2)
                UNROLLED for (int t = 0; t < T; ++t)
                    UNROLLED for (int i = 0; i < VECTORS; ++i)
                        results[t][i] += load<Floats>(zeros + i * LANES) * shared.sums[std::int64_t(token + t) * shared.groups + g];
            for (int first = g * call.group; first < (g + 1) * call.group; first += length)
                add_run<T>(shared.codes(block) + std::int64_t(first) * ROW_BYTES, token, first, group_scales, results);
        }
        UNROLLED for (int t = 0; t < T; ++t) {
            alignas(LINE) float sums[BLOCK];
            UNROLLED for (int i = 0; i < VECTORS; ++i) store(sums + i * LANES, results[t][i]);
            put_results(call, block * BLOCK, token + t, sums, BLOCK);
        }
    }

  private:
    static constexpr int FEW = 4, MOST = 16;  // more tokens than FEW share unpacked codes, MOST at once
    Grouped<Format::bfloat16> shared;
    const Linear &call;
    const int length, runs;  // inputs of a run
    float *scales;           // (tokens, runs)
    std::int32_t *totals;    // (tokens, runs)
    std::int16_t *wholes;    // (tokens, in)
    std::int8_t *digits;     // (tokens, 2, in)

    template <int T>
    __attribute__((always_inline)) void add_run(const std::uint8_t *codes, int token, int first, const float *group_scales,
                                                Floats (&results)[T][VECTORS]) {
        constexpr int AT_ONCE = T < 2 ? T : 2;  // tokens whose sums the registers hold
        UNROLLED for (int t = 0; t < T; t += AT_ONCE) {
            Ints sums[AT_ONCE][VECTORS];
            std::int32_t added[AT_ONCE];
            const std::int64_t at = token + t;
            UNROLLED for (int i = 0; i < AT_ONCE; ++i) added[i] = totals[(at + i) * runs + first / length];
            const RunInputs inputs{wholes + at * call.in + first, digits + 2 * at * call.in + first, call.in, added};
            RunSums<CODES, BLOCK>::template multiply<AT_ONCE>(codes, inputs, length, sums);
            UNROLLED for (int i = 0; i < AT_ONCE; ++i) {
                const float scale = scales[(at + i) * runs + first / length];
                const std::int32_t excess = CODES == Format::int4 ? call.middle * added[i] : 0;
                UNROLLED for (int v = 0; v < VECTORS; ++v)
                    results[t + i][v] += __builtin_convertvector(sums[i][v] - excess, Floats) * (load<Floats>(group_scales + v * LANES) * scale);
            }
        }
    }

#if defined(__AVX512VNNI__)
    // As `outputs`, of many tokens: the codes of a run are unpacked once for all of them.
    void outputs_of_many(int block, int token, int count) {
        Floats results[MOST][VECTORS];
        __m512i quads[RUN / 4][VECTORS];
        for (int t = 0; t < count; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) results[t][i] = Floats{};
        alignas(LINE) float pairs[AHEAD_GROUPS][2][BLOCK];
        for (int g = 0; g < shared.groups; ++g) {
            if (g % AHEAD_GROUPS == 0) read_pairs_of(block, g, pairs);
            const int in_group = call.group / length;
            for (int r = g * in_group; r < (g + 1) * in_group; ++r) {
                RunSums<CODES, BLOCK>::unpack(shared.codes(block) + std::int64_t(r) * length * ROW_BYTES, length, quads);
                int t = 0;
                for (; t + 4 <= count; t += 4) add_unpacked<4>(quads, token + t, r, pairs[g % AHEAD_GROUPS], results + t);
                if (t + 2 <= count) add_unpacked<2>(quads, token + t, r, pairs[g % AHEAD_GROUPS], results + t), t += 2;
                if (t < count) add_unpacked<1>(quads, token + t, r, pairs[g % AHEAD_GROUPS], results + t);
            }
        }
        for (int t = 0; t < count; ++t) {
            alignas(LINE) float sums[BLOCK];
            UNROLLED for (int i = 0; i < VECTORS; ++i) store(sums + i * LANES, results[t][i]);
            put_results(call, block * BLOCK, token + t, sums, BLOCK);
        }
    }

    template <int T>
    __attribute__((noinline)) void add_unpacked(const __m512i (*quads)[VECTORS], std::int64_t token, int run,
                                                const float (&pairs)[2][BLOCK], Floats (*results)[VECTORS]) const {
        const std::int64_t first = std::int64_t(run) * length;
        Ints sums[T][VECTORS];
        std::int32_t added[T];
        UNROLLED for (int t = 0; t < T; ++t) added[t] = totals[(token + t) * runs + run];
        const RunInputs inputs{wholes + token * call.in + first, digits + 2 * token * call.in + first, call.in, added};
        RunSums<CODES, BLOCK>::template multiply_unpacked<T>(quads, inputs, length, sums);
        const int group = int(first / call.group);
        const bool has_zeros = call.columns == 2 && first % call.group == 0;
        UNROLLED for (int t = 0; t < T; ++t) {
            const float scale = scales[(token + t) * runs + run];
            const float sum = has_zeros ? shared.sums[(token + t) * shared.groups + group] : 0.0f;
            const std::int32_t excess = CODES == Format::int4 ? call.middle * added[t] : 0;
            UNROLLED for (int v = 0; v < VECTORS; ++v) {
                Floats result = results[t][v];
                if (has_zeros) result += load<Floats>(pairs[1] + v * LANES) * sum;
                results[t][v] = result + __builtin_convertvector(sums[t][v] - excess, Floats) * (load<Floats>(pairs[0] + v * LANES) * scale);
            }
        }
    }
#endif

    // Scales and zeros of some groups from `first` on, with the format asked for once.
    void read_pairs_of(int block, int first, float (*to)[2][BLOCK]) const {
        const auto read = [&](Format format) __attribute__((always_inline)) {
            const int last = std::min(first + AHEAD_GROUPS, shared.groups);
            for (int g = first; g < last; ++g) {
                shared.prefetch_pairs(block, g + AHEAD_GROUPS);
                for (int i = 0; i < BLOCK; i += LANES) {
                    Floats group_scales, zeros;
                    pairs_of(call, format, g, block * BLOCK + i, group_scales, zeros);
                    store(to[g - first][0] + i, group_scales), store(to[g - first][1] + i, zeros);
                }
            }
        };
        switch (call.pair_format) {
            case Format::bfloat16:
                return read(Format::bfloat16);
            case Format::float16:
                return read(Format::float16);
            case Format::int8:
                return read(Format::int8);
            default:
                return read(Format::float32);
        }
    }

    void round(int token) {
        shared.read(token, [](int, Floats) {});
        const std::uint8_t *from = call.inputs + std::int64_t(token) * call.in * 2;
        const int vectors = length / LANES;
        for (int r = 0; r < runs; ++r) {
            Floats inputs[RUN / LANES];
            Words most{};  // as whole numbers, floats without sign keep their order, with NaN last
            for (int i = 0; i < vectors; ++i) {
                inputs[i] = Row<Format::bfloat16>::lanes(from, r * length + i * LANES, 0);
                const Words size = (Words)inputs[i] & 0x7fffffffu;
                most = size > most ? size : most;
            }
            std::uint32_t top = 0;
            for (int lane = 0; lane < LANES; ++lane) top = std::max(top, std::uint32_t(most[lane]));
            float largest;
            __builtin_memcpy(&largest, &top, 4);
            const bool is_finite = top < INFINITE, is_zero = largest < SMALLEST;
            const std::int64_t at = std::int64_t(token) * runs + r;
            scales[at] = !is_finite ? NAN : is_zero ? 0.0f : largest / LARGEST;
            const float by = is_finite && !is_zero ? LARGEST / largest : 0.0f;
            Ints total{};
            for (int i = 0; i < vectors; ++i) {
                const Ints whole = is_finite ? (Ints)(inputs[i] * by + ROUNDER) - (Ints)all(ROUNDER) : Ints{};
                const Ints high = (whole + 128) >> 8;
                const std::int64_t place = r * length + i * LANES;
                std::int8_t *to = digits + 2 * std::int64_t(token) * call.in + place;
                put_narrow<Bytes>(to, high), put_narrow<Bytes>(to + call.in, whole - (high << 8));
                put_narrow<Shorts>(wholes + std::int64_t(token) * call.in + place, whole);
                total += whole;
            }
            std::int32_t sum = 0;
            for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
            totals[at] = sum;
        }
    }
    typedef std::int16_t Shorts __attribute__((vector_size(LANES * 2)));
    template <class Narrow>
    static void put_narrow(void *to, Ints whole) {
        const Narrow narrow = __builtin_convertvector(whole, Narrow);
        __builtin_memcpy(to, &narrow, sizeof narrow);
    }
};
