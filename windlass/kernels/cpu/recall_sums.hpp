// Products of queries with the keys of a recall store.
// Included inside the namespace of one instruction set, after encode.hpp.
//
// Keys lie in tiles of 16 tokens, four bytes of one token beside the same four of the next: a vector holds one word of
// 16 tokens, and the products of a query with 16 keys need no sum across lanes. Queries of codes are whole numbers of 8
// bits times a scale. Where there are instructions for it, codes are multiplied as they are, elsewhere in float32.

constexpr int TILE = 16, PAGE = 8;
constexpr int PARTS = TILE / LANES;  // vectors of a word of a tile
constexpr int QUERIES = 4;           // whose sums the registers hold
constexpr int TILES = 2;             // that are read for each number of a query
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Channels that a word holds, and their places in a key.
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
        return from_halves(i == 0 ? w & 0xffffu : w >> 16);
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

// The query's factor for channel number `i` of a word, 0 where a row ends before its last word does.
template <Format F>
float of_word(const float *query, int word, int i, int channels) {
    const int channel = Word<F>::channel(word, i, channels);
    return channel < 0 || channel >= channels ? 0.0f : query[channel];
}

typedef Floats Products[TILES][QUERIES][PARTS];

// Keys of 16 tokens, and which of these may be read.
struct Tile {
    const std::uint32_t *keys;
    const std::uint16_t *scales;  // token by token (null unless low-bit)
    const std::uint8_t *allowed;
};
typedef Tile Tiles[TILES];

// Tiles that queries are multiplied with one after the other, and those that are prefetched meanwhile.
struct TilesAsHeld {
    const Tiles &tiles, &next;
};

// The step of which a query's numbers are multiples.
inline float step_of(const float *query, int channels) {
    float most = 0;
    for (int c = 0; c < channels; ++c) most = std::max(most, std::fabs(query[c]));
    return most > 0 ? most / 127 : 1;
}
inline int whole(float number, float step) { return int(std::lrint(number / step)); }

// Queries (count, channels) of a kv head: rounded where keys are codes, and then in multiples of `units`.
struct QueryRows {
    const float *numbers;
    int count, channels, words, group_bits;
    std::vector<float> units;
};
template <Format F>
QueryRows query_rows(const float *numbers, int count, const BestPages &call) {
    const int channels = call.channels;
    QueryRows rows{numbers, count, channels, call.words, call.group_bits, std::vector<float>(count, 1.0f)};
    if (F == Format::int8 || F == Format::int4)
        for (int q = 0; q < count; ++q) rows.units[q] = step_of(numbers + q * channels, channels);
    return rows;
}

// The queries of one kv head, and the sums of their products with the codes of some tiles. Codes of int4 count with
// their scales and offsets.
template <Format F>
class Sums {
    typedef Word<F> W;

  public:
    static constexpr Format FORMAT = F;
    typedef TilesAsHeld Held;
    explicit Sums(const QueryRows &rows)
        : words(rows.words), channels(rows.channels), group_bits(rows.group_bits), numbers(rows.count * words * W::COUNT) {
        const bool is_code = F == Format::int8 || F == Format::int4;
        for (int q = 0; q < rows.count; ++q)
            for (int w = 0; w < words; ++w)
                for (int i = 0; i < W::COUNT; ++i) {
                    const float number = of_word<F>(rows.numbers + q * rows.channels, w, i, rows.channels);
                    numbers[(q * words + w) * W::COUNT + i] = is_code ? whole(number, rows.units[q]) : number;
                }
    }
    Held held(const Tiles &tiles, const Tiles &next) const { return {tiles, next}; }
    void of(const Held &held, int first, Products &sums) const {
        const Tiles &tiles = held.tiles;
        const float *query = numbers.data() + std::size_t(first) * words * W::COUNT;
        for (int t = 0; t < TILES; ++t) {
            const std::uint32_t *tile = tiles[t].keys;
            for (auto &each : sums[t])
                for (auto &part : each) part = Floats{};
            std::vector<GroupPairs> pairs;  // of all groups, for each part
            const int groups = scales_of(channels, group_bits) / 2;
            for (int p = 0; F == Format::int4 && p < PARTS; ++p)
                for (int g = 0; g < groups; ++g) pairs.emplace_back(tiles[t].scales + p * LANES * 2 * groups, groups, g);
            for (int w = 0; w < words; ++w)
                for (int i = 0; i < W::COUNT; ++i) {
                    const int channel = W::channel(w, i, channels);
                    if (F == Format::int4 && channel < 0) continue;
                    for (int p = 0; p < PARTS; ++p) {
                        Floats level = W::level(load<Words>(tile + w * TILE + p * LANES), i);
                        if constexpr (F == Format::int4) {
                            const GroupPairs &own = pairs[p * groups + (channel >> group_bits)];
                            level = level * own.scales + own.offsets;
                        }
                        for (int q = 0; q < QUERIES; ++q)
                            sums[t][q][p] = sums[t][q][p] + level * query[(q * words + w) * W::COUNT + i];
                    }
                }
        }
    }

