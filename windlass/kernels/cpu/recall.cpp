// Which pages of evicted tokens matter to a step's queries, compiled once for each instruction set (WINDLASS_SET).
//
// Keys lie in tiles of 16 tokens, four bytes of one token beside the same four of the next: a vector holds one word of
// 16 tokens, and the products of a query with 16 keys need no sum across lanes. Queries of codes are whole numbers of 8
// bits times a scale. Where there are instructions for it, codes are multiplied as they are; elsewhere in float32.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "call.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

#include "rotate.hpp"
#include "encode.hpp"

constexpr int TILE = 16, PAGE = 8;
constexpr int PARTS = TILE / LANES;  // vectors of a word of a tile
constexpr int QUERIES = 4;           // whose sums the registers hold
constexpr int TILES = 2;             // that are read for each number of a query
constexpr int BLOCK_TILES = 32;      // of a piece of work
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Channels that a word holds, and where they stand among those of a key.
template <Format F>
struct Word;
template <>
struct Word<Format::float32> {
    static constexpr int COUNT = 1;
    static int channel(int word, int, int) { return word; }
    static Floats level(Words w, int) { return bits_of(w); }
};
template <>
struct Word<Format::bfloat16> {
    static constexpr int COUNT = 2;
    static int channel(int word, int i, int) { return 2 * word + i; }
    static Floats level(Words w, int i) { return bits_of(i == 0 ? w << 16 : w & 0xffff0000u); }
};
template <>
struct Word<Format::float16> {
    static constexpr int COUNT = 2;
    static int channel(int word, int i, int) { return 2 * word + i; }
    static Floats level(Words w, int i) {
        const Words h = i == 0 ? w & 0xffffu : w >> 16;
        const Floats magnitude = bits_of((h & 0x7fffu) << 13) * 0x1p112f;
        return bits_of((Words)magnitude | ((h & 0x8000u) << 16));
    }
};
template <>
struct Word<Format::int8> {
    static constexpr int COUNT = 4;
    static int channel(int word, int i, int) { return 4 * word + i; }
    static Floats level(Words w, int i) { return __builtin_convertvector((Ints)(w << (24 - 8 * i)) >> 24, Floats); }
};
template <>
struct Word<Format::int4> {
    static constexpr int COUNT = 8;
    // -1 behind the last channel of each half: rows end with a whole word.
    static int channel(int word, int i, int channels) {
        const int at = 4 * word + i / 2;
        return at < channels / 2 ? at + i % 2 * (channels / 2) : -1;
    }
    static Floats level(Words w, int i) { return Row<Format::int4>::levels((Ints)(w >> (4 * i))); }
};

// Of a query what is multiplied with channel number `i` of a word; 0 where a row ends before its last word does.
template <Format F>
float of_word(const float *query, int word, int i, int channels) {
    const int channel = Word<F>::channel(word, i, channels);
    return channel < 0 || channel >= channels ? 0.0f : query[channel];
}

typedef Floats Products[TILES][QUERIES][PARTS];

// What the queries of codes are multiples of.
inline float step_of(const float *query, int channels) {
    float most = 0;
    for (int c = 0; c < channels; ++c) most = std::max(most, std::fabs(query[c]));
    return most > 0 ? most / 127 : 1;
}
inline int whole(float number, float step) { return int(std::lrint(number / step)); }

// The queries of one kv head, and the sums of their products with the codes of some tiles.
template <Format F>
class Sums {
    typedef Word<F> W;

