// Products of queries and keys, and sums of weighted values.
// Included inside the namespace of one instruction set, after simd.hpp.

// Products of QUERIES queries with LANES keys. The result of query q is at out + q * BLOCK.
template <int QUERIES>
void multiply(const float *queries, const float *keys, int width, float *out) {
    constexpr int KEYS = LANES / QUERIES;
    for (int first = 0; first < LANES; first += KEYS) {
        Floats products[LANES] = {};
        for (int i = 0; i < width; i += LANES) {
            Floats key[KEYS];
            for (int k = 0; k < KEYS; ++k) key[k] = load<Floats>(keys + (first + k) * width + i);
            for (int q = 0; q < QUERIES; ++q) {
                Floats query = load<Floats>(queries + q * width + i);
                for (int k = 0; k < KEYS; ++k) products[q * KEYS + k] += query * key[k];
            }
        }
        Floats summed = sums(products);
        for (int q = 0; q < QUERIES; ++q)
            __builtin_memcpy(out + q * BLOCK + first, (float *)&summed + q * KEYS, KEYS * 4);
    }
}
void multiply_all(const float *queries, int count, const float *keys, int width, float *out) {
    int q = 0;
    for (; q + 4 <= count; q += 4) multiply<4>(queries + q * width, keys, width, out + q * BLOCK);
    for (; q + 2 <= count; q += 2) multiply<2>(queries + q * width, keys, width, out + q * BLOCK);
    for (; q < count; ++q) multiply<1>(queries + q * width, keys, width, out + q * BLOCK);
}

// Vectors of channels from `first` on, all in one half of a row of int4. Those of bfloat16 come in pairs, the even and the odd
// channels of both, if there are two: a shift and a mask take no shuffle.
template <Format F, int VECTORS>
struct Run {
    static constexpr bool IS_PARTED = F == Format::bfloat16 && VECTORS % 2 == 0;
    const int first, channels;
    Run(int first, int channels) : first(first), channels(channels) {}
    [[gnu::always_inline]] void load_all(const std::uint8_t *row, Floats (&out)[VECTORS]) const {
        if constexpr (IS_PARTED) {
            for (int v = 0; v < VECTORS; v += 2) load_parted(row + 2 * (first + v * LANES), out[v], out[v + 1]);
        } else {
            for (int v = 0; v < VECTORS; ++v) out[v] = Row<F>::lanes(row, first + v * LANES, channels);
        }
    }
};
template <int VECTORS>
struct Run<Format::int4, VECTORS> {
    static constexpr bool IS_PARTED = false;
    const int at, shift;
    Run(int first, int channels)
        : at(first < channels / 2 ? first : first - channels / 2), shift(first < channels / 2 ? 0 : 4) {}
    [[gnu::always_inline]] void load_all(const std::uint8_t *row, Floats (&out)[VECTORS]) const {
        for (int v = 0; v < VECTORS; ++v) out[v] = Row<Format::int4>::levels(wide_bytes(row + at + v * LANES) >> shift);
    }
};

// Adds to each query's sum the values of a block, weighted. `sum` points to the sum of channel `first`.
template <Format F, int QUERIES, int VECTORS>
void add_values(const float *weights, const std::uint8_t *values, std::size_t row_bytes, int channels,
                int count, const bool *is_seen, int first, float *sum, std::size_t sum_stride) {
    using Values = Run<F, VECTORS>;
    const Values run(first, channels);
    Floats sums_of[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) sums_of[q][v] = load<Floats>(sum + q * sum_stride + v * LANES);
    if constexpr (Values::IS_PARTED)
        for (int q = 0; q < QUERIES; ++q)
            for (int v = 0; v < VECTORS; v += 2) part(sums_of[q][v], sums_of[q][v + 1]);
    for (int start = 0; start < count; start += LANES) {
        if (!is_seen[start / LANES]) continue;
        const int end = start + LANES < count ? start + LANES : count;
        for (int j = start; j < end; ++j) {
            Floats value[VECTORS];
            run.load_all(values + j * row_bytes, value);
            for (int q = 0; q < QUERIES; ++q)
                for (int v = 0; v < VECTORS; ++v) sums_of[q][v] += weights[q * BLOCK + j] * value[v];
        }
    }
    if constexpr (Values::IS_PARTED)
        for (int q = 0; q < QUERIES; ++q)
            for (int v = 0; v < VECTORS; v += 2) join_parts(sums_of[q][v], sums_of[q][v + 1]);
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) store(sum + q * sum_stride + v * LANES, sums_of[q][v]);
}
// The sums of the channels from `from` to `to`.
template <Format F, int QUERIES>
void add_values(const float *weights, const std::uint8_t *values, std::size_t row_bytes, int from, int to,
                int channels, int count, const bool *is_seen, float *sum, std::size_t sum_stride) {
    constexpr int MAX_VECTORS = LANES == 16 || QUERIES < 3 ? 4 : 2;  // as many as the registers hold
    int i = from;
    // The two halves of a row of int4 are interleaved, and no vector spans both.
    const int middle = channels / 2;
    for (const int edge : {F == Format::int4 && middle < to ? middle : to, to}) {
        for (; i + MAX_VECTORS * LANES <= edge; i += MAX_VECTORS * LANES)
            add_values<F, QUERIES, MAX_VECTORS>(weights, values, row_bytes, channels, count, is_seen, i,
                                                sum + (i - from), sum_stride);
        for (; i + LANES <= edge; i += LANES)
            add_values<F, QUERIES, 1>(weights, values, row_bytes, channels, count, is_seen, i,
                                      sum + (i - from), sum_stride);
        for (; i < edge; ++i)
            for (int q = 0; q < QUERIES; ++q) {
                float total = 0;
                for (int j = 0; j < count; ++j)
                    if (is_seen[j / LANES])
                        total += weights[q * BLOCK + j] * Row<F>::one(values + j * row_bytes, i, channels);
                sum[q * sum_stride + i - from] += total;
            }
    }
}
template <Format F>
void add_all_values(const float *weights, int queries, const std::uint8_t *values, std::size_t row_bytes,
                    int from, int to, int channels, int count, const bool *is_seen, float *sum,
                    std::size_t sum_stride) {
    int q = 0;
    const auto add = [&](auto some) {
        add_values<F, some.value>(weights + q * BLOCK, values, row_bytes, from, to, channels, count, is_seen, sum + q * sum_stride, sum_stride);
        q += some.value;
    };
    while (q + 4 <= queries) add(std::integral_constant<int, 4>{});
    if (q + 3 == queries) add(std::integral_constant<int, 3>{});
    if (q + 2 == queries) add(std::integral_constant<int, 2>{});
    if (q < queries) add(std::integral_constant<int, 1>{});
}
