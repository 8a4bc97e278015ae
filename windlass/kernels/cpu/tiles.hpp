// Products in bfloat16 of many queries with a block's keys, and of their weights with its values.
// Included inside the namespace of one instruction set, after narrow.hpp and float_tiles.hpp.
//
// A block is laid out once for all queries of a kv head, in tiles whose rows have pairs of numbers. A column is a key and a
// pair two of its channels, or a column is a channel and a pair two slots.
#if defined(__AVX512BF16__)

constexpr int COLUMNS = PairTile::COLUMNS;

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
