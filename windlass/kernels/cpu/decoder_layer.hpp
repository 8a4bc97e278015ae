// A decoder layer for few tokens, before attention and after it. Included by `linear.cpp`.
//
// One parallel region for each of the two: between two linear layers its threads meet at a barrier, and their
// next input is in the nearest cache. Every number is rounded where the modules of transformers round it.

template <Format F>
inline Floats lanes_of(const std::uint8_t *from, std::int64_t i, int count) {
    constexpr int BYTES = F == Format::float32 ? 4 : 2;
    if (count >= LANES) return Row<F>::lanes(from + i * BYTES, 0, 0);
    std::uint8_t last[LANES * BYTES] = {};
    std::memcpy(last, from + i * BYTES, count * BYTES);
    return Row<F>::lanes(last, 0, 0);
}
template <Format F>
inline void put_lanes(std::uint8_t *to, std::int64_t i, Floats v, int count) {
    if (count >= LANES) return store_rounded<F>(to + i * (F == Format::float32 ? 4 : 2), v);
    for (int lane = 0; lane < count; ++lane) put(F, to, i + lane, v[lane]);
}

// One token's numbers, which may be normed in place.
template <Format F>
inline void norm_one(const Norm &norm, const std::uint8_t *from, std::uint8_t *to) {
    const int width = norm.width;
    Floats squares{};
    for (int i = 0; i < width; i += LANES) {
        const Floats x = lanes_of<F>(from, i, width - i);
        squares += x * x;
    }
    const float inverse = 1.0f / std::sqrt(sum_of(squares) / float(width) + norm.epsilon);
    for (int i = 0; i < width; i += LANES) {
        Floats x = lanes_of<F>(from, i, width - i) * inverse, weights = lanes_of<F>(norm.weights, i, width - i);
        if (norm.kind == Norm::narrow) x = rounded_lanes<F>(x);
        if (norm.kind == Norm::one_more) weights += 1.0f;
        put_lanes<F>(to, i, x * weights, width - i);
    }
}
template <Format F>
inline void norm_all(const Norm &norm, const std::uint8_t *from, std::uint8_t *to, std::int64_t count) {
    const std::int64_t bytes = std::int64_t(norm.width) * (F == Format::float32 ? 4 : 2);
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) norm_one<F>(norm, from + i * bytes, to + i * bytes);
}

template <int COUNT>
inline void activate(DecoderLayer::Activation activation, Floats (&x)[COUNT]) {
    Floats t[COUNT], e[COUNT];
    for (int k = 0; k < COUNT; ++k) t[k] = x[k];
    if (activation == DecoderLayer::gelu_tanh)
        for (int k = 0; k < COUNT; ++k) t[k] = (x[k] * x[k] * x[k] * 0.044715f + x[k]) * (2 * 0.7978845608f);
    for (int k = 0; k < COUNT; ++k) e[k] = t[k] < 0.0f ? t[k] : -t[k];
    exponentials(e);
    for (int k = 0; k < COUNT; ++k) x[k] *= (t[k] < 0.0f ? e[k] : all(1.0f)) / (e[k] + 1.0f);
}
// gate = activation of gate * up, COUNT vectors from `at` on, of `width` numbers each.
template <Format F, int COUNT>
inline void gate_some(DecoderLayer::Activation activation, std::uint8_t *gate, const std::uint8_t *up, std::int64_t at, int width) {
    Floats x[COUNT];
    for (int k = 0; k < COUNT; ++k) x[k] = lanes_of<F>(gate, at + k * LANES, width);
    activate(activation, x);
    for (int k = 0; k < COUNT; ++k) put_lanes<F>(gate, at + k * LANES, rounded_lanes<F>(x[k]) * lanes_of<F>(up, at + k * LANES, width), width);
}
// The same of numbers one after the other.
template <Format F>
inline void gated(DecoderLayer::Activation activation, std::uint8_t *gate, const std::uint8_t *up, std::int64_t count) {
    constexpr int COUNT = 4;  // each waits for its own steps alone, while the others go on
    const std::int64_t whole = count / (COUNT * LANES);
#pragma omp for schedule(static) nowait
    for (std::int64_t i = 0; i < whole; ++i) gate_some<F, COUNT>(activation, gate, up, i * COUNT * LANES, LANES);
#pragma omp for schedule(static)
    for (std::int64_t i = whole * COUNT * LANES; i < count; i += LANES)
        gate_some<F, 1>(activation, gate, up, i, int(std::min<std::int64_t>(count - i, LANES)));
}

