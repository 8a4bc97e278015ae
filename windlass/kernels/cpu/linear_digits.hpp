// Linear layers of codes in groups, see `linear_groups.hpp`, in whole numbers, for inputs of bfloat16. Included by
// `linear.cpp`.
//
// Each run of a token's inputs, 32 or 16 of one group, shares a scale, by which the largest of them is 127, and is rounded
// to whole numbers. Where one input is far larger than most of the token, the others of its run would be lost: such a run
// is rounded to 256ths of these numbers, which is finer than bfloat16. So are all runs in plain C++, where that costs
// nothing. Products of codes and inputs add up without rounding.

constexpr int RUN = 32;  // most inputs that share a scale
inline int run_of(const Linear &call) { return call.group % RUN ? RUN / 2 : RUN; }

struct RunScale {
    float scale;             // of a 256th
    std::int32_t high, low;  // sums of the digits, of whole inputs in `low` alone
    bool is_fine;
};
// Inputs of some tokens in a run, each `stride` behind the one before: as whole numbers, or as digits of 8 bits.
template <class Whole>
struct RunInputs {
    const Whole *first;
    std::int64_t stride;
};

// `multiply` writes `sums`: inputs of T tokens in a run times the codes of a block, less an excess. UNIT: 256ths that an
// input counts, so that sums of low digits are to be added where it is 256. ADDED: to each code of 8 bits. AT_ONCE: tokens
// whose sums the registers hold. Where `HAS_UNPACKED`, codes are unpacked once for more than FEW tokens, STEP inputs at a time.
// This one is plain C++, for codes of 4 bits.
template <Format CODES, int BLOCK>
struct RunSums {
    static constexpr int ROW_BYTES = BLOCK / 2, VECTORS = BLOCK / LANES, UNIT = 1, ADDED = 0;
    static constexpr bool HAS_UNPACKED = false;
    typedef std::int16_t Whole;
    static void in_order(Floats *) {}

    template <int T>
    static void multiply(const std::uint8_t *codes, int run, RunInputs<Whole> inputs, const std::int32_t (&excess)[T],
                         Floats (&sums)[T][VECTORS]) {
        std::int32_t own[T][BLOCK];
        for (int t = 0; t < T; ++t)
            for (int n = 0; n < BLOCK; ++n) own[t][n] = -excess[t];
        for (int k = 0; k < run; ++k) {
            const std::uint8_t *row = codes + k * ROW_BYTES;
            for (int t = 0; t < T; ++t) {
                const std::int32_t x = inputs.first[t * inputs.stride + k];
                for (int n = 0; n < ROW_BYTES; ++n)
                    own[t][n] += (row[n] & 15) * x, own[t][n + ROW_BYTES] += (row[n] >> 4) * x;
            }
        }
        for (int t = 0; t < T; ++t)
            for (int i = 0; i < VECTORS; ++i) sums[t][i] = __builtin_convertvector(load<Ints>(own[t] + i * LANES), Floats);
    }
};

// Asks for the codes of some inputs before they are read: into the nearest cache, and into the next one. With AVX2 alone
// codes that are read `ONCE` pass by the next one, which keeps what other code reads.
template <int BYTES, bool ONCE = false>
inline void ask_ahead(const std::uint8_t *codes) {
    constexpr bool IS_PAST = ONCE;
    constexpr int SOON = IS_PAST ? 1024 : 512, LATER = 8192;
    UNROLLED for (int line = 0; line < BYTES; line += LINE) {
        __builtin_prefetch(codes + SOON + line, 0, IS_PAST ? 0 : 3);
        if (!IS_PAST) __builtin_prefetch(codes + LATER + line, 0, 2);
    }
}

#if defined(__AVX2__)
// Some inputs of an output stand in a lane of 32 bits: four of 8 bits, or two of 16 bits where codes have 8.
template <Format CODES, int BLOCK>
struct RunSumsOf8 {
    static constexpr bool IS_NIBBLES = CODES == Format::int4, HAS_UNPACKED = true;
    static constexpr int ROW_BYTES = IS_NIBBLES ? BLOCK / 2 : BLOCK, VECTORS = BLOCK / LANES;
    static constexpr int UNIT = IS_NIBBLES ? 256 : 1, ADDED = 0, AT_ONCE = 2, STEP = IS_NIBBLES ? 4 : 2, FEW = IS_NIBBLES ? 2 : 4;
    static constexpr int CHUNK = IS_NIBBLES ? 16 : 32, CHUNKS = ROW_BYTES / CHUNK;  // bytes at once, of 32 outputs
    static constexpr int OF_CHUNK = 4;  // vectors of 8 outputs each: of low, and then of high nibbles
    typedef std::conditional_t<IS_NIBBLES, std::int8_t, std::int16_t> Whole;
    typedef __m256i Chunk[OF_CHUNK];
    typedef Chunk Codes[CHUNKS];

