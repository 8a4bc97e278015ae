// Sums of weighted values, in any format.
// Included inside the namespace of one instruction set, after the products of its formats.

template <Format F>
class ValueSums {
  public:
    // `stride`: floats from one query's state to the next one's.
    ValueSums(const Attend &call, std::size_t stride) : call(call), stride(stride) {}

    // Whether values are added up as products in bfloat16.
    bool is_narrow() const {
#if defined(__AVX512BF16__)
        const PackedStates &values = call.values;
        if (call.float_format != Format::bfloat16) return false;
        if (F == Format::int4) return values.group_bits == 5 && values.first == 0 && values.held % 64 == 0;  // whole groups in each half
        return (F == Format::bfloat16 || F == Format::int8) && values.channels % 32 == 0 && values.held % 32 == 0;
#else
        return false;
#endif
    }

    // The means of a head's values (null where all are 0).
    const float *means(int head) const {
        const PackedStates &packed = call.values;
        return packed.means ? packed.means + std::size_t(head) * packed.held + packed.first : nullptr;
    }

    // Adds the weighted values of a block to the sums of the queries that share a head. Overwrites `near`, the weights, and `far`.
    void add(int row, int head, std::size_t place, int count, const BlockMask &mask, int shared, std::ptrdiff_t ahead, float *near,
             float *far, float *states) {
        const PackedStates &packed = call.values;
        if (packed.full_precision) add_full_precision(row, head, place, count, shared, near, states);
        if constexpr (F == Format::int4) {
#if defined(__AVX512BF16__)
            if (is_narrow()) return add_narrow_groups(place, count, mask, shared, ahead, near, states);
#endif
            return add_groups(place, count, mask, shared, near, far, states);
        }
        if (packed.scales)  // a value is code * scale: the codes are weighed by weight * scale
            weigh_scales(packed.scales + place, count, shared, near);
#if defined(__AVX512BF16__)
        if constexpr (F == Format::bfloat16 || F == Format::int8)
            if (is_narrow()) {
                if (F == Format::int8 && packed.channels % 64 == 0)
                    return add_narrow_bytes(place, count, mask, shared, ahead, near, states);
                const NarrowValues values{packed.data + place * packed.row_bytes, packed.row_bytes, packed.first,
                                          packed.held, count, mask.is_seen};
                return add_all_narrow<F>(near, shared, values, packed.channels, next_keys(place, ahead), states + MAX_LANES,
                                         stride);
            }
#endif
        add_all_values<F>(near, shared, packed.data + place * packed.row_bytes, packed.row_bytes,
                          packed.first, packed.held, packed.held, count, mask.is_seen, states + MAX_LANES, stride);
    }

    // The same of many queries: values are decoded once for all of them, as a tile in float32.
    void add_tiles(int row, int head, std::size_t place, int count, const BlockMask &mask, int shared, float *near, float *states, float *tile) {
        const PackedStates &packed = call.values;
        if (packed.full_precision) add_full_precision(row, head, place, count, shared, near, states);
        const auto add = [&](int at, auto vectors) {
            lay_values(place, count, mask, at, vectors.value * LANES, tile);
            multiply_tile<FloatTile, vectors.value, true>(shared, near, BLOCK, tile, vectors.value * LANES, count, states + MAX_LANES + at, stride);
        };
        for (int at = 0; at < packed.channels;)
            if (packed.channels - at > (FloatTile::VECTORS - 1) * LANES) {
                add(at, std::integral_constant<int, FloatTile::VECTORS>{});
                at += FloatTile::COLUMNS;
            } else {
                add(at, std::integral_constant<int, 1>{});
                at += LANES;
            }
    }

  private:
    const Attend &call;
    const std::size_t stride;

