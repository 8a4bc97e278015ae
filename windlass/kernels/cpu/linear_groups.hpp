// Linear layers of codes of 4 or 8 bits, `group` inputs of an output sharing a scale and perhaps a zero, in blocks of
// `block` outputs whose codes of one input lie side by side, the last block filled up. Of 4 bits, byte j of an input has
// the code of output j in its low nibble and that of output j + block / 2 in its high one: c stands for
// (c - middle) * scale + zero. Of 8 bits a byte is a code with its sign. `pairs` has, group by group or block by block,
// scale and zero (or the scale alone, of one column) of each output, in floats, or by block in bytes that are multiplied
// with `supers`, one for SUPER inputs. Included by `linear.cpp`.

constexpr int SUPER = 256;

template <std::size_t... I>
inline Floats evens(Floats a, Floats b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, int(2 * I)...);
}
template <std::size_t... I>
inline Floats odds(Floats a, Floats b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, int(2 * I + 1)...);
}

inline int bytes_of(Format format) { return format == Format::float32 ? 4 : format == Format::int8 ? 1 : 2; }

// LANES scales, or zeros, that lie side by side.
inline Floats read_scales(Format format, const std::uint8_t *from) {
    switch (format) {
        case Format::float32:
            return Row<Format::float32>::lanes(from, 0, 0);
        case Format::bfloat16:
            return Row<Format::bfloat16>::lanes(from, 0, 0);
        case Format::float16:
            return Row<Format::float16>::lanes(from, 0, 0);
        default:
            return Row<Format::int8>::lanes(from, 0, 0);
    }
}

// Scale and zero of LANES outputs, two by two.
inline void read_pairs(Format format, const std::uint8_t *from, Floats &scales, Floats &zeros) {
    if (format == Format::bfloat16) {
        const Words both = load<Words>(from);
        scales = bits_of(both << 16), zeros = bits_of(both & 0xffff0000u);
        return;
    }
    const Floats a = read_scales(format, from), b = read_scales(format, from + LANES * bytes_of(format));
    scales = evens(a, b, std::make_index_sequence<LANES>{}), zeros = odds(a, b, std::make_index_sequence<LANES>{});
}

inline int blocks_of(const Linear &call) { return (call.out + call.block - 1) / call.block; }

// Of these, those of a group of `in_group` inputs and LANES outputs from `output` on.
inline void pairs_of(const Linear &call, Format format, const std::uint8_t *from, int in_group, int group, int output, Floats &scales,
                     Floats &zeros) {
    const int bytes = bytes_of(format), groups = call.in / in_group;
    zeros = Floats{};
    if (call.is_by_block) {
        const std::int64_t row = (std::int64_t(output / call.block) * groups + group) * call.columns * call.block;
        from += (row + output % call.block) * bytes;
        scales = read_scales(format, from);
        if (call.columns == 2) zeros = read_scales(format, from + call.block * bytes);
        return;
    }
    from += (std::int64_t(group) * blocks_of(call) * call.block + output) * call.columns * bytes;
    if (call.columns == 1)
        scales = read_scales(format, from);
    else
        read_pairs(format, from, scales, zeros);
}
inline void pairs_of(const Linear &call, Format format, int group, int output, Floats &scales, Floats &zeros) {
    pairs_of(call, format, call.pairs, call.group, group, output, scales, zeros);
    if (!call.supers) return;
    Floats scale, zero;
    pairs_of(call, Format::float16, call.supers, SUPER, group * call.group / SUPER, output, scale, zero);
    scales *= scale, zeros *= zero;
}
inline void pairs_of(const Linear &call, int group, int output, Floats &scales, Floats &zeros) {
    pairs_of(call, call.pair_format, group, output, scales, zeros);
}
// The zeros of codes of 4 bits from which 8 is subtracted, as the kernels below do it.
inline void shift_zeros(const Linear &call, Floats scales, Floats &zeros) {
    if (call.middle != 8) zeros += scales * float(8 - call.middle);
}

