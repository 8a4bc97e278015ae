// Sums of coded values, weighted, as products of whole numbers: weights of two signed digits of 8 bits, times codes (VNNI).
// Included inside the namespace of one instruction set, after narrow.hpp.
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

// The weights of a block, each a whole number of units: 256 times the high digit, and the low one.
struct WeightDigits {
    alignas(64) std::int8_t high[BLOCK], low[BLOCK];
    std::int32_t total;  // the sum of all
    float unit;

    // Weights times scales (null: 1). A weight that is no number makes the unit none.
    WeightDigits(const float *weights, const float *scales) {
        constexpr float MOST = 127 * 256;
        Floats scaled[BLOCK / LANES], largest{}, sum{};
        for (int i = 0; i < BLOCK / LANES; ++i) {
            scaled[i] = load<Floats>(weights + i * LANES);
            if (scales) scaled[i] *= load<Floats>(scales + i * LANES);
            largest = larger((Floats)_mm512_abs_ps((__m512)scaled[i]), largest);
            sum += scaled[i];
        }
        const float top = top_of(largest), check = sum_of(sum) * 0.0f;
        const Floats inverse = all(top > 0 && check == 0.0f ? MOST / top : 0.0f);
        unit = top / MOST + check;
        Ints count{};
        for (int i = 0; i < BLOCK / LANES; ++i) {
            const Ints whole = (Ints)_mm512_cvtps_epi32((__m512)(scaled[i] * inverse));
            count += whole;
            _mm_store_si128((__m128i *)(high + i * LANES), _mm512_cvtepi32_epi8((__m512i)(whole + 128 >> 8)));
            _mm_store_si128((__m128i *)(low + i * LANES), _mm512_cvtepi32_epi8((__m512i)whole));
        }
        total = _mm512_reduce_add_epi32((__m512i)count);
    }
};

// Sums of 16 channels of each of two digits.
struct DigitSums {
    __m512i high, low;

    // Bytes of four slots, channel by channel, unsigned, times the digits of these slots.
    [[gnu::always_inline]] void add(__m512i codes, const WeightDigits &weights, int slot) {
        const auto four = [&](const std::int8_t *digits) __attribute__((always_inline)) {
            std::int32_t word;
            __builtin_memcpy(&word, digits + slot, 4);
            return _mm512_set1_epi32(word);
        };
        high = _mm512_dpbusd_epi32(high, codes, four(weights.high)), low = _mm512_dpbusd_epi32(low, codes, four(weights.low));
    }
    // Less what was added to codes so that they are unsigned, for each unit of the weights.
    Floats without(std::int32_t added) const { return __builtin_convertvector(((Ints)high << 8) + (Ints)low - added, Floats); }
};

// Codes of a block's values, from one byte of each slot on.
struct CodedValues {
    const std::uint8_t *rows;
    std::size_t row_bytes;
    int count;
    const bool *is_seen;
};
// Calls `add` with the first of four slots in turn, and their rows. Slots behind the last are copies of it, whose weight is 0.
template <class Add>
[[gnu::always_inline]] inline void each_four(const CodedValues &values, Ahead ahead, Add add) {
    for (int j = 0; j < values.count; j += LANES) {
        ahead.fetch(j + 8, j + 16);
        if (!values.is_seen[j / LANES]) continue;
        const int end = values.count - j < LANES ? values.count : j + LANES;
        const std::uint8_t *row = values.rows + j * values.row_bytes;
        int slot = j;
        for (; slot + 4 <= end; slot += 4, row += 4 * values.row_bytes)
            add(slot, row, row + values.row_bytes, row + 2 * values.row_bytes, row + 3 * values.row_bytes);
        const auto some = [&](int i) { return row + (slot + i < end ? i : end - 1 - slot) * values.row_bytes; };
        if (slot < end) add(slot, row, some(1), some(2), some(3));
    }
}

// Adds 64 channels of int8 to the sums of each query.
template <int QUERIES>
void add_bytes(const WeightDigits *weights, const CodedValues &values, Ahead ahead, float *sums, std::size_t sum_stride) {
    DigitSums found[QUERIES][4] = {};
    const __m512i sign = _mm512_set1_epi8(-128);  // of codes, which are counted from 0 to 255
    each_four(values, ahead, [&](int slot, const auto *a, const auto *b, const auto *c, const auto *d) __attribute__((always_inline)) {
        const auto codes = [&](const std::uint8_t *row) __attribute__((always_inline)) { return _mm512_xor_si512(_mm512_loadu_si512(row), sign); };
        const __m512i first[2] = {codes(a), codes(b)}, second[2] = {codes(c), codes(d)};
        const __m512i low[2] = {_mm512_unpacklo_epi8(first[0], first[1]), _mm512_unpacklo_epi8(second[0], second[1])},
                      high[2] = {_mm512_unpackhi_epi8(first[0], first[1]), _mm512_unpackhi_epi8(second[0], second[1])};
        const __m512i fours[4] = {_mm512_unpacklo_epi16(low[0], low[1]), _mm512_unpackhi_epi16(low[0], low[1]),
                                  _mm512_unpacklo_epi16(high[0], high[1]), _mm512_unpackhi_epi16(high[0], high[1])};
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
#pragma GCC unroll 4
            for (int q = 0; q < QUERIES; ++q) found[q][v].add(fours[v], weights[q], slot);
    });
    for (int q = 0; q < QUERIES; ++q) {
        alignas(64) float numbers[64];  // lane i of vector v: channel i / 4 * 16 + 4 * v + i % 4
        for (int v = 0; v < 4; ++v) store(numbers + 16 * v, found[q][v].without(128 * weights[q].total) * weights[q].unit);
        float *sum = sums + q * sum_stride;
        for (int i = 0; i < 64; i += 4) {
            const float *from = numbers + i / 4 % 4 * 16 + i / 16 * 4;
            for (int lane = 0; lane < 4; ++lane) sum[i + lane] += from[lane];
        }
    }
}

// Calls `use` for all queries, from one number on and so many of them, three at most.
template <class Use>
[[gnu::always_inline]] inline void in_threes(int queries, Use use) {
    for (int first = 0, some; first < queries; first += some) {
        const int left = queries - first;
        some = left == 4 || left == 2 ? 2 : left < 3 ? left : 3;
        if (some == 3) use(first, std::integral_constant<int, 3>{});
        if (some == 2) use(first, std::integral_constant<int, 2>{});
        if (some == 1) use(first, std::integral_constant<int, 1>{});
    }
}
#endif
