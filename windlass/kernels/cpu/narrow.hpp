// Products in bfloat16, two to a lane, of queries with keys that were rotated in float32 and then rounded.
// Included inside the namespace of one instruction set, after rotate.hpp.
#if defined(__AVX512BF16__)

// Channels of keys as they are laid out here: whole vectors of bfloat16.
inline std::size_t narrow_width(int channels) { return (channels + 31) / 32 * std::size_t(32); }

inline void store_half(std::uint16_t *to, Floats v) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    __builtin_memcpy(to, &narrow, 32);
}

// Memory that is read after these keys: the values of their slots, and keys. It is prefetched all the time, few lines at
// once: keys as many while keys are read as while values are read.
struct Next {
    Ahead values, keys;

    Next from(int slot) const {
        return {{values.rows + slot * values.row_bytes, values.row_bytes}, {keys.rows + slot * keys.row_bytes, keys.row_bytes}};
    }
};

inline __m512i rounded(Floats a, Floats b) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

// Keys in rows of bfloat16, multiplied as they are. WIDTH: their width, with rows one after the other (0: any).
template <int WIDTH>
struct RowKeys {
    const std::uint8_t *rows;
    std::size_t some_row_bytes;
    int some_width;
    static constexpr std::size_t STRIDE = 2 * WIDTH;  // of queries
    static constexpr bool IS_TURNED = false;

    int width() const { return WIDTH ? WIDTH : some_width; }
    RowKeys from(int key) const {
        RowKeys moved = *this;
        moved.rows += key * (WIDTH ? 2 * WIDTH : some_row_bytes);
        return moved;
    }
    // Calls `use` with the 32 numbers of a key from each channel on.
    template <class Use>
    [[gnu::always_inline]] void each(int key, Use use) const {
        const std::uint8_t *row = rows + key * (WIDTH ? 2 * WIDTH : some_row_bytes);
#pragma GCC unroll 8
        for (int i = 0; i < width(); i += 32) use(i, once(_mm512_loadu_si512(row + 2 * i)));
    }
};

// A slot of int4 whose groups have 16 channels each, WIDTH of them in all.
template <int WIDTH>
struct GroupedSlot {
    const std::uint8_t *row;
    const float *pairs, *means;

    // The decoded numbers of a group stand in a table, out of which its codes choose.
    [[gnu::always_inline]] Floats lanes(int i) const {
        const Floats levels = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        const Floats table = levels * pairs[i / 8] + pairs[i / 8 + 1];
        const Ints codes = i < WIDTH / 2 ? wide_bytes(row + i) : wide_bytes(row + i - WIDTH / 2) >> 4;
        const Floats v = (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
        return means ? v + load<Floats>(means + i) : v;
    }
};

// Keys of which the first 2 * pairs channels are rotated by tables that are laid out for them. Of 32 bfloat16 in a vector
// the even ones are float32 once they are shifted, and the odd ones once the even ones are cleared.
// WIDTH: the width of keys whose rows lie one after the other, with all channels rotated (0: any, of bfloat16).
template <Format F, int WIDTH>
struct TurnedKeys {
    const std::uint8_t *rows;
    std::size_t some_row_bytes;
    int some_width, some_pairs;
    const float *tables;
    const std::conditional_t<F == Format::int4, float, std::uint16_t> *scales;
    const float *means;
    static constexpr std::size_t STRIDE = 2 * WIDTH;
    static constexpr bool IS_TURNED = true;
    static constexpr int SCALES = F == Format::int4 ? WIDTH / 8 : 1;  // groups of 16
    static constexpr int ROW_BYTES = F == Format::bfloat16 ? 2 * WIDTH : F == Format::int8 ? WIDTH : WIDTH / 2;