  private:
    int words, channels, group_bits;
    std::vector<float> numbers;
};

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define WINDLASS_CODE_SUMS
// Codes of int8 times whole numbers.
class CodeSums {
  public:
    static constexpr Format FORMAT = Format::int8;
    typedef TilesAsHeld Held;
    explicit CodeSums(const QueryRows &rows)
        : words(rows.words), numbers(std::size_t(rows.count) * words), offsets(rows.count) {
        for (int q = 0; q < rows.count; ++q) {
            const float *query = rows.numbers + q * rows.channels;
            for (int w = 0; w < words; ++w)
                for (int i = 0; i < 4; ++i) {
                    const int number = whole(of_word<FORMAT>(query, w, i, rows.channels), rows.units[q]);
                    ((std::int8_t *)(numbers.data() + q * words + w))[i] = std::int8_t(number);
                    offsets[q] += number * OFFSET;
                }
        }
    }
    Held held(const Tiles &tiles, const Tiles &next) const { return {tiles, next}; }
#if defined(__AVX512VNNI__)
    void of(const Held &held, int first, Products &sums) const {
        const Tiles &tiles = held.tiles, &next = held.next;
        const std::int32_t *query = numbers.data() + std::size_t(first) * words;
        __m512i totals[TILES][QUERIES];
        for (auto &each : totals)
            for (auto &total : each) total = _mm512_setzero_si512();
        for (int w = 0; w < words; ++w) {
            __m512i codes[TILES];
            for (int t = 0; t < TILES; ++t) {
                codes[t] = _mm512_xor_si512(_mm512_loadu_si512(tiles[t].keys + w * TILE), _mm512_set1_epi8(char(0x80)));
                __builtin_prefetch(next[t].keys + w * TILE);  // tiles are too short to foresee
            }
            for (int q = 0; q < QUERIES; ++q) {
                const __m512i number = _mm512_set1_epi32(query[q * words + w]);
                for (int t = 0; t < TILES; ++t) totals[t][q] = _mm512_dpbusd_epi32(totals[t][q], codes[t], number);
            }
        }
        for (int t = 0; t < TILES; ++t)
            for (int q = 0; q < QUERIES; ++q) {
                const __m512i total = _mm512_sub_epi32(totals[t][q], _mm512_set1_epi32(offsets[first + q]));
                sums[t][q][0] = (Floats)_mm512_cvtepi32_ps(total);
            }
    }
#else
    void of(const Held &held, int first, Products &sums) const {
        const Tiles &tiles = held.tiles, &next = held.next;
        const std::int32_t *query = numbers.data() + std::size_t(first) * words;
        for (int t = 0; t < TILES; ++t)
            for (int p = 0; p < PARTS; ++p) {
                const std::uint32_t *tile = tiles[t].keys + p * LANES;
                __m256i totals[QUERIES];
                for (__m256i &total : totals) total = _mm256_setzero_si256();
                for (int w = 0; w < words; ++w) {
                    const __m256i codes = _mm256_loadu_si256((const __m256i *)(tile + w * TILE));
                    if (p == 0) __builtin_prefetch(next[t].keys + w * TILE);
                    for (int q = 0; q < QUERIES; ++q) {
                        // Codes give their sign to the other factor. Two products of 2 * 128 * 127 fit into 16 bits.
                        const __m256i number = _mm256_set1_epi32(query[q * words + w]);
                        const __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(number, codes));
                        totals[q] = _mm256_add_epi32(totals[q], _mm256_madd_epi16(pair, _mm256_set1_epi16(1)));
                    }
                }
                for (int q = 0; q < QUERIES; ++q) sums[t][q][p] = (Floats)_mm256_cvtepi32_ps(totals[q]);
            }
    }
#endif

  private:
#if defined(__AVX512VNNI__)
    static constexpr int OFFSET = 128;  // which codes are too large by, to have no sign
#else
    static constexpr int OFFSET = 0;
#endif
    int words;
    std::vector<std::int32_t> numbers;  // (queries, words), four to each
    std::vector<std::int32_t> offsets;
};

// Codes of int4 times whole numbers, in groups of 16 channels, which four words have in one half of their bits. Both
// halves are whole groups.
class GroupSums {
    static constexpr int GROUP_WORDS = 4;

    // A group of LANES tokens, without signs.
#if defined(__AVX512VNNI__)
    struct Codes {
        __m512i words[GROUP_WORDS];