    template <int T>
    __attribute__((always_inline)) static void multiply(const std::uint8_t *codes, int run, RunInputs<Whole> inputs,
                                                        const std::int32_t (&excess)[T], Floats (&sums)[T][VECTORS]) {
        multiply<T>([&](int k, int chunk, Chunk &own) __attribute__((always_inline)) {
            const std::uint8_t *row = codes + k * ROW_BYTES;
            if (chunk == 0) ask_ahead<STEP * ROW_BYTES, T == 1>(row);
            read(row + chunk * CHUNK, own);
        }, run, inputs, excess, sums);
    }
    template <int T>
    __attribute__((always_inline)) static void multiply(const Codes *unpacked, int run, RunInputs<Whole> inputs,
                                                        const std::int32_t (&excess)[T], Floats (&sums)[T][VECTORS]) {
        multiply<T>([&](int k, int chunk, Chunk &own) __attribute__((always_inline)) {
            UNROLLED for (int i = 0; i < OF_CHUNK; ++i) own[i] = unpacked[k / STEP][chunk][i];
        }, run, inputs, excess, sums);
    }
    static void unpack(const std::uint8_t *codes, int run, Codes *to) {
        for (int k = 0; k < run; k += STEP) {
            ask_ahead<STEP * ROW_BYTES>(codes + k * ROW_BYTES);
            for (int chunk = 0; chunk < CHUNKS; ++chunk) read(codes + k * ROW_BYTES + chunk * CHUNK, to[k / STEP][chunk]);
        }
    }

    // Puts the outputs of a block in order, or, once more, in the order of the vectors: of 16 outputs the second and the
    // third four change places where codes have 4 bits.
    static void in_order(Floats *to) {
        if constexpr (!IS_NIBBLES) return;
#if defined(__AVX512F__)
        UNROLLED for (int i = 0; i < VECTORS; ++i) to[i] = (Floats)_mm512_shuffle_f32x4((__m512)to[i], (__m512)to[i], 0xd8);
#else
        UNROLLED for (int i = 0; i < VECTORS; i += 2) {
            const __m256i a = (__m256i)to[i], b = (__m256i)to[i + 1];
            to[i] = (Floats)lower_halves(a, b), to[i + 1] = (Floats)upper_halves(a, b);
        }
#endif
    }

