// Products of rows with the columns of a tile, in which a number of a row meets all columns at once, and nothing is summed
// across lanes. Included inside the namespace of one instruction set, after simd.hpp.

// A tile of float32, of such a width that registers hold the sums of six rows.
struct FloatTile {
    using Number = float;
    using Column = Floats;
    static constexpr int VECTORS = LANES == 16 ? 4 : 2, COLUMNS = VECTORS * LANES;

    static Column column(const float *from) { return load<Floats>(from); }
    static Column wide(float number) { return all(number); }
    static Floats add(Floats sum, Column number, Column column) { return sum + number * column; }
};

#if defined(__AVX512BF16__)
// A tile whose rows have pairs of bfloat16.
struct PairTile {
    using Number = std::uint32_t;
    using Column = __m512bh;
    static constexpr int VECTORS = 4, COLUMNS = VECTORS * LANES;

    static Column column(const std::uint32_t *from) { return (__m512bh)once(_mm512_loadu_si512(from)); }
    static Column wide(std::uint32_t pair) { return (__m512bh)_mm512_set1_epi32(int(pair)); }
    static Floats add(Floats sum, Column pair, Column column) { return dot(sum, pair, column); }
};

// Columns 0 to 15 of a tile, of 16 rows of 16 pairs.
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
        _mm512_storeu_si512(out + i * PairTile::COLUMNS, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (4 + i) * PairTile::COLUMNS, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(out + (8 + i) * PairTile::COLUMNS, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (12 + i) * PairTile::COLUMNS, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}
#endif

// LANES rows of `width` numbers, a multiple of LANES, `stride` apart, as columns of a tile, whose rows are `columns` wide.
inline void lay_columns(const float *rows, std::size_t stride, int width, int columns, float *tile) {
    for (int i = 0; i < width; i += LANES) {
        Floats square[LANES];
        for (int j = 0; j < LANES; ++j) square[j] = load<Floats>(rows + j * stride + i);
        transpose(square);
        for (int j = 0; j < LANES; ++j) store(tile + (i + j) * columns, square[j]);
    }
}

// Adds to the sums of ROWS rows, or sets them, their products with `depth` rows of a tile, `width` numbers apart. Rows are
// `stride` numbers apart.
template <class Tile, int ROWS, int VECTORS, bool IS_SUM>
inline void multiply_tile(const typename Tile::Number *rows, std::size_t stride, const typename Tile::Number *tile, int width, int depth, float *sums, std::size_t sum_stride) {
    Floats own[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) own[r][v] = Floats{};
    for (int p = 0; p < depth; ++p, tile += width) {
        typename Tile::Column columns[VECTORS];
        for (int v = 0; v < VECTORS; ++v) columns[v] = Tile::column(tile + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const typename Tile::Column number = Tile::wide(rows[r * stride + p]);
            for (int v = 0; v < VECTORS; ++v) own[r][v] = Tile::add(own[r][v], number, columns[v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) {
            float *to = sums + r * sum_stride + v * LANES;
            store(to, IS_SUM ? load<Floats>(to) + own[r][v] : own[r][v]);  // last, so that many sums are of few numbers
        }
}
// The same of `count` rows.
template <class Tile, int VECTORS, bool IS_SUM>
inline void multiply_tile(int count, const typename Tile::Number *rows, std::size_t stride, const typename Tile::Number *tile, int width, int depth, float *sums, std::size_t sum_stride) {
    const auto some = [&](auto size) {
        multiply_tile<Tile, size.value, VECTORS, IS_SUM>(rows, stride, tile, width, depth, sums, sum_stride);
        rows += size.value * stride, sums += size.value * sum_stride, count -= size.value;
    };
    while (count >= 6) some(std::integral_constant<int, 6>{});
    while (count >= 2) some(std::integral_constant<int, 2>{});
    if (count) some(std::integral_constant<int, 1>{});
}
