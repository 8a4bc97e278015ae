// Vectors of the widest kind that the compiler may use here, and loads that widen to float32.
// Included inside the namespace of one instruction set, so that no two sets share a function.

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef std::int8_t Bytes __attribute__((vector_size(LANES)));

template <class V>
inline V load(const void *from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}
inline void store(float *to, Floats v) { __builtin_memcpy(to, &v, sizeof v); }
inline Floats all(float x) { return x - Floats{}; }
inline Floats bits_of(Words w) { return (Floats)w; }

// Narrow numbers, one to a lane. Compilers split the generic conversion in two.
#if defined(__AVX512F__)
inline Words wide_halves(const void *from) {
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
inline Ints wide_bytes(const void *from) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
}
#elif defined(__AVX2__)
inline Words wide_halves(const void *from) {
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}
inline Ints wide_bytes(const void *from) {
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
#else
inline Words wide_halves(const void *from) { return __builtin_convertvector(load<Halves>(from), Words); }
inline Ints wide_bytes(const void *from) { return __builtin_convertvector(load<Bytes>(from), Ints); }
#endif

// float16 to float32. Without instructions for it, the exponent is rebased by a product.
inline float from_half(std::uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    std::uint32_t sign = std::uint32_t(h & 0x8000u) << 16, rest = std::uint32_t(h & 0x7fffu) << 13;
    float magnitude;
    __builtin_memcpy(&magnitude, &rest, 4);
    magnitude *= 0x1p112f;
    std::uint32_t word;
    __builtin_memcpy(&word, &magnitude, 4);
    if (rest >= 0x0f800000u) word |= 0x7f800000u;  // infinite, or no number
    word |= sign;
    __builtin_memcpy(&magnitude, &word, 4);
    return magnitude;
#endif
}
// float16 in the low halves of lanes.
inline Floats from_halves(Words h) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
#else
    const Words rest = (h & 0x7fffu) << 13, magnitude = (Words)(bits_of(rest) * 0x1p112f);
    const Words infinite = (Words)(rest >= 0x0f800000u) & 0x7f800000u;  // or no number
    return bits_of(magnitude | infinite | ((h & 0x8000u) << 16));
#endif
}
inline std::uint16_t to_half(float x) {
#if defined(__F16C__)
    return std::uint16_t(_cvtss_sh(x, 0));
#else
    std::uint32_t word;
    __builtin_memcpy(&word, &x, 4);
    std::uint32_t sign = (word >> 16) & 0x8000u, rest = word & 0x7fffffffu;
    if (rest >= 0x47800000u) return std::uint16_t(sign | (rest > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (rest < 0x38800000u) {  // subnormal: let float addition round
        float magnitude;
        __builtin_memcpy(&magnitude, &rest, 4);
        magnitude += 0.5f;
        __builtin_memcpy(&rest, &magnitude, 4);
        return std::uint16_t(sign | (rest - 0x3f000000u));
    }
    rest += 0xc8000fffu + ((rest >> 13) & 1u);
    return std::uint16_t(sign | (rest >> 13));
#endif
}
inline float from_brain(std::uint16_t b) {
    std::uint32_t word = std::uint32_t(b) << 16;
    float x;
    __builtin_memcpy(&x, &word, 4);
    return x;
}
inline std::uint16_t to_brain(float x) {
    std::uint32_t word;
    __builtin_memcpy(&word, &x, 4);
    if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return std::uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}
// The bits of floats, rounded to bfloat16 or float16, in the low halves of lanes.
template <Format F>
inline Words narrow(Words w) {
    if constexpr (F == Format::bfloat16) {
        const Words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
        return (Ints)(w & 0x7fffffffu) > 0x7f800000 ? Words{} + 0x7fc0u : rounded;  // AVX2 compares signed numbers alone
    } else {
#if defined(__AVX512F__)
        return (Words)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)w, 0));
#else
        const Floats v = bits_of(w);
        for (int i = 0; i < LANES; ++i) w[i] = to_half(v[i]);
        return w;
#endif
    }
}