  private:
    template <int T, class Next>
    __attribute__((always_inline)) static void multiply(Next next, int run, RunInputs<Whole> inputs, const std::int32_t (&excess)[T],
                                                        Floats (&sums)[T][VECTORS]) {
        constexpr int SECOND = (IS_NIBBLES ? ROW_BYTES : CHUNK / 2) / LANES;  // vectors to the second half of a chunk's outputs
        UNROLLED for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            __m256i own[T][OF_CHUNK];
            UNROLLED for (int t = 0; t < T; ++t)
                UNROLLED for (int i = 0; i < OF_CHUNK; ++i) own[t][i] = _mm256_setzero_si256();
            for (int k = 0; k < run; k += STEP) {
                Chunk codes;
                next(k, chunk, codes);
                UNROLLED for (int t = 0; t < T; ++t) {
                    int word;
                    __builtin_memcpy(&word, inputs.first + t * inputs.stride + k, 4);
                    const __m256i x = _mm256_set1_epi32(word);
                    UNROLLED for (int i = 0; i < OF_CHUNK; ++i) add_products(own[t][i], codes[i], x);
                }
            }
            UNROLLED for (int t = 0; t < T; ++t) {
                Floats *to = sums[t] + chunk * CHUNK / LANES;
                put(to, own[t][0], own[t][1], excess[t]), put(to + SECOND, own[t][2], own[t][3], excess[t]);
            }
        }
    }
    // Not by the intrinsics, for which GCC 12 copies each sum. A sum of 16 bits has at most 16 products of a run, which
    // is below 2^15.
    __attribute__((always_inline)) static void add_products(__m256i &sum, __m256i codes, __m256i x) {
        __m256i products;
        if constexpr (IS_NIBBLES)
            asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(codes), "x"(x));
        else
            asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(codes), "x"(x));
    }
    // The codes of a chunk's bytes in STEP rows.
    __attribute__((always_inline)) static void read(const std::uint8_t *row, Chunk &codes) {
        if constexpr (IS_NIBBLES) {
            const __m256i a = two_rows(row), b = two_rows(row + ROW_BYTES), nibble = _mm256_set1_epi8(15);
            const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
            const __m256i pairs = lower_halves(low, high), others = upper_halves(low, high);
            const __m256i first = _mm256_unpacklo_epi16(pairs, others), second = _mm256_unpackhi_epi16(pairs, others);
            codes[0] = _mm256_and_si256(first, nibble), codes[1] = _mm256_and_si256(second, nibble);
            codes[2] = _mm256_and_si256(_mm256_srli_epi16(first, 4), nibble);
            codes[3] = _mm256_and_si256(_mm256_srli_epi16(second, 4), nibble);
        } else {
            UNROLLED for (int half = 0; half < 2; ++half) {
                const __m128i a = bytes(row + half * 16), b = bytes(row + ROW_BYTES + half * 16);
                codes[2 * half] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
                codes[2 * half + 1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
            }
        }
    }
    static __m128i bytes(const std::uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }
    // 16 bytes of a row and of the row behind the next one.
    static __m256i two_rows(const std::uint8_t *row) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(bytes(row)), bytes(row + 2 * ROW_BYTES), 1);
    }
    static __m256i lower_halves(__m256i a, __m256i b) { return _mm256_inserti128_si256(a, _mm256_castsi256_si128(b), 1); }
    static __m256i upper_halves(__m256i a, __m256i b) {
        return _mm256_blend_epi32(b, _mm256_castsi128_si256(_mm256_extracti128_si256(a, 1)), 15);
    }
    static void put(Floats *to, __m256i a, __m256i b, std::int32_t excess) {
        const __m256i one = _mm256_set1_epi16(1);
        if constexpr (IS_NIBBLES) a = _mm256_madd_epi16(a, one), b = _mm256_madd_epi16(b, one);
#if defined(__AVX512F__)
        to[0] = floats((Ints)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1) - excess);
#else
        to[0] = floats((Ints)a - excess), to[1] = floats((Ints)b - excess);
#endif
    }
    static Floats floats(Ints sums) { return __builtin_convertvector(sums, Floats); }
};
template <int BLOCK>
struct RunSums<Format::int4, BLOCK> : RunSumsOf8<Format::int4, BLOCK> {};
template <int BLOCK>
struct RunSums<Format::int8, BLOCK> : RunSumsOf8<Format::int8, BLOCK> {};
#endif

#if defined(__AVX512VNNI__)
// Four inputs of an output stand in a lane. Vectors of outputs are those of `read`.
template <Format CODES>
struct RunSumsOf64 {
    static constexpr int BLOCK = 64, ROW_BYTES = CODES == Format::int4 ? BLOCK / 2 : BLOCK, VECTORS = 4;
    static constexpr int UNIT = 256, ADDED = 128, AT_ONCE = 4, STEP = 4, FEW = 4;
    static constexpr bool HAS_UNPACKED = true;
    typedef std::int8_t Whole;
    typedef __m512i Codes[VECTORS];  // of four inputs as the instruction takes them

    template <int T>
    __attribute__((noinline)) static void multiply(const std::uint8_t *codes, int run, RunInputs<Whole> inputs,
                                                   const std::int32_t (&excess)[T], Floats (&sums)[T][VECTORS]) {
        multiply<T>([&](int k, Codes &quads) __attribute__((always_inline)) { ask_ahead<STEP * ROW_BYTES, T == 1>(codes + k * ROW_BYTES), read(codes + k * ROW_BYTES, quads); },
                    run, inputs, excess, sums);
    }
    // As this, of codes that were unpacked once for many tokens.
    template <int T>
    __attribute__((always_inline)) static void multiply(const Codes *unpacked, int run, RunInputs<Whole> inputs,
                                                        const std::int32_t (&excess)[T], Floats (&sums)[T][VECTORS]) {
        multiply<T>([&](int k, Codes &quads) __attribute__((always_inline)) {
            UNROLLED for (int i = 0; i < VECTORS; ++i) quads[i] = unpacked[k / 4][i];
        }, run, inputs, excess, sums);
    }
    static void unpack(const std::uint8_t *codes, int run, Codes *to) {
        for (int k = 0; k < run; k += 4) ask_ahead<STEP * ROW_BYTES>(codes + k * ROW_BYTES), read(codes + k * ROW_BYTES, to[k / 4]);
    }

