// Arguments of kernels. All pointers are to tensors that Python keeps alive and has checked.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace windlass {

enum class Format : int { float32, bfloat16, float16, int8, int4 };

// Calls `use` with the format as a compile-time constant.
template <class Use>
void with_format(Format format, Use use) {
    switch (format) {
        case Format::float32:
            return use(std::integral_constant<Format, Format::float32>{});
        case Format::bfloat16:
            return use(std::integral_constant<Format, Format::bfloat16>{});
        case Format::float16:
            return use(std::integral_constant<Format, Format::float16>{});
        case Format::int8:
            return use(std::integral_constant<Format, Format::int8>{});
        case Format::int4:
            return use(std::integral_constant<Format, Format::int4>{});
    }
}

// Scales of a token of so many channels: one, or a scale and an offset for each 1 << group_bits channels.
inline int scales_of(int channels, int group_bits) { return group_bits ? 2 * (((channels - 1) >> group_bits) + 1) : 1; }

// The keys or the values of a layer, (batch, kv_heads, slots, row_bytes), contiguous.
// A number of int8 is code * scale + mean: one scale per slot and kv head, one mean per channel. A number of int4 is
// code * scale + offset + mean: `scales` has both side by side, for each 1 << group_bits channels.
// Meant are `channels` of the `held` ones, from `first` on: values may be a part of their keys.
struct PackedStates {
    const std::uint8_t *data;
    const std::uint16_t *scales;  // float16 (null unless low-bit)
    const float *means;           // (kv_heads, held), null where all are 0
    int channels, first, held;
    std::size_t row_bytes;
    // Some slots are held at full precision, too: slot s at entry ring_index[s], -1 for none. May be null.
    const std::uint8_t *full_precision;  // (batch, kv_heads, ring_entries, held) in `ring_format`
    const std::int32_t *ring_index;      // (batch, kv_heads, slots)
    int ring_entries;
    Format ring_format;
    int group_bits;

    std::size_t slot_scales() const { return std::size_t(scales_of(held, group_bits)); }
    std::int32_t ring_entry(std::size_t slot) const { return full_precision ? ring_index[slot] : -1; }
    // Those of one head, number `index` of all rows' heads, by themselves.
    PackedStates of_head(std::size_t index, int head, int slots) const {
        PackedStates own = *this;
        own.data += index * slots * row_bytes;
        if (scales) own.scales += index * slots * slot_scales();
        if (means) own.means += std::size_t(head) * held;
        if (full_precision) {
            own.full_precision += index * ring_entries * held * (ring_format == Format::float32 ? 4 : 2);
            own.ring_index += index * slots;
        }
        return own;
    }
};

// Rotary positions of one set of logits. Nothing is rotated where `keys` is null.
struct Branch {
    const std::int64_t *queries;  // (batch, score_heads, tokens)
    const std::int32_t *keys;     // (batch, score_heads, slots)
};

struct Attend {
    int batch, heads, kv_heads, score_heads, tokens, slots;
    int row_tokens, row_heads;  // queries and heads that a row has in memory, of which `tokens` and `heads` are meant
    int some;                   // queries per row at once, at most
    bool is_whole;              // one piece of work
    Format format;        // of keys and values
    Format float_format;  // of queries and the result
    PackedStates keys, values;
    const std::uint8_t *queries;          // innermost dimension contiguous
    std::int64_t query_strides[3];        // of batch, heads, tokens (in numbers)
    std::uint8_t *out;                    // (batch, tokens, heads, value channels)
    const std::int32_t *slot_positions;   // (batch, score_heads, slots)
    const std::int64_t *query_positions;  // (batch, tokens)
    Branch near, far;                     // `far` beyond `near_window` (its `keys` null: near everywhere)
    int near_window;
    const float *cos, *sin;  // (length, pairs)
    int pairs;
    bool is_steady;                    // each row of the tables is the one before it, rotated by row 1
    const float *query_gain;           // (key channels), of rotated queries (may be null)
    float scale, softcap;              // softcap 0: none
    int sliding_window, reach, sinks;  // window and reach: INT32_MAX for none
    int attention_chunk;               // INT32_MAX for none
    const float *sink_logits;          // (heads), may be null
    const float *log_counts;           // (batch, score_heads, slots), may be null
    const std::int64_t *observed;      // (batch, observations) columns or -1
    int observations;
    float *mass_rows;  // (batch, kv_heads, observations, slots), may be null
    float *mass_rest;  // (batch, kv_heads, slots), may be null
    int used = INT32_MAX;  // slots from here on are free, and need not be looked at

