// Encodes numbers in 8 or 4 bits, bit for bit as `reference.encode` does.
// Included inside the namespace of one instruction set, after simd.hpp.

// One row: `numbers`, which it divides by the scale that it returns, as float16.
inline std::uint16_t encode_row(float *numbers, int width, int bits, std::uint8_t *codes) {
    const float least = bits == 8 ? -128.0f : -8.0f, most = 65504.0f;
    float low = numbers[0], high = numbers[0];
    bool is_number = true;
    for (int i = 0; i < width; ++i) {
        low = numbers[i] < low ? numbers[i] : low, high = numbers[i] > high ? numbers[i] : high;
        is_number &= numbers[i] == numbers[i];
    }
    float scale = is_number ? (-low > high ? low : high) / least : NAN;
    scale = scale < -most ? -most : scale > most ? most : scale;
    const std::uint16_t narrow = to_half(scale);
    const float wide = from_half(narrow), divisor = wide != 0.0f ? wide : 1.0f;
    for (int i = 0; i < width; ++i) {
        float code = __builtin_rintf(numbers[i] / divisor);
        code = code < least ? least : code > -least - 1 ? -least - 1 : code;
        numbers[i] = code;
    }
    // NaN has code 0 in 8 bits, and the bits of 0 in 4.
    if (bits == 8)
        for (int i = 0; i < width; ++i)
            codes[i] = std::uint8_t(numbers[i] == numbers[i] ? std::int32_t(numbers[i]) : 0);
    else
        for (int i = 0; i < width / 2; ++i) {
            const float a = numbers[i] + 8, b = numbers[i + width / 2] + 8;
            codes[i] = std::uint8_t((a == a ? int(a) : 0) | (b == b ? int(b) : 0) << 4);
        }
    return narrow;
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
        call.scales[i] = encode_row(numbers, call.width, call.bits, call.codes + i * call.width * call.bits / 8);
    }
}
