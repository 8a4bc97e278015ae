// Which pages of evicted tokens matter to a step's queries, compiled once for each instruction set (WINDLASS_SET).
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
#include "recall_sums.hpp"

constexpr int BLOCK_TILES = 32;     // of a piece of work
constexpr float WORTH_STEPS = 256;  // of `core.recall`

// A page's worth to a query is the logarithm of the largest share that one of its tokens has in the softmax over pages,
// each of which counts by its largest product. Above a half it is the logarithm of half its odds, which float32 tells
// apart where shares are all but 1. A page's worth to a kv head is its largest worth to one of the head's queries.
// Where there are digests, pages are first ranked by these, and only the best of them are scored token by token.
// Worths are compared in steps, so that rounding decides nothing between the pages of a token that is repeated.
template <class S>
class Best {
  public:
    Best(const BestPages &call, float *scratch)
        : call(call), rows(call.batch * call.kv_heads), padded((call.queries_per_head + QUERIES - 1) / QUERIES * QUERIES),
          slots(call.slots()), pages(slots / PAGE), peaks(scratch),
          few(scratch + std::size_t(rows) * call.queries_per_head * pages),
          allowed((std::uint8_t *)(few + std::size_t(rows) * call.queries_per_head * call.candidate_pages())),
          allowed_of_pages(allowed + std::size_t(call.batch) * call.score_heads * slots),
          is_text(allowed_of_pages + std::size_t(call.batch) * call.score_heads * pages),
          text_of_pages(is_text + std::size_t(call.batch) * slots) {}

