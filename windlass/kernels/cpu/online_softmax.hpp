// The running softmax of one query.
// Included inside the namespace of one instruction set, after simd.hpp.

Floats capped(Floats x, float cap) {
    Floats scaled = x * (1.0f / cap), size = scaled > 0.0f ? scaled : -scaled;
    Floats e = exponential(size * -2.0f), t = (1.0f - e) / (1.0f + e) * cap;
    return scaled > 0.0f ? t : -t;
}

// The logits of one query over a block become weights, relative to the running maximum in state[0];
// state[1] is the running sum, `sum` the running weighted values.
void online_softmax(const Attend &call, const BlockMask &mask, int token, float *logits, const float *far,
                    const float *counts, float *state, float *sum, std::size_t width, float *logits_buf,
                    int count) {
    Floats top = all(HIDDEN);
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
    if (logits_buf) __builtin_memcpy(logits_buf, logits, count * sizeof(float));
    const float highest = top_of(top);
    if (highest == HIDDEN) {
        for (int j = 0; j < BLOCK; ++j) logits[j] = 0;
        return;
    }
    if (highest > state[0]) {
        const float shrink = state[0] == HIDDEN ? 0.0f : std::exp(state[0] - highest);
        state[0] = highest;
        state[1] *= shrink;
        for (std::size_t i = 0; i < width; i += LANES) store(sum + i, load<Floats>(sum + i) * shrink);
    }
    Floats total{};
    for (int j = 0; j < BLOCK; j += LANES) {
        Floats weight = exponential(load<Floats>(logits + j) - state[0]);
        store(logits + j, weight);
        total += weight;
    }
    state[1] += sum_of(total);
}
