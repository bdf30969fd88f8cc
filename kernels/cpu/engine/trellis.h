// Trellis codes: a row of tiles (16 rows of the matrix) at a time, each tile decoded into the first cache and used at once.
//
// Two ways to a tile's values. The exact one, here, looks each state up in the codebook. The others compute, for the codes of up to
// 3 bits whose values are sums of the four bytes of a product, the bytes themselves, and multiply them or their sums with
// integer activations.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../trellis_tile.h"
#include "leaves.h"

#if NSTF_X86
#include <immintrin.h>
#endif

namespace nstf::engine {

constexpr int64_t kSide = 16, kTile = kSide * kSide;
constexpr int kMostSummed = 12;  // quarter bits up to which values are sums of bytes
// The hashes of a state: its product's bytes, or its level (kernels/formats/trellis.py).
constexpr uint32_t kMultiplier = 0xA7491E23, kLevelMultiplier = 25115;

class Trellis : public Leaf {
  public:
    Trellis(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales)
        : Leaf(rows, cols), sections_(std::move(sections)), scales_(std::move(scales)),
          across_((cols + kSide - 1) / kSide) {
        where_.resize(static_cast<size_t>(rows));
        for (size_t s = 0; s < sections_.size(); ++s) {
            starts_.push_back(places_);
            const auto& members = sections_[s].rows;
            for (size_t i = 0; i < members.size(); ++i)
                where_[static_cast<size_t>(members[i])] = places_ + static_cast<int64_t>(i);
            places_ += (static_cast<int64_t>(members.size()) + kSide - 1) / kSide * kSide;
        }
    }

    uintptr_t key() const override { return 4; }
    int64_t places() const override { return places_; }
    int64_t unit() const override { return kSide; }
    std::string kernel() const override { return "trellis float32"; }
    Ahead codes(int64_t first, int64_t end) const override {  // of the section that the first place is in
        const Tiles row = tiles(first);
        return {row.codes, std::min<int64_t>(row.end - row.codes, (end - first) / kSide * across_ * row.bytes())};
    }

    void reserve(const float*, int64_t batch, Input& in) const override {
        in.batch = batch;
        in.stride = across_ * kSide;
        in.floats.grow(batch * in.stride);
    }
    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        for (int64_t b = first; b < end; ++b) {
            float* to = in.floats.data() + b * in.stride;
            std::copy_n(x + b * cols, cols, to);
            std::fill(to + cols, to + in.stride, 0.0f);
        }
    }
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t place = first; place < end; place += kSide) {
            const Tiles row = tiles(place);
            thread_local Buffer<float> weights;
            float* w = weights.grow(kSide * in.stride);
            decode_row(row, w, in.stride);
            for (int64_t b = 0; b < batch; ++b) {
                const float* x = in.floats.data() + b * in.stride;
                for (int i = 0; i < row.count; ++i) {
                    const float* wi = w + i * in.stride;
                    float total = 0;
#pragma omp simd reduction(+ : total)
                    for (int64_t k = 0; k < in.stride; ++k) total += wi[k] * x[k];
                    const int32_t r = row.rows[i];
                    y[b * stride + r] = total * scales_[static_cast<size_t>(r)];
                }
            }
        }
    }
    void decode(int64_t row, float* out) const override {
        const int64_t place = where_[static_cast<size_t>(row)];
        const Tiles tile_row = tiles(place / kSide * kSide);
        float values[kTile];
        for (int64_t t = 0; t < across_; ++t) {
            decode_tile(tile_row.codes + t * tile_row.bytes(), tile_row.section->quarter_bits,
                        tile_row.section->codebook, values);
            for (int64_t k = 0; k < std::min(kSide, cols - t * kSide); ++k)
                out[t * kSide + k] = values[place % kSide * kSide + k] * scales_[static_cast<size_t>(row)];
        }
    }

  protected:
    struct Tiles {  // a row of tiles
        const TrellisSection* section;
        const uint8_t *codes, *end;  // its first byte, and the section's last one's successor
        const int32_t* rows;         // of the matrix
        int count;
        int64_t bytes() const { return 8 * section->quarter_bits; }
    };

    Tiles tiles(int64_t place) const {
        size_t s = sections_.size() - 1;
        while (starts_[s] > place) --s;
        const TrellisSection& section = sections_[s];
        const int64_t at = place - starts_[s];
        const int64_t bytes = across_ * 8 * section.quarter_bits;
        const int64_t down = (static_cast<int64_t>(section.rows.size()) + kSide - 1) / kSide;
        return {&section, section.codes + at / kSide * bytes, section.codes + down * bytes, section.rows.data() + at,
                static_cast<int>(std::min<int64_t>(kSide, static_cast<int64_t>(section.rows.size()) - at))};
    }

    // [16][stride] at scale 1.
    void decode_row(const Tiles& row, float* out, int64_t stride) const {
        float values[kTile];
        for (int64_t t = 0; t < across_; ++t) {
            decode_tile(row.codes + t * row.bytes(), row.section->quarter_bits, row.section->codebook, values);
            for (int i = 0; i < kSide; ++i) std::copy_n(values + i * kSide, kSide, out + i * stride + t * kSide);
        }
    }

    std::vector<TrellisSection> sections_;
    std::vector<float> scales_;
    int64_t across_, places_ = 0;
    std::vector<int64_t> starts_, where_;
};

// A tile that may be read 16 bytes beyond its end: the last one of a section is copied.
constexpr int kRoom = 8 * 24 + 64;
inline const uint8_t* readable(const uint8_t* codes, int64_t bytes, const uint8_t* end, uint8_t* room) {
    if (codes + bytes + 16 <= end) return codes;
    std::memcpy(room, codes, static_cast<size_t>(bytes));
    return room;
}

// Where the states of a row of a tile lie, 32 bits a state: 16 bytes of the stream hold them all. They begin two bytes before the
// row's own codes, for the first row at the end of the tile.
struct RowWindows {
    // By the parity of the row: with an odd number of half bytes a row, every other row starts in the middle of one. Kept as
    // bytes: containers of vectors would be compiled without their instruction set.
    uint8_t pick[2][64];
    int32_t shift[2][16];
    int quarter_bits;
    explicit RowWindows(int q) : quarter_bits(q) {
        for (int odd = 0; odd < 2; ++odd) {
            const int start = 4 * odd * q & 7;
            for (int i = 0; i < 16; ++i) {
                const int bit = start + (i + 1) * q / 4;  // from the byte that holds the 16 bits before the row's first code
                for (int k = 0; k < 4; ++k) pick[odd][4 * i + k] = static_cast<uint8_t>(k < 3 ? bit / 8 + k : 0x80);
                shift[odd][i] = bit % 8;
            }
        }
    }
};

#if NSTF_X86
// 16 bytes of a circular stream of `size`, from two before `at`. Reads up to 16 bytes beyond it.
inline __m128i window(const uint8_t* codes, int64_t at, int64_t size) {
    if (at > 0) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + at - 2));
    uint16_t seam;
    std::memcpy(&seam, codes + size - 2, 2);
    return _mm_insert_epi16(_mm_slli_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), 2), seam, 0);
}

Shared trellis_avx512(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales);
Shared trellis_avx2(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales);
#endif

}  // namespace nstf::engine