    // Without masses, part number `number` of the queries of all heads.
    Attend part(int number) const {
        Attend found = *this;
        const int bytes = float_format == Format::float32 ? 4 : 2, first = number * some;
        found.tokens = tokens - first < some ? tokens - first : some, found.query_positions += first;
        found.queries += first * query_strides[2] * bytes, found.out += std::int64_t(first) * row_heads * values.channels * bytes;
        for (Branch *branch : {&found.near, &found.far})
            if (branch->queries) branch->queries += first;
        return found;
    }
    // The queries that share one kv head of one row, as one piece of work.
    Attend head(int row, int kv_head) const {
        Attend found = *this;
        const std::int64_t bytes = float_format == Format::float32 ? 4 : 2, index = std::int64_t(row) * kv_heads + kv_head,
                           score = std::int64_t(row) * score_heads + (score_heads == 1 ? 0 : kv_head);
        found.batch = found.kv_heads = found.score_heads = 1, found.heads = group(), found.is_whole = true;
        found.keys = keys.of_head(index, kv_head, slots), found.values = values.of_head(index, kv_head, slots);
        found.queries += bytes * (row * query_strides[0] + kv_head * group() * query_strides[1]);
        found.out += bytes * values.channels * (std::int64_t(row) * row_tokens * row_heads + kv_head * group());
        found.slot_positions += score * slots, found.query_positions += std::int64_t(row) * row_tokens;
        for (Branch *branch : {&found.near, &found.far}) {
            if (branch->queries) branch->queries += score * row_tokens;
            if (branch->keys) branch->keys += score * slots;
        }
        if (sink_logits) found.sink_logits += kv_head * group();
        if (log_counts) found.log_counts += score * slots;
        return found;
    }
    int parts() const { return (tokens + some - 1) / some; }
    // Whether there are so many parts of heads that each is work of its own, whatever the number of threads.
    bool has_many_parts() const { return !has_mass() && parts() > 1 && parts() * batch * kv_heads >= 16; }
    int group() const { return heads / kv_heads; }
    bool has_far() const { return far.keys != nullptr; }
    bool has_mass() const { return mass_rows != nullptr || mass_rest != nullptr; }
    // Whether keys are rotated once for many queries, and each head is work of its own.
    bool has_many_queries() const;
    bool has_steady_keys() const { return is_steady && !has_many_queries(); }
};

// Keys rotated to rotary positions, or values as they are, of the first `used` slots.
struct Rotate {
    int batch, kv_heads, score_heads, slots, used;
    Format format, float_format;  // of `packed` and of the result
    PackedStates packed;
    const std::int32_t *positions;  // (batch, score_heads, slots) (null: no rotation)
    const float *cos, *sin;         // (length, pairs)
    int pairs;
    std::uint8_t *out;  // (batch, kv_heads, used, channels)
};

// The cosine of each key with the mean direction of its row and head.
struct MeanKeyCosine {
    int batch, kv_heads, score_heads, slots;
    Format format;
    PackedStates keys;
    const std::int32_t *positions;  // (batch, score_heads, slots)
    float *out;                     // (batch, kv_heads, slots)
};

