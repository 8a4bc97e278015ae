// Products in bfloat16, two to a lane, of queries with keys that were rotated in float32 and then rounded.
// Included inside the namespace of one instruction set, after rotate.hpp.
#if defined(__AVX512BF16__)

// Channels of keys as they are laid out here: whole vectors of bfloat16.
inline std::size_t narrow_width(int channels) { return (channels + 31) / 32 * std::size_t(32); }

inline void store_half(std::uint16_t *to, Floats v) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    __builtin_memcpy(to, &narrow, 32);
}

// A vector in a register: the compiler would read memory once for each use, of which there can be only one a cycle.
template <class V>
inline V once(V v) {
    asm("" : "+v"(v));
    return v;
}

// Where 32 channels of 16 keys stand. Part p of them, 8 channels, stands in vectors 4 * p to 4 * p + 3; of these,
// vector v has keys 4 * v to 4 * v + 3, one after the other. It meets the same part of a query in
// all four places, so that of 16 products only the last four numbers of each are still to be added up.
struct KeyTile {
    __m512i vectors[16];

    // Takes in the same 32 channels of keys 4 * v to 4 * v + 3.
    [[gnu::always_inline]] void put(int v, const __m512i (&keys)[4]) {
        const __m512i a = _mm512_shuffle_i32x4(keys[0], keys[1], 0x44),
                      b = _mm512_shuffle_i32x4(keys[0], keys[1], 0xee),
                      c = _mm512_shuffle_i32x4(keys[2], keys[3], 0x44),
                      d = _mm512_shuffle_i32x4(keys[2], keys[3], 0xee);
        vectors[v] = _mm512_shuffle_i32x4(a, c, 0x88), vectors[4 + v] = _mm512_shuffle_i32x4(a, c, 0xdd);
        vectors[8 + v] = _mm512_shuffle_i32x4(b, d, 0x88), vectors[12 + v] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
};

// What is read soon, so many bytes for each slot: the heads of a block are too short for the CPU to see it coming.
struct Ahead {
    const std::uint8_t *rows;
    std::size_t row_bytes;

    // Asks for slots `from` to `to`.
    [[gnu::always_inline]] void fetch(int from, int to) const {
        const std::uint8_t *row = rows + from * row_bytes, *end = rows + to * row_bytes;
        for (; row < end; row += 64) __builtin_prefetch(row, 0, 2);  // as far as the second cache
    }
};
// What is read after 16 keys: the values of their slots, and keys. Memory is asked for all the time, and of keys as
// many while keys are read as while values are.
struct Next {
    Ahead values, keys;

