// Expected logits of keys, compiled once for each instruction set (WINDLASS_SET).
//
// Keys are laid out by channel, so that a vector holds the logits of many of them. A covariance is symmetric but for
// rounding, so the part above its diagonal counts twice: half of the products.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "expected.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

constexpr int VECTORS = 4;
constexpr int BLOCK_SLOTS = VECTORS * LANES;

// Rotates pairs of numbers, by an angle each.
void rotate(float *__restrict first, float *__restrict second, const float *__restrict cos, const float *__restrict sin, int pairs) {
    for (int i = 0; i < pairs; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * cos[i] - b * sin[i], second[i] = b * cos[i] + a * sin[i];
    }
}
// All by one angle.
void rotate(float *__restrict first, float *__restrict second, float cos, float sin, int pairs) {
    for (int i = 0; i < pairs; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * cos - b * sin, second[i] = b * cos + a * sin;
    }
}

// One row and kv head.
class Logits {
  public:
    Logits(const Expected &call, int index, float *scratch)
        : call(call), index(index), channels(call.channels), keys(scratch), means(keys + std::size_t(channels) * BLOCK_SLOTS),
          products(means + std::size_t(call.group) * channels) {}

    void run() {
        for (int member = 0; member < call.group; ++member) turn(member);
        for (int start = 0; start < call.slots; start += BLOCK_SLOTS) {
            const int count = std::min(BLOCK_SLOTS, call.slots - start);
            read(start, count);
            for (int member = 0; member < call.group; ++member) {
                float found[BLOCK_SLOTS];
                block(member, found);
                std::copy_n(found, count, call.out + (std::size_t(index) * call.group + member) * call.slots + start);
            }
        }
    }

  private:
    const Expected &call;
    const int index, channels;
    float *keys, *means, *products;

    // The mean and the covariance of one query head, rotated, with twice the part above the diagonal.
    void turn(int member) {
        const std::size_t head = std::size_t(index) * call.group + member, size = std::size_t(channels) * channels;
        const std::size_t row = std::size_t(index / call.kv_heads) * call.pairs;
        const float *cos = call.cos + row, *sin = call.sin + row;
        float *mean = means + std::size_t(member) * channels, *square = products + member * size;
        std::copy_n(call.means + head * channels, channels, mean);
        rotate(mean, mean + call.pairs, cos, sin, call.pairs);
        std::copy_n(call.covariances + head * size, size, square);
        for (float *states = square; states < square + size; states += channels) rotate(states, states + call.pairs, cos, sin, call.pairs);
        for (int i = 0; i < call.pairs; ++i) {  // whole rows at once
            float *first = square + std::size_t(i) * channels;
            rotate(first, first + std::size_t(call.pairs) * channels, cos[i], sin[i], channels);
        }
        for (int i = 0; i < channels; ++i)
            for (int j = i + 1; j < channels; ++j) square[std::size_t(i) * channels + j] *= 2;
    }

    void read(int start, int count) {
        const float *from = call.keys + (std::size_t(index) * call.slots + start) * channels;
        for (int c = 0; c < channels; ++c) {
            float *to = keys + std::size_t(c) * BLOCK_SLOTS;
            for (int j = 0; j < count; ++j) to[j] = from[std::size_t(j) * channels + c];
            std::fill(to + count, to + BLOCK_SLOTS, 0.0f);
        }
    }

    Floats key(int channel, int vector) const { return load<Floats>(keys + std::size_t(channel) * BLOCK_SLOTS + vector * LANES); }

    void block(int member, float *found) const {
        const float *mean = means + std::size_t(member) * channels, *square = products + std::size_t(member) * channels * channels;
        Floats with_mean[VECTORS] = {}, spread[VECTORS] = {};
        for (int i = 0; i < channels; i += 2) {
            const bool has_two = i + 1 < channels;
            const float *first = square + std::size_t(i) * channels, *second = has_two ? first + channels : first;
            Floats one[VECTORS], two[VECTORS] = {};
            for (int v = 0; v < VECTORS; ++v) one[v] = first[i] * key(i, v);
            for (int j = i + 1; j < channels; ++j)
                for (int v = 0; v < VECTORS; ++v) {
                    const Floats other = key(j, v);
                    one[v] += first[j] * other, two[v] += second[j] * other;
                }
            for (int v = 0; v < VECTORS; ++v) {
                spread[v] += key(i, v) * one[v], with_mean[v] += mean[i] * key(i, v);
                if (has_two) spread[v] += key(i + 1, v) * two[v], with_mean[v] += mean[i + 1] * key(i + 1, v);
            }
        }
        const float root = std::sqrt(float(channels));
        for (int v = 0; v < VECTORS; ++v) store(found + v * LANES, with_mean[v] / root + spread[v] / (2.0f * channels));
    }
};

}  // namespace

void expected(const Expected &call, float *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int index = 0; index < call.batch * call.kv_heads; ++index)
        Logits(call, index, scratch + omp_get_thread_num() * call.scratch()).run();
}

}  // namespace windlass::WINDLASS_SET
