// The recall store's part of a decode step: it writes the new token of each row, and puts the tokens of the best pages
// into free slots. Included by `recall.cpp`.

// The piece that has token number `index`, which becomes its number in there.
inline const Recall::Piece &piece_of(const Recall &store, std::int64_t &index) {
    const Recall::Piece *piece = store.pieces.data();
    for (; index >= std::int64_t(piece->tiles) * TILE; ++piece) index -= std::int64_t(piece->tiles) * TILE;
    return *piece;
}
inline std::uint32_t *words_at(const Recall &store, const Recall::Piece &piece, int row, std::int64_t index) {
    return piece.keys + (std::int64_t(row) * piece.tiles + index / TILE) * store.words * TILE + index % TILE;
}
inline std::int64_t place_of(const Recall::Piece &piece, int row, std::int64_t index) {
    return std::int64_t(row) * piece.tiles * TILE + index;
}
inline int code_bits(Format format) { return format == Format::int8 ? 8 : format == Format::int4 ? 4 : 0; }

// Numbers as a store has them: as they are, or as codes, less their means, and the scale of these.
inline std::uint16_t encoded(Format format, Format float_format, const std::uint8_t *from, int width, const float *means,
                             std::uint8_t *to) {
    const int bits = code_bits(format);
    if (!bits) return __builtin_memcpy(to, from, std::size_t(width) * (format == Format::float32 ? 4 : 2)), 0;
    float numbers[MAX_CHANNELS];
    read_row(float_format, from, width, numbers);
    for (int i = 0; means && i < width; ++i) numbers[i] -= means[i];
    return encode_row(numbers, width, bits, to);
}
inline void decoded(Format format, Format float_format, const std::uint8_t *from, int width, std::uint16_t scale,
                    const float *means, std::uint8_t *to) {
    if (!code_bits(format)) {
        __builtin_memcpy(to, from, std::size_t(width) * (format == Format::float32 ? 4 : 2));
        return;
    }
    float numbers[MAX_CHANNELS + LANES];
    const auto decode = [&](auto slot) {
        int i = 0;
        for (; i + LANES <= width; i += LANES) store(numbers + i, slot.lanes(i));
        for (; i < width; ++i) numbers[i] = slot.one(i);
    };
    if (format == Format::int8)
        decode(Slot<Format::int8>{from, width, from_half(scale), means});
    else
        decode(Slot<Format::int4>{from, width, from_half(scale), means});
    put_row(float_format, to, numbers, width);
}

class Step {
  public:
    Step(const RecallStep &call, const Recall &store) : call(call), store(store) {}