// The attention of a chunk's queries to each slot. The keys are rotated, and the log-sum-exps known.
struct QueryMass {
    int batch, heads, kv_heads, mask_heads, tokens, used, channels;
    int key_slots, slots, outputs;  // slots that keys have room for, and slots of the result
    Format format;                  // of queries and keys
    const std::uint8_t *queries;    // (batch, heads, tokens, channels)
    const std::uint8_t *keys;       // (batch, kv_heads, key_slots, channels), of which the first `used` count
    const bool *mask;               // (batch, mask_heads, tokens, used): which slots a query sees
    const float *log_counts;        // (batch, mask_heads, used), may be null
    const float *lse;               // (batch, heads, tokens)
    const std::int32_t *targets;    // (batch, tokens): the row of the result that a query adds to, -1 for none
    float scale;
    float *mass;  // (batch, kv_heads, outputs, slots)
};

// The `count` pages of 8 tokens that matter most to the queries of each kv head, the best first. Where there are digests,
// the largest and the least number of each channel of each page, only the `candidates` whose digests promise most are
// looked at.
struct BestPages {
    struct Piece {
        const std::uint32_t *keys;    // (batch, kv_heads, tiles, words, 16)
        const std::uint16_t *scales;  // (batch, kv_heads, tiles * 16, scales_of), float16 (null unless low-bit)
        int tiles;
    };
    struct Digests {
        Piece largest, least;
    };
    int batch, kv_heads, score_heads, queries_per_head, tokens, channels, words, kept, count;
    Format format;
    int group_bits;                 // of keys
    const float *queries;           // (batch, kv_heads, queries_per_head, channels): of each member all tokens
    const bool *is_query;           // (batch, tokens)
    std::vector<Piece> pieces;     // one after the other
    std::vector<Digests> digests;  // as well
    int candidates;                // at least `count`
    const std::int32_t *positions;  // (batch, slots), negative where a token is no part of the text
    const float *kept_index;        // (batch, score_heads, kept): tokens outside of all pages, -1 for none
    std::int64_t *best;             // (batch, kv_heads, count)
    std::uint8_t *is_read;          // (batch, kv_heads, count * 8): whether a token of these pages may be recalled

    std::int64_t slots() const {
        std::int64_t sum = 0;
        for (const auto &piece : pieces) sum += std::int64_t(piece.tiles) * 16;
        return sum;
    }
    bool has_digests() const { return !digests.empty(); }
    // The most pages that the tiles of all candidates have, read two tiles at a time.
    std::int64_t candidate_pages() const { return has_digests() ? (std::int64_t(candidates) + 1) / 2 * 4 : 0; }
    // Floats of scratch: each query's product with each page, again with the candidates, and a byte for each token and page
    // of a head, and of a row.
    std::size_t scratch() const {
        const std::size_t products = slots() / 8 + candidate_pages(), bytes = (score_heads + 1) * (slots() + slots() / 8);
        return std::size_t(batch) * (std::size_t(kv_heads) * queries_per_head * products + bytes / 4 + 1);
    }
};

// Rows of some tokens out of pieces (rows, tokens, row_bytes), in tiles of 16 tokens by words if `is_tiled`.
struct ReadTokens {
    struct Piece {
        const std::uint8_t *data;
        std::int64_t tokens;
    };
    std::int64_t rows, tokens, row_bytes;
    bool is_tiled;
    std::vector<Piece> pieces;
    const std::int64_t *index;  // (rows, tokens)
    std::uint8_t *out;          // (rows, tokens, row_bytes)
};

// New states of one token per row, (batch, kv_heads, 1, channels), with the strides of batch and heads in bytes.
struct NewStates {
    const std::uint8_t *states;
    std::int64_t row_stride, head_stride;
    const std::uint8_t *at(std::int64_t row, std::int64_t head) const {
        return states + row * row_stride + head * head_stride;
    }
};