// The results of a token from `row` on, at most `most` and all that are left. `sums` may change.
inline void put_results(const Linear &call, int row, int token, float *sums, int most) {
    const int count = std::min(most, call.out - row);
    const std::int64_t bytes = call.float_format == Format::float32 ? 4 : 2, at = (std::int64_t(token) * call.out + row) * bytes;
    float others[64];
    const auto add = [&](const std::uint8_t *from) {
        read_row(call.float_format, from, count, others);
        for (int n = 0; n < count; ++n) sums[n] += others[n];
    };
    if (call.bias) add(call.bias + row * bytes);
    put_row(call.float_format, call.result + at, sums, count);
    if (!call.added) return;
    read_row(call.float_format, call.result + at, count, sums);
    add(call.added + at);
    put_row(call.float_format, call.result + at, sums, count);
}

// The results of a token from `first` on, in bfloat16 and without a bias.
template <int VECTORS>
inline void put_brains(const Linear &call, int first, std::int64_t token, const Floats *sums) {
    const std::int64_t at = (token * call.out + first) * 2;
    UNROLLED for (int i = 0; i < VECTORS; ++i) {
        Floats own = rounded_lanes<Format::bfloat16>(sums[i]);
        if (call.added) own += Row<Format::bfloat16>::lanes(call.added + at, i * LANES, 0);
        store_rounded<Format::bfloat16>(call.result + at + i * LANES * 2, own);
    }
}

// The common parts of all kernels below: inputs and their sums by group, in float32, and the loop over blocks.
template <Format F>
class Grouped {
    static constexpr int BYTES = F == Format::float32 ? 4 : 2;

  public:
    const Linear &call;
    const int groups;
    float *sums;  // (tokens, groups)

    Grouped(const Linear &call, float *scratch) : call(call), groups(call.in / call.group), sums(scratch) {}

    float *rest() const { return sums + std::int64_t(call.tokens) * groups; }
    // Calls `take(i, LANES inputs of a token from i on)` for all of them, and adds them up.
    template <class Take>
    void read(int token, Take take) {
        const std::uint8_t *from = call.inputs + std::int64_t(token) * call.in * BYTES;
        for (int g = 0; g < groups; ++g) {
            Floats sum{};
            for (int i = g * call.group; i < (g + 1) * call.group; i += LANES) {
                const Floats x = Row<F>::lanes(from, i, 0);
                sum += x, take(i, x);
            }
            sums[std::int64_t(token) * groups + g] = sum_of(sum);
        }
    }
    std::int64_t row_bytes() const { return call.format == Format::int4 ? call.block / 2 : call.block; }
    const std::uint8_t *codes(int block) const { return call.weights + block * row_bytes() * call.in; }
    // Prefetches the scales of a block and group, which lie far from the previous group's.
    void prefetch_pairs(int block, int group) const {
        if (group >= groups) ++block, group -= groups;
        const std::int64_t blocks = blocks_of(call);
        if (group >= groups || block >= blocks) return;
        const int bytes = call.columns * bytes_of(call.pair_format);
        const std::int64_t row = call.is_by_block ? std::int64_t(block) * groups + group : group * blocks + block;
        const std::uint8_t *from = call.pairs + row * call.block * bytes;
        for (int line = 0; line < call.block * bytes; line += LINE) __builtin_prefetch(from + line);
    }
    template <class Kernel>
    static void all_blocks(Kernel &kernel, const Linear &call) {
        const int blocks = blocks_of(call);
#pragma omp for schedule(static) nowait
        for (int block = 0; block < blocks; ++block) {
            int token = 0;
            for (; token + 4 <= call.tokens; token += 4) kernel.template outputs<4>(block, token);
            if (token + 2 <= call.tokens) kernel.template outputs<2>(block, token), token += 2;
            if (token < call.tokens) kernel.template outputs<1>(block, token);
        }
    }
};

// Codes times inputs in float32, with any instruction set.
template <Format F, Format CODES, int BLOCK>
class GroupLinear {
    static constexpr int HALVES = CODES == Format::int4 ? 2 : 1;  // codes of a byte
    static constexpr int ROW_BYTES = BLOCK / HALVES, CHUNKS = ROW_BYTES / LANES;  // vectors of bytes of one input

  public:
    GroupLinear(const Linear &call, float *scratch) : shared(call, scratch), call(call), inputs(shared.rest()) {}