// One slot's numbers: `lanes(row, i)` are those from channel i on, `one(row, i)` is channel i.
template <Format>
struct Row;
template <>
struct Row<Format::float32> {
    static Floats lanes(const std::uint8_t *row, int i, int) { return load<Floats>(row + 4 * i); }
    static float one(const std::uint8_t *row, int i, int) {
        float x;
        __builtin_memcpy(&x, row + 4 * i, 4);
        return x;
    }
};
template <>
struct Row<Format::bfloat16> {
    static Floats lanes(const std::uint8_t *row, int i, int) {
        return bits_of(wide_halves(row + 2 * i) << 16);
    }
    static float one(const std::uint8_t *row, int i, int) {
        std::uint16_t b;
        __builtin_memcpy(&b, row + 2 * i, 2);
        return from_brain(b);
    }
};
template <>
struct Row<Format::float16> {
    static Floats lanes(const std::uint8_t *row, int i, int) {
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + 2 * i)));
#elif defined(__F16C__)
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * i)));
#else
        return from_halves(wide_halves(row + 2 * i));
#endif
    }
    static float one(const std::uint8_t *row, int i, int) {
        std::uint16_t h;
        __builtin_memcpy(&h, row + 2 * i, 2);
        return from_half(h);
    }
};
template <>
struct Row<Format::int8> {
    static Floats lanes(const std::uint8_t *row, int i, int) {
        return __builtin_convertvector(wide_bytes(row + i), Floats);
    }
    static float one(const std::uint8_t *row, int i, int) { return float(std::int8_t(row[i])); }
};
// Byte j holds channel j in its low nibble and channel j + channels / 2 in its high one.
template <>
struct Row<Format::int4> {
    static Floats lanes(const std::uint8_t *row, int i, int channels) {
        int half = channels / 2;
        if (i < half && i + LANES > half) {  // astride both halves
            Floats v{};
            for (int j = 0; j < LANES; ++j) v[j] = one(row, i + j, channels);
            return v;
        }
        return i < half ? levels(wide_bytes(row + i)) : levels(wide_bytes(row + i - half) >> 4);
    }
    // Decodes the lowest four bits of each lane.
    static Floats levels(Ints codes) {
#if defined(__AVX512F__)
        const Floats level = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)level);
#else
        return __builtin_convertvector((codes & 15) - 8, Floats);
#endif
    }
    static float one(const std::uint8_t *row, int i, int channels) {
        int half = channels / 2;
        return float((i < half ? row[i] & 15 : row[i - half] >> 4) - 8);
    }
};

// The scales and the offsets of LANES tokens in group number `group` of so many. `rows` has the pairs of each token.
struct GroupPairs {
    Floats scales, offsets;

    [[gnu::always_inline]] GroupPairs(const std::uint16_t *rows, int groups, int group) {
        const Words both = words(rows, groups, group);
        scales = from_halves(both & 0xffffu), offsets = from_halves(both >> 16);
    }

  private:
    [[gnu::always_inline]] static Words words(const std::uint16_t *rows, int groups, int group) {
#if defined(__AVX512F__)
        const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const auto load = [&](int i) __attribute__((always_inline)) { return _mm512_loadu_si512(rows + 32 * i); };
        if (groups == 2) return (Words)_mm512_permutex2var_epi32(load(0), (__m512i)(lanes * 2 + group), load(1));
        if (groups == 4) {
            const __m512i at = (__m512i)((lanes & 7) * 4 + group);
            const __m512i first = _mm512_permutex2var_epi32(load(0), at, load(1)), second = _mm512_permutex2var_epi32(load(2), at, load(3));
            return (Words)_mm512_mask_blend_epi32(0xff00, first, second);
        }
#endif
        Words found{};
        for (int t = 0; t < LANES; ++t) {
            std::uint32_t pair;
            __builtin_memcpy(&pair, rows + 2 * (t * groups + group), 4);
            found[t] = pair;
        }
        return found;
    }
};