    void remember() const {
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS];
        for (int row = 0; row < call.batch * call.kv_heads; ++row) {
            const int text = row / call.kv_heads, head = row % call.kv_heads;
            if (call.positions[text] < 0) continue;
            std::int64_t index = call.starts[text];
            const Recall::Piece &piece = piece_of(store, index);
            const std::int64_t place = place_of(piece, row, index);
            const float *means = store.means ? store.means + head * store.channels : nullptr;
            std::fill_n(bytes + 4 * (store.words - 1), 4, 0);
            const std::uint16_t scale = encoded(store.format, call.float_format, call.keys.at(text, head), store.channels, means, bytes);
            std::uint32_t *words = words_at(store, piece, row, index);
            for (int w = 0; w < store.words; ++w) __builtin_memcpy(words + w * TILE, bytes + 4 * w, 4);
            const std::uint16_t value_scale = encoded(store.format, call.float_format, call.values.at(text, head), store.value_channels,
                                                      nullptr, piece.values + place * store.value_bytes);
            if (piece.key_scales) piece.key_scales[place] = scale, piece.value_scales[place] = value_scale;
            digest(row, call.starts[text]);
        }
    }

    void recall(float *scratch, int threads) const {
        const int rows = call.batch * call.kv_heads, count = store.count * PAGE;
        const std::int64_t held = std::int64_t(call.batch) * call.score_heads * call.slots;
        float *queries = scratch, *kept = queries + padded(call.batch * call.heads * store.channels);
        for (int head = 0; head < call.batch * call.heads; ++head) turn(head, queries + std::int64_t(head) * store.channels);
        for (std::int64_t i = 0; i < held; ++i) kept[i] = call.slot_positions[i] < 0 ? -1.0f : call.kept[i];
        std::vector<std::int64_t> pages(std::size_t(rows) * store.count);
        std::vector<std::uint8_t> is_read(std::size_t(rows) * count);
        BestPages scan = pages_call(call, store);
        const std::vector<std::uint8_t> is_query(call.batch, 1);
        scan.queries = queries, scan.is_query = reinterpret_cast<const bool *>(is_query.data());
        scan.kept_index = kept, scan.best = pages.data(), scan.is_read = is_read.data();
        choose_pages(scan, kept + padded(int(held)), threads);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int row = 0; row < rows; ++row) put_all(row, pages.data() + std::int64_t(row) * store.count, is_read.data() + std::int64_t(row) * count);
    }

  private:
    const RecallStep &call;
    const Recall &store;

    // Writes the digest of a page, of its tokens up to the newest.
    void digest(int row, std::int64_t newest) const {
        if (store.digests.empty()) return;
        const int head = row % call.kv_heads, channels = store.channels;
        const float *means = store.means ? store.means + head * channels : nullptr;
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS + 64];
        std::uint8_t key[4 * MAX_CHANNELS];
        float numbers[MAX_CHANNELS], largest[MAX_CHANNELS], least[MAX_CHANNELS];
        std::fill_n(largest, channels, NOTHING), std::fill_n(least, channels, -NOTHING);
        for (std::int64_t token = newest / PAGE * PAGE; token <= newest; ++token) {
            std::int64_t index = token;
            const Recall::Piece &piece = piece_of(store, index);
            const std::uint32_t *words = words_at(store, piece, row, index);
            for (int w = 0; w < store.words; ++w) __builtin_memcpy(bytes + 4 * w, words + w * TILE, 4);
            decoded(store.format, call.float_format, bytes, channels, piece.key_scales ? piece.key_scales[place_of(piece, row, index)] : 0, means, key);
            read_row(call.float_format, key, channels, numbers);
            for (int i = 0; i < channels; ++i) {
                largest[i] = std::max(largest[i], numbers[i]);
                least[i] = std::min(least[i], numbers[i]);
            }
        }
        std::int64_t page = newest / PAGE;
        const BestPages::Digests *held = store.digests.data();
        for (; page >= std::int64_t(held->largest.tiles) * TILE; ++held) page -= std::int64_t(held->largest.tiles) * TILE;
        put_key(held->largest, row, page, largest, means);
        put_key(held->least, row, page, least, means);
    }

    void put_key(const BestPages::Piece &piece, int row, std::int64_t index, const float *numbers, const float *means) const {
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS + 64];
        std::uint8_t key[4 * MAX_CHANNELS];
        put_row(call.float_format, key, numbers, store.channels);
        std::fill_n(bytes + 4 * (store.words - 1), 4, 0);
        const std::uint16_t scale = encoded(store.format, call.float_format, key, store.channels, means, bytes);
        auto *words = const_cast<std::uint32_t *>(piece.keys) + (std::int64_t(row) * piece.tiles + index / TILE) * store.words * TILE + index % TILE;
        for (int w = 0; w < store.words; ++w) __builtin_memcpy(words + w * TILE, bytes + 4 * w, 4);
        if (piece.scales) const_cast<std::uint16_t *>(piece.scales)[std::int64_t(row) * piece.tiles * TILE + index] = scale;
    }

    // A query as attention turns it at the distance at which it looks for tokens.
    void turn(int number, float *out) const {
        const int text = number / call.heads, head = number % call.heads, pairs = store.pairs;
        const std::int64_t size = call.float_format == Format::float32 ? 4 : 2;
        read_row(call.float_format, call.queries + size * (text * call.query_strides[0] + head * call.query_strides[1]), store.channels, out);
        for (int i = 0; i < pairs; ++i) {
            const float a = out[i], b = out[i + pairs];
            out[i] = a * store.cos[i] - b * store.sin[i], out[i + pairs] = b * store.cos[i] + a * store.sin[i];
        }
        for (int i = 0; i < store.channels; ++i) out[i] *= call.scale;
    }

    void put_all(int row, const std::int64_t *pages, const std::uint8_t *is_read) const {
        const int text = row / call.kv_heads, head = row % call.kv_heads, count = store.count * PAGE;
        const std::int64_t own = std::int64_t(text) * call.score_heads + (call.score_heads == 1 ? 0 : head);
        const std::int64_t *free = call.free + own * count;
        std::int32_t *positions = call.read_positions + std::int64_t(row) * call.slots;
        std::copy_n(call.slot_positions + own * call.slots, call.slots, positions);
        const float *means = store.means ? store.means + head * store.channels : nullptr;
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS + 64];
        std::int32_t *recalled = store.last_recalled + std::int64_t(row) * count;
        for (int i = 0; i < count; ++i) {
            recalled[i] = -1;
            if (!is_read[i]) continue;
            std::int64_t index = pages[i / PAGE] * PAGE + i % PAGE;
            positions[free[i]] = recalled[i] = store.positions[text * store.tokens + index];
            const Recall::Piece &piece = piece_of(store, index);
            const std::int64_t place = place_of(piece, row, index), slot = std::int64_t(row) * call.slots + free[i];
            const std::uint32_t *words = words_at(store, piece, row, index);
            for (int w = 0; w < store.words; ++w) __builtin_memcpy(bytes + 4 * w, words + w * TILE, 4);
            decoded(store.format, call.float_format, bytes, store.channels, piece.key_scales ? piece.key_scales[place] : 0, means,
                    call.slot_keys + slot * store.channels * call.number_bytes());
            __builtin_memcpy(bytes, piece.values + place * store.value_bytes, store.value_bytes);
            decoded(store.format, call.float_format, bytes, store.value_channels, piece.value_scales ? piece.value_scales[place] : 0,
                    nullptr, call.slot_values + slot * store.value_channels * call.number_bytes());
        }
    }
};
