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
// The numbers of one token's key or value in a store: floats in `store`, or codes, to which `means` (may be null) are
// added.
struct Coding {
    Format store, floats;
    int width, group_bits;
    const float *means;

    bool is_code() const { return store == Format::int8 || store == Format::int4; }
    std::size_t bytes() const { return std::size_t(width) * (store == Format::float32 ? 4 : 2); }
    int scales() const { return scales_of(width, group_bits); }
};
// `scales` may be null where there are no codes.
inline void encoded(const Coding &as, const std::uint8_t *from, std::uint8_t *to, std::uint16_t *scales) {
    if (!as.is_code()) {
        __builtin_memcpy(to, from, as.bytes());
        return;
    }
    float numbers[MAX_CHANNELS];
    read_row(as.floats, from, as.width, numbers);
    for (int i = 0; as.means && i < as.width; ++i) numbers[i] -= as.means[i];
    if (as.group_bits)
        encode_row(numbers, as.width, 1 << as.group_bits, to, scales);
    else
        encode_row(numbers, as.width, to, scales);
}
inline void decoded(const Coding &as, const std::uint8_t *from, const std::uint16_t *scales, std::uint8_t *to) {
    if (!as.is_code()) {
        __builtin_memcpy(to, from, as.bytes());
        return;
    }
    const int width = as.width;
    float numbers[MAX_CHANNELS + LANES];
    const auto decode = [&](auto slot) {
        int i = 0;
        for (; i + LANES <= width; i += LANES) store(numbers + i, slot.lanes(i));
        for (; i < width; ++i) numbers[i] = slot.one(i);
    };
    if (as.store == Format::int8)
        decode(Slot<Format::int8>{from, width, from_half(*scales), as.means});
    else
        decode(Slot<Format::int4>{from, width, scales, as.group_bits, as.means});
    put_row(as.floats, to, numbers, width);
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
            const Coding keys = coding_of_keys(head), values = coding_of_values();
            std::fill_n(bytes + 4 * (store.words - 1), 4, 0);
            encoded(keys, call.keys.at(text, head), bytes, scales_at(piece.key_scales, place, keys));
            std::uint32_t *words = words_at(store, piece, row, index);
            for (int w = 0; w < store.words; ++w) __builtin_memcpy(words + w * TILE, bytes + 4 * w, 4);
            encoded(values, call.values.at(text, head), piece.values + place * store.value_bytes,
                    scales_at(piece.value_scales, place, values));
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

    Coding coding_of_keys(int head) const {
        return {store.format, call.float_format, store.channels, store.key_group_bits,
                store.means ? store.means + head * store.channels : nullptr};
    }
    Coding coding_of_values() const { return {store.format, call.float_format, store.value_channels, store.value_group_bits, nullptr}; }
    template <class Scales>
    static Scales *scales_at(Scales *scales, std::int64_t place, const Coding &as) {
        return scales ? scales + place * as.scales() : nullptr;
    }

    // Writes the digest of a page, of its tokens up to the newest.
    void digest(int row, std::int64_t newest) const {
        if (store.digests.empty()) return;
        const int channels = store.channels;
        const Coding keys = coding_of_keys(row % call.kv_heads);
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS + 64];
        std::uint8_t key[4 * MAX_CHANNELS];
        float numbers[MAX_CHANNELS], largest[MAX_CHANNELS], least[MAX_CHANNELS];
        std::fill_n(largest, channels, NOTHING), std::fill_n(least, channels, -NOTHING);
        for (std::int64_t token = newest / PAGE * PAGE; token <= newest; ++token) {
            std::int64_t index = token;
            const Recall::Piece &piece = piece_of(store, index);
            const std::uint32_t *words = words_at(store, piece, row, index);
            for (int w = 0; w < store.words; ++w) __builtin_memcpy(bytes + 4 * w, words + w * TILE, 4);
            decoded(keys, bytes, scales_at(piece.key_scales, place_of(piece, row, index), keys), key);
            read_row(call.float_format, key, channels, numbers);
            for (int i = 0; i < channels; ++i) {
                largest[i] = std::max(largest[i], numbers[i]);
                least[i] = std::min(least[i], numbers[i]);
            }
        }
        std::int64_t page = newest / PAGE;
        const BestPages::Digests *held = store.digests.data();
        for (; page >= std::int64_t(held->largest.tiles) * TILE; ++held) page -= std::int64_t(held->largest.tiles) * TILE;
        put_key(held->largest, row, page, largest, keys);
        put_key(held->least, row, page, least, keys);
    }

    void put_key(const BestPages::Piece &piece, int row, std::int64_t index, const float *numbers, const Coding &as) const {
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS + 64];
        std::uint8_t key[4 * MAX_CHANNELS];
        put_row(call.float_format, key, numbers, store.channels);
        std::fill_n(bytes + 4 * (store.words - 1), 4, 0);
        const std::int64_t place = std::int64_t(row) * piece.tiles * TILE + index;
        encoded(as, key, bytes, const_cast<std::uint16_t *>(scales_at(piece.scales, place, as)));
        auto *words = const_cast<std::uint32_t *>(piece.keys) + (std::int64_t(row) * piece.tiles + index / TILE) * store.words * TILE + index % TILE;
        for (int w = 0; w < store.words; ++w) __builtin_memcpy(words + w * TILE, bytes + 4 * w, 4);
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

    // One token out of the store, as slots hold theirs: its codes and scales if they hold such.
    void put_state(const Coding &as, const std::uint8_t *from, const std::uint16_t *scales, const PackedStates &to,
                   std::int64_t slot, int head) const {
        auto *own = const_cast<std::uint8_t *>(to.data) + slot * to.row_bytes;
        if (!to.scales) return decoded(as, from, scales, own);
        auto *own_scales = const_cast<std::uint16_t *>(to.scales) + slot * to.slot_scales();
        if (as.store == call.slot_format) {
            __builtin_memcpy(own, from, to.row_bytes);
            __builtin_memcpy(own_scales, scales, to.slot_scales() * sizeof(std::uint16_t));
            return;
        }
        std::uint8_t numbers[4 * MAX_CHANNELS];
        decoded(as, from, scales, numbers);
        encoded({call.slot_format, call.float_format, to.held, to.group_bits, to.means ? to.means + head * to.held : nullptr},
                numbers, own, own_scales);
    }

    void put_all(int row, const std::int64_t *pages, const std::uint8_t *is_read) const {
        const int text = row / call.kv_heads, head = row % call.kv_heads, count = store.count * PAGE;
        const std::int64_t own = std::int64_t(text) * call.score_heads + (call.score_heads == 1 ? 0 : head);
        const std::int64_t *free = call.free + own * count;
        std::int32_t *positions = call.read_positions + std::int64_t(row) * call.slots;
        std::copy_n(call.slot_positions + own * call.slots, call.slots, positions);
        const Coding keys = coding_of_keys(head), values = coding_of_values();
        alignas(64) std::uint8_t bytes[4 * MAX_CHANNELS + 64];
        std::int32_t *recalled = store.last_recalled + std::int64_t(row) * count;
        int page = -1;  // all of whose tokens are in one piece, from `start` on
        const Recall::Piece *piece = nullptr;
        std::int64_t start = 0;
        for (int i = 0; i < count; ++i) {
            recalled[i] = -1;
            if (!is_read[i]) continue;
            if (page != i / PAGE) page = i / PAGE, start = pages[page] * PAGE, piece = &piece_of(store, start);
            const std::int64_t index = start + i % PAGE, token = pages[page] * PAGE + i % PAGE;
            positions[free[i]] = recalled[i] = store.positions[text * store.tokens + token];
            const std::int64_t place = place_of(*piece, row, index), slot = std::int64_t(row) * call.slots + free[i];
            const std::uint32_t *words = words_at(store, *piece, row, index);
            for (int w = 0; w < store.words; ++w) __builtin_memcpy(bytes + 4 * w, words + w * TILE, 4);
            put_state(keys, bytes, scales_at(piece->key_scales, place, keys), call.slot_keys, slot, head);
            __builtin_memcpy(bytes, piece->values + place * store.value_bytes, store.value_bytes);
            put_state(values, bytes, scales_at(piece->value_scales, place, values), call.slot_values, slot, head);
        }
    }
};