    int width() const { return WIDTH ? WIDTH : some_width; }
    int pairs() const { return WIDTH ? WIDTH / 2 : some_pairs; }
    TurnedKeys from(int key) const {
        TurnedKeys moved = *this;
        moved.rows += key * (WIDTH ? ROW_BYTES : some_row_bytes), moved.tables += key * 2 * pairs();
        if (F != Format::bfloat16) moved.scales += key * SCALES;
        return moved;
    }
    // Calls `use` with the 32 numbers of a key from each channel on, rounded to bfloat16.
    template <class Use>
    [[gnu::always_inline]] void each(int key, Use use) const {
        each_wide(key, [&](int i, Floats a, Floats b) __attribute__((always_inline)) { use(i, rounded(a, b)); });
        if constexpr (!WIDTH)
            for (int i = 2 * pairs(); i < width(); i += 32)
                use(i, once(_mm512_loadu_si512(rows + key * some_row_bytes + 2 * i)));
    }
    // Calls `use` with the numbers of a key from each channel on, those that are rotated: 16, and the 16 behind them.
    template <class Use>
    [[gnu::always_inline]] void each_wide(int key, Use use) const {
        const std::uint8_t *row = rows + key * (WIDTH ? ROW_BYTES : some_row_bytes);
        const float *table = tables + key * 2 * pairs();
        const auto slot = [&] {
            if constexpr (F == Format::int4)
                return GroupedSlot<WIDTH>{row, scales + key * SCALES, means};
            else
                return Slot<F>{row, width(), F == Format::bfloat16 ? 1.0f : from_half(scales[key]), means};
        }();
#pragma GCC unroll 4
        for (int i = 0; i < pairs(); i += 32, table += 64) {
            const Floats c[2] = {once(load<Floats>(table)), once(load<Floats>(table + 16))},
                         s[2] = {once(load<Floats>(table + 32)), once(load<Floats>(table + 48))};
            Floats x[2], y[2];
            if constexpr (F == Format::bfloat16) {
                const Words odd = Words{} + 0xffff0000u;
                const Words a = once(load<Words>(row + 2 * i)), b = once(load<Words>(row + 2 * pairs() + 2 * i));
                x[0] = bits_of(a << 16), x[1] = bits_of(a & odd), y[0] = bits_of(b << 16), y[1] = bits_of(b & odd);
            } else {
                x[0] = slot.lanes(i), x[1] = slot.lanes(i + 16), y[0] = slot.lanes(pairs() + i), y[1] = slot.lanes(pairs() + i + 16);
            }
            use(i, x[0] * c[0] - y[0] * s[0], x[1] * c[1] - y[1] * s[1]);
            use(pairs() + i, y[0] * c[0] + x[0] * s[0], y[1] * c[1] + x[1] * s[1]);
        }
    }
};

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

// Sums of numbers that stand STEP lanes apart: of each 2 * STEP lanes of the result, the first half from `a`, the
// second from `b`. One of the two summands takes no shuffle, of which there is one a cycle.
template <int STEP>
inline Floats fold(Floats a, Floats b) {
    const __m512 x = (__m512)a, y = (__m512)b;
    if constexpr (STEP == 8)
        return (Floats)_mm512_mask_blend_ps(0xff00, x, y) + (Floats)_mm512_shuffle_f32x4(x, y, 0x4e);
    if constexpr (STEP == 4) {
        const __m512 other = _mm512_mask_blend_ps(0x0f0f, x, y);
        return (Floats)_mm512_mask_blend_ps(0xf0f0, x, y) + (Floats)_mm512_shuffle_f32x4(other, other, 0xb1);
    }
    if constexpr (STEP == 2) return (Floats)_mm512_mask_blend_ps(0xcccc, x, y) + (Floats)_mm512_shuffle_ps(x, y, 0x4e);
    const __m512 other = _mm512_mask_blend_ps(0x5555, x, y);
    return (Floats)_mm512_mask_blend_ps(0xaaaa, x, y) + (Floats)_mm512_permute_ps(other, 0xb1);
}

// A key's products with QUERIES queries, folded into one vector.
template <int QUERIES>
[[gnu::always_inline]] inline Floats fold_queries(const Floats (&products)[QUERIES]) {
    if constexpr (QUERIES == 4)
        return fold<4>(fold<8>(products[0], products[2]), fold<8>(products[1], products[3]));
    else if constexpr (QUERIES == 2)
        return fold<8>(products[0], products[1]);
    else
        return products[0];
}
// The products of KEYS keys, one after the other, folded into one vector.
template <int QUERIES, int KEYS, class Of>
[[gnu::always_inline]] inline Floats fold_keys(int first, Of of) {
    if constexpr (KEYS == 1) {
        return of(first);
    } else {
        const Floats a = fold_keys<QUERIES, KEYS / 2>(first, of), b = fold_keys<QUERIES, KEYS / 2>(first + KEYS / 2, of);
        return fold<KEYS / 2>(a, b);
    }
}

// Products of QUERIES queries, `stride` apart, with `count` keys, a multiple of 16. Query q's are at out + q * BLOCK. Only
// the first REAL of them are multiplied, and the others count as 0.
template <int QUERIES, int REAL, class Keys>
void multiply_narrow(const std::uint16_t *queries, std::size_t stride, Keys keys, int count, Next next, float *out) {
    constexpr int KEYS = 16 / QUERIES;
    constexpr bool IS_WIDE = Keys::IS_TURNED && Keys::STRIDE == 128;  // queries fit into the registers
    Floats wide[IS_WIDE ? REAL : 1][4];
    for (int q = 0; IS_WIDE && q < REAL; ++q)
        for (int v = 0; v < 4; ++v) wide[q][v] = Row<Format::bfloat16>::lanes((const std::uint8_t *)(queries + q * Keys::STRIDE) + 32 * v, 0, 0);
    for (int j = 0; j < count; j += 16) {
        Floats products[QUERIES];
#pragma GCC unroll 4
        for (int part = 0; part < QUERIES; ++part) {
            next.values.fetch(j + part * KEYS, j + (part + 1) * KEYS);
            next.keys.fetch(j + part * KEYS / 2, j + (part + 1) * KEYS / 2);
            products[part] = fold_keys<QUERIES, KEYS>(0, [&](int key) __attribute__((always_inline)) {
                Floats sums[QUERIES] = {};
                if constexpr (IS_WIDE) {
                    keys.each_wide(key, [&](int i, Floats a, Floats b) __attribute__((always_inline)) {
#pragma GCC unroll 4
                        for (int q = 0; q < REAL; ++q) sums[q] = sums[q] + wide[q][i / 16] * a + wide[q][i / 16 + 1] * b;
                    });
                    return fold_queries<QUERIES>(sums);
                }
                keys.each(key, [&](int i, __m512i numbers) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int q = 0; q < REAL; ++q)
                        sums[q] = dot(sums[q], (__m512bh)_mm512_loadu_si512(queries + q * (Keys::STRIDE ? Keys::STRIDE : stride) + i), (__m512bh)numbers);
                });
                return fold_queries<QUERIES>(sums);
            });
            keys = keys.from(KEYS);
        }
        if constexpr (QUERIES == 1) {
            store(out + j, products[0]);
        } else if constexpr (QUERIES == 2) {
            const __m512 a = (__m512)products[0], b = (__m512)products[1];
            store(out + j, (Floats)_mm512_shuffle_f32x4(a, b, 0x44)), store(out + BLOCK + j, (Floats)_mm512_shuffle_f32x4(a, b, 0xee));
        } else {
            const __m512 a = (__m512)products[0], b = (__m512)products[1], c = (__m512)products[2], d = (__m512)products[3];
            const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee),
                         low2 = _mm512_shuffle_f32x4(c, d, 0x44), high2 = _mm512_shuffle_f32x4(c, d, 0xee);
            store(out + j, (Floats)_mm512_shuffle_f32x4(low, low2, 0x88)), store(out + BLOCK + j, (Floats)_mm512_shuffle_f32x4(low, low2, 0xdd));
            store(out + 2 * BLOCK + j, (Floats)_mm512_shuffle_f32x4(high, high2, 0x88)), store(out + 3 * BLOCK + j, (Floats)_mm512_shuffle_f32x4(high, high2, 0xdd));
        }
    }
}
template <class Keys>
void multiply_all_narrow(const std::uint16_t *queries, std::size_t stride, int queries_count, const Keys &keys, int count,
                         Next next, float *out) {
    int q = 0;
    for (; q + 4 <= queries_count; q += 4, next = Next{})
        multiply_narrow<4, 4>(queries + q * stride, stride, keys, count, next, out + q * BLOCK);
    if (queries_count - q == 3) return multiply_narrow<4, 3>(queries + q * stride, stride, keys, count, next, out + q * BLOCK);
    for (; q + 2 <= queries_count; q += 2, next = Next{})
        multiply_narrow<2, 2>(queries + q * stride, stride, keys, count, next, out + q * BLOCK);
    for (; q < queries_count; ++q, next = Next{})
        multiply_narrow<1, 1>(queries + q * stride, stride, keys, count, next, out + q * BLOCK);
}
// Keys in rows that lie one after the other, their width known where it is a usual one, and queries are as wide.
template <class Use>
void with_row_keys(const std::uint8_t *rows, std::size_t row_bytes, int width, std::size_t stride, Use use) {
    if (row_bytes == 128 && width == 64 && stride == 128) return use(RowKeys<64>{rows, row_bytes, width});
    if (row_bytes == 256 && width == 128 && stride == 256) return use(RowKeys<128>{rows, row_bytes, width});
    use(RowKeys<0>{rows, row_bytes, width});
}

