// Leverage of keys in float64, compiled once for each instruction set (WINDLASS_SET).
//
// Keys are laid out by channel, so that a vector holds one channel of several tokens in all three products: with the
// projection, with one another, and with the inverse of the Cholesky factor.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "leverage.hpp"

namespace windlass::WINDLASS_SET {
namespace {

#include "simd.hpp"

typedef double Doubles __attribute__((vector_size(LANES * 4)));
constexpr int WIDE = LANES / 2, VECTORS = 4, STEP = VECTORS * WIDE, ROWS = 4;

// One row and head.
class Tokens {
  public:
    Tokens(const Leverage &call, int index, double *scratch)
        : call(call), width(call.width), stride(call.tokens()), is_counted(call.is_counted + std::size_t(index) * call.slots),
          from(call.keys + std::size_t(index) * call.slots * row_bytes()), out(call.out + std::size_t(index) * call.slots),
          keys(scratch), projected(call.projection ? keys + call.channels * stride : keys),
          products(projected + (call.projection ? width : call.channels) * stride),
          key(reinterpret_cast<float *>(products + std::size_t(width) * width)) {}

    void run() {
        read();
        if (call.projection) {
            int row = 0;
            for (; row + ROWS <= width; row += ROWS) project<ROWS>(row);
            for (; row < width; ++row) project<1>(row);
        }
        for (int i = 0; i < width; i += ROWS)
            for (int j = 0; j <= i; j += ROWS) multiply(i, j);
        for (int i = 0; i < width; ++i) product(i, i) += call.ridge;
        factorize();
        int token = 0;
        for (int start = 0; start < count; start += STEP) {
            double found[STEP];
            solve(start, found);
            for (const int last = std::min(count, start + STEP); token < last; ++slot)
                out[slot] = is_counted[slot] ? found[token++ - start] : 0;
        }
        std::fill(out + slot, out + call.slots, 0.0);
    }

  private:
    const Leverage &call;
    const int width;
    const std::size_t stride;
    const bool *is_counted;
    const std::uint8_t *from;
    double *out, *keys, *projected, *products;
    float *key;
    int count = 0, slot = 0;

    std::size_t row_bytes() const { return std::size_t(call.channels) * (call.format == Format::float32 ? 4 : 2); }
    double &product(int i, int j) { return products[std::size_t(i) * width + j]; }
    Doubles at(const double *states, int row, int token) const { return load<Doubles>(states + row * stride + token); }

    // The counted keys, less their mean. What fills the last vectors up is 0.
    void read() {
        for (int i = 0; i < call.slots; ++i) {
            if (!is_counted[i]) continue;
            read_row(call.format, from + i * row_bytes(), call.channels, key);
            for (int c = 0; c < call.channels; ++c) keys[c * stride + count] = key[c];
            ++count;
        }
        const int last = (count + STEP - 1) / STEP * STEP;
        for (int c = 0; c < call.channels; ++c) {
            double *channel = keys + c * stride, sum = 0;
            for (int i = 0; i < count; ++i) sum += channel[i];
            for (int i = 0; i < count; ++i) channel[i] -= sum / count;
            std::fill(channel + count, channel + last, 0.0);
        }
    }

    template <int R>
    void project(int row) {
        for (int start = 0; start < count; start += STEP) {
            Doubles sums[R][VECTORS] = {};
            for (int c = 0; c < call.channels; ++c)
                for (int r = 0; r < R; ++r)
                    for (int v = 0; v < VECTORS; ++v)
                        sums[r][v] += call.projection[std::size_t(c) * width + row + r] * at(keys, c, start + v * WIDE);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v)
                    __builtin_memcpy(projected + (row + r) * stride + start + v * WIDE, &sums[r][v], sizeof(Doubles));
        }
    }

    // Products of some channels with others. Past the last channel, that one is multiplied once more.
    void multiply(int first, int second) {
        Doubles sums[ROWS][ROWS] = {};
        const auto row = [&](int i) { return std::min(i, width - 1); };
        for (int token = 0; token < count; token += WIDE) {
            Doubles others[ROWS];
            for (int j = 0; j < ROWS; ++j) others[j] = at(projected, row(second + j), token);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < ROWS; ++j) sums[i][j] += at(projected, row(first + i), token) * others[j];
        }
        for (int i = first; i < std::min(first + ROWS, width); ++i)
            for (int j = second; j < std::min(second + ROWS, width); ++j) {
                double sum = 0;
                for (int lane = 0; lane < WIDE; ++lane) sum += sums[i - first][j - second][lane];
                product(i, j) = sum;
            }
    }

    // The lower Cholesky factor of the products, in their place.
    void factorize() {
        for (int i = 0; i < width; ++i)
            for (int j = 0; j <= i; ++j) {
                double rest = product(i, j);
                for (int k = 0; k < j; ++k) rest -= product(i, k) * product(j, k);
                product(i, j) = i == j ? std::sqrt(rest) : rest / product(j, j);
            }
    }

    // Squares of the lengths of STEP tokens, once the factor's inverse has whitened them.
    void solve(int start, double *found) {
        Doubles total[VECTORS] = {};
        for (int i = 0; i < width; ++i) {
            Doubles rest[VECTORS];
            for (int v = 0; v < VECTORS; ++v) rest[v] = at(projected, i, start + v * WIDE);
            for (int j = 0; j < i; ++j)
                for (int v = 0; v < VECTORS; ++v) rest[v] -= product(i, j) * at(projected, j, start + v * WIDE);
            for (int v = 0; v < VECTORS; ++v) {
                rest[v] /= product(i, i), total[v] += rest[v] * rest[v];
                __builtin_memcpy(projected + i * stride + start + v * WIDE, &rest[v], sizeof(Doubles));
            }
        }
        __builtin_memcpy(found, total, sizeof total);
    }
};

}  // namespace

void leverage(const Leverage &call, float *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int index = 0; index < call.heads; ++index)
        Tokens(call, index, reinterpret_cast<double *>(scratch + omp_get_thread_num() * call.scratch())).run();
}

}  // namespace windlass::WINDLASS_SET