    // `width` channels from `at` on, as rows of a tile, without the mean that `join` adds to all. Zeros stand for slots
    // that no query sees, and for channels that values do not have.
    void lay_values(std::size_t place, int count, const BlockMask &mask, int at, int width, float *tile) const {
        const PackedStates &packed = call.values;
        for (int j = 0; j < count; ++j)
            for (int i = at; i < at + width; i += LANES, tile += LANES) {
                Floats numbers{};
                if (mask.is_seen[j / LANES] && i < packed.channels) {
                    auto value = slot_of<F>(packed, place + j, 0);
                    value.means = nullptr;
                    if (i + LANES <= packed.channels) numbers = value.lanes(packed.first + i);
                    else for (int lane = 0; i + lane < packed.channels; ++lane) numbers[lane] = value.one(packed.first + i + lane);
                }
                store(tile, numbers);
            }
    }

#if defined(__AVX512BF16__)
    // As `add_groups`, two groups of 32 channels at a time.
    void add_narrow_groups(std::size_t place, int count, const BlockMask &mask, int shared, std::ptrdiff_t ahead,
                           float *near, float *states) {
        const PackedStates &packed = call.values;
        const int groups = packed.held / 32;
        const std::uint16_t *scales = packed.scales + place * packed.slot_scales();
        Ahead next = next_keys(place, ahead);
        GroupWeights weights;
        for (int group = 0; group < groups / 2; ++group) {
            const BlockPairs low(scales, groups, group, count), high(scales, groups, group + groups / 2, count);
            const GroupedValues values{packed.data + place * packed.row_bytes + 32 * group, packed.row_bytes, count, mask.is_seen};
            for (int first = 0; first < shared; first += 4, next.row_bytes = 0) {
                const int some = std::min(4, shared - first);
                float *low_sums = states + MAX_LANES + first * stride + 32 * group, *high_sums = low_sums + packed.held / 2;
                for (int q = 0; q < some; ++q) {
                    const float *own = near + (first + q) * BLOCK;
                    weigh_group(own, low, weights.low[q], low_sums + q * stride);
                    weigh_group(own, high, weights.high[q], high_sums + q * stride);
                }
                const auto add = [&](auto queries) {
                    add_group_codes<queries.value>(weights, values, next, low_sums, high_sums, stride);
                };
                if (some == 4) add(std::integral_constant<int, 4>{});
                if (some == 3) add(std::integral_constant<int, 3>{});
                if (some == 2) add(std::integral_constant<int, 2>{});
                if (some == 1) add(std::integral_constant<int, 1>{});
            }
        }
    }
    // Values of int8, whose weights have their scales already.
    void add_narrow_bytes(std::size_t place, int count, const BlockMask &mask, int shared, std::ptrdiff_t ahead,
                          float *near, float *states) {
        const PackedStates &packed = call.values;
        Ahead next = next_keys(place, ahead);
        in_threes(shared, [&](int first, auto queries) {
            const float *own[3];
            for (int q = 0; q < 3; ++q) own[q] = near + (first + std::min<int>(q, queries.value - 1)) * BLOCK;
            const WeightDigits weights[3] = {{own[0], nullptr}, {own[1], nullptr}, {own[2], nullptr}};
            for (int i = 0; i < packed.channels; i += 64, next.row_bytes = 0) {
                const CodedValues values{packed.data + place * packed.row_bytes + packed.first + i, packed.row_bytes, count, mask.is_seen};
                add_bytes<queries.value>(weights, values, next, states + MAX_LANES + first * stride + i, stride);
            }
        });
    }
    // Keys that are read after the values of a block.
    Ahead next_keys(std::size_t place, std::ptrdiff_t ahead) const {
        return {call.keys.data + (std::ptrdiff_t(place) + ahead) * std::ptrdiff_t(call.keys.row_bytes), call.keys.row_bytes};
    }
#endif

    // A value is code * scale + offset, of each group: its codes are weighed by weight * scale, and weight * offset is the
    // same for all its channels. Overwrites `far`.
    void add_groups(std::size_t place, int count, const BlockMask &mask, int shared, float *near, float *far, float *states) {
        const PackedStates &packed = call.values;
        const int groups = int(packed.slot_scales() / 2);
        for (int group = packed.first >> packed.group_bits; group < groups; ++group) {
            const int start = std::max(packed.first, group << packed.group_bits),
                      end = std::min(packed.held, (group + 1) << packed.group_bits);
            alignas(64) float scales[BLOCK] = {}, offsets[BLOCK] = {};
            const std::uint16_t *pairs = packed.scales + 2 * (place * groups + group);
            for (int j = 0; j < count; ++j, pairs += 2 * groups) scales[j] = from_half(pairs[0]), offsets[j] = from_half(pairs[1]);
            float *sum = states + MAX_LANES + start - packed.first;
            for (int q = 0; q < shared; ++q) {
                Floats total{};
                for (int j = 0; j < BLOCK; j += LANES) {
                    const Floats weight = load<Floats>(near + q * BLOCK + j);
                    store(far + q * BLOCK + j, weight * load<Floats>(scales + j));
                    total += weight * load<Floats>(offsets + j);
                }
                const float of_offsets = sum_of(total);
                for (int i = 0; i < end - start; ++i) sum[q * stride + i] += of_offsets;
            }
            add_all_values<F>(far, shared, packed.data + place * packed.row_bytes, packed.row_bytes, start, end, packed.held,
                              count, mask.is_seen, sum, stride);
        }
    }

    static void weigh_scales(const std::uint16_t *scales, int count, int shared, float *weights) {
        float wide[BLOCK] = {};
        for (int j = 0; j < count; ++j) wide[j] = from_half(scales[j]);
        for (int q = 0; q < shared; ++q)
            for (int j = 0; j < BLOCK; j += LANES)
                store(weights + q * BLOCK + j, load<Floats>(weights + q * BLOCK + j) * load<Floats>(wide + j));
    }

    // Adds the values that are held at full precision, without the mean that `join` adds to all, and sets their
    // weights to 0.
    void add_full_precision(int row, int head, std::size_t place, int count, int shared,
                            float *near, float *states) {
        const std::size_t index = std::size_t(row) * call.kv_heads + head;
        const float *own = means(head);
        for (int j = 0; j < count; ++j) {
            if (call.values.ring_entry(place + j) < 0) continue;
            with_slot<F>(call.values, index, place + j, head, [&](auto value) {
                for (int q = 0; q < shared; ++q) {
                    float &weight = near[q * BLOCK + j],
                          *sum = states + q * stride + MAX_LANES;
                    for (int i = 0; i < value.channels; ++i)
                        sum[i] += weight * (value.one(i) - (own ? own[i] : 0.0f));
                    weight = 0;
                }
            });
        }
    }
};
