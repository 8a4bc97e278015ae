// Linear layers of many tokens, with float32 alone on CPUs with AVX2, and in products of bfloat16. Included by `linear.cpp`.
//
// A panel of the weights is laid out, widened or decoded once for many tokens, in tiles that stay in the nearest caches.
#if defined(__AVX512BF16__) || (defined(__AVX2__) && !defined(__AVX512F__))

#if defined(__AVX512BF16__)
// Weights and inputs of bfloat16, two of an output in a number of a tile. Inputs are read where they are.
class PairPanels {
  public:
    using Tile = PairTile;
    static constexpr int PER_NUMBER = 2, DEPTH = 512, TILES = 1;  // inputs of a number, numbers of a column of a tile, tiles of a panel
    static constexpr bool READS_INPUTS = false;

    PairPanels(const Linear &call, float *) : call(call) {}

    const std::uint32_t *inputs(std::int64_t token) const {
        return reinterpret_cast<const std::uint32_t *>(call.inputs) + token * (call.in / PER_NUMBER);
    }
    void lay(int first, int at, int depth, std::uint32_t *tile) const {
        alignas(64) std::uint16_t rows[LANES * 32];
        const std::int64_t width = call.in;
        for (int v = 0; v < Tile::COLUMNS; v += LANES)
            for (int i = 0; i < depth; i += LANES) {
                const std::int64_t from = (first + v) * width + (at + i) * std::int64_t(PER_NUMBER);
                const auto *weights = reinterpret_cast<const std::uint16_t *>(call.weights) + from;
                const int outputs = std::min(LANES, call.out - first - v), numbers = std::min(LANES, depth - i);
                if (outputs == LANES && numbers == LANES) {
                    transpose_pairs(weights, width, tile + i * Tile::COLUMNS + v);
                    continue;
                }
                std::memset(rows, 0, sizeof rows);
                for (int j = 0; j < outputs; ++j) std::memcpy(rows + j * 32, weights + j * width, std::size_t(numbers) * 4);
                transpose_pairs(rows, 32, tile + i * Tile::COLUMNS + v);
            }
    }

    // Prefetches the weights of output `row`, which a later panel lays.
    void prefetch(int row, int at, int depth) const {
        if (row >= call.out) return;
        const std::uint8_t *weights = call.weights + (row * std::int64_t(call.in) + at * PER_NUMBER) * 2;
        for (int byte = 0; byte < depth * 4; byte += LINE) __builtin_prefetch(weights + byte, 0, 2);
    }

  private:
    const Linear &call;
};
#else
// Inputs, and weights of any kind, become float32.
class FloatPanels {
  public:
    using Tile = FloatTile;
    static constexpr int PER_NUMBER = 1, DEPTH = 256, TILES = 2;
    static constexpr bool READS_INPUTS = true;

    FloatPanels(const Linear &call, float *scratch) : call(call), own(scratch) {}

    void read_inputs(int token) const {
        const std::int64_t at = std::int64_t(token) * call.in;
        read_row(call.float_format, call.inputs + at * bytes_of(call.float_format), call.in, own + at);
    }
    const float *inputs(std::int64_t token) const { return own + token * call.in; }
    void prefetch(int, int, int) const {}
    void lay(int first, int at, int depth, float *tile) const {
        for (int v = 0; v < Tile::COLUMNS; v += LANES)
            if (!call.pairs)
                lay_rows(first + v, at, depth, tile + v);
            else if (call.format == Format::int4)
                lay_codes<Format::int4>(first + v, at, depth, tile + v);
            else
                lay_codes<Format::int8>(first + v, at, depth, tile + v);
    }

  private:
    const Linear &call;
    float *own;  // (tokens, in)