    [[gnu::always_inline]] void fetch(int slot) const {
        values.fetch(slot, slot + 4);
        keys.fetch(slot, slot + 2);
    }
};

// Keys in rows of bfloat16, `row_bytes` apart; those after `count` repeat the last.
inline void lay_rows(const std::uint8_t *rows, std::size_t row_bytes, int count, std::size_t width, Next next,
                     KeyTile *tiles) {
    for (int v = 0; v < 4; ++v) {
        next.fetch(4 * v);
        for (std::size_t i = 0; i < width; i += 32) {
            __m512i keys[4];
            for (int k = 0; k < 4; ++k) {
                const int j = 4 * v + k < count ? 4 * v + k : count - 1;
                keys[k] = once(_mm512_loadu_si512(rows + j * row_bytes + 2 * i));
            }
            tiles[i / 32].put(v, keys);
        }
    }
}

inline __m512i rounded(Floats a, Floats b) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

// Rows of the tables as `lay_split` reads them, 2 * pairs floats for each slot: of 32 pairs the cos of the even
// ones, of the odd ones, then their sin.
inline void split_tables(const std::int32_t *positions, int count, int pairs, const float *cos, const float *sin,
                         float *out) {
    for (int j = 0; j < count; ++j)
        for (int i = 0; i < pairs; i += 32)
            for (const float *table : {cos, sin}) {
                const float *from = table + std::int64_t(positions[j]) * pairs + i;
                const Floats a = load<Floats>(from), b = load<Floats>(from + 16);
                store(out, __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
                store(out + 16,
                      __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
                out += 32;
            }
}
// Of 32 channels those of rotated keys stand so: first the even ones. The queries' do, too.
inline void split_query(float *numbers, int rotated) {
    for (int i = 0; i < rotated; i += 32) {
        float odd[16];
        for (int j = 0; j < 16; ++j) odd[j] = numbers[i + 2 * j + 1];
        for (int j = 0; j < 16; ++j) numbers[i + j] = numbers[i + 2 * j];
        for (int j = 0; j < 16; ++j) numbers[i + 16 + j] = odd[j];
    }
}

// Keys in rows of bfloat16, rotated by `tables`: of 32 bfloat16 in a vector, the even ones are float32 once they are
// shifted, and the odd ones once the even ones are cleared.
inline void lay_split(const std::uint8_t *rows, std::size_t row_bytes, int count, int pairs, const float *tables,
                      Next next, KeyTile *tiles) {
    const Words odd = Words{} + 0xffff0000u;
    for (int v = 0; v < 4; ++v) {
        next.fetch(4 * v);
        for (int i = 0; i < pairs; i += 32) {
            __m512i first[4], second[4];
            for (int k = 0; k < 4; ++k) {
                const int j = 4 * v + k < count ? 4 * v + k : count - 1;
                const std::uint8_t *row = rows + j * row_bytes + 2 * i;
                const float *table = tables + j * 2 * pairs + 2 * i;
                const Words a = once(load<Words>(row)), b = once(load<Words>(row + 2 * pairs));
                const Floats c[2] = {once(load<Floats>(table)), once(load<Floats>(table + 16))},
                             s[2] = {once(load<Floats>(table + 32)), once(load<Floats>(table + 48))},
                             x[2] = {bits_of(a << 16), bits_of(a & odd)}, y[2] = {bits_of(b << 16), bits_of(b & odd)};
                first[k] = rounded(x[0] * c[0] - y[0] * s[0], x[1] * c[1] - y[1] * s[1]);
                second[k] = rounded(y[0] * c[0] + x[0] * s[0], y[1] * c[1] + x[1] * s[1]);
            }
            tiles[i / 32].put(v, first);
            tiles[(pairs + i) / 32].put(v, second);
        }
    }
}

// Keys of low bits of which all channels are rotated, 2 * PAIRS of them.
template <Format F, int PAIRS>
void lay_rotated(const PackedStates &packed, std::size_t place, int head, const std::int32_t *positions, int count,
                 const float *cos, const float *sin, Next next, KeyTile *tiles) {
    for (int v = 0; v < 4; ++v) {
        next.fetch(4 * v);
        for (int i = 0; i < PAIRS; i += 32) {
            __m512i first[4], second[4];
            for (int k = 0; k < 4; ++k) {
                const int j = 4 * v + k < count ? 4 * v + k : count - 1;
                Slot<F> slot = slot_of<F>(packed, place + j, head);
                slot.channels = 2 * PAIRS;  // now a constant
                const std::int64_t angle = std::int64_t(positions[j]) * PAIRS + i;
                Floats a[2], b[2];
                for (int h = 0; h < 2; ++h) {
                    const Floats x = slot.lanes(i + 16 * h), y = slot.lanes(PAIRS + i + 16 * h);
                    const Floats c = once(load<Floats>(cos + angle + 16 * h)), s = once(load<Floats>(sin + angle + 16 * h));
                    a[h] = x * c - y * s, b[h] = y * c + x * s;
                }
                first[k] = rounded(a[0], a[1]), second[k] = rounded(b[0], b[1]);
            }
            tiles[i / 32].put(v, first);
            tiles[(PAIRS + i) / 32].put(v, second);
        }
    }
}

// One slot's numbers, rotated, as a row of bfloat16. `pairs` and the channels are multiples of 16.
template <class S>
inline void rotate_narrow(const S &slot, int pairs, const float *cos, const float *sin, std::uint16_t *out) {
    for (int i = 0; i < pairs; i += 16) {
        const Floats x = slot.lanes(i), y = slot.lanes(pairs + i), c = load<Floats>(cos + i),
                     s = load<Floats>(sin + i);
        store_half(out + i, x * c - y * s), store_half(out + pairs + i, y * c + x * s);
    }
    for (int i = 2 * pairs; i < slot.channels; i += 16) store_half(out + i, slot.lanes(i));
}

// Products of QUERIES queries, `stride` apart, with the 16 keys of `tiles`; those of query q at out + q * BLOCK.
template <int QUERIES>
void multiply_narrow(const std::uint16_t *queries, std::size_t stride, const KeyTile *tiles, std::size_t width,
                     float *out) {
    Floats products[QUERIES][4] = {};
    for (std::size_t i = 0; i < width; i += 8) {
        const __m512i *keys = tiles[i / 32].vectors + i % 32 / 8 * 4;
        for (int q = 0; q < QUERIES; ++q) {
            const __m512bh query = (__m512bh)_mm512_broadcast_i32x4(
                _mm_loadu_si128((const __m128i *)(queries + q * stride + i)));
            for (int v = 0; v < 4; ++v) products[q][v] = dot(products[q][v], query, (__m512bh)keys[v]);
        }
    }
    for (int q = 0; q < QUERIES; ++q) {
        fold<2>(products[q]);
        fold<1>(products[q]);
        store(out + q * BLOCK, __builtin_shufflevector(products[q][0], products[q][0], 0, 4, 8, 12, 1, 5, 9, 13,
                                                       2, 6, 10, 14, 3, 7, 11, 15));
    }
}
inline void multiply_all_narrow(const std::uint16_t *queries, std::size_t stride, int count, const KeyTile *tiles,
                                std::size_t width, float *out) {
    int q = 0;
    for (; q + 4 <= count; q += 4) multiply_narrow<4>(queries + q * stride, stride, tiles, width, out + q * BLOCK);
    for (; q + 2 <= count; q += 2) multiply_narrow<2>(queries + q * stride, stride, tiles, width, out + q * BLOCK);
    for (; q < count; ++q) multiply_narrow<1>(queries + q * stride, stride, tiles, width, out + q * BLOCK);
}

// 32 numbers of a slot, from channel i on, as bfloat16; codes of low bits are exact.
template <Format F>
inline __m512i numbers_of(const std::uint8_t *row, int i, int channels) {
    if constexpr (F == Format::bfloat16) {
        return once(_mm512_loadu_si512(row + 2 * i));
    } else if constexpr (F == Format::int8) {
        return rounded(Row<F>::lanes(row, i, channels), Row<F>::lanes(row, i + 16, channels));
    } else {
        const bool is_low = i < channels / 2;
        const __m512i bytes = _mm512_cvtepu8_epi16(
            _mm256_loadu_si256((const __m256i *)(row + (is_low ? i : i - channels / 2))));
        const __m512i level = rounded(Floats{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
                                      Floats{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7});
        // Of an index the lowest five bits count, and the levels stand there twice.
        return _mm512_permutexvar_epi16(is_low ? bytes : _mm512_srli_epi16(bytes, 4), level);
    }
}

// The values of a block as they lie in memory; meant are the channels from `first` on.
struct NarrowValues {
    const std::uint8_t *rows;
    std::size_t row_bytes;
    int first, held, count;
    const bool *is_seen;
};

// As `add_values`, two slots at a time; weights are bfloat16 pairs.
template <Format F, int QUERIES, int VECTORS>
void add_narrow(const float *weights, NarrowValues values, int at, Ahead ahead, float *sum, std::size_t sum_stride) {
    Floats low[QUERIES][VECTORS], high[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v)
            load_interleaved(sum + q * sum_stride + at + v * 32, low[q][v], high[q][v]);
    for (int j = 0; j < values.count; j += 2) {
        if (j % 4 == 0 && ahead.row_bytes) ahead.fetch(j + 2, j + 4);
        if (!values.is_seen[j / LANES]) continue;
        const std::uint8_t *row = values.rows + j * values.row_bytes,
                           *next = j + 1 < values.count ? row + values.row_bytes : row;
        __m512bh a[VECTORS], b[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            const __m512i x = numbers_of<F>(row, values.first + at + v * 32, values.held),
                          y = numbers_of<F>(next, values.first + at + v * 32, values.held);
            a[v] = (__m512bh)_mm512_unpacklo_epi16(x, y), b[v] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
        for (int q = 0; q < QUERIES; ++q) {
            const __m512bh weight = (__m512bh)all(weights[q * BLOCK / 2 + j / 2]);
            for (int v = 0; v < VECTORS; ++v) {
                low[q][v] = dot(low[q][v], weight, a[v]);
                high[q][v] = dot(high[q][v], weight, b[v]);
            }
        }
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v)
            store_interleaved(sum + q * sum_stride + at + v * 32, low[q][v], high[q][v]);
}
template <Format F, int QUERIES>
void add_narrow(const float *weights, const NarrowValues &values, int channels, Ahead ahead, float *sum,
                std::size_t sum_stride) {
    constexpr int VECTORS = QUERIES == 1 ? 4 : 2;  // what the registers hold
    int i = 0;
    for (; i + 32 * VECTORS <= channels; i += 32 * VECTORS, ahead.row_bytes = 0)
        add_narrow<F, QUERIES, VECTORS>(weights, values, i, ahead, sum, sum_stride);
    for (; i < channels; i += 32, ahead.row_bytes = 0)
        add_narrow<F, QUERIES, 1>(weights, values, i, ahead, sum, sum_stride);
}
// Overwrites the weights. What is `ahead` is asked for once.
template <Format F>
void add_all_narrow(float *weights, int queries, const NarrowValues &values, int channels, Ahead ahead, float *sum,
                    std::size_t sum_stride) {
    for (int at = 0; at < queries * BLOCK; at += 32)  // in place: pairs take half the room
        store_narrow(weights + at / 2, load<Floats>(weights + at), load<Floats>(weights + at + 16));
    int q = 0;
    for (; q + 4 <= queries; q += 4, ahead.row_bytes = 0)
        add_narrow<F, 4>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
    for (; q + 2 <= queries; q += 2, ahead.row_bytes = 0)
        add_narrow<F, 2>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
    for (; q < queries; ++q, ahead.row_bytes = 0)
        add_narrow<F, 1>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
}
#endif