    void run() {
#pragma omp for schedule(static)
        for (int token = 0; token < call.tokens; ++token) {
            float *to = inputs + std::int64_t(token) * call.in;
            shared.read(token, [&](int i, Floats x) { store(to + i, x); });
        }
        Grouped<F>::all_blocks(*this, call);
    }

    template <int T>
    void outputs(int block, int token) {
        constexpr int STEP = T > 1 ? 2 / HALVES : CHUNKS < 4 ? CHUNKS : 4;  // chunks at once, whose sums the registers hold
        alignas(LINE) float results[T][BLOCK] = {};
        for (int g = 0; g < shared.groups; ++g) {
            shared.prefetch_pairs(block, g + 1);
            const std::uint8_t *codes = shared.codes(block) + std::int64_t(g) * call.group * ROW_BYTES;
            for (int chunk = 0; chunk < CHUNKS; chunk += STEP) add_group<T, STEP>(codes, block, token, g, chunk, results);
        }
        for (int t = 0; t < T; ++t) put_results(call, block * BLOCK, token + t, results[t], BLOCK);
    }

  private:
    Grouped<F> shared;
    const Linear &call;
    float *inputs;  // (tokens, in)

    template <int T, int STEP>
    void add_group(const std::uint8_t *codes, int block, int token, int group, int chunk, float (*results)[BLOCK]) {
        const float *from = inputs + std::int64_t(token) * call.in + std::int64_t(group) * call.group;
        Floats sums_of[T][STEP][HALVES];
        UNROLLED for (int t = 0; t < T; ++t)
            UNROLLED for (int c = 0; c < STEP; ++c) sums_of[t][c][0] = sums_of[t][c][HALVES - 1] = Floats{};
        for (int k = 0; k < call.group; ++k) {
            __builtin_prefetch(codes + k * ROW_BYTES + 1024);
            UNROLLED for (int c = 0; c < STEP; ++c) {
                const std::uint8_t *here = codes + k * ROW_BYTES + (chunk + c) * LANES;
                Floats levels[HALVES];
                if constexpr (CODES == Format::int4) {
                    const Ints bytes = wide_bytes(here);
                    levels[0] = Row<CODES>::levels(bytes), levels[1] = Row<CODES>::levels(bytes >> 4);
                } else {
                    levels[0] = Row<CODES>::lanes(here, 0, 0);
                }
                UNROLLED for (int t = 0; t < T; ++t) {
                    const Floats x = all(from[std::int64_t(t) * call.in + k]);
                    UNROLLED for (int half = 0; half < HALVES; ++half) sums_of[t][c][half] += levels[half] * x;
                }
            }
        }
        UNROLLED for (int c = 0; c < STEP; ++c)
            UNROLLED for (int half = 0; half < HALVES; ++half) {
                const int first = half * (BLOCK / 2) + (chunk + c) * LANES;
                Floats scales, zeros;
                pairs_of(call, group, block * BLOCK + first, scales, zeros);
                if (CODES == Format::int4) shift_zeros(call, scales, zeros);
                UNROLLED for (int t = 0; t < T; ++t) {
                    const Floats sum = all(shared.sums[std::int64_t(token + t) * shared.groups + group]);
                    float *to = results[t] + first;
                    store(to, fused(sums_of[t][c][half], scales, fused(sum, zeros, load<Floats>(to))));
                }
            }
    }
};

#include "linear_digits.hpp"

#if defined(__AVX512BF16__)
// Codes in pairs of bfloat16, in which they are exact, times inputs of float16 or float32 in as many parts of bfloat16 as
// make them exact.
//
// Of four inputs k, words of the rows of codes k and k + 2, and of k + 1 and k + 3, are interleaved: a lane then has
// two inputs of the same outputs, and each of its nibbles two inputs of one output. Lanes 0 to 7 of a sum are of the
// even inputs and the others of the odd ones.
template <Format F>
class NibblePairs {
    static constexpr int BLOCK = 64, PARTS = F == Format::float16 ? 2 : 3;
    static constexpr int SUMS = 8;          // vectors of sums of one token
    // Bytes of codes that are asked for before they are read: into the nearest cache, and into the next one.
    static constexpr int SOON = 512, LATER = 8192;

  public:
    NibblePairs(const Linear &call, float *scratch)
        : shared(call, scratch), call(call), inputs(reinterpret_cast<std::uint16_t *>(shared.rest())) {}