// A layer's recall store: keys and values of all tokens of its rows, piece by piece, of which `tokens` have room.
struct Recall {
    struct Piece {
        std::uint32_t *keys;        // (batch, kv_heads, tiles, words, 16)
        std::uint16_t *key_scales;  // (batch, kv_heads, tiles * 16, scales_of), float16 (null unless low-bit)
        std::uint8_t *values;       // (batch, kv_heads, tiles * 16, value_bytes)
        std::uint16_t *value_scales;
        int tiles;
    };
    int words, channels, value_bytes, value_channels;
    Format format;       // of keys and values (that of new states unless low-bit)
    int key_group_bits, value_group_bits;
    const float *means;  // (kv_heads, channels), of keys (may be null)
    std::vector<Piece> pieces;
    std::vector<BestPages::Digests> digests;  // of pages
    int candidates;                           // pages to score token by token (0: all)
    const std::int32_t *positions;  // (batch, tokens), negative where a token is no part of the text
    std::int64_t tokens;
    std::int32_t *last_recalled;  // (batch, kv_heads, count * 8): positions that a step reads, -1 for unused places
    const float *cos, *sin;  // (pairs): of the distance at which queries look for tokens
    int pairs, count, state;  // reads at most `count` pages. Tensor number `state` has the numbers of tokens in slots
};

// A step of one token per row with such a store.
struct RecallStep {
    int batch, heads, kv_heads, score_heads, slots;
    Format float_format, slot_format;  // of queries and new states, and of slots
    const std::uint8_t *queries;
    std::int64_t query_strides[2];  // of batch and heads, in numbers
    NewStates keys, values;
    const std::int64_t *positions;  // (batch), negative for padding
    const std::int64_t *starts;     // (batch): tokens that each row had before
    float scale;
    const float *kept;                   // (batch, score_heads, slots): the number of each slot's token
    const std::int32_t *slot_positions;  // (batch, score_heads, slots)
    const std::int64_t *free;            // (batch, score_heads, count * 8): slots for the recalled tokens
    PackedStates slot_keys, slot_values;
    std::int32_t *read_positions;  // (batch, kv_heads, slots): including recalled tokens
};

// The scan of such a step, without its queries, kept tokens and results, which the caller sets.
inline BestPages pages_call(const RecallStep &step, const Recall &store) {
    BestPages call{};
    call.batch = step.batch, call.kv_heads = step.kv_heads, call.score_heads = step.score_heads;
    call.queries_per_head = step.heads / step.kv_heads, call.tokens = 1;
    call.channels = store.channels, call.words = store.words, call.kept = step.slots, call.count = store.count;
    call.format = store.format, call.group_bits = store.key_group_bits;
    for (const auto &piece : store.pieces) call.pieces.push_back({piece.keys, piece.key_scales, piece.tiles});
    call.positions = store.positions;
    if (store.candidates > 0) call.digests = store.digests, call.candidates = store.candidates;
    return call;
}

// Numbers that become codes of 4 bits, or of 8 bits where `group` is 0, as `PackedStates` says, and their scales.
struct Encode {
    int batch, kv_heads, tokens, width;
    int group;  // channels that share a scale and an offset. 0: one scale for all
    Format float_format;
    const std::uint8_t *states;  // innermost dimension contiguous
    std::int64_t strides[3];     // of batch, kv_heads, tokens (in numbers)
    const float *means;          // (kv_heads, width), may be null
    std::uint8_t *codes;         // (batch, kv_heads, tokens, width or width / 2)
    std::uint16_t *scales;       // (batch, kv_heads, tokens, 1 or 2 * groups), float16
};

