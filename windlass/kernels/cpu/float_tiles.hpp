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