    void run() {
#pragma omp for schedule(static)
        for (int token = 0; token < call.tokens; ++token) {
            std::uint16_t *to = inputs + std::int64_t(token) * PARTS * call.in;
            shared.read(token, [&](int i, Floats x) {
                for (int part = 0; part < PARTS; ++part) {
                    const __m256i brains = (__m256i)_mm512_cvtneps_pbh((__m512)x);
                    // Of each four inputs the second and the third change places.
                    const __m256i pairs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(brains, 0xd8), 0xd8);
                    _mm256_storeu_si256((__m256i *)(to + std::int64_t(part) * call.in + i), pairs);
                    x -= bits_of((Words)_mm512_cvtepu16_epi32(brains) << 16);
                }
            });
        }
        Grouped<F>::all_blocks(*this, call);
    }

    template <int T>
    void outputs(int block, int token) {
        Floats results[T][SUMS];
        for (int t = 0; t < T; ++t)
            for (int s = 0; s < SUMS; ++s) results[t][s] = Floats{};
        const std::uint8_t *codes = shared.codes(block);
        for (int g = 0; g < shared.groups; ++g) {
            shared.prefetch_pairs(block, g + 2);
            const std::uint8_t *here = codes + std::int64_t(g) * call.group * (BLOCK / 2);
            if constexpr (T <= 2)
                add_group<T, 0, 2>(here, block, token, g, results);
            else {
                add_group<T, 0, 1>(here, block, token, g, results);
                add_group<T, 1, 1>(here, block, token, g, results);
            }
        }
        for (int t = 0; t < T; ++t)
            for (int s = 0; s < SUMS; ++s)
                for (int lane = 0; lane < 8; ++lane) {
                    const int n = block * BLOCK + output(s, lane);
                    if (n < call.out) put_result(call, n, token + t, results[t][s][lane] + results[t][s][lane + 8]);
                }
    }

  private:
    Grouped<F> shared;
    const Linear &call;
    std::uint16_t *inputs;  // (tokens, PARTS, in)

    // Which output of a block a lane of sum `s` belongs to: four sums are of the low words of a vector, four of the high.
    static constexpr int output(int s, int lane) {
        const int nibble = s & 3;
        return (lane >> 2 & 1) * 16 + (s >> 2) * 8 + (lane & 3) * 2 + (nibble >> 1) + 32 * (nibble & 1);
    }
    template <int S, std::size_t... I>
    static Floats in_order_of(Floats low, Floats high, std::index_sequence<I...>) {
        return __builtin_shufflevector(low, high, (output(S, int(I)) & 31)...);
    }
    template <int S, int T>
    void put_group(Floats (*results)[SUMS], const Floats (*sums_of)[4], const Floats *scales, const Floats *zeros,
                   const Floats *totals) {
        constexpr int FIRST = (S & 1) * 2;
        const Floats scale = in_order_of<S>(scales[FIRST], scales[FIRST + 1], std::make_index_sequence<LANES>{});
        const Floats zero = in_order_of<S>(zeros[FIRST], zeros[FIRST + 1], std::make_index_sequence<LANES>{});
        UNROLLED for (int t = 0; t < T; ++t) results[t][S] = fused(sums_of[t][S & 3], scale, fused(totals[t], zero, results[t][S]));
    }

    template <int T, int FIRST, int HALVES>
    void add_group(const std::uint8_t *codes, int block, int token, int group, Floats (*results)[SUMS]) {
        static const std::int16_t LEVELS[32] = {
            -16128, -16160, -16192, -16224, -16256, -16320, -16384, -16512, 0, 16256, 16384, 16448, 16512, 16544, 16576, 16608,
            -16128, -16160, -16192, -16224, -16256, -16320, -16384, -16512, 0, 16256, 16384, 16448, 16512, 16544, 16576, 16608};
        const __m512i levels = _mm512_loadu_si512(LEVELS);
        const std::uint16_t *from = inputs + std::int64_t(token) * PARTS * call.in + std::int64_t(group) * call.group;
        Floats sums_of[HALVES][T][4];
        UNROLLED for (int h = 0; h < HALVES; ++h)
            UNROLLED for (int t = 0; t < T; ++t)
                UNROLLED for (int n = 0; n < 4; ++n) sums_of[h][t][n] = Floats{};
        for (int k = 0; k < call.group; k += 4) {
            const std::uint8_t *row = codes + k * (BLOCK / 2);
            if (FIRST == 0 && token == 0)
                for (int line = 0; line < 2 * LINE; line += LINE) {
                    __builtin_prefetch(row + SOON + line), __builtin_prefetch(row + LATER + line, 0, 2);
                }
            const __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(row + LINE);
            UNROLLED for (int h = 0; h < HALVES; ++h) {
                const __m512i words = FIRST + h ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
                UNROLLED for (int n = 0; n < 4; ++n) {
                    const __m512i code = _mm512_permutexvar_epi16(n ? _mm512_srli_epi16(words, 4 * n) : words, levels);
                    UNROLLED for (int t = 0; t < T; ++t)
                        UNROLLED for (int part = 0; part < PARTS; ++part)
                            sums_of[h][t][n] =
                                dot(sums_of[h][t][n], (__m512bh)code, spread(from + (t * PARTS + part) * std::int64_t(call.in) + k));
                }
            }
        }
        Floats scales[4], zeros[4], totals[T];
        UNROLLED for (int i = 0; i < 4; ++i) {
            pairs_of(call, group, block * BLOCK + i * LANES, scales[i], zeros[i]);
            shift_zeros(call, scales[i], zeros[i]);
        }
        UNROLLED for (int t = 0; t < T; ++t)
            totals[t] = (Floats)_mm512_maskz_set1_epi32(0x00ff, bits(shared.sums[std::int64_t(token + t) * shared.groups + group]));
        UNROLLED for (int h = 0; h < HALVES; ++h) {
            if (FIRST + h == 0) {
                put_group<0, T>(results, sums_of[h], scales, zeros, totals), put_group<1, T>(results, sums_of[h], scales, zeros, totals);
                put_group<2, T>(results, sums_of[h], scales, zeros, totals), put_group<3, T>(results, sums_of[h], scales, zeros, totals);
            } else {
                put_group<4, T>(results, sums_of[h], scales, zeros, totals), put_group<5, T>(results, sums_of[h], scales, zeros, totals);
                put_group<6, T>(results, sums_of[h], scales, zeros, totals), put_group<7, T>(results, sums_of[h], scales, zeros, totals);
            }
        }
    }
    static int bits(float x) {
        int word;
        __builtin_memcpy(&word, &x, 4);
        return word;
    }
    // Two inputs in the lower half of the lanes, the next two in the upper.
    static __m512bh spread(const std::uint16_t *from) {
        int even, odd;
        __builtin_memcpy(&even, from, 4), __builtin_memcpy(&odd, from + 2, 4);
        return (__m512bh)_mm512_mask_set1_epi32(_mm512_set1_epi32(even), 0xff00, odd);
    }
};
#endif

