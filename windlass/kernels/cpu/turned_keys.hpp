// Keys rotated by rows of the tables that are laid out for them, and multiplied while they are in registers.
// Included inside the namespace of one instruction set, after rotate.hpp.

constexpr int LAID = 2 * LANES;  // pairs whose cos, and then sin, lie side by side

// One row of the tables, 2 * pairs floats: for each LAID pairs their cos, then their sin. For bfloat16 keys even and odd
// channels are parted.
template <Format F>
inline void lay_row(std::int64_t position, int pairs, const float *cos, const float *sin, float *out) {
    for (int i = 0; i < pairs; i += LAID)
        for (const float *table : {cos, sin}) {
            const float *from = table + position * pairs + i;
            Floats low = load<Floats>(from), high = load<Floats>(from + LANES);
            if (F == Format::bfloat16) part(low, high);
            store(out, low), store(out + LANES, high);
            out += LAID;
        }
}
// Calls `put` with channels of a query that is rotated already, rotated back by a row of the tables as they are laid.
template <class Put>
inline void turn_back(const float *query, const float *row, int pairs, Put put) {
    for (int i = 0; i < pairs; i += LAID) {
        Floats first[2], second[2];
        for (int h = 0; h < 2; ++h) {
            const Floats a = load<Floats>(query + i + LANES * h), b = load<Floats>(query + pairs + i + LANES * h),
                         c = load<Floats>(row + 2 * i + LANES * h), s = load<Floats>(row + 2 * i + LAID + LANES * h);
            first[h] = a * c + b * s, second[h] = b * c - a * s;
        }
        put(i, first[0], first[1]), put(pairs + i, second[0], second[1]);
    }
}

// Two vectors of a key's channels: the even and the odd ones of bfloat16, which take no shuffle.
template <Format F>
[[gnu::always_inline]] inline void load_laid(const Slot<F> &slot, int i, Floats (&out)[2]) {
    if constexpr (F == Format::bfloat16) {
        load_parted(slot.row + 2 * i, out[0], out[1]);
    } else {
        out[0] = slot.lanes(i), out[1] = slot.lanes(i + LANES);
    }
}

// Adds up the products of QUERIES queries, one after the other, with KEYS keys of WIDTH channels that are all rotated, by rows of the
// tables that follow each other.
template <Format F, int WIDTH, int QUERIES, int KEYS>
[[gnu::always_inline]] inline void multiply_turned(const Slot<F> (&keys)[KEYS], const float *rows, const float *queries, Floats (&out)[QUERIES][KEYS]) {
    constexpr int PAIRS = WIDTH / 2;
    asm("" : "+r"(queries));  // they are read again for each key, as registers do not hold them
    for (int q = 0; q < QUERIES; ++q)
        for (int k = 0; k < KEYS; ++k) out[q][k] = Floats{};
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i += LAID) {
        Floats x[KEYS][2], y[KEYS][2];
        for (int k = 0; k < KEYS; ++k) load_laid<F>(keys[k], i, x[k]), load_laid<F>(keys[k], PAIRS + i, y[k]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            Floats a[KEYS], b[KEYS];
            for (int k = 0; k < KEYS; ++k) {
                const float *row = rows + k * WIDTH + 2 * i + LANES * h;
                const Floats c = once(load<Floats>(row)), s = once(load<Floats>(row + LAID));
                a[k] = x[k][h] * c - y[k][h] * s, b[k] = y[k][h] * c + x[k][h] * s;
            }
#pragma GCC unroll 4
            for (int q = 0; q < QUERIES; ++q) {
                const float *query = queries + q * WIDTH + i + LANES * h;
                const Floats low = once(load<Floats>(query)), high = once(load<Floats>(query + PAIRS));
                for (int k = 0; k < KEYS; ++k) out[q][k] += a[k] * low;
                for (int k = 0; k < KEYS; ++k) out[q][k] += b[k] * high;
            }
        }
    }
}
// Products of QUERIES queries with the keys of `count` slots. Query q's are at out + q * BLOCK.
template <Format F, int WIDTH, int QUERIES>
void multiply_turned(const PackedStates &packed, std::size_t place, int head, int count, const float *rows, const float *queries, Ahead next_keys,
                     Ahead next_values, float *out) {
    constexpr int KEYS = QUERIES < 4 ? 2 : 1;  // as many as the registers hold
    const auto key = [&](int j) __attribute__((always_inline)) {
        Slot<F> slot = slot_of<F>(packed, place + j, head);
        slot.channels = WIDTH;
        return slot;
    };
    for (int first = 0; first < count; first += LANES) {
        Floats products[QUERIES][LANES];
        int j = 0;
        for (; j < LANES && first + j + KEYS <= count; j += KEYS) {
            next_keys.fetch(first + j, first + j + KEYS), next_values.fetch(first + j, first + j + KEYS);
            Slot<F> keys[KEYS];
            for (int k = 0; k < KEYS; ++k) keys[k] = key(first + j + k);
            Floats found[QUERIES][KEYS];
            multiply_turned<F, WIDTH, QUERIES, KEYS>(keys, rows + (first + j) * WIDTH, queries, found);
            for (int q = 0; q < QUERIES; ++q)
                for (int k = 0; k < KEYS; ++k) products[q][j + k] = found[q][k];
        }
        for (; j < LANES; ++j) {
            Floats found[QUERIES][1] = {};
            if (first + j < count) multiply_turned<F, WIDTH, QUERIES, 1>({key(first + j)}, rows + (first + j) * WIDTH, queries, found);
            for (int q = 0; q < QUERIES; ++q) products[q][j] = found[q][0];
        }
        for (int q = 0; q < QUERIES; ++q) store(out + q * BLOCK + first, sums(products[q]));
    }
}
