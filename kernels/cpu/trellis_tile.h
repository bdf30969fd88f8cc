// The decoder of a trellis tile (kernels/formats/trellis.py): 256 values from their stream.
#pragma once

#include <cstdint>
#include <cstring>

namespace nstf {

constexpr int kTileValues = 256;

// `codes`: 8 quarter_bits bytes, a circular stream; `codebook`: [65536]. The state of a value is the 16 bits that end where its
// code ends, so the first ones reach back to the end of the stream.
inline void decode_tile(const uint8_t* codes, int quarter_bits, const float* codebook, float* out) {
    const int bytes = 8 * quarter_bits;
    uint8_t ring[8 * 24 + 8];
    ring[0] = codes[bytes - 2], ring[1] = codes[bytes - 1];
    std::memcpy(ring + 2, codes, static_cast<size_t>(bytes));
    for (int t = 0; t < kTileValues; ++t) {
        const int end = (t + 1) * quarter_bits / 4;  // of the stream, so 16 less in the ring
        uint32_t word;
        std::memcpy(&word, ring + (end >> 3), 4);
        out[t] = codebook[word >> (end & 7) & 0xffff];
    }
}

}  // namespace nstf