// A linear layer: inputs (tokens, in) by weights (out, in), all contiguous.
struct Linear {
    int tokens, in, out;
    Format format;        // of the weights (int8: code * scale, with pairs: see `linear_groups.hpp`)
    Format float_format;  // of inputs, bias and the result
    const std::uint8_t *inputs, *weights;
    Format scale_format;
    const std::uint8_t *scales;  // (out) in `scale_format`, of int8 weights
    const std::uint8_t *bias;   // (out), may be null
    std::uint8_t *result;       // (tokens, out)
    // Of weights in groups: (in / group, blocks * block, columns), or by block (blocks, in / group, columns, block), in
    // `pair_format`, inputs that share a scale, outputs that lie side by side, the code of 4 bits that stands for its zero,
    // and (blocks, in / 256, columns, block) in float16, or null.
    const std::uint8_t *pairs;
    int group, block;
    Format pair_format;
    int columns;
    bool is_by_block;
    int middle;
    const std::uint8_t *supers;
    const std::uint8_t *added = nullptr;  // (tokens, out) in `float_format`: added to the result once that is rounded
    bool has_inputs = false;              // in scratch, as a layer that `shares_inputs` has left them there

    // True if both, of the same inputs, may put them into scratch in the same form.
    bool shares_inputs(const Linear &other) const {
        return pairs && other.pairs && in == other.in && group == other.group && format == other.format;
    }
    // Floats of scratch: the inputs in float32, as digits, or as parts of bfloat16, and numbers of each token.
    std::size_t scratch() const { return std::size_t(tokens) * (2 * std::size_t(in) + 64); }
};

// Numbers of each token over the root of the mean of their squares, times weights, as modules of transformers round it.
struct Norm {
    enum Kind { narrow, one_more, wide };  // rounds before the weights, multiplies by weights + 1, rounds nothing
    const std::uint8_t *weights;           // (width) (null: there is no such norm)
    int width;
    float epsilon;
    Kind kind;
};

// The parts of a decoder layer before and after attention, for few tokens. `tokens`, `inputs` and `result` of its
// linear layers are given call by call.
struct DecoderLayer {
    enum Activation { silu, gelu_tanh };
    Format float_format;
    Norm first, second;  // of the inputs of attention, and of the feed-forward layers
    Norm of_queries, of_keys;
    Linear queries, keys, values, output, gate, up, down;
    Activation activation;

    std::size_t scratch(int tokens) const {
        std::size_t most = 0;
        for (const Linear *each : {&queries, &output, &gate, &down}) {
            Linear sized = *each;
            sized.tokens = tokens;
            most = most < sized.scratch() ? sized.scratch() : most;
        }
        return rows(tokens) + most;
    }
    // Of these, the layer's own: the norm's output, the sum after attention, gate, and up.
    std::size_t rows(int tokens) const {
        return std::size_t(tokens) * 2 * (padded_to_lines(queries.in) + padded_to_lines(down.in));
    }
    static std::size_t padded_to_lines(int floats) { return (std::size_t(floats) + 15) / 16 * 16; }
};

// Of so many tokens, each number in the layer's `float_format`, all contiguous.
struct BeforeAttention {
    int tokens;
    const std::uint8_t *hidden;             // (tokens, queries.in)
    std::uint8_t *queries, *keys, *values;  // (tokens, out)
};
struct AfterAttention {
    int tokens;
    const std::uint8_t *hidden, *attended;  // the input before attention, and (tokens, output.in)
    std::uint8_t *result;                   // (tokens, queries.in)
};

inline constexpr int RECALL_PAGE = 8;  // tokens that are recalled together
inline constexpr int BLOCK = 128;      // slots whose logits are alive at once
inline constexpr int STEADY = 64;      // slots at positions that follow each other whose keys share a row of the tables
inline constexpr int FEW_TOKENS = 16;  // queries per row at which all heads of a block of slots are read together
inline constexpr int MAX_TOKENS = 64;  // queries per row
inline constexpr int MAX_CHANNELS = 1024;
inline constexpr int MAX_LANES = 16;  // of any instruction set