inline float number(Format format, const std::uint8_t *row, std::int64_t i) {
    switch (format) {
        case Format::bfloat16:
            return Row<Format::bfloat16>::one(row + 2 * i, 0, 0);
        case Format::float16:
            return Row<Format::float16>::one(row + 2 * i, 0, 0);
        case Format::int8:
            return Row<Format::int8>::one(row + i, 0, 0);
        default:
            return Row<Format::float32>::one(row + 4 * i, 0, 0);
    }
}
inline void put(Format format, std::uint8_t *row, std::int64_t i, float x) {
    std::uint16_t narrow;
    switch (format) {
        case Format::bfloat16:
            narrow = to_brain(x), __builtin_memcpy(row + 2 * i, &narrow, 2);
            break;
        case Format::float16:
            narrow = to_half(x), __builtin_memcpy(row + 2 * i, &narrow, 2);
            break;
        default:
            __builtin_memcpy(row + 4 * i, &x, 4);
    }
}

// The low halves of lanes whose high ones are 0.
inline Halves low_halves(Words w) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)w), _mm256_extracti128_si256((__m256i)w, 1));
#else
    return __builtin_convertvector(w, Halves);
#endif
}

// Stores LANES floats, rounded to the format.
template <Format F>
inline void store_rounded(std::uint8_t *to, Floats v) {
    if constexpr (F == Format::float32) {
        __builtin_memcpy(to, &v, sizeof v);
    } else {
        const Halves rounded = low_halves(narrow<F>((Words)v));
        __builtin_memcpy(to, &rounded, sizeof rounded);
    }
}

template <Format F>
inline Floats rounded_lanes(Floats v) {
    if constexpr (F == Format::bfloat16) return bits_of(narrow<F>((Words)v) << 16);
    if constexpr (F == Format::float16) return from_halves(narrow<F>((Words)v));
    return v;
}

// Rows of numbers to float32 and back, with the format asked for once.
inline void read_row(Format format, const std::uint8_t *row, int count, float *out) {
    const auto read = [&](int bytes, auto lanes) {
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(out + i, lanes(row + bytes * i));
        for (; i < count; ++i) out[i] = number(format, row, i);
    };
    if (format == Format::bfloat16) return read(2, [](const std::uint8_t *from) { return Row<Format::bfloat16>::lanes(from, 0, 0); });
    if (format == Format::float16) return read(2, [](const std::uint8_t *from) { return Row<Format::float16>::lanes(from, 0, 0); });
    if (format == Format::int8) return read(1, [](const std::uint8_t *from) { return Row<Format::int8>::lanes(from, 0, 0); });
    __builtin_memcpy(out, row, 4 * std::size_t(count));
}
template <Format F>
inline void put_row_of(std::uint8_t *row, const float *numbers, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store_rounded<F>(row + 2 * i, load<Floats>(numbers + i));
    for (; i < count; ++i) put(F, row, i, numbers[i]);
}
inline void put_row(Format format, std::uint8_t *row, const float *numbers, int count) {
    if (format == Format::bfloat16) return put_row_of<Format::bfloat16>(row, numbers, count);
    if (format == Format::float16) return put_row_of<Format::float16>(row, numbers, count);
    __builtin_memcpy(row, numbers, 4 * std::size_t(count));
}