    void lay_rows(int first, int at, int depth, float *tile) const {
        alignas(64) float rows[LANES * DEPTH];
        const int width = (depth + LANES - 1) / LANES * LANES;
        for (int j = 0; j < LANES; ++j) {
            const int count = first + j < call.out ? depth : 0;
            const std::int64_t begin = std::int64_t(first + j) * call.in + at;
            read_row(call.format, call.weights + begin * bytes_of(call.format), count, rows + j * DEPTH);
            std::fill(rows + j * DEPTH + count, rows + j * DEPTH + width, 0.0f);
        }
        lay_columns(rows, DEPTH, width, Tile::COLUMNS, tile);
    }
    // Codes of an input lie side by side, as its weights do in a tile.
    template <Format CODES>
    void lay_codes(int first, int at, int depth, float *tile) const {
        const BlockColumn<CODES> column(call, first);
        for (int k = at; k < at + depth;) {
            const int group = k / call.group, end = std::min((group + 1) * call.group, at + depth);
            Floats scale, zero;
            pairs_of(call, group, first, scale, zero);
            for (; k < end; ++k, tile += Tile::COLUMNS) store(tile, column.decoded(k, scale, zero));
        }
    }
};
#endif

// `Panels` says how inputs and weights stand in tiles.
template <class Panels>
class PanelLinear {
    using Tile = typename Panels::Tile;
    using Number = typename Tile::Number;
    static constexpr int DEPTH = Panels::DEPTH, TILES = Panels::TILES, COLUMNS = Tile::COLUMNS, OUTPUTS = TILES * COLUMNS;
    static constexpr int MOST = 256, LEAST = 48;  // tokens of a piece of work. LEAST at a time stay in the cache while they meet all its tiles

  public:
    PanelLinear(const Linear &call, float *scratch)
        : call(call), panels(call, scratch), bytes(bytes_of(call.float_format)), numbers(call.in / Panels::PER_NUMBER) {}

    // One thread's part.
    void run() {
        const int count = (call.out + OUTPUTS - 1) / OUTPUTS, wanted = (4 * omp_get_num_threads() + count - 1) / count;
        const int size = std::clamp((call.tokens + wanted - 1) / wanted, LEAST, MOST), parts = (call.tokens + size - 1) / size;
        if constexpr (Panels::READS_INPUTS) {
#pragma omp for schedule(static)
            for (int token = 0; token < call.tokens; ++token) panels.read_inputs(token);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int item = 0; item < count * parts; ++item) {
            const int first = item % parts * size;
            multiply(item / parts * OUTPUTS, first, std::min(size, call.tokens - first));
        }
    }

  private:
    const Linear &call;
    const Panels panels;
    const int bytes, numbers;

    // `count` tokens from `token` on, and OUTPUTS outputs from `first` on.
    void multiply(int first, int token, int count) const {
        alignas(64) float sums[MOST * OUTPUTS];
        alignas(64) Number tiles[TILES][DEPTH * COLUMNS];
        for (int at = 0; at < numbers; at += DEPTH) {
            const int depth = std::min(DEPTH, numbers - at);
            for (int t = 0; t < TILES; ++t) panels.lay(first + t * COLUMNS, at, depth, tiles[t]);
            const auto multiply_all = [&](auto is_sum) {
                for (int row = 0; row < count; row += LEAST) {
                    for (int r = row * OUTPUTS / count; r < std::min(row + LEAST, count) * OUTPUTS / count; ++r) panels.prefetch(first + OUTPUTS + r, at, depth);
                    for (int t = 0; t < TILES; ++t)
                        multiply_tile<Tile, Tile::VECTORS, is_sum>(std::min(LEAST, count - row), panels.inputs(token + row) + at, numbers,
                                                                   tiles[t], COLUMNS, depth, sums + row * OUTPUTS + t * COLUMNS, OUTPUTS);
                }
            };
            if (at)
                multiply_all(std::true_type{});
            else
                multiply_all(std::false_type{});
        }
        const int outputs = std::min(OUTPUTS, call.out - first);
        alignas(64) float bias[OUTPUTS] = {};
        if (call.bias) read_row(call.float_format, call.bias + first * bytes, outputs, bias);
        for (int row = 0; row < count; ++row) put(sums + row * OUTPUTS, bias, token + row, first, outputs);
    }

    // A token's results of outputs from `first` on. Overwrites `sums`.
    void put(float *sums, const float *bias, std::int64_t token, int first, int count) const {
        if (Panels::PER_NUMBER == 2 && count == OUTPUTS) {  // of bfloat16
            for (int i = 0; i < OUTPUTS; i += LANES) store(sums + i, load<Floats>(sums + i) + load<Floats>(bias + i));
            return put_brains<OUTPUTS / LANES>(call, first, token, reinterpret_cast<const Floats *>(sums));
        }
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
