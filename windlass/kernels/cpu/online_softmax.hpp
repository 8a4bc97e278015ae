// The running softmax of one query.
// Included inside the namespace of one instruction set, after simd.hpp.

Floats capped(Floats x, float cap) {
    Floats scaled = x * (1.0f / cap), size = scaled > 0.0f ? scaled : -scaled;
    Floats e = exponential(size * -2.0f), t = (1.0f - e) / (1.0f + e) * cap;
    return scaled > 0.0f ? t : -t;
}

// Summands to the logits of a block's queries, BLOCK for each query (null where there are none).
struct Logits {
    float *near;
    const float *far, *counts;
};

// The logits of one query over a block, as they count: capped, corrected and hidden. Returns the highest.
inline float finish_logits(const Attend &call, const BlockMask &mask, int token, float *logits, const float *far, const float *counts) {
    Floats top = all(HIDDEN);
    if (mask.is_open[token] && !far && !counts && call.softcap == 0) {
        for (int j = 0; j < BLOCK; j += LANES) top = larger(load<Floats>(logits + j), top);
        return top_of(top);
    }
    for (int j = 0; j < BLOCK; j += LANES) {
        Floats x = load<Floats>(logits + j);
        if (far) x = load<Ints>(mask.is_far[token] + j) ? load<Floats>(far + j) : x;
        if (call.softcap > 0) x = capped(x, call.softcap);
        if (counts) x += load<Floats>(counts + j);
        const Floats bias = load<Floats>(mask.bias[token] + j);
        x = bias == 0.0f ? x : bias;
        store(logits + j, x);
        top = larger(x, top);
    }
    return top_of(top);
}

// The running softmax of a few queries, so that the latency of one hides behind the others. Logits become weights,
// relative to the running maximum in state[0]. state[1] is the running sum, and from MAX_LANES on stand the running
// weighted values.
template <int QUERIES>
inline void advance_softmax(const float *highest, float *logits, float *states, std::size_t state_width, std::size_t width) {
    for (int q = 0; q < QUERIES; ++q) {
        float *state = states + q * state_width;
        if (!(highest[q] > state[0])) continue;
        const float shrink = state[0] == HIDDEN ? 0.0f : std::exp(state[0] - highest[q]);
        state[0] = highest[q];
        state[1] *= shrink;
        for (std::size_t i = 0; i < width; i += LANES)
            store(state + MAX_LANES + i, load<Floats>(state + MAX_LANES + i) * shrink);
    }
    Floats total[QUERIES] = {}, top[QUERIES];
    for (int q = 0; q < QUERIES; ++q) top[q] = all(states[q * state_width] == HIDDEN ? 0.0f : states[q * state_width]);  // all is hidden so far
    constexpr int SIDE = 4 / QUERIES;  // vectors of a query at once
    for (int j = 0; j < BLOCK; j += SIDE * LANES) {
        Floats weights[QUERIES * SIDE];
        for (int i = 0; i < QUERIES * SIDE; ++i) weights[i] = load<Floats>(logits + i / SIDE * BLOCK + j + i % SIDE * LANES) - top[i / SIDE];
        exponentials(weights);
        for (int i = 0; i < QUERIES * SIDE; ++i) store(logits + i / SIDE * BLOCK + j + i % SIDE * LANES, weights[i]), total[i / SIDE] += weights[i];
    }
    for (int q = 0; q < QUERIES; ++q) states[q * state_width + 1] += sum_of(total[q]);
}