// The second where either is no number.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
inline Floats roots(Floats v) {
#if defined(__AVX512F__)
    return (Floats)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
    return (Floats)_mm256_sqrt_ps((__m256)v);
#else
    for (int i = 0; i < LANES; ++i) v[i] = std::sqrt(v[i]);
    return v;
#endif
}
// a * b + c, rounded once where the CPU can, whatever the compiler makes of its surroundings.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The lanes of `v`, moved by STEP.
template <int STEP, class V, std::size_t... I>
inline V moved(V v, std::index_sequence<I...>) {
    return __builtin_shufflevector(v, v, int((I + STEP) % LANES)...);
}
inline Words larger(Words a, Words b) { return a > b ? a : b; }
template <int STEP = LANES / 2, class V>
inline auto top_of(V v) {
    v = larger(v, moved<STEP>(v, std::make_index_sequence<LANES>{}));
    if constexpr (STEP == 1)
        return v[0];
    else
        return top_of<STEP / 2>(v);
}
template <int STEP = LANES / 2, class V>
inline auto sum_of(V v) {
    v += moved<STEP>(v, std::make_index_sequence<LANES>{});
    if constexpr (STEP == 1)
        return v[0];
    else
        return sum_of<STEP / 2>(v);
}

// Each x becomes e to the x, for x <= 0, within 2 units of the last place, and 0 below -87. Several side by side hide the
// latency of their steps.
template <int COUNT>
[[gnu::always_inline]] inline void exponentials(Floats (&x)[COUNT]) {
    const Floats low = all(-87.0f);
    Floats f[COUNT], r[COUNT], p[COUNT];
    const auto each = [](auto step) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int k = 0; k < COUNT; ++k) step(k);
    };
    each([&](int k) { r[k] = larger(x[k], low); });
#if defined(__AVX512F__)
    each([&](int k) { f[k] = (Floats)_mm512_roundscale_ps((__m512)(r[k] * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
#else
    constexpr float WHOLE = 12582912.0f;  // 1.5 * 2^23: added to a number, it rounds that to a whole one in the lowest bits
    Floats n[COUNT];
    each([&](int k) { n[k] = r[k] * 1.44269504f + WHOLE; });
    each([&](int k) { f[k] = n[k] - WHOLE; });
#endif
    each([&](int k) { r[k] = r[k] - f[k] * 0.693359375f; });
    each([&](int k) { r[k] = r[k] - f[k] * -2.12194440e-4f; });
    each([&](int k) { p[k] = 1.9875691500e-4f * r[k] + 1.3981999507e-3f; });
    each([&](int k) { p[k] = p[k] * r[k] + 8.3334519073e-3f; });
    each([&](int k) { p[k] = p[k] * r[k] + 4.1665795894e-2f; });
    each([&](int k) { p[k] = p[k] * r[k] + 1.6666665459e-1f; });
    each([&](int k) { p[k] = p[k] * r[k] + 5.0000001201e-1f; });
    each([&](int k) { p[k] = p[k] * r[k]; });
    each([&](int k) { p[k] = p[k] * r[k] + r[k]; });
    each([&](int k) { p[k] = p[k] + 1.0f; });
#if defined(__AVX512F__)
    each([&](int k) { x[k] = (Floats)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x[k], (__m512)low, _CMP_GT_OQ), (__m512)p[k], (__m512)f[k]); });
#else
    each([&](int k) { p[k] = bits_of((Words)p[k] + ((Words)n[k] << 23)); });  // their power of 2, added to the exponent
    each([&](int k) { x[k] = x[k] > low ? p[k] : all(0.0f); });
#endif
}
inline Floats exponential(Floats x) {
    Floats one[1] = {x};
    exponentials(one);
    return one[0];
}

// Of each 2 * STEP lanes, the first half from `a` and the second from `b`: their part number TAKE.
template <int STEP, int TAKE, std::size_t... I>
inline Floats halves(Floats a, Floats b, std::index_sequence<I...>) {
    return __builtin_shufflevector(
        a, b, int((I / STEP % 2 ? LANES : 0) + I / (2 * STEP) * (2 * STEP) + TAKE * STEP + I % STEP)...);
}
template <int STEP>
inline void fold(Floats *v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (STEP == 4) {  // without a shuffle of 256 bits by two vectors, which takes 8 operations on some CPUs
        for (int i = 0; i < STEP; ++i) {
            const __m256 a = (__m256)v[i], b = (__m256)v[i + STEP];
            const __m256 swapped = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_extractf128_ps(a, 1)), _mm256_castps256_ps128(b), 1);
            v[i] = (Floats)_mm256_blend_ps(a, b, 0xf0) + (Floats)swapped;
        }
        return;
    }
