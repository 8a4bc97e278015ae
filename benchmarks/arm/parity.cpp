// The kernels against plain loops in float64, for every instruction set that was compiled in: see `run.sh`.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "call.hpp"
#include "decode.hpp"
#include "instruction_sets.hpp"

using namespace windlass;

namespace {

int failures = 0;

void expect(const std::string &what, double error, double tolerance) {
    if (error <= tolerance) return;
    ++failures;
    std::printf("FAILED %s: %.2e, allowed %.0e\n", what.c_str(), error, tolerance);
}

// Relative distance of two lists of numbers.
double distance(const std::vector<double> &ours, const std::vector<double> &truth) {
    double off = 0, size = 1e-30;
    for (std::size_t i = 0; i < truth.size(); ++i)
        off += (ours[i] - truth[i]) * (ours[i] - truth[i]), size += truth[i] * truth[i];
    return std::isfinite(off) ? std::sqrt(off / size) : INFINITY;
}

// float16 and bfloat16 by their definitions, not by the kernels' code.
double half(std::uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return h >> 15 ? -size : size;
}
std::uint16_t nearest_half(double x) {
    std::uint16_t best = 0;
    int low = 0, high = 0x7bff;  // halves of one sign are in the order of their bits
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (half(std::uint16_t(middle)) <= std::abs(x)) low = middle;
        else high = middle - 1;
    }
    best = std::uint16_t(low);
    return std::uint16_t(best | (x < 0 ? 0x8000 : 0));
}
double brain(std::uint16_t b) {
    const std::uint32_t word = std::uint32_t(b) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

// Numbers in a format: their bytes and their decoded values.
struct Numbers {
    std::vector<std::uint8_t> bytes;
    std::vector<double> meant;

    static Numbers random(std::mt19937 &g, Format format, std::size_t count) {
        std::normal_distribution<float> normal;
        Numbers made;
        for (std::size_t i = 0; i < count; ++i) {
            const float x = normal(g);
            std::uint32_t word;
            std::memcpy(&word, &x, 4);
            const std::uint16_t narrow = format == Format::bfloat16 ? std::uint16_t(word >> 16) : nearest_half(x);
            const auto *from = format == Format::float32 ? (const std::uint8_t *)&word : (const std::uint8_t *)&narrow;
            made.bytes.insert(made.bytes.end(), from, from + (format == Format::float32 ? 4 : 2));
            made.meant.push_back(format == Format::float32 ? x : format == Format::bfloat16 ? brain(narrow) : half(narrow));
        }
        return made;
    }
};
std::vector<double> meant(Format format, const std::vector<std::uint8_t> &bytes) {
    std::vector<double> all;
    for (std::size_t i = 0; i < bytes.size(); i += format == Format::float32 ? 4 : 2) {
        float x;
        std::uint16_t narrow;
        std::memcpy(&narrow, &bytes[i], 2);
        if (format == Format::float32) std::memcpy(&x, &bytes[i], 4);
        all.push_back(format == Format::float32 ? x : format == Format::bfloat16 ? brain(narrow) : half(narrow));
    }
    return all;
}

// Keys or values, (1, kv_heads, slots, width).
struct Held {
    Numbers floats;
    std::vector<std::uint8_t> codes;
    std::vector<std::uint16_t> scales;
    std::vector<float> means;
    std::vector<double> meant;
    PackedStates packed{};

    Held(std::mt19937 &g, Format format, int kv_heads, int slots, int width) {
        const std::size_t rows = std::size_t(kv_heads) * slots;
        packed.channels = packed.held = width;
        if (format != Format::int8 && format != Format::int4) {
            floats = Numbers::random(g, format, rows * width);
            meant = floats.meant;
            packed.data = floats.bytes.data(), packed.row_bytes = floats.bytes.size() / rows;
            return;
        }
        std::normal_distribution<float> normal;
        const int most = format == Format::int8 ? 128 : 8, row_bytes = format == Format::int8 ? width : width / 2;
        for (std::size_t i = 0; i < rows * row_bytes; ++i) codes.push_back(std::uint8_t(g()));
        for (std::size_t i = 0; i < rows; ++i) scales.push_back(nearest_half(normal(g) / most));
        for (int i = 0; i < kv_heads * width; ++i) means.push_back(normal(g));
        for (std::size_t row = 0; row < rows; ++row)
            for (int i = 0; i < width; ++i) {
                const std::uint8_t *from = &codes[row * row_bytes];
                const int code = format == Format::int8 ? std::int8_t(from[i])
                                                        : (i < width / 2 ? from[i] & 15 : from[i - width / 2] >> 4) - 8;
                meant.push_back(code * half(scales[row]) + means[row / slots * width + i]);
            }
        packed.data = codes.data(), packed.row_bytes = row_bytes;
        packed.scales = scales.data(), packed.means = means.data();
    }
};

struct Case {
    Format format, float_format;
    int kv_heads, group, width, pairs, slots, tokens, sliding_window;
    bool is_in_order;

    double tolerance() const { return float_format == Format::float32 ? 1e-5 : 1e-2; }
    std::string name() const {
        char text[160];
        std::snprintf(text, sizeof text, "format %d/%d, heads %dx%d, width %d, pairs %d, slots %d, tokens %d, window %d, %s",
                      int(format), int(float_format), kv_heads, group, width, pairs, slots, tokens, sliding_window,
                      is_in_order ? "in order" : "scattered");
        return text;
    }
};

// A call of `attend`, and its expected result.
struct Attention {
    Case sizes;
    Held keys, values;
    Numbers queries;
    std::vector<float> cos, sin, mass;
    std::vector<std::int32_t> slot_positions, key_positions;
    std::vector<std::int64_t> query_positions, observed;
    std::vector<std::uint8_t> out;
    std::vector<double> true_out, true_mass;
    Attend call{};

    Attention(std::mt19937 &g, const Case &c)
        : sizes(c),
          keys(g, c.format, c.kv_heads, c.slots, c.width),
          values(g, c.format, c.kv_heads, c.slots, c.width),
          queries(Numbers::random(g, c.float_format, std::size_t(c.kv_heads) * c.group * c.tokens * c.width)) {
        const int heads = c.kv_heads * c.group, rows = 2 * c.slots + c.tokens;
        for (int p = 0; p < rows; ++p)
            for (int i = 0; i < c.pairs; ++i) {
                const double angle = p / std::pow(10000.0, double(i) / c.pairs);
                cos.push_back(float(1.1 * std::cos(angle))), sin.push_back(float(1.1 * std::sin(angle)));
            }
        for (int j = 0; j < c.slots; ++j) slot_positions.push_back(c.is_in_order ? j : int((j * 7919LL) % (2 * c.slots)));
        if (!c.is_in_order)
            for (int j = 0; j < c.slots; j += 5) slot_positions[j] = -1;
        for (int p : slot_positions) key_positions.push_back(std::max(p, 0));
        for (int t = 0; t < c.tokens; ++t) query_positions.push_back(rows - c.tokens + t), observed.push_back(t);
        if (c.is_in_order)
            for (int t = 0; t < c.tokens; ++t) query_positions[t] = c.slots - c.tokens + t;
        out.resize(std::size_t(c.tokens) * heads * c.width * (c.float_format == Format::float32 ? 4 : 2));
        mass.resize(std::size_t(c.kv_heads) * c.tokens * c.slots);
        call.batch = 1, call.heads = heads, call.kv_heads = c.kv_heads, call.score_heads = 1, call.tokens = c.tokens;
        call.slots = c.slots, call.format = c.format, call.float_format = c.float_format;
        call.keys = keys.packed, call.values = values.packed;
        call.queries = queries.bytes.data(), call.out = out.data();
        call.query_strides[1] = std::int64_t(c.tokens) * c.width, call.query_strides[2] = c.width;
        call.slot_positions = slot_positions.data(), call.query_positions = query_positions.data();
        call.near = {query_positions.data(), key_positions.data()};
        call.cos = cos.data(), call.sin = sin.data(), call.pairs = c.pairs, call.is_steady = c.is_in_order;
        call.scale = 1 / std::sqrt(float(c.width));
        call.sliding_window = c.sliding_window, call.reach = call.attention_chunk = INT32_MAX;
        call.observed = observed.data(), call.observations = c.tokens, call.mass_rows = mass.data();
        compute();
    }
    Attention(const Attention &) = delete;

    std::vector<double> rotated(const double *states, std::int64_t position) const {
        std::vector<double> all(states, states + sizes.width);
        for (int i = 0; i < sizes.pairs; ++i) {
            const double c = cos[position * sizes.pairs + i], s = sin[position * sizes.pairs + i], a = all[i], b = all[i + sizes.pairs];
            all[i] = a * c - b * s, all[i + sizes.pairs] = b * c + a * s;
        }
        return all;
    }

    void compute() {
        const Case &c = sizes;
        const int heads = c.kv_heads * c.group;
        true_out.assign(std::size_t(c.tokens) * heads * c.width, 0), true_mass.assign(mass.size(), 0);
        for (int head = 0; head < heads; ++head)
            for (int t = 0; t < c.tokens; ++t) {
                const int kv_head = head / c.group;
                const auto query = rotated(&queries.meant[(std::size_t(head) * c.tokens + t) * c.width], query_positions[t]);
                std::vector<double> weights(c.slots);
                double top = -INFINITY, total = 0;
                for (int j = 0; j < c.slots; ++j) {
                    const auto key = rotated(&keys.meant[(std::size_t(kv_head) * c.slots + j) * c.width], key_positions[j]);
                    double logit = 0;
                    for (int i = 0; i < c.width; ++i) logit += query[i] * key[i] * call.scale;
                    const std::int64_t away = query_positions[t] - slot_positions[j];
                    const bool is_seen = slot_positions[j] >= 0 && away >= 0 && away < c.sliding_window;
                    weights[j] = is_seen ? logit : -INFINITY, top = std::max(top, weights[j]);
                }
                for (double &w : weights) total += w = std::exp(w - top);
                for (int j = 0; j < c.slots; ++j) {
                    const double *value = &values.meant[(std::size_t(kv_head) * c.slots + j) * c.width];
                    for (int i = 0; i < c.width; ++i)
                        true_out[(std::size_t(t) * heads + head) * c.width + i] += weights[j] / total * value[i];
                    true_mass[(std::size_t(kv_head) * c.tokens + t) * c.slots + j] += weights[j] / total;
                }
            }
    }

    void check(const std::string &set, const std::string &what) const {
        expect(set + " " + what + ", " + sizes.name(), distance(meant(sizes.float_format, out), true_out), sizes.tolerance());
        expect(set + " mass of " + what + ", " + sizes.name(), distance({mass.begin(), mass.end()}, true_mass), sizes.tolerance());
    }
};

void try_attention(const std::string &set, std::mt19937 &g, const Case &c) {
    for (int threads : {1, 2}) {
        Attention given(g, c);
        std::vector<float> scratch(Scratch(given.call, threads).total());
        kernels_of(set).attend(given.call, scratch.data(), threads);
        given.check(set, "attention");
    }
}

// The last slot is free, and its token arrives as a new one.
void try_decode(const std::string &set, std::mt19937 &g, const Case &c) {
    Attention given(g, c);
    const int last = c.slots - 1, bytes = int(given.keys.packed.row_bytes);
    std::vector<std::uint8_t> keys, values;
    for (int head = 0; head < c.kv_heads; ++head) {
        auto *key = given.keys.floats.bytes.data() + (std::size_t(head) * c.slots + last) * bytes;
        auto *value = given.values.floats.bytes.data() + (std::size_t(head) * c.slots + last) * bytes;
        keys.insert(keys.end(), key, key + bytes), values.insert(values.end(), value, value + bytes);
        std::fill_n(key, bytes, 0), std::fill_n(value, bytes, 0);
    }
    given.slot_positions[last] = -1;
    Attend call = given.call;
    call.near = {}, call.observed = nullptr, call.mass_rows = nullptr;
    Decode decode(call, {}, false, Recall{}, kernels_of(set));
    std::int64_t written = -1;
    const std::int64_t position = last, next = last + 1;
    const std::vector<std::int32_t> before(given.slot_positions.begin(), given.slot_positions.end());
    const Decode::Given step{given.queries.bytes.data(),
                             {0, c.width},
                             {keys.data(), 0, bytes},
                             {values.data(), 0, bytes},
                             &position,
                             &next,
                             {before.data(), given.slot_positions.data()},
                             {},
                             &written,
                             given.out.data(),
                             given.mass.data(),
                             nullptr,
                             nullptr,
                             {}};
    std::vector<float> scratch(decode.scratch(step, 2));
    decode.step(step, scratch.data(), 2);
    expect(set + " decode's slot", double(written != last), 0);
    given.check(set, "decode");
}

// Words of keys in tiles of 16 tokens, and the decoded keys. Codes of int4: the channels of the first half are low.
struct TiledKeys {
    std::vector<std::uint32_t> words;
    std::vector<std::uint16_t> scales;
    std::vector<double> meant;  // (heads, tokens, channels)

    TiledKeys(std::mt19937 &g, Format format, int heads, int tokens, int channels) : meant(std::size_t(heads) * tokens * channels) {
        const int bytes = format == Format::float32 ? 4 * channels : format <= Format::float16 ? 2 * channels
                          : format == Format::int8  ? channels
                                                    : channels / 2;
        words.resize(std::size_t(heads) * tokens * bytes / 4);
        const Numbers floats = Numbers::random(g, format <= Format::float16 ? format : Format::float32, meant.size());
        for (std::size_t at = 0; at < std::size_t(heads) * tokens; ++at) {
            std::vector<std::uint8_t> row(bytes);
            double *own = meant.data() + at * channels;
            if (format <= Format::float16) {
                std::copy_n(floats.bytes.begin() + at * bytes, bytes, row.begin());
                std::copy_n(floats.meant.begin() + at * channels, channels, own);
            } else {
                scales.push_back(nearest_half(0.01 + 0.001 * (g() % 100)));
                for (std::uint8_t &byte : row) byte = std::uint8_t(g());
                for (int c = 0; c < channels; ++c) {
                    const int code = format == Format::int8 ? std::int8_t(row[c])
                                                            : (row[c % bytes] >> (c < bytes ? 0 : 4) & 15) - 8;
                    own[c] = code * half(scales.back());
                }
            }
            const std::size_t head = at / tokens, token = at % tokens, count = bytes / 4;
            for (std::size_t w = 0; w < count; ++w)
                std::memcpy(&words[((head * tokens / 16 + token / 16) * count + w) * 16 + token % 16], row.data() + 4 * w, 4);
        }
    }
    BestPages::Piece piece(int tokens) const { return {words.data(), scales.empty() ? nullptr : scales.data(), tokens / 16}; }
};

// One query of each head: pages in the order of their largest products, with digests that promise most to every second.
void try_recall(const std::string &set, std::mt19937 &g, Format format, int channels, bool has_digests) {
    const int heads = 3, tokens = 992, pages = tokens / 8, room = 160, count = 20, bits = format == Format::int8 ? 8 : 4;
    const int bytes = format == Format::float32 ? 4 * channels : format <= Format::float16 ? 2 * channels : channels * bits / 8;
    const TiledKeys keys(g, format, heads, tokens, channels), largest(g, format, heads, room, channels), least(g, format, heads, room, channels);
    const Numbers queries = Numbers::random(g, Format::float32, std::size_t(heads) * channels);
    std::vector<float> asked(queries.meant.begin(), queries.meant.end()), kept(heads, -1.0f);
    std::vector<std::int32_t> positions(tokens);
    for (int i = 0; i < tokens; ++i) positions[i] = i % 7 ? i : -1;
    const auto is_query = std::make_unique<bool[]>(1);
    is_query[0] = true;
    std::vector<std::int64_t> best(std::size_t(heads) * count);
    std::vector<std::uint8_t> is_read(best.size() * 8);
    BestPages call{};
    call.batch = 1, call.kv_heads = call.score_heads = heads, call.queries_per_head = call.tokens = call.kept = 1;
    call.channels = channels, call.words = bytes / 4, call.count = count, call.format = format;
    call.queries = asked.data(), call.is_query = is_query.get(), call.pieces = {keys.piece(tokens)};
    call.positions = positions.data(), call.kept_index = kept.data(), call.best = best.data(), call.is_read = is_read.data();
    if (has_digests) call.digests = {{largest.piece(room), least.piece(room)}}, call.candidates = 64;
    std::vector<float> scratch(call.scratch());
    kernels_of(set).best_pages(call, scratch.data(), 2);
    double off = 0, size = 0;
    for (int head = 0; head < heads; ++head) {
        std::vector<double> peaks(pages, -INFINITY), promised(pages);
        std::vector<double> query(queries.meant.begin() + head * channels, queries.meant.begin() + (head + 1) * channels);
        double step = 0;
        for (double number : query) step = std::max(step, std::abs(number) / 127);
        if (format > Format::float16)
            for (double &number : query) number = std::nearbyint(number / step) * step;
        for (int token = 0; token < tokens; ++token) {
            double sum = 0;
            for (int c = 0; c < channels; ++c) sum += query[c] * keys.meant[(std::size_t(head) * tokens + token) * channels + c];
            if (positions[token] >= 0) peaks[token / 8] = std::max(peaks[token / 8], sum);
        }
        for (int page = 0; page < pages; ++page)
            for (int c = 0; c < channels; ++c)
                promised[page] += query[c] * (query[c] > 0 ? largest : least).meant[(std::size_t(head) * room + page) * channels + c];
        std::vector<double> order(promised);
        std::sort(order.rbegin(), order.rend());
        std::vector<double> looked;
        for (int page = 0; page < pages; ++page)
            if (!has_digests || promised[page] >= order[63]) looked.push_back(peaks[page]);
        std::sort(looked.rbegin(), looked.rend());
        // Of a page that is chosen in another's place, how much less its product is.
        for (int i = 0; i < count; ++i) {
            off = std::max(off, std::abs(looked[i] - peaks[best[std::size_t(head) * count + i]]));
            size = std::max(size, std::abs(looked[i]));
        }
    }
    const std::string name = set + " best pages of format " + std::to_string(int(format)) + ", " + std::to_string(channels) + " channels";
    expect(name + (has_digests ? ", by digests" : ""), off / size, 1e-5);
}

void try_linear(const std::string &set, std::mt19937 &g, Format format, Format float_format, int tokens, int in, int out) {
    const bool is_int8 = format == Format::int8;
    const Numbers inputs = Numbers::random(g, float_format, std::size_t(tokens) * in), bias = Numbers::random(g, float_format, out);
    const Numbers scales = Numbers::random(g, Format::float32, out);
    Numbers weights;
    if (!is_int8) weights = Numbers::random(g, format, std::size_t(out) * in);
    for (int i = 0; is_int8 && i < out * in; ++i) {
        weights.bytes.push_back(std::uint8_t(g()));
        weights.meant.push_back(std::int8_t(weights.bytes.back()) * scales.meant[i / in]);
    }
    std::vector<std::uint8_t> result(std::size_t(tokens) * out * (float_format == Format::float32 ? 4 : 2));
    std::vector<double> truth;
    for (int t = 0; t < tokens; ++t)
        for (int o = 0; o < out; ++o) {
            double sum = bias.meant[o];
            for (int i = 0; i < in; ++i) sum += inputs.meant[t * in + i] * weights.meant[std::size_t(o) * in + i];
            truth.push_back(sum);
        }
    Linear call{};
    call.tokens = tokens, call.in = in, call.out = out, call.format = format, call.float_format = float_format;
    call.inputs = inputs.bytes.data(), call.weights = weights.bytes.data(), call.bias = bias.bytes.data(), call.result = result.data();
    if (is_int8) call.scale_format = Format::float32, call.scales = scales.bytes.data();
    std::vector<float> scratch(call.scratch());
    kernels_of(set).linear(call, scratch.data(), 2);
    const std::string sizes = std::to_string(int(format)) + "/" + std::to_string(int(float_format)) + " " + std::to_string(tokens) + "x" + std::to_string(in) + "x" + std::to_string(out);
    expect(set + " linear " + sizes, distance(meant(float_format, result), truth), float_format == Format::float32 ? 1e-5 : 1e-2);
}

}  // namespace