    void run(int threads) {
        prepare();
        const std::vector<Block> blocks = blocks_of();
        const int items = rows * int(blocks.size());
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (std::int64_t part = 0; part < call.batch * parts(); ++part) find_text(int(part / parts()), part % parts());
#pragma omp for schedule(static)
            for (std::int64_t part = 0; part < call.batch * call.score_heads * parts(); ++part) allow(int(part / parts()), part % parts());
#pragma omp for schedule(dynamic, 4)
            for (int item = 0; item < items; ++item) {
                const Block &block = blocks[item % blocks.size()];
                const int row = item / int(blocks.size());
                for (int tile = block.from; tile < block.to; tile += TILES)
                    call.has_digests() ? of_digests(row, tile, block) : of_pages(row, tile, block);
            }
#pragma omp for schedule(dynamic, 1)
            for (int row = 0; row < rows; ++row) call.has_digests() ? choose_of_few(row) : choose_of_all(row);
        }
    }

  private:
    struct Block {
        const BestPages::Piece *piece, *least;  // of tokens, or the largest and the least of digests
        int from, to;                           // tiles of the piece
        std::int64_t start;  // of the piece, in tokens, or in pages
    };
    const BestPages &call;
    const int rows, padded;
    const std::int64_t slots, pages;
    float *const peaks;  // (rows, queries_per_head, pages), each query's in its own unit. From digests if there are any
    float *const few;    // (rows, queries_per_head, candidate pages)
    std::uint8_t *const allowed;           // (batch, score_heads, slots): whether a token may be read
    std::uint8_t *const allowed_of_pages;  // (batch, score_heads, pages): how many of a page
    std::uint8_t *const is_text;           // (batch, slots): whether a token is part of the text
    std::uint8_t *const text_of_pages;     // (batch, pages): how many of a page
    std::vector<S> sums, above, below;  // of each row: of its queries, and of their positive and negative numbers alone
    std::vector<std::vector<float>> units;  // factors for the sums of a row's queries

    std::vector<Block> blocks_of() const {
        std::vector<Block> blocks;
        std::int64_t start = 0;
        const auto cut = [&](const BestPages::Piece &piece, const BestPages::Piece *least) {
            for (int tile = 0; tile < piece.tiles; tile += BLOCK_TILES)
                blocks.push_back({&piece, least, tile, std::min(tile + BLOCK_TILES, piece.tiles), start});
            start += std::int64_t(piece.tiles) * TILE;
        };
        if (call.has_digests())
            for (const auto &each : call.digests) cut(each.largest, &each.least);
        else
            for (const auto &piece : call.pieces) cut(piece, nullptr);
        return blocks;
    }

    void prepare() {
        std::vector<float> queries(std::size_t(padded) * call.channels), part(queries.size());
        for (auto *each : {&sums, &above, &below}) each->reserve(rows);
        for (int row = 0; row < rows; ++row) {
            const std::size_t count = std::size_t(call.queries_per_head) * call.channels;
            std::copy_n(call.queries + row * count, count, queries.begin());
            QueryRows own = query_rows<S::FORMAT>(queries.data(), padded, call);
            sums.emplace_back(own), units.push_back(own.units);
            if (!call.has_digests()) continue;
            own.numbers = part.data();
            std::transform(queries.begin(), queries.end(), part.begin(), [](float x) { return std::max(x, 0.0f); });
            above.emplace_back(own);
            std::transform(queries.begin(), queries.end(), part.begin(), [](float x) { return std::min(x, 0.0f); });
            below.emplace_back(own);
        }
    }

    std::int64_t held_of(int row) const { return call.score_heads == 1 ? row / call.kv_heads : row; }

    static constexpr std::int64_t PART = 32768;  // tokens whose permission is looked up at once
    std::int64_t parts() const { return (slots + PART - 1) / PART; }

    void find_text(int text, std::int64_t part) {
        const std::int32_t *positions = call.positions + text * slots;
        std::uint8_t *own = is_text + text * slots, *counts = text_of_pages + text * pages;
        const std::int64_t first = part * PART, last = std::min(slots, first + PART);
        for (std::int64_t slot = first; slot < last; ++slot) own[slot] = positions[slot] >= 0;
        for (std::int64_t page = first / PAGE; page < last / PAGE; ++page)
            counts[page] = std::uint8_t(load<std::uint64_t>(own + page * PAGE) * 0x0101010101010101u >> 56);
    }

    void allow(int held, std::int64_t part) {
        const int text = held / call.score_heads;
        std::uint8_t *own = allowed + held * slots, *counts = allowed_of_pages + held * pages;
        const std::int64_t first = part * PART, last = std::min(slots, first + PART);
        std::copy(is_text + text * slots + first, is_text + text * slots + last, own + first);
        std::copy(text_of_pages + text * pages + first / PAGE, text_of_pages + text * pages + last / PAGE, counts + first / PAGE);
        for (int i = 0; i < call.kept; ++i) {
            const float index = call.kept_index[std::int64_t(held) * call.kept + i];
            if (!(index >= float(first) && index < float(last))) continue;
            counts[std::int64_t(index) / PAGE] -= own[std::int64_t(index)];
            own[std::int64_t(index)] = 0;
        }
    }

    Tile tile_of(const BestPages::Piece &piece, std::int64_t at, const std::uint8_t *allowed) const {
        const std::int64_t scales = std::int64_t(TILE) * scales_of(call.channels, call.group_bits);
        return {piece.keys + at * call.words * TILE, piece.scales ? piece.scales + at * scales : nullptr, allowed};
    }

    // Tiles as far behind these as are soon asked for, where all are asked for in their order.
    void follow(const Tiles &tiles, Tiles &next) const {
        constexpr int AHEAD = 2 * TILES * TILE;
        for (int t = 0; t < TILES; ++t)
            next[t] = {tiles[t].keys + AHEAD * call.words, tiles[t].scales ? tiles[t].scales + AHEAD * scales_of(call.channels, call.group_bits) : nullptr, nullptr};
    }

    // The products of some queries with tiles, without unreadable ones.
    static void multiply(const S &queries, const typename S::Held &held, const Tiles &tiles, int first, Products &products) {
        queries.of(held, first, products);
        for (int t = 0; t < TILES; ++t)
            for (int p = 0; p < PARTS; ++p) {
                const Ints is_allowed = wide_bytes(tiles[t].allowed + p * LANES) != Ints{};
                const Floats scales = S::FORMAT == Format::int8 ? Row<Format::float16>::lanes((const std::uint8_t *)(tiles[t].scales + p * LANES), 0, 0)
                                                                : all(1.0f);
                for (int q = 0; q < QUERIES; ++q)
                    products[t][q][p] = is_allowed ? products[t][q][p] * scales : all(NOTHING);
            }
    }

    // Of two tiles of digests, which lie side by side.
    void of_digests(int row, int tile, const Block &block) {
        const std::int64_t at = std::int64_t(row) * block.piece->tiles + tile, page = block.start + std::int64_t(tile) * TILE;
        if (page >= pages) return;
        const std::int64_t count = std::min<std::int64_t>(TILES * TILE, pages - page);
        std::uint8_t own[TILES * TILE] = {};
        std::copy_n(allowed_of_pages + held_of(row) * pages + page, count, own);
        Tiles largest, least;
        for (int t = 0; t < TILES; ++t) {
            largest[t] = tile_of(*block.piece, at + t, own + t * TILE);
            least[t] = tile_of(*block.least, at + t, own + t * TILE);
        }
        Tiles next, next_least;
        follow(largest, next), follow(least, next_least);
        const typename S::Held most = above[row].held(largest, next), fewest = below[row].held(least, next_least);
        for (int first = 0; first < call.queries_per_head; first += QUERIES) {
            Products products, more;
            multiply(above[row], most, largest, first, products);
            multiply(below[row], fewest, least, first, more);
            for (int q = 0; q < std::min(QUERIES, call.queries_per_head - first); ++q) {
                float *to = peaks + (std::int64_t(row) * call.queries_per_head + first + q) * pages + page;
                float found[TILES * TILE], *out = count == TILES * TILE ? to : found;
                for (int i = 0; i < TILES * PARTS; ++i)
                    store(out + i * LANES, products[i / PARTS][q][i % PARTS] + more[i / PARTS][q][i % PARTS]);
                if (out == found) std::copy_n(found, count, to);
            }
        }
    }

    // Of two tiles of tokens, which lie side by side.
    void of_pages(int row, int tile, const Block &block) {
        const std::int64_t at = std::int64_t(row) * block.piece->tiles + tile;
        const std::int64_t slot = block.start + std::int64_t(tile) * TILE;
        const std::uint8_t *own = allowed + held_of(row) * slots + slot;
        Tiles tiles, next;
        for (int t = 0; t < TILES; ++t) tiles[t] = tile_of(*block.piece, at + t, own + t * TILE);
        follow(tiles, next);
        of_tiles(row, tiles, next, peaks + std::int64_t(row) * call.queries_per_head * pages + slot / PAGE, pages);
    }

    // The peaks of the tiles' pages. A query's are `stride` behind the previous query's.
    void of_tiles(int row, const Tiles &tiles, const Tiles &next, float *out, std::int64_t stride) const {
        bool is_any = false;
        for (const Tile &tile : tiles)
            for (int i = 0; i < TILE; i += 8) is_any |= load<std::uint64_t>(tile.allowed + i) != 0;
        if (!is_any) {
            for (int q = 0; q < call.queries_per_head; ++q) std::fill_n(out + q * stride, TILES * TILE / PAGE, NOTHING);
            return;
        }
        const typename S::Held held = sums[row].held(tiles, next);
        for (int first = 0; first < call.queries_per_head; first += QUERIES) {
            Products products;
            multiply(sums[row], held, tiles, first, products);
            put_largest(products, std::min(QUERIES, call.queries_per_head - first), out + first * stride, stride);
        }
    }

    // The largest number of each page of the tiles, for `count` queries.
    void put_largest(const Products &products, int count, float *out, std::int64_t stride) const {
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
        for (int q = 0; q < count; ++q) std::copy_n(found + q * PAGES, PAGES, out + q * stride);
    }

    static float largest(const float *from, std::int64_t count) {
        Floats most = all(NOTHING);
        std::int64_t p = 0;
        for (; p + LANES <= count; p += LANES) most = larger(most, load<Floats>(from + p));
        float top = NOTHING;
        for (int i = 0; i < LANES; ++i) top = std::max(top, most[i]);
        for (; p < count; ++p) top = std::max(top, from[p]);
        return top;
    }

    // The worth of `count` pages. `of_all` has a row of their peaks for each query.
    std::vector<float> worth(int row, const float *of_all, std::int64_t count) const {
        std::vector<float> found(count, NOTHING);
        for (int q = 0; q < call.queries_per_head; ++q) {
            if (!call.is_query[row / call.kv_heads * call.tokens + q % call.tokens]) continue;
            const float *own = of_all + (std::int64_t(row) * call.queries_per_head + q) * count;
            const float top = largest(own, count);
            if (top == NOTHING) continue;
            const std::int64_t first = std::find(own, own + count, top) - own, others = count - first - 1;
            const float *behind = own + first + 1, unit = units[row][q];
            const float second = std::max(largest(own, first), largest(behind, others));
            float odds = std::numeric_limits<float>::infinity();
            if (second > NOTHING)
                odds = (top - second) * unit - std::log(sum_of_exponentials(own, first, second, unit) +
                                                        sum_of_exponentials(behind, others, second, unit));
            const float lse = top * unit + std::log1p(std::exp(-odds));
            for (std::int64_t p = 0; p < count; ++p) {
                const float share = own[p] * unit - lse;
                found[p] = share > found[p] ? share : found[p];
            }
            if (odds > 0) found[first] = std::max(found[first], odds - std::log(2.0f));
        }
        for (float &each : found) each = std::nearbyint(each * WORTH_STEPS) / WORTH_STEPS;
        return found;
    }

    // The `count` largest numbers by their index, the best first. Of equal ones the earlier wins.
    static std::vector<std::int64_t> best(const std::vector<float> &numbers, int count) {
        const auto before = [&](std::int64_t a, std::int64_t b) {
            return numbers[a] > numbers[b] || (numbers[a] == numbers[b] && a < b);
        };
        // A heap of the best so far, the last of them in front: few of the others come before that.
        std::vector<std::int64_t> order(count);
        for (int i = 0; i < count; ++i) order[i] = i;
        std::make_heap(order.begin(), order.end(), before);
        for (std::int64_t p = count; p < std::int64_t(numbers.size()); ++p)
            if (numbers[p] > numbers[order.front()]) {
                std::pop_heap(order.begin(), order.end(), before);
                order.back() = p;
                std::push_heap(order.begin(), order.end(), before);
            }
        std::sort_heap(order.begin(), order.end(), before);
        return order;
    }

    // The indices of the `count` largest numbers, most of which are not positive, in their own order. Of equal
    // ones the earlier wins. Numbers are counted by intervals, and only the last interval with any of them is sorted.
    static std::vector<std::int64_t> first_of(const std::vector<float> &numbers, std::int64_t count) {
        constexpr int INTERVALS = 4096, WIDEST = 64;  // of equal width from 0, with all above, to -WIDEST, with all below
        std::vector<std::uint16_t> intervals(numbers.size());
        for (std::size_t i = 0; i < numbers.size(); ++i)
            intervals[i] = std::uint16_t(std::clamp(numbers[i] * (-float(INTERVALS) / WIDEST), 0.0f, float(INTERVALS - 1)));
        std::int64_t counts[INTERVALS] = {};
        for (const std::uint16_t interval : intervals) ++counts[interval];
        int last = 0;
        std::int64_t before = 0;  // numbers of the intervals before the last
        while (before + counts[last] < count) before += counts[last++];
        std::vector<std::int64_t> found, of_last;
        found.reserve(count);
        for (std::int64_t i = 0; i < std::int64_t(numbers.size()); ++i) {
            if (intervals[i] < last) found.push_back(i);
            if (intervals[i] == last) of_last.push_back(i);
        }
        std::stable_sort(of_last.begin(), of_last.end(), [&](std::int64_t a, std::int64_t b) { return numbers[a] > numbers[b]; });
        found.insert(found.end(), of_last.begin(), of_last.begin() + (count - before));
        std::sort(found.begin(), found.end());
        return found;
    }

    void choose_of_all(int row) {
        const std::vector<std::int64_t> order = best(worth(row, peaks, pages), call.count);
        for (int i = 0; i < call.count; ++i) put(row, i, order[i]);
    }

    void choose_of_few(int row) {
        const std::int64_t width = call.candidate_pages();
        const std::vector<std::int64_t> candidates = first_of(worth(row, peaks, pages), call.candidates);
        float *own = few + std::int64_t(row) * call.queries_per_head * width;
        std::fill_n(own, call.queries_per_head * width, NOTHING);
        std::vector<std::int64_t> ids(width, -1);
        std::vector<std::uint8_t> is_read(width * PAGE);
        std::vector<Tile> tiles;  // of whole pairs
        for (std::int64_t page : candidates) {
            const std::int64_t tile = page * PAGE / TILE, in_tile = page % (TILE / PAGE);
            if (tiles.empty() || tile != ids[(tiles.size() - 1) * (TILE / PAGE)] / (TILE / PAGE)) {
                const std::int64_t at = std::int64_t(tiles.size());
                for (int i = 0; i < TILE / PAGE; ++i) ids[at * (TILE / PAGE) + i] = tile * (TILE / PAGE) + i;
                tiles.push_back(tile_at(row, tile, is_read.data() + at * TILE));
            }
            std::copy_n(allowed + held_of(row) * slots + page * PAGE, PAGE, is_read.data() + (tiles.size() - 1) * TILE + in_tile * PAGE);
        }
        if (tiles.size() % TILES) tiles.push_back({tiles.back().keys, tiles.back().scales, is_read.data() + tiles.size() * TILE});
        for (std::size_t i = 0; i < tiles.size(); i += TILES) {
            const std::size_t soon = std::min(i + 2 * TILES, tiles.size() - TILES);
            of_tiles(row, {tiles[i], tiles[i + 1]}, {tiles[soon], tiles[soon + 1]}, own + i * (TILE / PAGE), width);
        }
        const std::vector<std::int64_t> order = best(worth(row, few, width), call.count);
        for (int i = 0; i < call.count; ++i) put(row, i, ids[order[i]]);
    }

    Tile tile_at(int row, std::int64_t tile, const std::uint8_t *is_read) const {
        const BestPages::Piece *piece = call.pieces.data();
        for (; tile >= piece->tiles; ++piece) tile -= piece->tiles;
        return tile_of(*piece, std::int64_t(row) * piece->tiles + tile, is_read);
    }

    // Page `page` is read (-1: no page is left with tokens to read).
    void put(int row, int number, std::int64_t page) {
        const std::int64_t to = std::int64_t(row) * call.count + number;
        call.best[to] = std::max<std::int64_t>(page, 0);
        if (page < 0) {
            std::fill_n(call.is_read + to * PAGE, PAGE, 0);
            return;
        }
        std::copy_n(allowed + held_of(row) * slots + page * PAGE, PAGE, call.is_read + to * PAGE);
    }

    static float sum_of_exponentials(const float *from, std::int64_t count, float top, float unit) {
        Floats sums{};
        float padded[LANES];
        for (std::int64_t p = 0; p < count; p += LANES) {
            const float *numbers = from + p;
            if (p + LANES > count) {
                std::fill(std::copy(numbers, from + count, padded), padded + LANES, NOTHING);
                numbers = padded;
            }
            const Floats x = (load<Floats>(numbers) - top) * unit;
            sums = sums + exponential(larger(x, all(-80.0f)));  // numbers far below the top count nothing
        }
        float sum = 0;
        for (int i = 0; i < LANES; ++i) sum += sums[i];
        return sum;
    }
};

