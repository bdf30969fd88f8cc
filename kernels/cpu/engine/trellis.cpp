// Trellis codes: a row of tiles (16 rows of the matrix) at a time, each tile decoded into the first cache and used at once.
//
// Two ways to a tile's values. The exact one looks each state up in the codebook. The other computes, for the codes of up to
// 3 bits whose values are sums of the four bytes of a product, the bytes themselves, and multiplies them with int8
// activations as they are: AVX-512 VNNI adds four such products in one instruction, and 16 weights take 6.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "leaves.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NSTF_VNNI 1
#include <immintrin.h>
#endif

namespace nstf::engine {
namespace {

constexpr int64_t kSide = 16, kTile = kSide * kSide;

// The 16 bits that end where each code ends.
void decode_tile(const uint8_t* codes, int quarter_bits, const float* codebook, float* out) {
    const int bytes = 8 * quarter_bits;
    uint8_t ring[8 * 24 + 8];
    ring[0] = codes[bytes - 2], ring[1] = codes[bytes - 1];
    std::memcpy(ring + 2, codes, static_cast<size_t>(bytes));
    for (int t = 0; t < kTile; ++t) {
        const int end = (t + 1) * quarter_bits / 4;  // of the stream, so 16 less in the ring
        uint32_t word;
        std::memcpy(&word, ring + (end >> 3), 4);
        out[t] = codebook[word >> (end & 7) & 0xffff];
    }
}

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
        const uint8_t* codes;
        const int32_t* rows;  // of the matrix
        int count;
        int64_t bytes() const { return 8 * section->quarter_bits; }
    };

    Tiles tiles(int64_t place) const {
        size_t s = sections_.size() - 1;
        while (starts_[s] > place) --s;
        const TrellisSection& section = sections_[s];
        const int64_t at = place - starts_[s];
        return {&section, section.codes + at / kSide * across_ * 8 * section.quarter_bits, section.rows.data() + at,
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

}  // namespace
}  // namespace nstf::engine

#if NSTF_VNNI

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,prefer-vector-width=512")

namespace nstf::engine {
namespace {

// Where the states of a row of a tile lie: 16 bytes of the stream hold them all.
struct Windows {
    // By the parity of the row: with an odd number of half bytes a row, every other row starts in the middle of one. Kept as
    // bytes: containers of vectors would be compiled without their instruction set.
    uint8_t pick[2][64];
    int32_t shift[2][16];
    int quarter_bits;
    explicit Windows(int q) : quarter_bits(q) {
        for (int odd = 0; odd < 2; ++odd) {
            const int start = 4 * odd * q & 7;
            for (int i = 0; i < 16; ++i) {
                const int bit = start + (i + 1) * q / 4;  // from the byte that holds the 16 bits before the row's first code
                for (int k = 0; k < 4; ++k) pick[odd][4 * i + k] = static_cast<uint8_t>(k < 3 ? bit / 8 + k : 0x80);
                shift[odd][i] = bit % 8;
            }
        }
    }
    // The 16-bit states of row r, a lane each, with other bits above them. `ring` begins two bytes before the stream.
    __m512i states(const uint8_t* ring, int r) const {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(ring + (4 * r * quarter_bits >> 3)));
        return _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), _mm512_loadu_si512(pick[r & 1])),
                                 _mm512_loadu_si512(shift[r & 1]));
    }
};

constexpr int kMostSummed = 12;  // quarter bits up to which values are sums of bytes
constexpr uint32_t kMultiplier = 0xA7491E23, kLevelMultiplier = 25115;

// Activations: int8 per 16 columns, each four times; its scale; and 510 times the sum over all columns.
class TrellisInt8 : public Trellis {
  public:
    TrellisInt8(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales)
        : Trellis(rows, cols, std::move(sections), std::move(scales)) {
        for (const TrellisSection& s : sections_) {
            windows_.emplace_back(s.quarter_bits);
            if (s.quarter_bits > kMostSummed) levels_ = levels(s.codebook);
        }
    }
    uintptr_t key() const override { return 5; }
    std::string kernel() const override { return "trellis int8"; }