        Codes() = default;
        [[gnu::always_inline]] Codes(const std::uint32_t *from, int shift) {
            for (int i = 0; i < GROUP_WORDS; ++i) {
                const __m512i word = _mm512_loadu_si512(from + i * TILE);
                words[i] = _mm512_and_si512(shift ? _mm512_srli_epi32(word, 4) : word, _mm512_set1_epi8(15));
            }
        }
        [[gnu::always_inline]] Floats times(const std::int32_t *query) const {
            __m512i total = _mm512_setzero_si512();
            for (int i = 0; i < GROUP_WORDS; ++i) total = _mm512_dpbusd_epi32(total, words[i], _mm512_set1_epi32(query[i]));
            return (Floats)_mm512_cvtepi32_ps(total);
        }
    };
#else
    struct Codes {
        __m256i words[GROUP_WORDS];

        Codes() = default;
        [[gnu::always_inline]] Codes(const std::uint32_t *from, int shift) {
            for (int i = 0; i < GROUP_WORDS; ++i) {
                const __m256i word = _mm256_loadu_si256((const __m256i *)(from + i * TILE));
                words[i] = _mm256_and_si256(shift ? _mm256_srli_epi32(word, 4) : word, _mm256_set1_epi8(15));
            }
        }
        [[gnu::always_inline]] Floats times(const std::int32_t *query) const {
            __m256i pairs = _mm256_setzero_si256();  // of 16 bits: 4 * 2 * 15 * 127 at most
            for (int i = 0; i < GROUP_WORDS; ++i)
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(words[i], _mm256_set1_epi32(query[i])));
            return (Floats)_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    };
#endif
    struct Group {
        Codes codes;
        Floats scales, rest;
    };

  public:
    // Tiles whose groups are unpacked once for all queries, in the order in which these add them up.
    struct Held {
        Group groups[TILES][PARTS][MAX_CHANNELS / 16];

        Held(const Tiles &tiles, const Tiles &next, int count) {
            for (int t = 0; t < TILES; ++t)
                for (int w = 0; w < count / 2; ++w) {
                    const std::uint32_t *words = tiles[t].keys + w * GROUP_WORDS * TILE;
                    for (int i = 0; i < GROUP_WORDS; ++i) __builtin_prefetch(next[t].keys + (w * GROUP_WORDS + i) * TILE);
                    for (const int half : {0, 1}) {
                        const int number = w + half * (count / 2);
                        __builtin_prefetch(next[t].scales + number * 2 * TILE);
                        for (int p = 0; p < PARTS; ++p) {
                            Group &group = groups[t][p][2 * w + half];
                            const GroupPairs pairs(tiles[t].scales + p * LANES * 2 * count, count, number);
                            group.codes = Codes(words + p * LANES, 4 * half);
                            group.scales = pairs.scales;
                            group.rest = pairs.offsets - 8.0f * pairs.scales;  // codes are too large by 8
                        }
                    }
                }
        }
    };
    static constexpr Format FORMAT = Format::int4;
    static bool knows(const BestPages &call) { return call.group_bits == 4 && call.channels % 32 == 0; }

    explicit GroupSums(const QueryRows &rows)
        : groups(rows.words / GROUP_WORDS * 2), numbers(std::size_t(rows.count) * groups * GROUP_WORDS), totals(std::size_t(rows.count) * groups) {
        for (int q = 0; q < rows.count; ++q)
            for (int c = 0; c < rows.channels; ++c) {
                const int number = whole(rows.numbers[q * rows.channels + c], rows.units[q]);
                ((std::int8_t *)(numbers.data() + std::size_t(q) * groups * GROUP_WORDS))[c] = std::int8_t(number);
                totals[q * groups + c / 16] += float(number);
            }
    }
    Held held(const Tiles &tiles, const Tiles &next) const { return Held(tiles, next, groups); }
    void of(const Held &held, int first, Products &sums) const {
        for (int t = 0; t < TILES; ++t)
            for (int p = 0; p < PARTS; ++p) {
                Floats own[QUERIES] = {};
                const Group *group = held.groups[t][p];
                for (int w = 0; w < groups / 2; ++w)
                    for (const int number : {w, w + groups / 2}) {
                        const Codes codes = group->codes;
                        const Floats scales = group->scales, rest = group->rest;
                        ++group;
                        for (int q = 0; q < QUERIES; ++q) {
                            const std::size_t at = std::size_t(first + q) * groups + number;
                            own[q] += scales * codes.times(numbers.data() + at * GROUP_WORDS) + rest * totals[at];
                        }
                    }
                for (int q = 0; q < QUERIES; ++q) sums[t][q][p] = own[q];
            }
    }

  private:
    int groups;
    std::vector<std::int32_t> numbers;  // (queries, groups, words of a group), four to each
    std::vector<float> totals;          // (queries, groups): sums of these
};
#endif

// Keys count without their mean: it adds the same to all products of a query, and only differences of these matter.
//