    // Puts the outputs of a block in order, or, once more, in the order of the vectors: of codes of 8 bits, quarter q of
    // vector i has the outputs from 16 * q + 4 * i on.
    static void in_order(Floats *to) {
        if constexpr (CODES == Format::int4) return;
        __m512i v[VECTORS];
        UNROLLED for (int i = 0; i < VECTORS; ++i) v[i] = (__m512i)to[i];
        const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
        to[0] = (Floats)_mm512_shuffle_i32x4(a, b, 0x88), to[1] = (Floats)_mm512_shuffle_i32x4(a, b, 0xdd);
        to[2] = (Floats)_mm512_shuffle_i32x4(c, d, 0x88), to[3] = (Floats)_mm512_shuffle_i32x4(c, d, 0xdd);
    }

  private:
    // The instruction takes codes without sign, so that 128 is added to those of 8 bits.
    template <int T, class Next>
    __attribute__((always_inline)) static void multiply(Next next, int run, RunInputs<Whole> inputs, const std::int32_t (&excess)[T],
                                                        Floats (&sums)[T][VECTORS]) {
        __m512i own[T][VECTORS];
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) own[t][i] = _mm512_set1_epi32(-excess[t]);
        const auto step = [&](int k) __attribute__((always_inline)) {
            Codes quads;
            next(k, quads);
            UNROLLED for (int t = 0; t < T; ++t) {
                const __m512i x = four(inputs.first + t * inputs.stride + k);
                UNROLLED for (int i = 0; i < VECTORS; ++i) add_products(own[t][i], quads[i], x);
            }
        };
        if (run == RUN)
            UNROLLED for (int k = 0; k < RUN; k += 4) step(k);
        else
            for (int k = 0; k < run; k += 4) step(k);
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) sums[t][i] = (Floats)_mm512_cvtepi32_ps(own[t][i]);
    }
    __attribute__((always_inline)) static __m512i four(const std::int8_t *digits) {
        int word;
        __builtin_memcpy(&word, digits, 4);
        return _mm512_set1_epi32(word);
    }
    // Not by the intrinsic, for which GCC 12 copies each sum twice.
    __attribute__((always_inline)) static void add_products(__m512i &sum, __m512i codes, __m512i x) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    }
    __attribute__((always_inline)) static void read(const std::uint8_t *row, Codes &quads) {
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
            const __m512i sign = _mm512_set1_epi8(char(0x80));
            __m512i rows[4];
            UNROLLED for (int i = 0; i < 4; ++i) rows[i] = _mm512_xor_si512(_mm512_loadu_si512(row + i * ROW_BYTES), sign);
            const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpacklo_epi8(rows[2], rows[3]);
            const __m512i c = _mm512_unpackhi_epi8(rows[0], rows[1]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
            quads[0] = _mm512_unpacklo_epi16(a, b), quads[1] = _mm512_unpackhi_epi16(a, b);
            quads[2] = _mm512_unpacklo_epi16(c, d), quads[3] = _mm512_unpackhi_epi16(c, d);
        }
    }
};
template <>
struct RunSums<Format::int4, 64> : RunSumsOf64<Format::int4> {};
template <>
struct RunSums<Format::int8, 64> : RunSumsOf64<Format::int8> {};
#endif

template <Format CODES, int BLOCK>
class DigitGroups {
    using Sums = RunSums<CODES, BLOCK>;
    static constexpr std::uint32_t INFINITE = 0x7f800000u;
    static constexpr float SMALLEST = 0x1p-100f;  // of a run's largest input
    static constexpr float OUTLIER = 6;  // times the root of the mean of the token's squares: a larger input makes its run fine
    static constexpr float ROUNDER = 0x1.8p23f;  // added to a small float, it leaves a whole number in the last bits
    static constexpr int ROW_BYTES = Sums::ROW_BYTES, VECTORS = BLOCK / LANES;
    static constexpr int AHEAD_GROUPS = 8;  // whose scales are decoded at once
    typedef Floats Pairs[2][VECTORS];       // scales and zeros of a block's outputs

