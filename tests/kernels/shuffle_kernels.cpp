// The int8 kernels of shuffle codes of every instruction set this processor has against the portable decoder and sums in double
// precision, without Python: for processors that only an emulator stands for (test_neon.py). Prints the largest error per set;
// exit status 1 where one is above its limit, or where no set was found.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "engine/shuffle.h"

namespace nstf::engine {
namespace {

StoredShuffle sample(int64_t rows, int64_t cols, int q, bool extreme, std::vector<uint8_t>& codes, std::mt19937& random) {
    StoredShuffle s{rows, cols, q, nullptr, {}, {}};
    int phases = 16;
    for (int n = q; phases > 1 && n % 2 == 0; n /= 2) phases /= 2;
    // Sums of entries are at most 63: all 63 is where sums in 16 bits would overflow.
    for (int i = 0; i < 32 * phases; ++i) s.tables.push_back(extreme ? (i & 16 ? 40 : 23) : random() % 32);
    for (int64_t r = 0; r < rows; ++r) s.scales.push_back(static_cast<float>(random() % 1000 + 1) * 1e-3f);
    codes.resize(static_cast<size_t>((rows + 31) / 32 * s.chunks() * q * 64));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random());
    s.codes = codes.data();
    return s;
}

double error(Matrix& matrix, const std::vector<float>& values, const std::vector<float>& x, int64_t batch) {
    const int64_t rows = matrix.rows, cols = matrix.cols;
    std::vector<float> y(static_cast<size_t>(batch * rows));
    matrix.multiply(x.data(), batch, y.data(), rows, 2);
    double worst = 0, size = 0;
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t r = 0; r < rows; ++r) {
            double sum = 0, squares = 0;
            for (int64_t k = 0; k < cols; ++k) {
                const double term = double(values[static_cast<size_t>(r * cols + k)]) * x[static_cast<size_t>(b * cols + k)];
                sum += term, squares += term * term;
            }
            const double off = std::fabs(sum - y[static_cast<size_t>(b * rows + r)]);
            worst = off <= worst ? worst : off;  // not a number is the worst
            size = std::max(size, std::sqrt(squares));
        }
    return worst / std::max(size, 1e-3);
}

int run() {
    const int64_t shapes[][2] = {{1, 1}, {13, 97}, {40, 160}, {300, 577}, {33, 64}};
    int bad = 0, sets = 0;
    for (Isa set : isas()) {
        double most[2] = {};
        std::string kernel;
        for (int q = 8; q <= 20; ++q)
            for (const auto& shape : shapes)
                for (bool extreme : {false, true}) {
                    std::mt19937 random(7);
                    std::vector<uint8_t> codes;
                    const StoredShuffle s = sample(shape[0], shape[1], q, extreme, codes, random);
                    const int64_t bytes = static_cast<int64_t>(codes.size());
                    use_isa("portable");
                    const Shared plain = shuffle(s, bytes, true);
                    std::vector<float> values(static_cast<size_t>(shape[0] * shape[1])), own(values);
                    plain->decode_rows(0, shape[0], values.data());
                    use_isa(name(set));
                    const Shared matrix = shuffle(s, bytes, false);
                    kernel = matrix->kernel();
                    matrix->decode_rows(0, shape[0], own.data());
                    for (int64_t batch : {1, 2, 5, 13}) {
                        std::vector<float> x(static_cast<size_t>(batch * shape[1]), 2.0f);
                        std::normal_distribution<float> normal;
                        if (!extreme)
                            for (float& v : x) v = normal(random);
                        const double found = error(*matrix, values, x, batch);
                        most[extreme] = std::max(most[extreme], found);
                        // Rounding to int8 loses nothing of equal activations.
                        if (!(found < (extreme ? 1e-4 : 3e-2)) || own != values) {
                            ++bad;
                            std::printf("%s: %d quarter bits, %d x %d, batch %d: %g\n", name(set), q, static_cast<int>(shape[0]),
                                        static_cast<int>(shape[1]), static_cast<int>(batch), found);
                        }
                    }
                }
        if (kernel.find("int8") == std::string::npos) continue;
        ++sets;
        std::printf("%s: %s, largest error %.4f, of equal activations %.6f\n", name(set), kernel.c_str(), most[0], most[1]);
    }
    return bad > 0 || sets == 0;
}

}  // namespace
}  // namespace nstf::engine

int main() { return nstf::engine::run(); }
