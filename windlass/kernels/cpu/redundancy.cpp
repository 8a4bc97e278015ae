// How much each key is like the others, compiled once for each instruction set (WINDLASS_SET).
//
// Directions of keys are laid out by channel, too, so that a vector holds the cosines of one key with many others. Of
// the cosines above the threshold only that with the newest key counts, so keys are compared from the newest on until it
// is found.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "redundancy.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

#include "rotate.hpp"

constexpr int KEYS = 8;  // compared at once
constexpr float MIN_NORM = 1e-12f;

// One row and head.
template <Format F>
class Head {
  public:
    Head(const Redundancy &call, int index, float *scratch)
        : call(call), index(index), width(int(padded(call.keys.channels))), tokens(int(call.tokens())),
          by_token(scratch), by_channel(by_token + std::size_t(tokens) * width), sum(by_channel + std::size_t(tokens) * width),
          order(call.order + std::size_t(index) * call.slots), out(call.out + std::size_t(index) * call.slots) {}

    void run() {
        const std::int32_t *positions = call.positions + std::size_t(index) * call.slots;
        for (held = 0; held < call.slots && positions[order[held]] >= 0;) ++held;
        std::fill_n(out, call.slots, 0.0f);
        std::fill_n(sum, width, 0.0f);
        for (int i = 0; i < held; ++i) read(i);
        const int last = (held + LANES - 1) / LANES * LANES;
        for (int i = held; i < last; ++i)
            for (int c = 0; c < width; ++c) by_channel[std::size_t(c) * tokens + i] = 0;
        for (int i = 0; i < held; ++i) {
            Floats with_all{};
            for (int c = 0; c < width; c += LANES) {
                const Floats key = load<Floats>(direction(i) + c);
                with_all += (load<Floats>(sum + c) - key) * key;
            }
            out[order[i]] = sum_of(with_all);
        }
        for (int first = 0; first < held; first += KEYS) exempt(first, std::min(KEYS, held - first));
    }

  private:
    const Redundancy &call;
    const int index, width, tokens;
    float *by_token, *by_channel, *sum;
    const std::int64_t *order;
    float *out;
    int held = 0;

    float *direction(int token) const { return by_token + std::size_t(token) * width; }

    // The direction of one token's key.
    void read(int token) {
        float *key = direction(token);
        const int head = index % call.kv_heads;
        with_slot<F>(call.keys, index, std::size_t(index) * call.slots + order[token], head,
                     [&](auto slot) { rotate(slot, 0, nullptr, nullptr, key); });
        for (int c = call.keys.channels; c < width; ++c) key[c] = 0;
        Floats squares{};
        for (int c = 0; c < width; c += LANES) squares += load<Floats>(key + c) * load<Floats>(key + c);
        const float scale = 1 / std::max(std::sqrt(sum_of(squares)), MIN_NORM);
        for (int c = 0; c < width; ++c) {
            key[c] *= scale;
            sum[c] += key[c];
            by_channel[std::size_t(c) * tokens + token] = key[c];
        }
    }

    // Takes the cosines of some keys with the newest key that each is near to from the sums of those newest keys.
    void exempt(int first, int count) {
        int left = count;
        bool is_found[KEYS] = {};
        for (int start = (held - 1) / LANES * LANES; start >= 0 && left; start -= LANES) {
            Floats cosines[KEYS] = {};
            for (int c = 0; c < call.keys.channels; ++c) {
                const Floats others = load<Floats>(by_channel + std::size_t(c) * tokens + start);
                // Rows behind the last one are scratch: their cosines are not looked at.
                for (int i = 0; i < KEYS; ++i) cosines[i] += others * direction(first + i)[c];
            }
            for (int i = 0; i < count; ++i) {
                if (is_found[i]) continue;
                for (int lane = LANES - 1; lane >= 0; --lane)
                    if (cosines[i][lane] > call.threshold && start + lane != first + i) {
                        out[order[start + lane]] -= cosines[i][lane];
                        is_found[i] = true, --left;
                        break;
                    }
            }
        }
    }
};

template <Format F>
void run(const Redundancy &call, float *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int index = 0; index < call.batch * call.kv_heads; ++index)
        Head<F>(call, index, scratch + omp_get_thread_num() * call.scratch()).run();
}

}  // namespace

void redundancy(const Redundancy &call, float *scratch, int threads) {
    with_format(call.format, [&](auto f) { run<f.value>(call, scratch, threads); });
}

}  // namespace windlass::WINDLASS_SET
