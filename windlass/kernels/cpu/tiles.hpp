// Products in bfloat16 of many queries with a block's keys, and of their weights with its values.
// Included inside the namespace of one instruction set, after narrow.hpp and float_tiles.hpp.
//
// A block is laid out once for all queries of a kv head, in tiles whose rows have pairs of numbers. A column is a key and a
// pair two of its channels, or a column is a channel and a pair two slots.
#if defined(__AVX512BF16__)

constexpr int COLUMNS = 64;

struct PairTile {
    using Number = std::uint32_t;
    using Column = __m512bh;

    static Column column(const std::uint32_t *from) { return (__m512bh)once(_mm512_loadu_si512(from)); }
    static Column wide(std::uint32_t pair) { return (__m512bh)_mm512_set1_epi32(int(pair)); }
    static Floats add(Floats sum, Column pair, Column column) { return dot(sum, pair, column); }
};

// Columns 0 to 15 of `out`, COLUMNS numbers a row, of 16 rows of 16 pairs.
inline void transpose_pairs(const std::uint16_t *rows, std::size_t stride, std::uint32_t *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j)
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]), a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    for (int i = 0; i < 4; ++i) {
        const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44), low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44),
                      high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee), high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
        _mm512_storeu_si512(out + i * COLUMNS, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (4 + i) * COLUMNS, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(out + (8 + i) * COLUMNS, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (12 + i) * COLUMNS, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}
// A tile of 16 keys, rows of `width` numbers, from column `first` on.
inline void lay_keys(const std::uint16_t *rows, std::size_t width, int first, std::uint32_t *tile) {
    for (std::size_t i = 0; i < width; i += 32) transpose_pairs(rows + i, width, tile + i / 2 * COLUMNS + first);
}

// A tile of the slots from `first` on, COLUMNS at most, with channels `at` to `at` + COLUMNS of their values.
inline void lay_values(const NarrowValues &values, int first, int at, int channels, std::uint32_t *tile) {
    alignas(64) std::uint16_t order[2][32];
    for (int i = 0; i < 32; ++i) order[0][i] = std::uint16_t(i / 2 + i % 2 * 32), order[1][i] = std::uint16_t(order[0][i] + 16);
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (int j = 0; j < COLUMNS; j += 2, tile += COLUMNS)
        for (int i = 0; i < COLUMNS; i += 32) {
            const auto row = [&](int slot) {
                const bool is_read = first + slot < values.count && at + i < channels && values.is_seen[(first + slot) / LANES];
                const std::uint8_t *from = values.rows + (first + slot) * values.row_bytes + 2 * (values.first + at + i);
                return is_read ? _mm512_loadu_si512(from) : __m512i{};
            };
            const __m512i x = row(j), y = row(j + 1);
            _mm512_storeu_si512(tile + i, _mm512_permutex2var_epi16(x, low, y));
            _mm512_storeu_si512(tile + i + 16, _mm512_permutex2var_epi16(x, high, y));
        }
}
#endif