// A linear layer of `tokens`, by all threads, which meet after it. `before`: the latest layer, of the same inputs.
inline void product(Linear layer, int tokens, const std::uint8_t *inputs, std::uint8_t *result, float *scratch,
                    const std::uint8_t *added = nullptr, const Linear *before = nullptr) {
    layer.tokens = tokens, layer.inputs = inputs, layer.result = result, layer.added = added;
    layer.has_inputs = before && layer.shares_inputs(*before);
    linear_part(layer, scratch);
#pragma omp barrier
}

// Parts of a layer by themselves, for passes whose products are PyTorch's.
template <Format F>
void norm_tokens(const Norm &norm, const std::uint8_t *from, std::uint8_t *to, std::int64_t tokens, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    norm_all<F>(norm, from, to, tokens);
}
template <Format F>
void gate_rows(DecoderLayer::Activation activation, std::uint8_t *gate, const std::uint8_t *up, std::int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
    gated<F>(activation, gate, up, count);
}

template <Format F>
void before_attention(const DecoderLayer &layer, const BeforeAttention &call, float *scratch, int threads) {
    auto *normed = reinterpret_cast<std::uint8_t *>(scratch);
    float *rest = scratch + layer.rows(call.tokens);
    const Norm &of_queries = layer.of_queries, &of_keys = layer.of_keys;
#pragma omp parallel num_threads(threads)
    {
        norm_all<F>(layer.first, call.hidden, normed, call.tokens);
        product(layer.queries, call.tokens, normed, call.queries, rest);
        product(layer.keys, call.tokens, normed, call.keys, rest, nullptr, &layer.queries);
        product(layer.values, call.tokens, normed, call.values, rest, nullptr, &layer.keys);
        if (of_queries.weights)
            norm_all<F>(of_queries, call.queries, call.queries,
                        std::int64_t(call.tokens) * (layer.queries.out / of_queries.width));
        if (of_keys.weights)
            norm_all<F>(of_keys, call.keys, call.keys, std::int64_t(call.tokens) * (layer.keys.out / of_keys.width));
    }
}

template <Format F>
void after_attention(const DecoderLayer &layer, const AfterAttention &call, float *scratch, int threads) {
    const std::size_t width = std::size_t(call.tokens) * DecoderLayer::padded_to_lines(layer.queries.in);
    auto *normed = reinterpret_cast<std::uint8_t *>(scratch);
    auto *middle = reinterpret_cast<std::uint8_t *>(scratch + width);
    auto *gate = reinterpret_cast<std::uint8_t *>(scratch + 2 * width);
    auto *up = gate + std::size_t(call.tokens) * DecoderLayer::padded_to_lines(layer.down.in) * sizeof(float);
    float *rest = scratch + layer.rows(call.tokens);
#pragma omp parallel num_threads(threads)
    {
        product(layer.output, call.tokens, call.attended, middle, rest, call.hidden);
        norm_all<F>(layer.second, middle, normed, call.tokens);
        product(layer.gate, call.tokens, normed, gate, rest);
        product(layer.up, call.tokens, normed, up, rest, nullptr, &layer.gate);
        gated<F>(layer.activation, gate, up, std::int64_t(call.tokens) * layer.down.in);
        product(layer.down, call.tokens, gate, call.result, rest, middle);
    }
}