  public:
    DigitGroups(const Linear &call, float *scratch)
        : shared(call, scratch),
          call(call),
          length(run_of(call)),
          runs(call.in / length),
          in_group(call.group / length),
          scales(reinterpret_cast<RunScale *>(shared.rest())),
          wholes(reinterpret_cast<std::int16_t *>(scales + std::int64_t(call.tokens) * runs)),
          digits(reinterpret_cast<std::int8_t *>(wholes + std::int64_t(call.tokens) * call.in)) {}

    void run() {
        if (!call.has_inputs) {
#pragma omp for schedule(static)
            for (int token = 0; token < call.tokens; ++token) round(token);
        }
        if constexpr (Sums::HAS_UNPACKED)
            if (call.tokens > Sums::FEW && call.tokens <= MOST) {  // a thread goes on where it has prefetched
#pragma omp for schedule(static) nowait
                for (int block = 0; block < blocks_of(call); ++block) outputs_of_many(block, 0, call.tokens);
                return;
            } else if (call.tokens > MOST) {
#pragma omp for schedule(dynamic) collapse(2) nowait
                for (int block = 0; block < blocks_of(call); ++block)
                    for (int token = 0; token < call.tokens; token += MOST)
                        outputs_of_many(block, token, std::min(MOST, call.tokens - token));
                return;
            }
        Grouped<Format::bfloat16>::all_blocks(*this, call);
    }

