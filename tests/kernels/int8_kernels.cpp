// The int8 kernels of every instruction set this processor has against sums in double precision, without Python: for
// processors that only an emulator stands for (test_neon.py). Prints the largest error per set and format; exit status 1 where one
// is above its limit, or where no set was found.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "engine/leaves.h"
#include "half.h"

namespace nstf::engine {
namespace {

struct Format {
    const char* name;
    Code code;
    int bits;
    int64_t group;
    Scale scale;
    bool zeros, grid;
};

// All codes and activations at one end of their range is where sums in 16 bits would overflow.
enum class Fill { kRandom, kLargest, kLargestTimesNegative, kSmallest };

// A matrix and its values.
struct Sample {
    PackedMatrix w;
    std::vector<uint8_t> codes, scale_codes, zeros;
    std::vector<uint16_t> halves, super_;
    std::vector<float> scales;
    std::vector<double> values;

    Sample(const Format& f, int64_t rows, int64_t cols, Fill fill, std::mt19937& random) {
        w.rows = rows, w.cols = cols, w.bits = f.bits, w.code = f.code, w.scale_kind = f.scale;
        w.group = f.group == 0 ? cols : std::min(f.group, cols);
        w.groups = (cols + w.group - 1) / w.group;
        w.row_bytes = (cols * f.bits + 7) / 8;
        // Values that int8 holds as they are.
        for (int i = 0; i < 16; ++i)
            w.table[i] = f.grid ? std::round(127 * std::sinh(0.3f * static_cast<float>(i - 7)) / std::sinh(2.4f))
                                : static_cast<float>(i - 8);
        const int most = fill == Fill::kSmallest ? 0 : 255;
        auto byte = [&](int end) { return static_cast<uint8_t>(fill == Fill::kRandom ? random() & 255 : end); };
        for (int64_t i = 0; i < rows * w.row_bytes; ++i) codes.push_back(byte(most));
        const int64_t count = rows * w.groups;
        for (int64_t i = 0; i < count; ++i) {
            scale_codes.push_back(static_cast<uint8_t>(f.scale == Scale::kPower ? 120 + random() % 10 : random() & 255));
            scales.push_back(static_cast<float>(random() % 1000 + 1) * 1e-3f);
            halves.push_back(float_to_half(scales.back()));
        }
        for (int64_t r = 0; r < rows; ++r) super_.push_back(float_to_half(static_cast<float>(random() % 100 + 1) * 1e-2f));
        w.zero_bytes = (w.groups * f.bits + 7) / 8;
        for (int64_t i = 0; i < rows * w.zero_bytes; ++i) zeros.push_back(byte(255 - most));
        w.codes = codes.data(), w.codes_end = codes.data() + codes.size();
        w.scale = f.scale == Scale::kFloat ? static_cast<const void*>(scales.data())
                  : f.scale == Scale::kHalf ? static_cast<const void*>(halves.data()) : scale_codes.data();
        if (f.scale == Scale::kSteps) w.super_ = super_.data();
        if (f.zeros) w.zeros = zeros.data();
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < cols; ++k) values.push_back(value(r, k));
    }