template <Format F>
inline void linear_groups(const Linear &call, float *scratch) {
#if defined(__AVX2__)
    if (F == Format::bfloat16 && call.format == Format::int8) return DigitGroups<Format::int8, 64>(call, scratch).run();
#endif
    if (call.format == Format::int8) return GroupLinear<F, Format::int8, 64>(call, scratch).run();
    if constexpr (F == Format::bfloat16) {
        if (call.block == 64) return DigitGroups<Format::int4, 64>(call, scratch).run();
        return DigitGroups<Format::int4, 32>(call, scratch).run();
    } else {
#if defined(__AVX512BF16__)
        if (call.block == 64) return NibblePairs<F>(call, scratch).run();
#endif
        if (call.block == 64) return GroupLinear<F, Format::int4, 64>(call, scratch).run();
        GroupLinear<F, Format::int4, 32>(call, scratch).run();
    }
}

// The codes of LANES outputs from `first` on, which stand in one block.
template <Format CODES>
class BlockColumn {
  public:
    BlockColumn(const Linear &call, int first)
        : row_bytes(CODES == Format::int4 ? call.block / 2 : call.block), middle(all(float(call.middle))) {
        const int place = first % call.block, half = call.block / 2;
        is_high = CODES == Format::int4 && place >= half;
        codes = call.weights + std::int64_t(first / call.block) * row_bytes * call.in + (is_high ? place - half : place);
    }
    // Decodes the codes of input `k`.
    Floats decoded(int k, Floats scale, Floats zero) const {
        const Ints bytes = wide_bytes(codes + k * row_bytes);
        if constexpr (CODES == Format::int8) return __builtin_convertvector(bytes, Floats) * scale + zero;
        const Ints levels = (is_high ? bytes >> 4 : bytes) & 15;
        return (__builtin_convertvector(levels, Floats) - middle) * scale + zero;
    }

