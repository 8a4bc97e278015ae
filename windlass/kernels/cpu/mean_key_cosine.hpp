// The cosine of each key with the mean direction of its row and head, in two passes over the keys.
// Included inside the namespace of one instruction set, after products.hpp and rotate.hpp.

// A row and head's sums are made piece by piece and joined in order, however many threads there are.
template <Format F>
class MeanKeyCosineKernel {
  public:
    explicit MeanKeyCosineKernel(const MeanKeyCosine &call, float *scratch)
        : call(call),
          width(int(padded(call.keys.channels))),
          splits(pieces(call.slots)),
          sums_of_pieces(scratch) {}

    void run(int threads) {
        const int heads = call.batch * call.kv_heads;
        if (heads >= threads) {  // the second pass finds the keys of one head in the cache
#pragma omp parallel for num_threads(threads) schedule(static)
            for (int index = 0; index < heads; ++index) {
                for (int split = 0; split < splits; ++split) sum_piece(index, split);
                join(index);
                for (int split = 0; split < splits; ++split) compare_piece(index, split);
            }
            return;
        }
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int i = 0; i < heads * splits; ++i) sum_piece(i / splits, i % splits);
#pragma omp for schedule(static)
            for (int index = 0; index < heads; ++index) join(index);
#pragma omp for schedule(static)
            for (int i = 0; i < heads * splits; ++i) compare_piece(i / splits, i % splits);
        }
    }

  private:
    const MeanKeyCosine &call;
    const int width, splits;
    float *sums_of_pieces;

    float *sum_of_piece(int index, int split) const {
        return sums_of_pieces + (std::size_t(index) * splits + split) * width;
    }
    float *out_of(int index) const { return call.out + std::size_t(index) * call.slots; }

    // Calls `use` with the first slot and the number of each LANES slots of a piece, and with a function that
    // reads LANES channels of one of them, from some channel on: straight from memory where none of the slots
    // is free or held at full precision, else out of a buffer, in which a free slot has zeros.
    template <class Use>
    void read_piece(int index, int split, Use use) const {
        const int row = index / call.kv_heads, head = index % call.kv_heads;
        const std::int32_t *positions =
            call.positions +
            (std::size_t(row) * call.score_heads + (call.score_heads == 1 ? 0 : head)) * call.slots;
        const PackedStates packed = call.keys;  // a copy, which a store to `keys` cannot change
        alignas(64) float keys[LANES * MAX_CHANNELS];
        const int start = split * piece(call.slots),
                  end = start + piece(call.slots) < call.slots ? start + piece(call.slots) : call.slots;
        for (int at = start; at < end; at += LANES) {
            const int count = at + LANES < end ? LANES : end - at;
            const std::size_t place = std::size_t(index) * call.slots + at;
            bool is_whole = count == LANES && packed.channels == width && !packed.full_precision;
            for (int j = 0; j < count; ++j) is_whole &= positions[at + j] >= 0;
            if (is_whole) {
                Slot<F> slots[LANES];
                for (int j = 0; j < LANES; ++j) slots[j] = slot_of<F>(packed, place + j, head);
                use(at, count, [&](int j, int i) { return slots[j].lanes(i); });
                continue;
            }
            for (int j = 0; j < LANES; ++j) {
                float *to = keys + j * width;
                const bool is_held = j < count && positions[at + j] >= 0;
                if (is_held)
                    with_slot<F>(packed, index, place + j, head,
                                 [&](auto key) { rotate(key, 0, nullptr, nullptr, to); });
                for (int i = is_held ? packed.channels : 0; i < width; ++i) to[i] = 0;
            }
            use(at, count, [&](int j, int i) { return load<Floats>(keys + j * width + i); });
        }
    }

    // The sum of a piece's directions. `out` gets the inverse lengths of its keys.
    void sum_piece(int index, int split) const {
        float *sum = sum_of_piece(index, split), *out = out_of(index);
        for (int i = 0; i < width; ++i) sum[i] = 0;
        read_piece(index, split, [&](int at, int count, auto lanes) {
            Floats squares[LANES] = {};
            for (int i = 0; i < width; i += LANES)
                for (int j = 0; j < LANES; ++j) {
                    const Floats key = lanes(j, i);
                    squares[j] += key * key;
                }
            float scales[LANES];
            store(scales, 1.0f / larger(roots(sums(squares)), all(MIN_NORM)));
            for (int i = 0; i < width; i += LANES) {
                Floats total = load<Floats>(sum + i);
                for (int j = 0; j < LANES; ++j) total += lanes(j, i) * scales[j];
                store(sum + i, total);
            }
            __builtin_memcpy(out + at, scales, count * sizeof(float));
        });
    }

    // The sum of all pieces' directions, one long, in the place of the first.
    void join(int index) const {
        float *anchor = sum_of_piece(index, 0);
        Floats squares{};
        for (int i = 0; i < width; i += LANES) {
            Floats total = load<Floats>(anchor + i);
            for (int split = 1; split < splits; ++split)
                total += load<Floats>(sum_of_piece(index, split) + i);
            store(anchor + i, total);
            squares += total * total;
        }
        const Floats norm = larger(roots(all(sum_of(squares))), all(MIN_NORM));
        for (int i = 0; i < width; i += LANES) store(anchor + i, load<Floats>(anchor + i) / norm);
    }

    void compare_piece(int index, int split) const {
        const float *anchor = sum_of_piece(index, 0);
        float *out = out_of(index);
        read_piece(index, split, [&](int at, int count, auto lanes) {
            Floats products[LANES] = {};
            for (int i = 0; i < width; i += LANES) {
                const Floats part = load<Floats>(anchor + i);
                for (int j = 0; j < LANES; ++j) products[j] += part * lanes(j, i);
            }
            const Floats summed = sums(products);
            for (int j = 0; j < count; ++j) out[at + j] *= summed[j];
        });
    }

    static constexpr float MIN_NORM = 1e-12f;
};