  public:
    Sums(const float *queries, int count, int channels, int words)
        : words(words), numbers(count * words * W::COUNT), units(count, 1.0f) {
        const bool is_code = F == Format::int8 || F == Format::int4;
        for (int q = 0; q < count; ++q) {
            const float *query = queries + q * channels;
            if (is_code) units[q] = step_of(query, channels);
            for (int w = 0; w < words; ++w)
                for (int i = 0; i < W::COUNT; ++i) {
                    const float number = of_word<F>(query, w, i, channels);
                    numbers[(q * words + w) * W::COUNT + i] = is_code ? whole(number, units[q]) : number;
                }
        }
    }
    // What the sums of a query are to be multiplied by.
    float unit(int query) const { return units[query]; }
    void of(const std::uint32_t *tiles, int first, Products &sums) const {
        const float *query = numbers.data() + std::size_t(first) * words * W::COUNT;
        for (int t = 0; t < TILES; ++t) {
            const std::uint32_t *tile = tiles + std::size_t(t) * words * TILE;
            for (auto &each : sums[t])
                for (auto &part : each) part = Floats{};
            for (int w = 0; w < words; ++w)
                for (int i = 0; i < W::COUNT; ++i)
                    for (int p = 0; p < PARTS; ++p) {
                        const Floats level = W::level(load<Words>(tile + w * TILE + p * LANES), i);
                        for (int q = 0; q < QUERIES; ++q)
                            sums[t][q][p] = sums[t][q][p] + level * query[(q * words + w) * W::COUNT + i];
                    }
        }
    }

  private:
    int words;
    std::vector<float> numbers, units;
};

#if defined(__AVX512VNNI__)
// Codes times whole numbers.
template <Format F>
class CodeSums {
    static constexpr bool IS_INT4 = F == Format::int4;
    static constexpr int HALVES = IS_INT4 ? 2 : 1;

  public:
    CodeSums(const float *queries, int count, int channels, int words)
        : words(words), numbers(std::size_t(count) * words * HALVES), units(count), offsets(count) {
        for (int q = 0; q < count; ++q) {
            const float *query = queries + q * channels;
            units[q] = step_of(query, channels);
            for (int w = 0; w < words; ++w)
                for (int h = 0; h < HALVES; ++h)
                    for (int i = 0; i < 4; ++i) {
                        const int number = whole(of_word<F>(query, w, IS_INT4 ? 2 * i + h : i, channels), units[q]);
                        ((std::int8_t *)(numbers.data() + (q * words + w) * HALVES + h))[i] = std::int8_t(number);
                        offsets[q] += number * (IS_INT4 ? 8 : 128);  // which codes are too large by, to have no sign
                    }
        }
    }
    float unit(int query) const { return units[query]; }
    void of(const std::uint32_t *tiles, int first, Products &sums) const {
        const int stride = words * HALVES;
        const std::int32_t *query = numbers.data() + std::size_t(first) * stride;
        __m512i totals[TILES][QUERIES];
        for (auto &each : totals)
            for (auto &total : each) total = _mm512_setzero_si512();
        for (int w = 0; w < words; ++w) {
            __m512i word[TILES];
            for (int t = 0; t < TILES; ++t) {
                word[t] = _mm512_loadu_si512(tiles + (t * words + w) * TILE);
                __builtin_prefetch(tiles + ((t + 2 * TILES) * words + w) * TILE);  // tiles are too short to foresee
            }
            for (int h = 0; h < HALVES; ++h) {
                __m512i codes[TILES];
                for (int t = 0; t < TILES; ++t)
                    codes[t] = IS_INT4 ? _mm512_and_si512(h == 0 ? word[t] : _mm512_srli_epi32(word[t], 4),
                                                          _mm512_set1_epi8(15))
                                       : _mm512_xor_si512(word[t], _mm512_set1_epi8(char(0x80)));
                for (int q = 0; q < QUERIES; ++q) {
                    const __m512i number = _mm512_set1_epi32(query[q * stride + w * HALVES + h]);
                    for (int t = 0; t < TILES; ++t) totals[t][q] = _mm512_dpbusd_epi32(totals[t][q], codes[t], number);
                }
            }
        }
        for (int t = 0; t < TILES; ++t)
            for (int q = 0; q < QUERIES; ++q) {
                const __m512i total = _mm512_sub_epi32(totals[t][q], _mm512_set1_epi32(offsets[first + q]));
                sums[t][q][0] = (Floats)_mm512_cvtepi32_ps(total);
            }
    }