  private:
    const std::int64_t row_bytes;
    const Floats middle;
    bool is_high;
    const std::uint8_t *codes;
};

// Decodes the codes of one block's outputs, into rows of `call.in` numbers: LANES outputs at once, and of so many inputs
// as stand in the lanes of a vector.
template <Format CODES, Format F>
inline void decode_block(const Linear &call, int block, std::uint8_t *to) {
    constexpr int PER_LANE = F == Format::float32 ? 1 : 2, TILE = LANES * PER_LANE, BYTES = 4 / PER_LANE;
    const int here = std::min(call.block, call.out - block * call.block);
    for (int n = 0; n < here; n += LANES) {
        const BlockColumn<CODES> column(call, block * call.block + n);
        Floats scale{}, zero{};
        for (int i = 0; i < call.in; i += TILE) {
            const int inputs = std::min(TILE, call.in - i);
            Floats tile[LANES];
            for (int j = 0; j < LANES; ++j) {
                const int k = i + j * PER_LANE;
                if (k >= call.in) {
                    tile[j] = Floats{};
                    continue;
                }
                if (k % call.group == 0) pairs_of(call, k / call.group, block * call.block + n, scale, zero);
                tile[j] = column.decoded(k, scale, zero);
                if constexpr (PER_LANE == 2)
                    tile[j] = bits_of(narrow<F>((Words)tile[j]) | narrow<F>((Words)column.decoded(k + 1, scale, zero)) << 16);
            }
            transpose(tile);
            std::uint8_t *from = to + (std::int64_t(n) * call.in + i) * BYTES;
            for (int row = 0; row < std::min(LANES, here - n); ++row, from += std::int64_t(call.in) * BYTES)
                if (inputs == TILE)
                    store(reinterpret_cast<float *>(from), tile[row]);
                else
                    __builtin_memcpy(from, &tile[row], std::size_t(inputs) * BYTES);
        }
    }
}
template <Format CODES>
inline void decode_block(const Linear &call, int block, std::uint8_t *to) {
    switch (call.float_format) {
        case Format::bfloat16:
            return decode_block<CODES, Format::bfloat16>(call, block, to);
        case Format::float16:
            return decode_block<CODES, Format::float16>(call, block, to);
        default:
            return decode_block<CODES, Format::float32>(call, block, to);
    }
}

// Decodes the codes of one output.
template <Format CODES>
inline void decode_output(const Linear &call, std::int64_t output, std::uint8_t *to) {
    constexpr int GROUP = 32;  // inputs decoded at once
    const int half = call.block / 2, place = int(output % call.block), lane = int(output % LANES);
    const std::int64_t row_bytes = CODES == Format::int4 ? half : call.block;
    const std::uint8_t *codes = call.weights + output / call.block * row_bytes * call.in + place % row_bytes;
    const int bytes = call.float_format == Format::float32 ? 4 : 2;
    float numbers[GROUP], scale = 0, zero = 0;
    for (int i = 0; i < call.in; i += GROUP) {
        const int inputs = std::min(GROUP, call.in - i);
        for (int k = 0; k < inputs; ++k) {
            if ((i + k) % call.group == 0) {
                Floats scales, zeros;
                pairs_of(call, (i + k) / call.group, int(output) - lane, scales, zeros);
                scale = scales[lane], zero = zeros[lane];
            }
            const std::uint8_t code = codes[(i + k) * row_bytes];
            if constexpr (CODES == Format::int4)
                numbers[k] = float((place < half ? code & 15 : code >> 4) - call.middle) * scale + zero;
            else
                numbers[k] = float(std::int8_t(code)) * scale + zero;
        }
        put_row(call.float_format, to + std::int64_t(i) * bytes, numbers, inputs);
    }
}
