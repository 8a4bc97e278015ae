// One slot's key or value as float32, rotated to its position.
// Included inside the namespace of one instruction set, after simd.hpp.

// The numbers of one slot, from channel i on, for any slot outside of the ring.
template <Format F>
struct Slot {
    const std::uint8_t *row;
    int channels;
    float scale;
    const float *means;

    Floats lanes(int i) const {
        Floats v = Row<F>::lanes(row, i, channels);
        if constexpr (F == Format::int8)
            v = means ? v * scale + load<Floats>(means + i) : v * scale;
        return v;
    }
    float one(int i) const {
        float x = Row<F>::one(row, i, channels);
        if constexpr (F == Format::int8) x = means ? x * scale + means[i] : x * scale;
        return x;
    }
};

// Of two numbers, a scale and an offset, for each 1 << group_bits channels.
template <>
struct Slot<Format::int4> {
    const std::uint8_t *row;
    int channels;
    const std::uint16_t *pairs;
    int group_bits;
    const float *means;

    Floats lanes(int i) const {
        const int first = i >> group_bits, last = (i + LANES - 1) >> group_bits;
        if (first != last) {  // astride groups
            Floats v{};
            for (int j = 0; j < LANES; ++j) v[j] = one(i + j);
            return v;
        }
        const Floats v = Row<Format::int4>::lanes(row, i, channels) * from_half(pairs[2 * first]) + from_half(pairs[2 * first + 1]);
        return means ? v + load<Floats>(means + i) : v;
    }
    float one(int i) const {
        const std::uint16_t *pair = pairs + 2 * (i >> group_bits);
        const float x = Row<Format::int4>::one(row, i, channels) * from_half(pair[0]) + from_half(pair[1]);
        return means ? x + means[i] : x;
    }
};

template <Format F>
inline Slot<F> slot_of(const PackedStates &packed, std::size_t place, int head) {
    const float *means = packed.means ? packed.means + std::size_t(head) * packed.held : nullptr;
    if constexpr (F == Format::int4)
        return {packed.data + place * packed.row_bytes, packed.held, packed.scales + place * packed.slot_scales(), packed.group_bits, means};
    else
        return {packed.data + place * packed.row_bytes, packed.held, packed.scales ? from_half(packed.scales[place]) : 1.0f, means};
}

template <Format F>
inline Slot<F> ring_slot_of(const PackedStates &packed, std::size_t index, int entry) {
    const std::size_t bytes = F == Format::float32 ? 4 : 2,
                      row = (index * packed.ring_entries + entry) * packed.held;
    return {packed.full_precision + (row + packed.first) * bytes, packed.channels, 1.0f, nullptr};
}

// Calls `use` with the slot at `place`, of the row and head number `index`: at full precision if it is held
// so.
template <Format F, class Use>
inline void with_slot(const PackedStates &packed, std::size_t index, std::size_t place, int head, Use use) {
    const int entry = packed.ring_entry(place);
    if (entry < 0) return use(slot_of<F>(packed, place, head));
    switch (packed.ring_format) {
        case Format::bfloat16:
            return use(ring_slot_of<Format::bfloat16>(packed, index, entry));
        case Format::float16:
            return use(ring_slot_of<Format::float16>(packed, index, entry));
        default:
            return use(ring_slot_of<Format::float32>(packed, index, entry));
    }
}

// One slot's numbers as float32, each pair (i, i + pairs) rotated by its angle: so many vectors of pairs.
template <int VECTORS, class S>
[[gnu::always_inline]] inline void rotate_vectors(S slot, const float *cos, const float *sin, float *out) {
    constexpr int PAIRS = VECTORS * LANES;
    slot.channels = 2 * PAIRS;  // now a constant
    Floats a[VECTORS], b[VECTORS];
    for (int v = 0; v < VECTORS; ++v) a[v] = slot.lanes(v * LANES), b[v] = slot.lanes(PAIRS + v * LANES);
    for (int v = 0; v < VECTORS; ++v) {
        const Floats c = load<Floats>(cos + v * LANES), s = load<Floats>(sin + v * LANES);
        store(out + v * LANES, a[v] * c - b[v] * s);
        store(out + PAIRS + v * LANES, b[v] * c + a[v] * s);
    }
}

// As above, for any number of pairs and channels.
template <class S>
inline void rotate(const S &slot, int pairs, const float *cos, const float *sin, float *out) {
    int i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        Floats a = slot.lanes(i), b = slot.lanes(i + pairs);
        Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        store(out + i, a * c - b * s);
        store(out + i + pairs, b * c + a * s);
    }
    for (; i < pairs; ++i) {
        float a = slot.one(i), b = slot.one(i + pairs);
        out[i] = a * cos[i] - b * sin[i];
        out[i + pairs] = b * cos[i] + a * sin[i];
    }
    for (i = 2 * pairs; i + LANES <= slot.channels; i += LANES) store(out + i, slot.lanes(i));
    for (; i < slot.channels; ++i) out[i] = slot.one(i);
}

// Asks for a row that will be read soon: the heads of a block are too short for the CPU to see it coming.
inline void fetch(const std::uint8_t *row, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(row + i, 0, 2);  // as far as the second cache
}

// Memory that is read soon. The heads of a block are too short for the CPU's own prefetching.
struct Ahead {
    const std::uint8_t *rows;
    std::size_t row_bytes;

    // Asks for slots `from` to `to`.
    [[gnu::always_inline]] void fetch(int from, int to) const { windlass::WINDLASS_SET::fetch(rows + from * row_bytes, (to - from) * row_bytes); }
};

template <Format F>
void rotate_slots(const Rotate &call, int threads) {
    const std::int64_t heads = std::int64_t(call.batch) * call.kv_heads, items = heads * pieces(call.used);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t item = 0; item < items; ++item) {
        const int row = int(item / pieces(call.used) / call.kv_heads),
                  head = int(item / pieces(call.used) % call.kv_heads);
        const int start = int(item % pieces(call.used)) * piece(call.used);
        const int end = start + piece(call.used) < call.used ? start + piece(call.used) : call.used;
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        const std::int32_t *positions =
            call.positions
                ? call.positions +
                      (std::size_t(row) * call.score_heads + (call.score_heads == 1 ? 0 : head)) * call.slots
                : nullptr;
        float rotated[MAX_CHANNELS];
        for (int j = start; j < end; ++j) {
            const std::int64_t angle = positions ? std::int64_t(positions[j]) * call.pairs : 0;
            with_slot<F>(call.packed, index, index * call.slots + j, head, [&](auto slot) {
                rotate(slot, positions ? call.pairs : 0, call.cos + angle, call.sin + angle, rotated);
            });
            const int channels = call.packed.channels;
            std::uint8_t *out = call.out + (index * call.used + j) * channels *
                                               (call.float_format == Format::float32 ? 4 : 2);
            if (call.float_format == Format::bfloat16) {
                std::uint16_t narrow[MAX_CHANNELS];
                for (int i = 0; i < channels; ++i) narrow[i] = to_brain(rotated[i]);
                __builtin_memcpy(out, narrow, channels * 2);
            } else
                for (int i = 0; i < channels; ++i) put(call.float_format, out, i, rotated[i]);
        }
    }
}
