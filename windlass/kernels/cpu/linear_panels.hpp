// Linear layers of many tokens on CPUs that multiply float32 alone. Included by `linear.cpp`.
//
// A panel of the weights is widened or decoded once for many tokens, in tiles that stay in the nearest caches.
#if defined(__AVX2__) && !defined(__AVX512F__)

class PanelLinear {
    static constexpr int DEPTH = 256;  // inputs of a tile
    static constexpr int COLUMNS = FloatTile::COLUMNS, TILES = 2, OUTPUTS = TILES * COLUMNS;
    static constexpr int MOST = 256, LEAST = 48;  // tokens of a piece of work. LEAST at a time stay in the cache while they meet all its tiles

  public:
    static constexpr int FEWEST = 17;  // tokens for which a tile is worth its making, beyond MAX_ROWS of Python

    PanelLinear(const Linear &call, float *inputs) : call(call), inputs(inputs), bytes(bytes_of(call.float_format)) {}

    // One thread's part.
    void run() {
        const int panels = (call.out + OUTPUTS - 1) / OUTPUTS, wanted = (4 * omp_get_num_threads() + panels - 1) / panels;
        const int size = std::clamp((call.tokens + wanted - 1) / wanted, LEAST, MOST), parts = (call.tokens + size - 1) / size;
#pragma omp for schedule(static)
        for (int token = 0; token < call.tokens; ++token) {
            const std::int64_t at = std::int64_t(token) * call.in;
            read_row(call.float_format, call.inputs + at * bytes, call.in, inputs + at);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int item = 0; item < panels * parts; ++item) {
            const int first = item % parts * size;
            multiply(item / parts * OUTPUTS, first, std::min(size, call.tokens - first));
        }
    }

  private:
    const Linear &call;
    float *inputs;
    const int bytes;

    // `count` tokens from `token` on, and OUTPUTS outputs from `first` on.
    void multiply(int first, int token, int count) const {
        alignas(64) float sums[MOST * OUTPUTS], tiles[TILES][DEPTH * COLUMNS];
        std::fill_n(sums, count * OUTPUTS, 0.0f);
        for (int at = 0; at < call.in; at += DEPTH) {
            const int depth = std::min(DEPTH, call.in - at);
            const float *rows = inputs + std::int64_t(token) * call.in + at;
            for (int t = 0; t < TILES; ++t) lay(first + t * COLUMNS, at, depth, tiles[t]);
            for (int row = 0; row < count; row += LEAST)
                for (int t = 0; t < TILES; ++t)
                    multiply_tile<FloatTile, FloatTile::VECTORS, true>(std::min(LEAST, count - row), rows + std::int64_t(row) * call.in, call.in,
                                                                       tiles[t], COLUMNS, depth, sums + row * OUTPUTS + t * COLUMNS, OUTPUTS);
        }
        const int outputs = std::min(OUTPUTS, call.out - first);
        float bias[OUTPUTS] = {};
        if (call.bias) read_row(call.float_format, call.bias + first * bytes, outputs, bias);
        for (int row = 0; row < count; ++row) put(sums + row * OUTPUTS, bias, token + row, first, outputs);
    }

    // The weights of a tile's outputs from `first` on, `depth` of their inputs from `at` on.
    void lay(int first, int at, int depth, float *tile) const {
        for (int v = 0; v < COLUMNS; v += LANES)
            if (!call.pairs)
                lay_rows(first + v, at, depth, tile + v);
            else if (call.format == Format::int4)
                lay_codes<Format::int4>(first + v, at, depth, tile + v);
            else
                lay_codes<Format::int8>(first + v, at, depth, tile + v);
    }
    void lay_rows(int first, int at, int depth, float *tile) const {
        alignas(64) float rows[LANES * DEPTH];
        const int width = (depth + LANES - 1) / LANES * LANES;
        for (int j = 0; j < LANES; ++j) {
            const int count = first + j < call.out ? depth : 0;
            const std::int64_t begin = std::int64_t(first + j) * call.in + at;
            read_row(call.format, call.weights + begin * bytes_of(call.format), count, rows + j * DEPTH);
            std::fill(rows + j * DEPTH + count, rows + j * DEPTH + width, 0.0f);
        }
        lay_columns(rows, DEPTH, width, COLUMNS, tile);
    }
    // Codes of an input lie side by side, as its weights do in a tile.
    template <Format CODES>
    void lay_codes(int first, int at, int depth, float *tile) const {
        const BlockColumn<CODES> column(call, first);
        for (int k = at; k < at + depth;) {
            const int group = k / call.group, end = std::min((group + 1) * call.group, at + depth);
            Floats scale, zero;
            pairs_of(call, group, first, scale, zero);
            for (; k < end; ++k, tile += COLUMNS) store(tile, column.decoded(k, scale, zero));
        }
    }

    // A token's results of outputs from `first` on. Overwrites `sums`.
    void put(float *sums, const float *bias, std::int64_t token, int first, int count) const {
        const std::int64_t at = (token * call.out + first) * bytes;
        if (call.scales)
            for (int i = 0; i < count; ++i) sums[i] *= scale_of(call, first + i);
        for (int i = 0; i < count; ++i) sums[i] += bias[i];
        put_row(call.float_format, call.result + at, sums, count);
        if (!call.added) return;
        float added[OUTPUTS];
        read_row(call.float_format, call.result + at, count, sums), read_row(call.float_format, call.added + at, count, added);
        for (int i = 0; i < count; ++i) sums[i] += added[i];
        put_row(call.float_format, call.result + at, sums, count);
    }
};
#endif
