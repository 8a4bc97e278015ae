// Linear layers of many tokens whose weights have 16 bits, on CPUs that multiply float32 alone. Included by `linear.cpp`.
//
// A panel of the weights is widened once for many tokens, in tiles that stay in the nearest caches.
#if defined(__AVX2__) && !defined(__AVX512F__)

template <Format F>
class PanelLinear {
    static constexpr int DEPTH = 256;  // inputs of a tile
    static constexpr int TILES = 2, OUTPUTS = TILES * FloatTile::COLUMNS;
    static constexpr int MOST = 256, LEAST = 48;  // tokens of a piece of work. LEAST at a time stay in the cache while they meet all its tiles

  public:
    static constexpr int FEWEST = 17;  // tokens for which a tile is worth its making, beyond MAX_ROWS of Python

    PanelLinear(const Linear &call, float *inputs) : call(call), inputs(inputs) {}

    // One thread's part.
    void run() {
        const int panels = (call.out + OUTPUTS - 1) / OUTPUTS, wanted = (4 * omp_get_num_threads() + panels - 1) / panels;
        const int size = std::clamp((call.tokens + wanted - 1) / wanted, LEAST, MOST), parts = (call.tokens + size - 1) / size;
#pragma omp for schedule(static)
        for (int token = 0; token < call.tokens; ++token)
            read_row(F, call.inputs + std::int64_t(token) * call.in * 2, call.in, inputs + std::int64_t(token) * call.in);
#pragma omp for schedule(dynamic, 1) nowait
        for (int item = 0; item < panels * parts; ++item) {
            const int first = item % parts * size;
            multiply(item / parts * OUTPUTS, first, std::min(size, call.tokens - first));
        }
    }

  private:
    const Linear &call;
    float *inputs;

    // `count` tokens from `token` on, and OUTPUTS outputs from `first` on.
    void multiply(int first, int token, int count) const {
        alignas(64) float sums[MOST * OUTPUTS], tiles[TILES][DEPTH * FloatTile::COLUMNS];
        std::fill_n(sums, count * OUTPUTS, 0.0f);
        for (int at = 0; at < call.in; at += DEPTH) {
            const int depth = std::min(DEPTH, call.in - at);
            const float *rows = inputs + std::int64_t(token) * call.in + at;
            for (int t = 0; t < TILES; ++t) lay(first + t * FloatTile::COLUMNS, at, depth, tiles[t]);
            for (int row = 0; row < count; row += LEAST)
                for (int t = 0; t < TILES; ++t)
                    multiply_tile<FloatTile, FloatTile::VECTORS, true>(
                        std::min(LEAST, count - row), rows + std::int64_t(row) * call.in, call.in, tiles[t], FloatTile::COLUMNS, depth,
                        sums + row * OUTPUTS + t * FloatTile::COLUMNS, OUTPUTS);
        }
        const int outputs = std::min(OUTPUTS, call.out - first);
        float bias[OUTPUTS] = {};
        if (call.bias) read_row(F, call.bias + first * 2, outputs, bias);
        for (int row = 0; row < count; ++row) put(sums + row * OUTPUTS, bias, (std::int64_t(token) + row) * call.out + first, outputs);
    }

    // The weights of a tile's outputs from `first` on, `depth` of their inputs from `at` on.
    void lay(int first, int at, int depth, float *tile) const {
        alignas(64) float rows[LANES * DEPTH];
        const int width = (depth + LANES - 1) / LANES * LANES;
        for (int v = 0; v < FloatTile::COLUMNS; v += LANES) {
            for (int j = 0; j < LANES; ++j) {
                const int output = first + v + j, count = output < call.out ? depth : 0;
                read_row(F, call.weights + (std::int64_t(output) * call.in + at) * 2, count, rows + j * DEPTH);
                std::fill(rows + j * DEPTH + count, rows + j * DEPTH + width, 0.0f);
            }
            lay_columns(rows, DEPTH, width, FloatTile::COLUMNS, tile + v);
        }
    }

    // A token's results, which begin with number `at` of all. Overwrites `sums`.
    void put(float *sums, const float *bias, std::int64_t at, int count) const {
        for (int i = 0; i < count; ++i) sums[i] += bias[i];
        put_row(F, call.result + at * 2, sums, count);
        if (!call.added) return;
        float added[OUTPUTS];
        read_row(F, call.result + at * 2, count, sums), read_row(F, call.added + at * 2, count, added);
        for (int i = 0; i < count; ++i) sums[i] += added[i];
        put_row(F, call.result + at * 2, sums, count);
    }
};
#endif