  private:
    int words;
    std::vector<std::int32_t> numbers;  // (queries, words, halves), four to each
    std::vector<float> units;
    std::vector<std::int32_t> offsets;
};
#endif

// Keys count without their mean: it adds the same to all products of a query, and only differences of these matter.
//
// A page's worth to a query is the logarithm of the largest share that one of its tokens has in the softmax over pages,
// each of which counts by its largest product; to a kv head it is the most that it is worth to one of its queries.
template <class S>
class Best {
  public:
    Best(const BestPages &call, float *scratch)
        : call(call), rows(call.batch * call.kv_heads), padded((call.queries_per_head + QUERIES - 1) / QUERIES * QUERIES),
          slots(call.slots()), pages(slots / PAGE), peaks(scratch),
          allowed((std::uint8_t *)(scratch + std::size_t(rows) * call.queries_per_head * pages)) {}

    void run(int threads) {
        prepare();
        std::vector<Block> blocks;
        std::int64_t start = 0;
        for (const auto &piece : call.pieces) {
            for (int tile = 0; tile < piece.tiles; tile += BLOCK_TILES)
                blocks.push_back({&piece, tile, std::min(tile + BLOCK_TILES, piece.tiles), start});
            start += std::int64_t(piece.tiles) * TILE;
        }
        const int items = rows * int(blocks.size());
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int held = 0; held < call.batch * call.score_heads; ++held) allow(held);
#pragma omp for schedule(dynamic, 4)
            for (int item = 0; item < items; ++item) {
                const Block &block = blocks[item % blocks.size()];
                for (int tile = block.from; tile < block.to; tile += TILES)
                    of_tiles(item / int(blocks.size()), tile, block);
            }
#pragma omp for schedule(static)
            for (int row = 0; row < rows; ++row) choose(row);
        }
    }

  private:
    struct Block {
        const BestPages::Piece *piece;
        int from, to;        // tiles of the piece
        std::int64_t start;  // of the piece, in tokens
    };
    const BestPages &call;
    const int rows, padded;
    const std::int64_t slots, pages;
    float *const peaks;           // (rows, queries_per_head, pages), each query's in its own unit
    std::uint8_t *const allowed;  // (batch, score_heads, slots)
    std::vector<S> sums;

    void prepare() {
        std::vector<float> queries(std::size_t(padded) * call.channels);
        sums.reserve(rows);
        for (int row = 0; row < rows; ++row) {
            const std::size_t count = std::size_t(call.queries_per_head) * call.channels;
            std::copy_n(call.queries + row * count, count, queries.begin());
            sums.emplace_back(queries.data(), padded, call.channels, call.words);
        }
    }

    std::uint8_t *allowed_of(int row) const {
        return allowed + (call.score_heads == 1 ? row / call.kv_heads : row) * slots;
    }

    void allow(int held) {
        const std::int32_t *positions = call.positions + held / call.score_heads * slots;
        std::uint8_t *own = allowed + held * slots;
        for (std::int64_t slot = 0; slot < slots; ++slot) own[slot] = positions[slot] >= 0;
        for (int i = 0; i < call.kept; ++i) {
            const float index = call.kept_index[std::int64_t(held) * call.kept + i];
            if (index >= 0 && index < float(slots)) own[std::int64_t(index)] = 0;
        }
    }

    void of_tiles(int row, int tile, const Block &block) {
        const std::int64_t at = std::int64_t(row) * block.piece->tiles + tile;
        const std::int64_t slot = block.start + std::int64_t(tile) * TILE;
        const std::uint8_t *own = allowed_of(row) + slot;
        float *out = peaks + std::int64_t(row) * call.queries_per_head * pages + slot / PAGE;
        if (!is_any(own)) {
            for (int q = 0; q < call.queries_per_head; ++q) std::fill_n(out + q * pages, TILES * TILE / PAGE, NOTHING);
            return;
        }
        Floats scales[TILES][PARTS];
        Ints is_allowed[TILES][PARTS];
        for (int i = 0; i < TILES * PARTS; ++i) {
            is_allowed[i / PARTS][i % PARTS] = wide_bytes(own + i * LANES) != Ints{};
            if (block.piece->scales)
                scales[i / PARTS][i % PARTS] = Row<Format::float16>::lanes(
                    (const std::uint8_t *)(block.piece->scales + at * TILE + i * LANES), 0, 0);
        }
        for (int first = 0; first < call.queries_per_head; first += QUERIES) {
            Products products;
            sums[row].of(block.piece->keys + at * call.words * TILE, first, products);
            for (int t = 0; t < TILES; ++t)
                for (int p = 0; p < PARTS; ++p)
                    for (int q = 0; q < QUERIES; ++q) {
                        Floats &x = products[t][q][p];
                        if (block.piece->scales) x = x * scales[t][p];
                        x = is_allowed[t][p] ? x : all(NOTHING);
                    }
            put_largest(products, std::min(QUERIES, call.queries_per_head - first), out + first * pages);
        }
    }

    static bool is_any(const std::uint8_t *tiles) {
        std::uint64_t any = 0;
        for (int i = 0; i < TILES * TILE; i += 8) any |= load<std::uint64_t>(tiles + i);
        return any != 0;
    }

    // The largest number of each page of the tiles, for `count` queries.
    void put_largest(const Products &products, int count, float *out) const {
        constexpr int PAGES = TILES * TILE / PAGE;
        float found[QUERIES * PAGES];
#if defined(__AVX512F__)
        Floats halves[QUERIES], quarters[QUERIES / 2];
        for (int q = 0; q < QUERIES; ++q) {
            const Floats a = products[0][q][0], b = products[1][q][0];
            halves[q] = larger(
                __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
        }
        for (int i = 0; i < QUERIES / 2; ++i) {
            const Floats a = halves[2 * i], b = halves[2 * i + 1];
            quarters[i] = larger(
                __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
        }
        const Floats a = quarters[0], b = quarters[1];
        store(found,
              larger(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)));
#else
        float numbers[TILE];
        for (int q = 0; q < QUERIES; ++q)
            for (int t = 0; t < TILES; ++t) {
                for (int p = 0; p < PARTS; ++p) store(numbers + p * LANES, products[t][q][p]);
                for (int page = 0; page < TILE / PAGE; ++page)
                    found[q * PAGES + t * (TILE / PAGE) + page] =
                        *std::max_element(numbers + page * PAGE, numbers + (page + 1) * PAGE);
            }
#endif
        for (int q = 0; q < count; ++q) std::copy_n(found + q * PAGES, PAGES, out + q * pages);
    }

    float largest(const float *from) const {
        Floats most = all(NOTHING);
        std::int64_t p = 0;
        for (; p + LANES <= pages; p += LANES) most = larger(most, load<Floats>(from + p));
        float top = NOTHING;
        for (int i = 0; i < LANES; ++i) top = std::max(top, most[i]);
        for (; p < pages; ++p) top = std::max(top, from[p]);
        return top;
    }

    void choose(int row) {
        std::vector<float> worth(pages, NOTHING);
        for (int q = 0; q < call.queries_per_head; ++q) {
            if (!call.is_query[row / call.kv_heads * call.tokens + q % call.tokens]) continue;
            const float *own = peaks + (std::int64_t(row) * call.queries_per_head + q) * pages;
            const float top = largest(own);
            if (top == NOTHING) continue;
            const float unit = sums[row].unit(q), lse = top * unit + std::log(sum_of_exponentials(own, top, unit));
            for (std::int64_t p = 0; p < pages; ++p) {
                const float share = own[p] * unit - lse;
                worth[p] = share > worth[p] ? share : worth[p];
            }
        }
        const auto before = [&](std::int64_t a, std::int64_t b) {
            return worth[a] > worth[b] || (worth[a] == worth[b] && a < b);
        };
        // A heap of the best so far, the last of them in front: few of the others come before that.
        std::vector<std::int64_t> order(call.count);
        for (int i = 0; i < call.count; ++i) order[i] = i;
        std::make_heap(order.begin(), order.end(), before);
        for (std::int64_t p = call.count; p < pages; ++p)
            if (worth[p] > worth[order.front()]) {
                std::pop_heap(order.begin(), order.end(), before);
                order.back() = p;
                std::push_heap(order.begin(), order.end(), before);
            }
        std::sort_heap(order.begin(), order.end(), before);
        for (int i = 0; i < call.count; ++i) {
            const std::int64_t to = std::int64_t(row) * call.count + i;
            call.best[to] = order[i];
            std::copy_n(allowed_of(row) + order[i] * PAGE, PAGE, call.is_read + to * PAGE);
        }
    }

    float sum_of_exponentials(const float *from, float top, float unit) const {
        Floats sums{};
        float padded[LANES];
        for (std::int64_t p = 0; p < pages; p += LANES) {
            const float *numbers = from + p;
            if (p + LANES > pages) {
                std::fill(std::copy(numbers, from + pages, padded), padded + LANES, NOTHING);
                numbers = padded;
            }
            const Floats x = (load<Floats>(numbers) - top) * unit;
            sums = sums + exponential(larger(x, all(-80.0f)));  // of what is far below the top nothing counts
        }
        float sum = 0;
        for (int i = 0; i < LANES; ++i) sum += sums[i];
        return sum;
    }
};

