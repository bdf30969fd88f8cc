// What the engine's leaves need of arrays as a file holds them, where that is more than a pointer. The definitions are those of
// kernels/formats; they are here too so that a file runs without torch.
#pragma once

#include <cstdint>
#include <vector>

#include "leaves.h"

namespace nstf::engine {

// The arrays of a trellis-coded matrix (kernels/formats/trellis.py).
struct StoredTrellis {
    int64_t rows, cols;
    std::vector<int> quarter_bits;      // of every section
    std::vector<int64_t> section_rows;  // empty: one section with all rows
    const uint8_t* codes;
    int64_t bytes;
    const uint8_t* numbers;  // the section of every row, bit-packed; null for one section
    int64_t number_bytes;
    int number_bits;
    const float* quantiles;  // [4096], the values above 3 bits; null where there are none
};
// Throws std::invalid_argument when sizes or numbers do not fit together.
std::vector<TrellisSection> sections(const StoredTrellis& stored);

// Row scales: `codes` of 8 bits, squared, or of 16 (float16), times `top`.
std::vector<float> trellis_scales(const uint8_t* codes, int64_t rows, float top);
std::vector<float> trellis_scales(const uint16_t* halves, int64_t rows, float top);

// The random signs of a rotated basis (kernels/formats/rotated.py).
std::vector<float> rotation_signs(int64_t size, uint32_t seed, uint32_t side);

}  // namespace nstf::engine