    template <int T>
    void outputs(int block, int token) {
        Floats results[T][VECTORS];
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) results[t][i] = Floats{};
        Pairs pairs[AHEAD_GROUPS];
        for (int g = 0; g < shared.groups; ++g) {
            if (g % AHEAD_GROUPS == 0) read_pairs_of(block, g, pairs);
            shared.prefetch_pairs(block, g + AHEAD_GROUPS);  // not all of them at once, which the memory cannot serve
            for (int r = g * in_group; r < (g + 1) * in_group; ++r) {
                const std::uint8_t *codes = codes_of(block, r);
                constexpr int AT_ONCE = T < 2 ? T : 2;  // tokens whose sums the registers hold
                UNROLLED for (int t = 0; t < T; t += AT_ONCE) add_run<AT_ONCE>(codes, token + t, r, zeros_of(token + t, r), pairs[g % AHEAD_GROUPS], results + t);
            }
        }
        UNROLLED for (int t = 0; t < T; ++t) put(block, token + t, results[t]);
    }

  private:
    static constexpr int MOST = 64;  // tokens that share unpacked codes
    Grouped<Format::bfloat16> shared;
    const Linear &call;
    const int length, runs, in_group;  // inputs of a run, and runs of a token and of a group
    RunScale *scales;        // (tokens, runs)
    std::int16_t *wholes;    // (tokens, in)
    std::int8_t *digits;     // (tokens, 2, in)

    const std::uint8_t *codes_of(int block, int run) const { return shared.codes(block) + std::int64_t(run) * length * ROW_BYTES; }

    // Adds a run of T tokens. `codes`: as they lie, or unpacked. `zeros`: of `zeros_of`, from the first of them on.
    template <int T, class Codes>
    __attribute__((always_inline)) void add_run(const Codes *codes, std::int64_t token, int run, const float *zeros, const Pairs &pairs,
                                                Floats (*results)[VECTORS]) const {
        const RunScale *own = scales + token * runs + run;
        const int added = CODES == Format::int4 ? call.middle : Sums::ADDED;  // to each code
        Floats sums[T][VECTORS];
        std::int32_t excess[T];
        if constexpr (Sums::UNIT == 1) {
            UNROLLED for (int t = 0; t < T; ++t) excess[t] = added * own[t * runs].low;
            Sums::template multiply<T>(codes, length, {wholes + token * call.in + run * length, call.in}, excess, sums);
        } else {
            const std::int8_t *first = digits + 2 * token * call.in + run * length;
            UNROLLED for (int t = 0; t < T; ++t) excess[t] = added * own[t * runs].high;
            Sums::template multiply<T>(codes, length, {first, 2 * std::int64_t(call.in)}, excess, sums);
            UNROLLED for (int t = 0; t < T; ++t)
                if (own[t * runs].is_fine) {
                    Floats lows[1][VECTORS];
                    const std::int32_t its[] = {added * own[t * runs].low};
                    Sums::template multiply<1>(codes, length, {first + (2 * t + 1) * std::int64_t(call.in), 0}, its, lows);
                    UNROLLED for (int i = 0; i < VECTORS; ++i) sums[t][i] += lows[0][i] * (1.0f / Sums::UNIT);
                }
        }
        const auto add = [&](auto has_zeros) __attribute__((always_inline)) {
            UNROLLED for (int t = 0; t < T; ++t) {
                const float scale = own[t * runs].scale * Sums::UNIT, zero = has_zeros ? zeros[t * shared.groups] : 0;
                UNROLLED for (int i = 0; i < VECTORS; ++i) {
                    Floats result = results[t][i];
                    if constexpr (has_zeros) result = fused(pairs[1][i], all(zero), result);
                    results[t][i] = fused(sums[t][i], pairs[0][i] * scale, result);
                }
            }
        };
        if (zeros)
            add(std::true_type{});
        else
            add(std::false_type{});
    }
    // The sums of a token's rounded inputs by group, if zeros count and a group begins with the run.
    const float *zeros_of(std::int64_t token, int run) const {
        if (call.columns != 2 || run % in_group) return nullptr;
        return shared.sums + token * shared.groups + run / in_group;
    }
    void put(int block, int token, Floats (&results)[VECTORS]) const {
        Sums::in_order(results);
        const int first = block * BLOCK;
        if (first + BLOCK <= call.out && !call.bias) {
            put_brains<VECTORS>(call, first, token, results);
            return;
        }
        alignas(LINE) float sums[BLOCK];
        UNROLLED for (int i = 0; i < VECTORS; ++i) store(sums + i * LANES, results[i]);
        put_results(call, block * BLOCK, token, sums, BLOCK);
    }

    // As `outputs`, of many tokens: the codes of a run are unpacked once for all of them.
    void outputs_of_many(int block, int token, int count) {
        Floats results[MOST][VECTORS];
        typename Sums::Codes codes[RUN / Sums::STEP];
        for (int t = 0; t < count; ++t)
            UNROLLED for (int i = 0; i < VECTORS; ++i) results[t][i] = Floats{};
        Pairs pairs[AHEAD_GROUPS];
        for (int r = 0; r < runs; ++r) {
            const int group = r / in_group, ahead = group % AHEAD_GROUPS;
            if (r % in_group == 0 && ahead == 0) read_pairs_of(block, group, pairs);
            if (r % in_group == 0) shared.prefetch_pairs(block, group + AHEAD_GROUPS);
            Sums::unpack(codes_of(block, r), length, codes);
            add_unpacked(codes, token, count, r, pairs[ahead], results);
        }
        for (int t = 0; t < count; ++t) put(block, token + t, results[t]);
    }

    template <class Codes>
    __attribute__((noinline)) void add_unpacked(const Codes *codes, int token, int count, int run, const Pairs &pairs,
                                                Floats (*results)[VECTORS]) const {
        const float *zeros = zeros_of(token, run);
        const auto add = [&](auto at_once) __attribute__((always_inline)) {
            constexpr int T = at_once;
            for (; count >= T; count -= T, token += T, results += T, zeros += zeros ? T * std::int64_t(shared.groups) : 0)
                add_run<T>(codes, token, run, zeros, pairs, results);
        };
        if constexpr (Sums::AT_ONCE == 4) add(std::integral_constant<int, 4>{});
        add(std::integral_constant<int, 2>{}), add(std::integral_constant<int, 1>{});
    }

    // Scales and zeros of some groups from `first` on, with the format asked for once.
    void read_pairs_of(int block, int first, Pairs *to) const {
        const int last = std::min(first + AHEAD_GROUPS, shared.groups);
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (CODES == Format::int4)
            if (call.is_by_block && call.pair_format == Format::float16 && !call.supers) return read_halves_of(block, first, last, to);
#endif
        const bool is_run = call.is_by_block && !call.supers;  // they lie one after the other
        const auto read = [&](Format format) __attribute__((always_inline)) {
            const int bytes = bytes_of(format);
            const std::uint8_t *from = call.pairs + (std::int64_t(block) * shared.groups + first) * call.columns * BLOCK * bytes;
            for (int g = first; g < last; ++g, ++to) {
                for (int i = 0; i < VECTORS; ++i) {
                    Floats &scale = (*to)[0][i], &zero = (*to)[1][i];
                    const std::uint8_t *own = from + i * LANES * bytes;
                    if (!is_run)
                        pairs_of(call, format, g, block * BLOCK + i * LANES, scale, zero);
                    else
                        scale = read_scales(format, own), zero = call.columns == 2 ? read_scales(format, own + BLOCK * bytes) : Floats{};
                }
                from += call.columns * BLOCK * bytes;
                Sums::in_order((*to)[0]), Sums::in_order((*to)[1]);
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
#if defined(__AVX2__) && !defined(__AVX512F__)
    // As this, of float16, in the order of the vectors at once.
    void read_halves_of(int block, int first, int last, Pairs *to) const {
        const auto read = [&](const std::uint8_t *from, int at) __attribute__((always_inline)) {
            const __m128d low = _mm_load_sd((const double *)(from + at * 2));
            return (Floats)_mm256_cvtph_ps(_mm_castpd_si128(_mm_loadh_pd(low, (const double *)(from + at * 2 + 16))));
        };
        const std::uint8_t *from = call.pairs + (std::int64_t(block) * shared.groups + first) * call.columns * BLOCK * 2;
        for (int g = first; g < last; ++g, ++to)
            for (int column = 0; column < call.columns; ++column, from += BLOCK * 2)
                UNROLLED for (int i = 0; i < VECTORS; i += 2)
                    (*to)[column][i] = read(from, i * LANES), (*to)[column][i + 1] = read(from, i * LANES + 4);
    }
#endif

    void round(int token) {
        const std::uint8_t *from = call.inputs + std::int64_t(token) * call.in * 2;
        Floats squares{};
        for (int i = 0; i < call.in; i += LANES) {
            const Floats x = Row<Format::bfloat16>::lanes(from, i, 0);
            squares += x * x;
        }
        const float limit = OUTLIER * std::sqrt(sum_of(squares) / float(call.in));
        float *sums = shared.sums + std::int64_t(token) * shared.groups;
        std::fill_n(sums, shared.groups, 0.0f);
        const int vectors = length / LANES;
        for (int r = 0; r < runs; ++r) {
            Floats inputs[RUN / LANES];
            Words most{};  // as whole numbers, floats without sign keep their order, with NaN last
            for (int i = 0; i < vectors; ++i) {
                inputs[i] = Row<Format::bfloat16>::lanes(from, r * length + i * LANES, 0);
                const Words size = (Words)inputs[i] & 0x7fffffffu;
                most = larger(size, most);
            }
            const std::uint32_t top = top_of(most);
            float largest;
            __builtin_memcpy(&largest, &top, 4);
            const bool is_finite = top < INFINITE, is_zero = largest < SMALLEST;
            const bool is_fine = is_finite && (Sums::UNIT == 1 || largest > limit);
            const float steps = is_fine ? 127 * 256 : 127;
            const float by = is_finite && !is_zero ? steps / largest : 0.0f;
            const std::int64_t place = std::int64_t(token) * call.in + r * length;
            std::int8_t *high = digits + place + std::int64_t(token) * call.in, *low = high + call.in;
            Ints highs{}, lows{};
            for (int i = 0; i < vectors; ++i) {
                const Floats scaled = once(inputs[i] * by);  // rounded, with any instruction set
                const Ints whole = is_finite ? (Ints)(scaled + ROUNDER) - (Ints)all(ROUNDER) : Ints{};
                if constexpr (Sums::UNIT == 1) {
                    put_narrow<Shorts>(wholes + place + i * LANES, whole);
                    lows += whole;
                } else {
                    const Ints top_digit = is_fine ? (whole + 128) >> 8 : whole;
                    put_narrow<Bytes>(high + i * LANES, top_digit);
                    highs += top_digit;
                    if (!is_fine) continue;
                    const Ints rest = whole - (top_digit << 8);
                    put_narrow<Bytes>(low + i * LANES, rest);
                    lows += rest;
                }
            }
            const float scale = !is_finite ? NAN : is_zero ? 0.0f : largest / (127 * 256);
            const RunScale own{scale, sum_of(highs), sum_of(lows), is_fine};
            scales[std::int64_t(token) * runs + r] = own;
            sums[r / in_group] += scale * float(own.high * 256 + own.low);  // as rounded, so that errors meet weights and not codes
        }
    }
    typedef std::int16_t Shorts __attribute__((vector_size(LANES * 2)));
    template <class Narrow>
    static void put_narrow(void *to, Ints whole) {
        const Narrow narrow = __builtin_convertvector(whole, Narrow);
        __builtin_memcpy(to, &narrow, sizeof narrow);
    }
};