    static int code(const uint8_t* p, int64_t i, int bits) {
        int found = 0;
        for (int b = 0; b < bits; ++b) found |= (p[(i * bits + b) / 8] >> ((i * bits + b) % 8) & 1) << b;
        return found;
    }
    double scale(int64_t r, int64_t g) const {
        const size_t i = static_cast<size_t>(r * w.groups + g);
        if (w.scale_kind == Scale::kFloat) return scales[i];
        if (w.scale_kind == Scale::kHalf) return half_to_float(halves[i]);
        if (w.scale_kind == Scale::kPower) return power_of_two(scale_codes[i]);
        return half_to_float(super_[static_cast<size_t>(r)]) * (scale_codes[i] + 1) / 256.0;
    }
    double value(int64_t r, int64_t k) const {
        const int64_t g = k / w.group;
        const int c = code(codes.data() + r * w.row_bytes, k, w.bits);
        double v = w.code == Code::kTable4 ? w.table[c] : c - (1 << (w.bits - 1));
        if (w.zeros != nullptr) v = c - code(zeros.data() + r * w.zero_bytes, g, w.bits);
        return v * scale(r, g);
    }
};

// The largest error of a product as a share of the size of its terms.
double error(Matrix& matrix, const Sample& s, const std::vector<float>& x, int64_t batch) {
    const int64_t rows = s.w.rows, cols = s.w.cols;
    std::vector<float> y(static_cast<size_t>(batch * rows));
    matrix.multiply(x.data(), batch, y.data(), rows, 2);
    double worst = 0, size = 0;
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t r = 0; r < rows; ++r) {
            double sum = 0, squares = 0;
            for (int64_t k = 0; k < cols; ++k) {
                const double term = s.values[static_cast<size_t>(r * cols + k)] * x[static_cast<size_t>(b * cols + k)];
                sum += term, squares += term * term;
            }
            const double off = std::fabs(sum - y[static_cast<size_t>(b * rows + r)]);
            worst = off <= worst ? worst : off;  // not a number is the worst
            size = std::max(size, std::sqrt(squares));
        }
    return worst / std::max(size, 1e-3);
}

int run() {
    std::vector<Format> formats;
    for (int bits = 2; bits <= 8; ++bits)
        for (bool zeros : {false, true}) {
            const Code code = bits == 4 ? Code::kTable4 : bits == 8 ? Code::kBytes : Code::kBits;
            formats.push_back({"int", code, bits, 32, Scale::kHalf, zeros, false});
            formats.push_back({"int", code, bits, 96, Scale::kFloat, zeros, false});
            formats.push_back({"int", code, bits, 0, Scale::kHalf, zeros, false});
            if (bits != 4) formats.push_back({"int", code, bits, 64, Scale::kSteps, zeros, false});
        }
    for (int64_t group : {0, 32, 128}) formats.push_back({"grid", Code::kTable4, 4, group, Scale::kSteps, false, true});
    formats.push_back({"powers of two", Code::kTable4, 4, 32, Scale::kPower, false, true});
    const int64_t shapes[][2] = {{1, 1}, {13, 97}, {40, 160}, {33, 577}, {20, 64}};
    int bad = 0, sets = 0;
    for (Isa set : isas()) {
        use_isa(name(set));
        if (!int8_available()) continue;
        ++sets;
        double most[2] = {};
        std::string kernel;
        for (const Format& f : formats)
            for (const auto& shape : shapes)
                for (Fill fill : {Fill::kRandom, Fill::kLargest, Fill::kLargestTimesNegative, Fill::kSmallest}) {
                    std::mt19937 random(7);
                    const Sample s(f, shape[0], shape[1], fill, random);
                    const Shared matrix = packed_int8({s.w});
                    kernel = matrix->kernel();
                    for (int64_t batch : {1, 2, 5, 13}) {
                        const float all = fill == Fill::kLargestTimesNegative ? -2.0f : 2.0f;
                        std::vector<float> x(static_cast<size_t>(batch * shape[1]), all);
                        std::normal_distribution<float> normal;
                        if (fill == Fill::kRandom)
                            for (float& v : x) v = normal(random);
                        // Rounding to int8 loses nothing of equal activations.
                        const bool even = fill != Fill::kRandom;
                        const double found = error(*matrix, s, x, batch);
                        most[even] = std::max(most[even], found);
                        if (!(found < (even ? 1e-4 : 3e-2))) {
                            ++bad;
                            std::printf("%s: %s, %d bits, groups of %d, %d x %d, batch %d: %g\n", name(set), f.name, f.bits,
                                        static_cast<int>(f.group), static_cast<int>(shape[0]), static_cast<int>(shape[1]),
                                        static_cast<int>(batch), found);
                        }
                    }
                }
        std::printf("%s: %s, largest error %.4f, of equal activations %.6f\n", name(set), kernel.c_str(), most[0], most[1]);
    }
    return bad > 0 || sets == 0;
}

}  // namespace
}  // namespace nstf::engine

int main() { return nstf::engine::run(); }