// The first `count` keys, rotated, in rows of bfloat16, followed by zeros up to 16.
template <class Keys>
void lay_rows(const Keys &keys, int count, std::uint16_t *rows) {
    for (int j = 0; j < count; ++j)
        keys.each(j, [&](int i, __m512i key) { _mm512_storeu_si512(rows + j * keys.width() + i, key); });
    for (int i = count * keys.width(); i < 16 * keys.width(); i += 32) _mm512_storeu_si512(rows + i, __m512i{});
}

// 32 numbers of a slot, from channel i on, as bfloat16, in which codes of int8 are exact.
template <Format F>
inline __m512i numbers_of(const std::uint8_t *row, int i, int channels) {
    if constexpr (F == Format::bfloat16)
        return once(_mm512_loadu_si512(row + 2 * i));
    else
        return rounded(Row<F>::lanes(row, i, channels), Row<F>::lanes(row, i + 16, channels));
}

// The values of a block as they lie in memory, from channel `first` on.
struct NarrowValues {
    const std::uint8_t *rows;
    std::size_t row_bytes;
    int first, held, count;
    const bool *is_seen;
};

// As `add_values`, two slots at a time. Weights are bfloat16 pairs.
template <Format F, int QUERIES, int VECTORS>
void add_narrow(const float *weights, NarrowValues values, int at, Ahead ahead, float *sum, std::size_t sum_stride) {
    Floats low[QUERIES][VECTORS], high[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v)
            load_interleaved(sum + q * sum_stride + at + v * 32, low[q][v], high[q][v]);
    const auto add = [&](const std::uint8_t *row, const std::uint8_t *next, const float *weight) __attribute__((always_inline)) {
        __m512bh a[VECTORS], b[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            const __m512i x = numbers_of<F>(row, values.first + at + v * 32, values.held),
                          y = numbers_of<F>(next, values.first + at + v * 32, values.held);
            a[v] = (__m512bh)_mm512_unpacklo_epi16(x, y), b[v] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
        for (int q = 0; q < QUERIES; ++q) {
            const __m512bh pair = (__m512bh)all(weight[q * BLOCK / 2]);
            for (int v = 0; v < VECTORS; ++v) {
                low[q][v] = dot(low[q][v], pair, a[v]);
                high[q][v] = dot(high[q][v], pair, b[v]);
            }
        }
    };
    for (int j = 0; j < values.count; j += LANES) {
        if (!values.is_seen[j / LANES]) {
            ahead.fetch(j + 8, j + 16);
            continue;
        }
        const std::uint8_t *row = values.rows + j * values.row_bytes;
        const float *weight = weights + j / 2;
        int left = values.count - j < LANES ? values.count - j : LANES, fetched = j + 8;
        for (; left >= 2; left -= 2, row += 2 * values.row_bytes, ++weight, ++fetched)
            ahead.fetch(fetched, fetched + 1), add(row, row + values.row_bytes, weight);
        if (left) add(row, row, weight);  // the slot after it has weight 0
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v)
            store_interleaved(sum + q * sum_stride + at + v * 32, low[q][v], high[q][v]);
}
template <Format F, int QUERIES>
void add_narrow(const float *weights, const NarrowValues &values, int channels, Ahead ahead, float *sum,
                std::size_t sum_stride) {
    constexpr int VECTORS = QUERIES == 1 ? 4 : 2;  // as many as the registers hold
    int i = 0;
    for (; i + 32 * VECTORS <= channels; i += 32 * VECTORS, ahead.row_bytes = 0)
        add_narrow<F, QUERIES, VECTORS>(weights, values, i, ahead, sum, sum_stride);
    for (; i < channels; i += 32, ahead.row_bytes = 0)
        add_narrow<F, QUERIES, 1>(weights, values, i, ahead, sum, sum_stride);
}
// Overwrites the weights. Memory `ahead` is prefetched once.
template <Format F>
void add_all_narrow(float *weights, int queries, const NarrowValues &values, int channels, Ahead ahead, float *sum,
                    std::size_t sum_stride) {
    for (int at = 0; at < queries * BLOCK; at += 32)  // in place: pairs take half the room
        store_narrow(weights + at / 2, load<Floats>(weights + at), load<Floats>(weights + at + 16));
    int q = 0;
    for (; q + 4 <= queries; q += 4, ahead.row_bytes = 0)
        add_narrow<F, 4>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
    if (queries - q == 3) return add_narrow<F, 3>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
    for (; q + 2 <= queries; q += 2, ahead.row_bytes = 0)
        add_narrow<F, 2>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
    for (; q < queries; ++q, ahead.row_bytes = 0)
        add_narrow<F, 1>(weights + q * BLOCK / 2, values, channels, ahead, sum + q * sum_stride, sum_stride);
}

// Values of int4 in groups of 32 channels: 32 bytes of each slot, whose low halves are one group and whose high halves
// are another.
struct GroupedValues {
    const std::uint8_t *rows;
    std::size_t row_bytes;
    int count;
    const bool *is_seen;
};
// Weights of a block times scales, rounded to bfloat16, for a group of the low and one of the high halves.
struct GroupWeights {
    alignas(64) std::uint16_t low[4][BLOCK], high[4][BLOCK];
};
constexpr float CODE_OFFSET = 24;  // codes are counted from 16 to 31, which are 16 with other lowest bits

// Adds the weighted codes of two groups to the sums of each query. Sums of code 0 are subtracted by others.
template <int QUERIES>
void add_group_codes(const GroupWeights &weights, GroupedValues values, Ahead ahead, float *low_sums, float *high_sums, std::size_t sum_stride) {
    const __m512i bits = _mm512_set1_epi16(0x78), sixteen = _mm512_set1_epi16(0x4180);
    const auto coded = [&](__m512i shifted) __attribute__((always_inline)) {
        return (__m512bh)_mm512_ternarylogic_epi32(shifted, bits, sixteen, 0xea);  // shifted & bits | sixteen
    };
    Floats low[QUERIES][2] = {}, high[QUERIES][2] = {};
    const auto add = [&](const std::uint8_t *row, const std::uint8_t *next, int pair) __attribute__((always_inline)) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)row), y = _mm256_loadu_si256((const __m256i *)next);
        const __m512i bytes[2] = {_mm512_cvtepu8_epi16(_mm256_unpacklo_epi8(x, y)), _mm512_cvtepu8_epi16(_mm256_unpackhi_epi8(x, y))};
        const auto both = [&](const std::uint16_t *of_query) __attribute__((always_inline)) {
            float word;
            __builtin_memcpy(&word, of_query + 2 * pair, 4);
            return (__m512bh)all(word);
        };
        for (int v = 0; v < 2; ++v) {
            const __m512bh low_codes = coded(_mm512_slli_epi16(bytes[v], 3)), high_codes = coded(_mm512_srli_epi16(bytes[v], 1));
            for (int q = 0; q < QUERIES; ++q) {
                low[q][v] = dot(low[q][v], both(weights.low[q]), low_codes);
                high[q][v] = dot(high[q][v], both(weights.high[q]), high_codes);
            }
        }
    };
    for (int j = 0; j < values.count; j += LANES) {
        if (!values.is_seen[j / LANES]) {
            ahead.fetch(j + 8, j + 16);
            continue;
        }
        const std::uint8_t *row = values.rows + j * values.row_bytes;
        const int left = values.count - j < LANES ? values.count - j : LANES;
        int i = 0, fetched = j + 8;
        for (; i + 2 <= left; i += 2, row += 2 * values.row_bytes, ++fetched)
            ahead.fetch(fetched, fetched + 1), add(row, row + values.row_bytes, (j + i) / 2);
        if (i < left) add(row, row, (j + i) / 2);  // the slot after it has weight 0
    }
    const auto add_to = [](float *sum, const Floats (&found)[2]) {
        const __m512 a = (__m512)found[0], b = (__m512)found[1];  // channels 0 to 7 and 16 to 23, and the others
        store(sum, load<Floats>(sum) + (Floats)_mm512_shuffle_f32x4(a, b, 0x44));
        store(sum + 16, load<Floats>(sum + 16) + (Floats)_mm512_shuffle_f32x4(a, b, 0xee));
    };
    for (int q = 0; q < QUERIES; ++q) add_to(low_sums + q * sum_stride, low[q]), add_to(high_sums + q * sum_stride, high[q]);
}