// Slots that one piece of work covers: by the number of slots alone, so that the number of threads
// never changes a result.
inline int piece(int slots) {
    int blocks = (slots + BLOCK - 1) / BLOCK;
    int wanted = (blocks + 15) / 16;
    return BLOCK * (wanted < 1 ? 1 : wanted > 8 ? 8 : wanted);
}
inline int pieces(int slots) { return (slots + piece(slots) - 1) / piece(slots); }
// The same for attention. Many queries have fewer pieces, since each has a partial result of each query.
inline bool Attend::has_many_queries() const { return tokens > FEW_TOKENS; }
inline int piece(const Attend &call) {
    if (call.is_whole) return BLOCK * ((call.slots + BLOCK - 1) / BLOCK);
    if (!call.has_many_queries()) return piece(call.slots);
    const int blocks = (call.slots + BLOCK - 1) / BLOCK;
    return BLOCK * ((blocks + 7) / 8);
}
inline int pieces(const Attend &call) { return (call.slots + piece(call) - 1) / piece(call); }
inline std::size_t padded(int count) { return (count + MAX_LANES - 1) / MAX_LANES * std::size_t(MAX_LANES); }

// Floats of scratch that a call needs: one sum of keys for each piece.
inline std::size_t scratch_size(const MeanKeyCosine &call) {
    return std::size_t(call.batch) * call.kv_heads * pieces(call.slots) * padded(call.keys.channels);
}

// Floats of scratch that a call needs, by part.
struct Scratch {
    std::size_t queries, unrounded, turned, partials, summed, logits, keys_rotated, probabilities, tables, tiles;
    std::size_t key_width, value_width, partial_width, slot_width;

    Scratch(const Attend &call, int threads) {
        key_width = padded(call.keys.channels);
        value_width = padded(call.values.channels);
        partial_width = value_width + MAX_LANES;  // its maximum and its sum stand in front
        slot_width = padded(call.slots);
        std::size_t rows = std::size_t(call.batch) * call.heads * call.tokens;
        std::size_t shared = (std::size_t(call.group()) * call.tokens + 3) / 4 * 4;  // a kernel multiplies four queries at once
        queries = rows * key_width * (call.has_far() ? 2 : 1) + 3 * key_width;
        unrounded = call.has_steady_keys() ? rows * key_width : 0;
        turned = call.has_steady_keys() ? threads * shared * key_width : 0;
        partials = rows * pieces(call) * partial_width;
        summed = padded(int(rows * 2));
        logits = call.has_mass() ? rows * slot_width : 0;
        keys_rotated = threads * MAX_LANES * (key_width + MAX_LANES);
        probabilities = threads * 2 * shared * BLOCK;
        tables = threads * 2 * std::size_t(BLOCK) * 2 * call.pairs;
        tiles = call.has_many_queries() ? threads * 4 * MAX_LANES * (key_width + BLOCK) : 0;  // of keys or of slots, COLUMNS wide at most
        if (call.has_steady_keys()) tables += threads * std::size_t(STEADY + BLOCK / STEADY) * 2 * call.pairs;
    }
    std::size_t total() const { return queries + unrounded + turned + partials + summed + logits + keys_rotated + probabilities + tables + tiles; }
};

// Floats of scratch of a part of a head, or of all heads.
inline std::size_t part_scratch(const Attend &call, int threads) {
    const bool is_alone = call.has_many_parts();
    const Attend own = is_alone ? call.head(0, 0) : call;
    const std::size_t first = Scratch(own.part(0), is_alone ? 1 : threads).total(),
                      last = Scratch(own.part(own.parts() - 1), is_alone ? 1 : threads).total();
    return padded(int(first < last ? last : first));
}

// Floats of scratch that the scan of a step needs: queries, kept tokens, and scratch of `BestPages`.
inline std::size_t scratch_size(const RecallStep &step, const Recall &store) {
    return padded(step.batch * step.heads * store.channels) + padded(step.batch * step.score_heads * step.slots) +
           pages_call(step, store).scratch();
}

}  // namespace windlass
