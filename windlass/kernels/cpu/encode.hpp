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

// The same with a scale and an offset for each `group` channels: `pairs`, side by side.
inline void encode_row(float *numbers, int width, int group, std::uint8_t *codes, std::uint16_t *pairs) {
    const float most = 65504.0f;
    const auto bounded = [&](float x) { return x < -most ? -most : x > most ? most : x; };
    for (int first = 0; first < width; first += group, pairs += 2) {
        const int last = first + group < width ? first + group : width;
        float low = numbers[first], high = numbers[first];
        bool is_number = true;
        for (int i = first; i < last; ++i) {
            low = numbers[i] < low ? numbers[i] : low, high = numbers[i] > high ? numbers[i] : high;
            is_number &= numbers[i] == numbers[i];
        }
        low = low < -7.5f * most ? -7.5f * most : low, high = high > 7.5f * most ? 7.5f * most : high;
        low = low > 7.5f * most ? 7.5f * most : low, high = high < -7.5f * most ? -7.5f * most : high;
        if (!is_number) low = high = NAN;
        pairs[0] = to_half(bounded((high - low) / 15));
        const float scale = from_half(pairs[0]), divisor = scale != 0.0f ? scale : 1.0f;
        pairs[1] = to_half(bounded((low + high) * 0.5f + scale * 0.5f));
        const float offset = from_half(pairs[1]);
        for (int i = first; i < last; ++i) {
            const float code = __builtin_rintf((numbers[i] - offset) / divisor);
            numbers[i] = code < -8 ? -8 : code > 7 ? 7 : code;
        }
    }
    for (int i = 0; i < width / 2; ++i) {
        const float a = numbers[i] + 8, b = numbers[i + width / 2] + 8;
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
        for (int j = 0; j < call.width; ++j) numbers[j] = number(call.float_format, from, j);
        for (int j = 0; call.means && j < call.width; ++j) numbers[j] -= call.means[head * call.width + j];
        if (call.group)
            encode_row(numbers, call.width, call.group, call.codes + i * call.width / 2, call.scales + i * 2 * ((call.width - 1) / call.group + 1));
        else
            encode_row(numbers, call.width, call.codes + i * call.width, call.scales + i);
    }
}
