// Encodes numbers in 8 or 4 bits, bit for bit as `reference.encode` does.
// Included inside the namespace of one instruction set, after simd.hpp.

// One row, `numbers`, which become its codes.
inline void encode_row(float *numbers, int width, std::uint8_t *codes, std::uint16_t *scale_of_all) {
    const float least = -128.0f, most = 65504.0f;
    float low = numbers[0], high = numbers[0];
    bool is_number = true;
    for (int i = 0; i < width; ++i) {
        low = numbers[i] < low ? numbers[i] : low, high = numbers[i] > high ? numbers[i] : high;
        is_number &= numbers[i] == numbers[i];
    }
    float scale = is_number ? (-low > high ? low : high) / least : NAN;
    scale = scale < -most ? -most : scale > most ? most : scale;
    *scale_of_all = to_half(scale);
    const float wide = from_half(*scale_of_all), divisor = wide != 0.0f ? wide : 1.0f;
    for (int i = 0; i < width; ++i) {
        float code = __builtin_rintf(numbers[i] / divisor);
        code = code < least ? least : code > -least - 1 ? -least - 1 : code;
        codes[i] = std::uint8_t(code == code ? std::int32_t(code) : 0);
    }
}

// A loop of so many turns that is vectorised, not unrolled.
template <int SIZE, class Turn>
inline void each(Turn turn) {
#pragma omp simd
    for (int i = 0; i < SIZE; ++i) turn(i);
}
// Joins halves of `numbers` until one is left: the order of all sums of the reference.
template <int SIZE, class Number, class Join>
inline Number folded(Number *numbers, Join join) {
    if constexpr (SIZE == 1) {
        return numbers[0];
    } else {
        each<SIZE / 2>([&](int i) { numbers[i] = join(numbers[i], numbers[i + SIZE / 2]); });
        return folded<SIZE / 2>(numbers, join);
    }
}
template <int SIZE, class Number>
inline Number sum(Number *numbers) {
    return folded<SIZE>(numbers, [](Number a, Number b) { return a + b; });
}

// A group of SIZE channels, of which `count` are in the row. All products in its sums are exact, so that they may be
// fused with what is added.
template <int SIZE>
class Group {
  public:
    Group(const float *row, int count) : count(count) {
        if (count == SIZE)
            each<SIZE>([&](int i) { numbers[i] = row[i], own[i] = 1.0f; });
        else
            for (int i = 0; i < SIZE; ++i) numbers[i] = row[i < count ? i : count - 1], own[i] = i < count;
    }

    // Its codes, and its scale and offset.
    void encode(float *codes, std::uint16_t *pair) {
        std::uint16_t fit[2];
        each<SIZE>([&](int i) { wide[i] = double(numbers[i]) * double(own[i]); });
        sum_of_numbers = sum<SIZE>(wide);
        widest_fit(pair);
        double error = code(pair, codes);
        for (int step = 0; step < STEPS; ++step) {
            best_fit(codes, fit);
            const double lower = code(fit, tried);
            if (!(lower < error)) return;
            error = lower, pair[0] = fit[0], pair[1] = fit[1];
            each<SIZE>([&](int i) { codes[i] = tried[i]; });
        }
    }

  private:
    static constexpr int STEPS = 4;  // of the reference
    static constexpr float MOST = 65504.0f, REACH = 7.5f * MOST, ROUNDER = 0x1.8p23f;

    const int count;
    alignas(64) float numbers[SIZE], own[SIZE], tried[SIZE], small[SIZE], other[SIZE];
    alignas(64) double wide[SIZE];
    double sum_of_numbers;

    static float bounded(float x, float most) { return x < -most ? -most : x > most ? most : x; }
    static std::uint16_t narrow(float x) { return to_half(bounded(x, MOST)); }