// The scales and the offsets of a block's slots in one group, 0 behind the last slot.
struct BlockPairs {
    alignas(64) float scales[BLOCK], offsets[BLOCK];

    BlockPairs(const std::uint16_t *rows, int groups, int group, int count) {
        int j = 0;
        for (; j + LANES <= count; j += LANES) {
            const GroupPairs pairs(rows + 2 * j * groups, groups, group);
            store(scales + j, pairs.scales), store(offsets + j, pairs.offsets);
        }
        for (; j < BLOCK; ++j) {
            const std::uint16_t *pair = rows + 2 * (j * groups + group);
            scales[j] = j < count ? from_half(pair[0]) : 0, offsets[j] = j < count ? from_half(pair[1]) : 0;
        }
    }
};
// Writes weights * scales, and adds what a number has whose code is 0: weights * offsets, less CODE_OFFSET.
inline void weigh_group(const float *weights, const BlockPairs &pairs, std::uint16_t *out, float *sum) {
    Floats of_offsets{}, of_scales{};
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int j = 0; j < BLOCK; j += 32) {
        const Floats a = load<Floats>(weights + j), b = load<Floats>(weights + j + 16);
        const __m512i narrow = rounded(a * load<Floats>(pairs.scales + j), b * load<Floats>(pairs.scales + j + 16));
        _mm512_store_si512(out + j, narrow);
        of_scales = dot(of_scales, (__m512bh)narrow, ones);
        of_offsets += a * load<Floats>(pairs.offsets + j) + b * load<Floats>(pairs.offsets + j + 16);
    }
    const float more = sum_of(of_offsets - CODE_OFFSET * of_scales);
    for (int i = 0; i < 32; i += 16) store(sum + i, load<Floats>(sum + i) + more);
}
#endif