int main() {
    std::mt19937 g(1);
    std::string sets = instruction_sets() + " ", set;
    for (std::size_t at = 0, end; (end = sets.find(' ', at)) != std::string::npos; at = end + 1) {
        set = sets.substr(at, end - at);
        int checks = 0;
        for (Format format : {Format::float32, Format::bfloat16, Format::float16, Format::int8, Format::int4})
            for (Format float_format : {Format::float32, Format::bfloat16, Format::float16}) {
                if (format <= Format::float16 && format != float_format) continue;
                for (bool is_in_order : {false, true}) {
                    try_attention(set, g, {format, float_format, 2, 4, 64, 32, 333, 1, INT32_MAX, is_in_order});
                    try_attention(set, g, {format, float_format, 3, 1, 128, 64, 150, 2, 71, is_in_order});
                    try_attention(set, g, {format, float_format, 1, 5, 40, 10, 77, 3, INT32_MAX, is_in_order});
                    ++checks;
                }
                if (format == float_format) try_decode(set, g, {format, float_format, 2, 3, 64, 32, 140, 1, INT32_MAX, true});
                if (format == float_format || format > Format::float16)
                    for (const int channels : {64, 40}) try_recall(set, g, format, channels, false), try_recall(set, g, format, channels, true);
                for (int tokens : {1, 3, 16})
                    if (format != Format::int4) try_linear(set, g, format, float_format, tokens, 192, 77);
            }
        std::printf("%s: %s\n", set.c_str(), failures ? "FAILED" : checks ? "as float64 says" : "nothing was looked at");
    }
    return failures ? 1 : 0;
}
