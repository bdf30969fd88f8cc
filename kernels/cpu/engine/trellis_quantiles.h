// The codebook of trellises above 3 bits in integers of 16 bits, for sets whose gathers are slow: a table of 4096 numbers costs a
// load for every weight, a parabola two products for sixteen.
//
// A level is the upper 12 bits of a multiple of the state, and stands for a quantile of the normal distribution. By symmetry its
// distance to the nearer tail does: 0..2047. The logarithm of that distance is nearly linear in the quantile, and as a float its
// exponent chooses a parabola, its mantissa the place on it:
//     quantile = c0 - (c1 - c2 t) t,   t = mantissa in [0, 1).
// Off by at most 0.0025 where rounding to 6 bits is off by 0.017 on average.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace nstf::engine {

constexpr float kQuantileUnit = 1.0f / 8192;  // what an integer stands for

// By exponent, of which 12 occur. c1 counts 8 units and is a multiple of 256; so is c2, which counts 64.
struct QuantileTable {
    uint8_t c0_low[16] = {}, c0_high[16] = {}, c1[16] = {}, c2[16] = {};
};

// A distance to the tail as a float: the exponent modulo 16, and the mantissa in 13 bits.
struct TailPlace {
    int piece, t;
    explicit TailPlace(int distance) {
        const float v = static_cast<float>(16 * distance + 15);
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        piece = static_cast<int>(bits >> 23 & 15);
        t = static_cast<int>(bits >> 12 & 2047) * 4;
    }
    // What is taken off c0, in the steps of the vector kernels.
    int below(int c1, int c2) const { return (256 * c1 - (256 * c2 * t >> 16)) * t >> 16; }
};

inline float quantile_of_tail(const QuantileTable& q, int distance) {
    const TailPlace at(distance);
    const auto i = static_cast<size_t>(at.piece);
    return static_cast<float>(256 * q.c0_high[i] + q.c0_low[i] - at.below(q.c1[i], q.c2[i])) * kQuantileUnit;
}

// upper: the quantiles from the largest one down to the middle, [2048].
inline QuantileTable fitted(const float* upper) {
    QuantileTable table;
    for (int first = 0, last; first < 2048; first = last + 1) {
        const int piece = TailPlace(first).piece;
        last = first;
        while (last + 1 < 2048 && TailPlace(last + 1).piece == piece) ++last;
        std::vector<int> some;  // distances that stand for the piece
        for (int d = first; d <= last; d += std::max(1, (last - first) / 64)) some.push_back(d);
        some.push_back(last);
        const auto wanted = [&](int d) { return upper[d] / kQuantileUnit; };
        // Through the ends and the middle, and then the best of the integers near by.
        const auto place = [](int d) { return static_cast<float>(TailPlace(d).t) / 8192; };
        const auto slope = [&](int a, int b) { return a == b ? 0 : (wanted(a) - wanted(b)) / (place(b) - place(a)); };
        const int middle = (first + last + 1) / 2;
        const float early = slope(first, middle), late = slope(middle, last);
        const float bend = last - first < 2 ? 0 : (early - late) / (place(last) - place(first));
        const float start = early + bend * (place(first) + place(middle));
        const int near1 = static_cast<int>(start * 8 / 256), near2 = static_cast<int>(bend * 64 / 256);
        float least = 1e30f;
        for (int c2 = std::max(0, near2 - 8); c2 <= std::min(255, std::max(0, near2 + 8)); ++c2)
            for (int c1 = std::max(0, near1 - 4); c1 <= std::min(255, std::max(0, near1 + 4)); ++c1) {
                float low = 1e30f, high = -1e30f;
                for (int d : some) {
                    const float c0 = wanted(d) + static_cast<float>(TailPlace(d).below(c1, c2));
                    low = std::min(low, c0), high = std::max(high, c0);
                }
                if (high - low >= least) continue;
                least = high - low;
                const auto i = static_cast<size_t>(piece);
                const int c0 = static_cast<int>(std::lround((low + high) / 2));
                table.c0_low[i] = static_cast<uint8_t>(c0), table.c0_high[i] = static_cast<uint8_t>(c0 >> 8);
                table.c1[i] = static_cast<uint8_t>(c1), table.c2[i] = static_cast<uint8_t>(c2);
            }
    }
    return table;
}

// The table of a codebook [65536]. Throws std::invalid_argument for one that is not that of all rates above 3 bits.
inline const QuantileTable& quantile_table(const float* codebook, uint32_t multiplier) {
    const auto level = [&](uint32_t state) { return static_cast<int>((state * multiplier & 0xffff) >> 4); };
    static const QuantileTable table = [&] {
        std::vector<float> upper(2048);
        for (uint32_t state = 0; state < 65536; ++state)
            if (level(state) >= 2048) upper[static_cast<size_t>(4095 - level(state))] = codebook[state];
        return fitted(upper.data());
    }();
    // There is one such codebook in a process, and many matrices: it is looked through once.
    static std::atomic<const float*> known{nullptr};
    if (codebook == known) return table;
    for (uint32_t state = 0; state < 65536; ++state) {
        const int l = level(state);
        const float q = l < 2048 ? -quantile_of_tail(table, l) : quantile_of_tail(table, 4095 - l);
        if (std::fabs(q - codebook[state]) > 2.5e-3f) throw std::invalid_argument("trellis: not the codebook of this rate");
    }
    known = codebook;
    return table;
}

}  // namespace nstf::engine
