#include "stored.h"

#include <numeric>
#include <stdexcept>

#include "../half.h"
#include "trellis.h"

namespace nstf::engine {
namespace {

constexpr int64_t kStates = 65536;

int64_t tiles(int64_t size) { return (size + kSide - 1) / kSide; }

// The value of every state, as long as the process lives: there are two of them.
const float* codebook(int quarter_bits, const float* quantiles) {
    if (quarter_bits <= kMostSummed) {
        static const std::vector<float> sums = [] {
            std::vector<float> table(kStates);
            for (uint32_t i = 0; i < kStates; ++i) {
                const uint32_t p = i * kMultiplier;
                table[i] = (static_cast<float>((p & 255) + (p >> 8 & 255) + (p >> 16 & 255) + (p >> 24)) - 510) / 148;
            }
            return table;
        }();
        return sums.data();
    }
    if (!quantiles) throw std::invalid_argument("trellis: no quantiles");
    static const std::vector<float> levels = [&] {
        std::vector<float> table(kStates);
        for (uint32_t i = 0; i < kStates; ++i) table[i] = quantiles[(i * kLevelMultiplier & 0xffff) >> 4];
        return table;
    }();
    return levels.data();
}

}  // namespace

std::vector<TrellisSection> sections(const StoredTrellis& s) {
    const size_t count = s.quarter_bits.size();
    std::vector<int64_t> sizes = s.section_rows.empty() ? std::vector<int64_t>{s.rows} : s.section_rows;
    if (sizes.size() != count) throw std::invalid_argument("trellis: sections without rates");
    std::vector<TrellisSection> found(count);
    int64_t at = 0;
    for (size_t i = 0; i < count; ++i) {
        const int q = s.quarter_bits[i];
        if (q < 4 || q > 24) throw std::invalid_argument("trellis: no such rate");
        found[i] = {s.codes + at, q, codebook(q, s.quantiles), {}};
        at += tiles(sizes[i]) * tiles(s.cols) * 8 * q;
    }
    if (at != s.bytes) throw std::invalid_argument("trellis: a section has another shape");
    if (s.section_rows.empty()) {
        found[0].rows.resize(static_cast<size_t>(s.rows));
        std::iota(found[0].rows.begin(), found[0].rows.end(), 0);
        return found;
    }
    if (!s.numbers || s.number_bytes != (s.rows * s.number_bits + 7) / 8)
        throw std::invalid_argument("trellis: numbers of another size");
    for (int64_t row = 0; row < s.rows; ++row) {
        const int64_t bit = row * s.number_bits;
        uint32_t word = s.numbers[bit / 8];
        if (bit / 8 + 1 < s.number_bytes) word |= static_cast<uint32_t>(s.numbers[bit / 8 + 1]) << 8;
        const size_t number = word >> bit % 8 & ((1u << s.number_bits) - 1);
        if (number >= count) throw std::invalid_argument("trellis: no such section");
        found[number].rows.push_back(static_cast<int32_t>(row));
    }
    for (size_t i = 0; i < count; ++i)
        if (static_cast<int64_t>(found[i].rows.size()) != sizes[i])
            throw std::invalid_argument("trellis: sections have other rows than the tree says");
    return found;
}

std::vector<float> trellis_scales(const uint8_t* codes, int64_t rows, float top) {
    std::vector<float> scales(static_cast<size_t>(rows));
    for (size_t i = 0; i < scales.size(); ++i) {
        const float root = static_cast<float>(codes[i]) / 255;
        scales[i] = root * root * top;
    }
    return scales;
}

std::vector<float> trellis_scales(const uint16_t* halves, int64_t rows, float top) {
    std::vector<float> scales(static_cast<size_t>(rows));
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = half_to_float(halves[i]) * top;
    return scales;
}

std::vector<float> rotation_signs(int64_t size, uint32_t seed, uint32_t side) {
    std::vector<float> signs(static_cast<size_t>(size));
    for (size_t i = 0; i < signs.size(); ++i) {
        uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u + (2 * seed + side + 1) * 0x632BE5ABu;
        for (uint32_t multiplier : {0x21F0AAADu, 0x735A2D97u}) {
            x = (x ^ x >> 16) * multiplier;
            x ^= x >> 15;
        }
        signs[i] = x >> 16 & 1 ? -1.0f : 1.0f;
    }
    return signs;
}

}  // namespace nstf::engine