    // The least and the largest number get the lowest and the highest code.
    void widest_fit(std::uint16_t *pair) {
        each<SIZE>([&](int i) { small[i] = numbers[i] == numbers[i] ? 0.0f : 1.0f; });
        const bool is_number = sum<SIZE>(small) == 0.0f;
        each<SIZE>([&](int i) { small[i] = other[i] = numbers[i]; });
        const float least = folded<SIZE>(small, [](float a, float b) { return a < b ? a : b; });
        const float largest = folded<SIZE>(other, [](float a, float b) { return a > b ? a : b; });
        const float low = is_number ? bounded(least, REACH) : NAN, high = is_number ? bounded(largest, REACH) : NAN;
        pair[0] = narrow((high - low) / 15);
        pair[1] = narrow((low + high) * 0.5f + from_half(pair[0]) * 0.5f);
    }

    // The least squared error for these codes.
    void best_fit(const float *codes, std::uint16_t *pair) {
        each<SIZE>([&](int i) { small[i] = codes[i] * own[i], other[i] = codes[i] * small[i]; });
        const float total = sum<SIZE>(small), spread = count * sum<SIZE>(other) - total * total;
        each<SIZE>([&](int i) { wide[i] = double((count * codes[i] - total) * own[i]) * double(numbers[i]); });
        pair[0] = narrow(float(sum<SIZE>(wide) / (spread != 0.0f ? spread : 1.0f)));
        pair[1] = narrow(float((sum_of_numbers - double(from_half(pair[0])) * total) / count));
    }

    // Rounds to codes. Returns the sum of their squared errors.
    double code(const std::uint16_t *pair, float *codes) {
        const float scale = from_half(pair[0]), offset = from_half(pair[1]), divisor = scale != 0.0f ? scale : 1.0f;
        each<SIZE>([&](int i) {
            const float level = (numbers[i] - offset) / divisor, high = level < -8.0f ? -8.0f : level;
            codes[i] = ((high > 7.0f ? 7.0f : high) + ROUNDER) - ROUNDER;
            small[i] = numbers[i] - (codes[i] * scale + offset);
        });
        each<SIZE>([&](int i) { wide[i] = double(small[i]) * double(small[i]) * double(own[i]); });
        return sum<SIZE>(wide);
    }
};

// The same with a scale and an offset for each `group` channels, 16 or 32: `pairs`, side by side.
inline void encode_row(const float *numbers, int width, int group, std::uint8_t *codes, std::uint16_t *pairs) {
    float levels[MAX_CHANNELS + 32];
    for (int first = 0; first < width; first += group, pairs += 2) {
        const int count = width - first < group ? width - first : group;
        if (group == 16)
            Group<16>(numbers + first, count).encode(levels + first, pairs);
        else
            Group<32>(numbers + first, count).encode(levels + first, pairs);
    }
    for (int i = 0; i < width / 2; ++i) {
        const float a = levels[i] + 8, b = levels[i + width / 2] + 8;
        codes[i] = std::uint8_t((a == a ? int(a) : 0) | (b == b ? int(b) : 0) << 4);  // NaN has the bits of 0
    }
}

void encode_rows(const Encode &call, int threads) {
    const std::int64_t rows = std::int64_t(call.batch) * call.kv_heads * call.tokens;
    const std::int64_t size = call.float_format == Format::float32 ? 4 : 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * call.width > 1 << 16)
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t token = i % call.tokens, head = i / call.tokens % call.kv_heads,
                           row = i / call.tokens / call.kv_heads;
        const std::uint8_t *from = call.states + size * (row * call.strides[0] + head * call.strides[1] +
                                                         token * call.strides[2]);
        float numbers[MAX_CHANNELS];
        read_row(call.float_format, from, call.width, numbers);
        for (int j = 0; call.means && j < call.width; ++j) numbers[j] -= call.means[head * call.width + j];
        if (call.group)
            encode_row(numbers, call.width, call.group, call.codes + i * call.width / 2, call.scales + i * 2 * ((call.width - 1) / call.group + 1));
        else
            encode_row(numbers, call.width, call.codes + i * call.width, call.scales + i);
    }
}