    void reserve(const float*, int64_t batch, Input& in) const override {
        in.batch = batch;
        in.stride = across_ * kSide;
        in.sums_stride = 1;
        in.floats.grow(batch * in.stride);
        in.codes.grow(batch * in.stride * 4);
        in.scales_stride = across_;
        in.scales.grow(batch * across_);
        in.sums.grow(batch);
    }

    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        Trellis::prepare(x, first, end, in);
        for (int64_t b = first; b < end; ++b) {
            const float* from = in.floats.data() + b * in.stride;
            double total = 0;
            for (int64_t t = 0; t < across_; ++t) {
                const __m512 v = _mm512_loadu_ps(from + t * kSide);
                const float top = _mm512_reduce_max_ps(_mm512_abs_ps(v));
                const float scale = top / 127, inverse = top > 1e-30f ? 127 / top : 0;
                const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
                in.scales.data()[b * across_ + t] = scale / 148;
                total += static_cast<double>(scale / 148) * _mm512_reduce_add_epi32(q);
                const __m512i four = _mm512_mullo_epi32(_mm512_and_si512(q, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x01010101));
                _mm512_storeu_si512(in.codes.data() + (b * in.stride + t * kSide) * 4, four);
            }
            in.sums.data()[b] = static_cast<float>(510 * total);
        }
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t place = first; place < end; place += kSide) {
            const Tiles row = tiles(place);
            const size_t s = static_cast<size_t>(row.section - sections_.data());
            if (batch > 1) several(in, batch, row, s, y, stride);
            else if (row.section->quarter_bits <= kMostSummed) summed(in, row, windows_[s], y);
            else looked_up(in, row, s, y);
        }
    }

  private:
    // The upper bits of a multiple of the state choose one of 4096 levels: the codebook in a sixteenth of its size.
    static const float* levels(const float* codebook) {
        static const std::vector<float> found = [&] {
            std::vector<float> table(4096);
            for (uint32_t i = 0; i < 65536; ++i) table[(i * kLevelMultiplier & 0xffff) >> 4] = codebook[i];
            return table;
        }();
        for (uint32_t i = 0; i < 65536; ++i)
            if (found[(i * kLevelMultiplier & 0xffff) >> 4] != codebook[i])
                throw std::invalid_argument("trellis: not the codebook of this rate");
        return found.data();
    }

    static void ring(const uint8_t* codes, int64_t bytes, uint8_t* out) {
        out[0] = codes[bytes - 2], out[1] = codes[bytes - 1];
        std::memcpy(out + 2, codes, static_cast<size_t>(bytes));
    }

    void summed(const Input& in, const Tiles& row, const Windows& windows, float* y) const {
        const __m512i low = _mm512_set1_epi32(0xffff), by = _mm512_set1_epi32(static_cast<int>(kMultiplier));
        const int64_t bytes = row.bytes();
        __m512 total[kSide];
        for (auto& t : total) t = _mm512_setzero_ps();
        uint8_t room[8 * 24 + 80];
        for (int64_t t = 0; t < across_; ++t) {
            ring(row.codes + t * bytes, bytes, room);
            const __m512i x = _mm512_loadu_si512(in.codes.data() + t * kSide * 4);
            const __m512 scale = _mm512_set1_ps(in.scales.data()[t]);
#pragma GCC unroll 16
            for (int r = 0; r < kSide; ++r) {
                const __m512i product = _mm512_mullo_epi32(_mm512_and_si512(windows.states(room, r), low), by);
                const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), product, x);
                total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total[r]);
            }
        }
        for (int i = 0; i < row.count; ++i) {
            const int32_t r = row.rows[i];
            y[r] = (_mm512_reduce_add_ps(total[i]) - in.sums.data()[0]) * scales_[static_cast<size_t>(r)];
        }
    }

    // The values of a row of a tile.
    __m512 values(const uint8_t* room, int r, size_t s) const {
        const __m512i state = _mm512_and_si512(windows_[s].states(room, r), _mm512_set1_epi32(0xffff));
        if (sections_[s].quarter_bits > kMostSummed) {
            const __m512i at = _mm512_mullo_epi16(state, _mm512_set1_epi32(kLevelMultiplier));
            return _mm512_i32gather_ps(_mm512_srli_epi32(at, 4), levels_, 4);
        }
        const __m512i product = _mm512_mullo_epi32(state, _mm512_set1_epi32(static_cast<int>(kMultiplier)));
        const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), product, _mm512_set1_epi32(0x01010101));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(510)));
    }
    float unit(size_t s) const { return sections_[s].quarter_bits > kMostSummed ? 1.0f : 1.0f / 148; }

    void looked_up(const Input& in, const Tiles& row, size_t s, float* y) const {
        const int64_t bytes = row.bytes();
        __m512 total[kSide];
        for (auto& t : total) t = _mm512_setzero_ps();
        uint8_t room[8 * 24 + 80];
        for (int64_t t = 0; t < across_; ++t) {
            ring(row.codes + t * bytes, bytes, room);
            const __m512 x = _mm512_loadu_ps(in.floats.data() + t * kSide);
            for (int r = 0; r < kSide; ++r) total[r] = _mm512_fmadd_ps(values(room, r, s), x, total[r]);
        }
        for (int i = 0; i < row.count; ++i) {
            const int32_t r = row.rows[i];
            y[r] = _mm512_reduce_add_ps(total[i]) * unit(s) * scales_[static_cast<size_t>(r)];
        }
    }

    // The row of tiles decoded and turned once, [column][16 rows], for all activations.
    void several(const Input& in, int64_t batch, const Tiles& row, size_t s, float* y, int64_t stride) const {
        thread_local Buffer<float> weights;
        float* w = weights.grow(in.stride * kSide);
        const int64_t bytes = row.bytes();
        uint8_t room[8 * 24 + 80];
        for (int64_t t = 0; t < across_; ++t) {
            ring(row.codes + t * bytes, bytes, room);
            alignas(64) float tile[kTile];
            for (int r = 0; r < kSide; ++r) _mm512_store_ps(tile + r * kSide, values(room, r, s));
            const __m512i down = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                                    _mm512_set1_epi32(kSide));
            for (int c = 0; c < kSide; ++c)
                _mm512_store_ps(w + (t * kSide + c) * kSide, _mm512_i32gather_ps(down, tile + c, 4));
        }
        alignas(64) float scale[kSide] = {};
        alignas(64) int32_t rows[kSide] = {};
        for (int i = 0; i < row.count; ++i) {
            rows[i] = row.rows[i];
            scale[i] = scales_[static_cast<size_t>(rows[i])] * unit(s);
        }
        const __m512 by = _mm512_load_ps(scale);
        const __m512i where = _mm512_load_si512(rows);
        const __mmask16 there = static_cast<__mmask16>((1 << row.count) - 1);
        int64_t b = 0;
        for (; b + 12 <= batch; b += 12) tokens<12>(in, b, w, by, where, there, y + b * stride, stride);
        for (; b + 4 <= batch; b += 4) tokens<4>(in, b, w, by, where, there, y + b * stride, stride);
        for (; b < batch; ++b) tokens<1>(in, b, w, by, where, there, y + b * stride, stride);
    }

    template <int T>
    static void tokens(const Input& in, int64_t b, const float* w, __m512 by, __m512i where, __mmask16 there, float* y,
                       int64_t stride) {
        __m512 total[T];
        const float* x = in.floats.data() + b * in.stride;
        for (auto& t : total) t = _mm512_setzero_ps();
        for (int64_t k = 0; k < in.stride; ++k) {
            const __m512 column = _mm512_load_ps(w + k * kSide);
            for (int t = 0; t < T; ++t)
                total[t] = _mm512_fmadd_ps(column, _mm512_set1_ps(x[t * in.stride + k]), total[t]);
        }
        for (int t = 0; t < T; ++t)
            _mm512_mask_i32scatter_ps(y + t * stride, there, where, _mm512_mul_ps(total[t], by), 4);
    }

    std::vector<Windows> windows_;
    const float* levels_ = nullptr;
};

}  // namespace
}  // namespace nstf::engine

#pragma GCC pop_options

#endif

namespace nstf::engine {

Shared trellis(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales, bool exact) {
    if (static_cast<int64_t>(scales.size()) != rows || sections.empty())
        throw std::invalid_argument("trellis: scales or sections are missing");
#if NSTF_VNNI
    if (!exact && int8_available())
        return std::make_shared<TrellisInt8>(rows, cols, std::move(sections), std::move(scales));
#endif
    (void)exact;
    return std::make_shared<Trellis>(rows, cols, std::move(sections), std::move(scales));
}

}  // namespace nstf::engine