template <Format F>
void best_of(const BestPages &call, float *scratch, int threads) {
#if defined(__AVX512VNNI__)
    if constexpr (F == Format::int8 || F == Format::int4) return Best<CodeSums<F>>(call, scratch).run(threads);
#endif
    Best<Sums<F>>(call, scratch).run(threads);
}

void choose_pages(const BestPages &call, float *scratch, int threads) {
    switch (call.format) {
        case Format::float32:
            return best_of<Format::float32>(call, scratch, threads);
        case Format::bfloat16:
            return best_of<Format::bfloat16>(call, scratch, threads);
        case Format::float16:
            return best_of<Format::float16>(call, scratch, threads);
        case Format::int8:
            return best_of<Format::int8>(call, scratch, threads);
        case Format::int4:
            return best_of<Format::int4>(call, scratch, threads);
    }
}

// A token's row out of the pieces that hold it.
void read_row(const ReadTokens &call, std::int64_t row, std::int64_t index, std::uint8_t *out) {
    std::int64_t start = 0;
    for (const auto &[data, tokens] : call.pieces) {
        if (index < start + tokens) {
            const std::int64_t at = row * tokens + index - start;
            if (!call.is_tiled) {
                __builtin_memcpy(out, data + at * call.row_bytes, call.row_bytes);
                return;
            }
            const std::uint32_t *tile = (const std::uint32_t *)data + at / TILE * (call.row_bytes / 4) * TILE + at % TILE;
            for (std::int64_t w = 0; w < call.row_bytes / 4; ++w) __builtin_memcpy(out + 4 * w, tile + w * TILE, 4);
            return;
        }
        start += tokens;
    }
}

#include "recall_step.hpp"

}  // namespace

void best_pages(const BestPages &call, float *scratch, int threads) { choose_pages(call, scratch, threads); }

void remember(const RecallStep &call, const Recall &store) { Step(call, store).remember(); }

void recall(const RecallStep &call, const Recall &store, float *scratch, int threads) {
    Step(call, store).recall(scratch, threads);
}

void read_tokens(const ReadTokens &call, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t row = 0; row < call.rows; ++row)
        for (std::int64_t i = 0; i < call.tokens; ++i) {
            const std::int64_t at = row * call.tokens + i;
            read_row(call, row, call.index[at], call.out + at * call.row_bytes);
        }
}

}  // namespace windlass::WINDLASS_SET