#endif
    for (int i = 0; i < STEP; ++i)
        v[i] = halves<STEP, 0>(v[i], v[i + STEP], std::make_index_sequence<LANES>{}) +
               halves<STEP, 1>(v[i], v[i + STEP], std::make_index_sequence<LANES>{});
}
// Lane i of the result is the sum of the lanes of v[i]. Overwrites v.
inline Floats sums(Floats (&v)[LANES]) {
    if constexpr (LANES == 16) fold<8>(v);
    if constexpr (LANES >= 8) fold<4>(v);
    fold<2>(v);
    fold<1>(v);
    return v[0];
}
template <int STEP>
inline void swap_squares(Floats *v) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & STEP)) {
            const Floats a = v[i], b = v[i + STEP];
            v[i] = halves<STEP, 0>(a, b, std::make_index_sequence<LANES>{});
            v[i + STEP] = halves<STEP, 1>(a, b, std::make_index_sequence<LANES>{});
        }
}
// Lane j of v[i] and lane i of v[j] change places.
inline void transpose(Floats (&v)[LANES]) {
    if constexpr (LANES == 16) swap_squares<8>(v);
    if constexpr (LANES >= 8) swap_squares<4>(v);
    swap_squares<2>(v);
    swap_squares<1>(v);
}

// A vector in a register: the compiler would read memory once for each use, of which there are few a cycle.
template <class V>
inline V once(V v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX2__)
    asm("" : "+x"(v));
#endif
    return v;
}

// Two vectors of numbers become their even and their odd ones, and back.
template <std::size_t... I>
inline void part(Floats &a, Floats &b, std::index_sequence<I...>) {
    const Floats even = __builtin_shufflevector(a, b, int(2 * I)...);
    b = __builtin_shufflevector(a, b, int(2 * I + 1)...), a = even;
}
template <std::size_t... I>
inline void join_parts(Floats &even, Floats &odd, std::index_sequence<I...>) {
    const Floats first = __builtin_shufflevector(even, odd, int(I / 2 + I % 2 * LANES)...);
    odd = __builtin_shufflevector(even, odd, int(LANES / 2 + I / 2 + I % 2 * LANES)...), even = first;
}
inline void part(Floats &a, Floats &b) { part(a, b, std::make_index_sequence<LANES>{}); }
inline void join_parts(Floats &even, Floats &odd) { join_parts(even, odd, std::make_index_sequence<LANES>{}); }
// The same of every two whole vectors of a row.
inline void part_row(float *row, int count) {
    for (int i = 0; i + 2 * LANES <= count; i += 2 * LANES) {
        Floats low = load<Floats>(row + i), high = load<Floats>(row + i + LANES);
        part(low, high);
        store(row + i, low), store(row + i + LANES, high);
    }
}
// The even and the odd ones of two vectors of bfloat16, as float32.
inline void load_parted(const void *from, Floats &even, Floats &odd) {
    const Words both = load<Words>(from);
    even = bits_of(both << 16), odd = bits_of(both & 0xffff0000u);
}

#if defined(__AVX512BF16__)
// Stores 32 bfloat16: `a`, then `b`.
inline void store_narrow(void *to, Floats a, Floats b) {
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    __builtin_memcpy(to, &both, 64);
}
inline Floats dot(Floats sum, __m512bh a, __m512bh b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
// Sums of channels between their own order and the one in which AVX-512 interleaves two rows.
inline void load_interleaved(const float *from, Floats &low, Floats &high) {
    const Floats a = load<Floats>(from), b = load<Floats>(from + 16);
    low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
inline void store_interleaved(float *to, Floats low, Floats high) {
    store(to, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(to + 16,
          __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}
#endif