template <Format F>
void best_of(const BestPages &call, float *scratch, int threads) {
#ifdef WINDLASS_CODE_SUMS
    if constexpr (F == Format::int8) return Best<CodeSums>(call, scratch).run(threads);
    if constexpr (F == Format::int4)
        if (GroupSums::knows(call)) return Best<GroupSums>(call, scratch).run(threads);
#endif
    Best<Sums<F>>(call, scratch).run(threads);
}

void choose_pages(const BestPages &call, float *scratch, int threads) {
    with_format(call.format, [&](auto f) { best_of<f.value>(call, scratch, threads); });
}

// Copies tokens' rows out of the pieces that hold them. Most tokens are in the piece of the token before.
class RowReader {
  public:
    explicit RowReader(const ReadTokens &call) : call(call) {}

    void read(std::int64_t row, std::int64_t index, std::uint8_t *out) {
        if (index < start) piece = 0, start = 0;
        while (piece < call.pieces.size() && index >= start + call.pieces[piece].tokens) start += call.pieces[piece++].tokens;
        if (piece == call.pieces.size()) return;
        const auto &[data, tokens] = call.pieces[piece];
        const std::int64_t at = row * tokens + index - start;
        if (!call.is_tiled) {
            __builtin_memcpy(out, data + at * call.row_bytes, call.row_bytes);
            return;
        }
        const std::uint32_t *tile = (const std::uint32_t *)data + at / TILE * (call.row_bytes / 4) * TILE + at % TILE;
        for (std::int64_t w = 0; w < call.row_bytes / 4; ++w) __builtin_memcpy(out + 4 * w, tile + w * TILE, 4);
    }

  private:
    const ReadTokens &call;
    std::size_t piece = 0;
    std::int64_t start = 0;  // of the piece
};

#include "recall_step.hpp"

}  // namespace

void best_pages(const BestPages &call, float *scratch, int threads) { choose_pages(call, scratch, threads); }

void remember(const RecallStep &call, const Recall &store) { Step(call, store).remember(); }

void recall(const RecallStep &call, const Recall &store, float *scratch, int threads) {
    Step(call, store).recall(scratch, threads);
}

void read_tokens(const ReadTokens &call, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t row = 0; row < call.rows; ++row) {
        RowReader reader(call);
        for (std::int64_t at = row * call.tokens; at < (row + 1) * call.tokens; ++at)
            reader.read(row, call.index[at], call.out + at * call.row_bytes);
    }
}

}  // namespace windlass::WINDLASS_SET
