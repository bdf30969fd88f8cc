// Trellis codes in AVX2. Up to 3 bits: the sums of the four bytes of each product, 16 bits each, times activations of 16 bits:
// 16 weights take 16 instructions. Above: the codebook, by a table of
// its 4096 values.
#include "trellis.h"

#if NSTF_X86

#include <immintrin.h>

#include <cmath>
#include <stdexcept>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")

namespace nstf::engine {
namespace {

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// The 32 states of two rows of a tile, 16 bits each; 16 bytes of the stream hold them all.
struct PairWindows {
    // A state lies in three bytes: pairs of them, the first two and the last two, times powers of two that shift them into their
    // place, since there is no shift of 16 bits by different amounts. Kept as bytes: containers of vectors would be compiled
    // without their instruction set.
    uint8_t low[64], high[64];
    uint16_t by[32];
    explicit PairWindows(int q) {
        for (int i = 0; i < 32; ++i) {
            const int bit = (i + 1) * q / 4, byte = (bit - 1) / 8;  // from the 16 bits before the first row's first code
            for (int k = 0; k < 2; ++k) {
                low[2 * i + k] = static_cast<uint8_t>(byte + k);
                high[2 * i + k] = static_cast<uint8_t>(std::min(15, byte + 2 + k));
            }
            by[i] = static_cast<uint16_t>(1 << (16 - (bit - 8 * byte)));  // shifts of 1 to 8 bits
        }
    }
    // The bytes that rows 2 r and 2 r + 1 lie in, twice.
    static __m256i bytes(const uint8_t* codes, int r, int step, int64_t size) {
        return _mm256_broadcastsi128_si256(window(codes, r * step, size));
    }
    // Of one of the two rows: the sums of the bytes of its states' products.
    __m256i sums(__m256i bytes, int row) const {
        const __m256i shift = load(by + 16 * row), ones = _mm256_set1_epi8(1);
        const __m256i state =
            _mm256_or_si256(_mm256_mulhi_epu16(_mm256_shuffle_epi8(bytes, load(low + 32 * row)), shift),
                            _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, load(high + 32 * row)), shift));
        const __m256i by_low = _mm256_set1_epi16(static_cast<int16_t>(kMultiplier & 0xffff));
        const __m256i by_high = _mm256_set1_epi16(static_cast<int16_t>(kMultiplier >> 16));
        const __m256i lower = _mm256_mullo_epi16(state, by_low);
        const __m256i upper = _mm256_add_epi16(_mm256_mulhi_epu16(state, by_low), _mm256_mullo_epi16(state, by_high));
        return _mm256_add_epi16(_mm256_maddubs_epi16(lower, ones), _mm256_maddubs_epi16(upper, ones));
    }
};

// The eight states of half a row of a tile, a lane each, with other bits above their 16.
struct Windows : RowWindows {
    using RowWindows::RowWindows;
    __m256i states(__m128i bytes, int r, int half) const {
        return _mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), load(pick[r & 1] + 32 * half)),
                                 load(shift[r & 1] + 8 * half));
    }
};

// The codebook above 3 bits by level, of which a multiple of the state's upper 12 bits is: small enough for the first cache.
struct Levels {
    alignas(64) float values[4096];
    explicit Levels(const float* codebook) {
        for (uint32_t i = 0; i < 65536; ++i) values[level(i)] = codebook[i];
    }
    static uint32_t level(uint32_t state) { return (state * kLevelMultiplier & 0xffff) >> 4; }
    bool holds(const float* codebook) const {
        for (uint32_t i = 0; i < 65536; ++i)
            if (values[level(i)] != codebook[i]) return false;
        return true;
    }
    __m256 operator()(__m256i states) const {
        const __m256i product = _mm256_mullo_epi16(states, _mm256_set1_epi32(kLevelMultiplier));
        return _mm256_i32gather_ps(values, _mm256_srli_epi32(product, 4), 4);
    }
};

// Activations: int16 per 16 columns; its scale; and 510 times the sum over all columns.
class TrellisAvx2 : public Trellis {
  public:
    TrellisAvx2(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales)
        : Trellis(rows, cols, std::move(sections), std::move(scales)) {
        for (const TrellisSection& s : sections_) {
            windows_.emplace_back(s.quarter_bits);
            pairs_.emplace_back(std::min(s.quarter_bits, kMostSummed));
            if (s.quarter_bits > kMostSummed) levels_ = &levels(s.codebook);
        }
    }
    uintptr_t key() const override { return 8; }
    std::string kernel() const override {
        for (const TrellisSection& s : sections_)
            if (s.quarter_bits <= kMostSummed) return "trellis int16, avx2";
        return "trellis float32, avx2";
    }

    void reserve(const float* x, int64_t batch, Input& in) const override {
        Trellis::reserve(x, batch, in);
        in.wide.grow(in.stride);
        in.scales.grow(across_);
        in.sums.grow(1);
    }

    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        Trellis::prepare(x, first, end, in);
        if (in.batch > 1) return;
        constexpr float kMost = 32767;
        double total = 0;
        for (int64_t t = 0; t < across_; ++t) {
            const float* from = in.floats.data() + t * kSide;
            float top = 0;
            for (int i = 0; i < kSide; ++i) top = std::max(top, std::fabs(from[i]));
            const float inverse = top > 1e-30f ? kMost / top : 0;
            in.scales.data()[t] = top / kMost / 148;
            int32_t sum = 0;
            for (int i = 0; i < kSide; ++i) {
                const int32_t q = static_cast<int32_t>(std::nearbyint(from[i] * inverse));
                in.wide.data()[t * kSide + i] = static_cast<int16_t>(q);
                sum += q;
            }
            total += static_cast<double>(in.scales.data()[t]) * sum;
        }
        in.sums.data()[0] = static_cast<float>(510 * total);
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t place = first; place < end; place += kSide) {
            const Tiles row = tiles(place);
            const size_t s = static_cast<size_t>(row.section - sections_.data());
            if (batch > 1) several(in, batch, row, s, y, stride);
            else if (row.section->quarter_bits <= kMostSummed) summed(in, row, pairs_[s], y);
            else looked_up(in, row, windows_[s], y);
        }
    }

  private:
    // One table does for all; throws std::invalid_argument for a codebook that is not the one of all rates above 3 bits.
    static const Levels& levels(const float* codebook) {
        static const Levels found(codebook);
        if (!found.holds(codebook)) throw std::invalid_argument("trellis: not the codebook of this rate");
        return found;
    }
    static float sum_of(__m256 v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }

    void summed(const Input& in, const Tiles& row, const PairWindows& windows, float* y) const {
        const int64_t bytes = row.bytes();
        const int step = row.section->quarter_bits;
        __m256 total[kSide];
        for (auto& t : total) t = _mm256_setzero_ps();
        uint8_t room[kRoom];
        for (int64_t t = 0; t < across_; ++t) {
            const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row.codes + t * bytes + 4096 + i, 0, 2);
            const __m256i x = load(in.wide.data() + t * kSide);
            const __m256 scale = _mm256_set1_ps(in.scales.data()[t]);
            for (int r = 0; r < kSide / 2; ++r) {
                const __m256i all = PairWindows::bytes(codes, r, step, bytes);
                for (int i = 0; i < 2; ++i) {
                    const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(windows.sums(all, i), x));
                    total[2 * r + i] = _mm256_fmadd_ps(sum, scale, total[2 * r + i]);
                }
            }
        }
        for (int i = 0; i < row.count; ++i) {
            const int32_t r = row.rows[i];
            y[r] = (sum_of(total[i]) - in.sums.data()[0]) * scales_[static_cast<size_t>(r)];
        }
    }

    void looked_up(const Input& in, const Tiles& row, const Windows& windows, float* y) const {
        const int64_t bytes = row.bytes();
        const Levels& look = *levels_;
        uint8_t room[kRoom];
        // Eight rows at a time: their sums fill the registers.
        for (int first = 0; first < kSide; first += kSide / 2) {
            __m256 total[kSide / 2];
            for (auto& t : total) t = _mm256_setzero_ps();
            for (int64_t t = 0; t < across_; ++t) {
                const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
                const __m256 x0 = _mm256_load_ps(in.floats.data() + t * kSide);
                const __m256 x1 = _mm256_load_ps(in.floats.data() + t * kSide + 8);
                for (int r = 0; r < kSide / 2; ++r) {
                    const __m128i all = window(codes, (first + r) * windows.quarter_bits / 2, bytes);
                    total[r] = _mm256_fmadd_ps(look(windows.states(all, first + r, 0)), x0, total[r]);
                    total[r] = _mm256_fmadd_ps(look(windows.states(all, first + r, 1)), x1, total[r]);
                }
            }
            for (int i = first; i < std::min(row.count, first + 8); ++i)
                y[row.rows[i]] = sum_of(total[i - first]) * scales_[static_cast<size_t>(row.rows[i])];
        }
    }

    // A tile's values, [16][16].
    void values(const Tiles& row, const uint8_t* codes, size_t section, float* out) const {
        const int64_t bytes = row.bytes();
        if (row.section->quarter_bits > kMostSummed) {
            const Windows& windows = windows_[section];
            for (int r = 0; r < kSide; ++r) {
                const __m128i all = window(codes, r * windows.quarter_bits / 2, bytes);
                for (int half = 0; half < 2; ++half)
                    _mm256_storeu_ps(out + r * kSide + 8 * half, (*levels_)(windows.states(all, r, half)));
            }
            return;
        }
        const __m256 unit = _mm256_set1_ps(1.0f / 148);
        for (int r = 0; r < kSide; ++r) {
            const __m256i all = PairWindows::bytes(codes, r / 2, row.section->quarter_bits, bytes);
            const __m256i sum = _mm256_sub_epi16(pairs_[section].sums(all, r % 2), _mm256_set1_epi16(510));
            const __m256i first = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sum));
            const __m256i second = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sum, 1));
            _mm256_storeu_ps(out + r * kSide, _mm256_mul_ps(_mm256_cvtepi32_ps(first), unit));
            _mm256_storeu_ps(out + r * kSide + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(second), unit));
        }
    }

    // The row of tiles decoded and turned once, [column][16 rows], for all activations.
    void several(const Input& in, int64_t batch, const Tiles& row, size_t section, float* y, int64_t stride) const {
        thread_local Buffer<float> weights;
        float* w = weights.grow(in.stride * kSide);
        const int64_t bytes = row.bytes();
        uint8_t room[kRoom];
        for (int64_t t = 0; t < across_; ++t) {
            float tile[kTile];
            values(row, readable(row.codes + t * bytes, bytes, row.end, room), section, tile);
            for (int c = 0; c < kSide; ++c)
                for (int r = 0; r < kSide; ++r) w[(t * kSide + c) * kSide + r] = tile[r * kSide + c];
        }
        int64_t b = 0;
        for (; b + 6 <= batch; b += 6) tokens<6>(in, b, w, row, y + b * stride, stride);
        for (; b + 2 <= batch; b += 2) tokens<2>(in, b, w, row, y + b * stride, stride);
        for (; b < batch; ++b) tokens<1>(in, b, w, row, y + b * stride, stride);
    }

    template <int T>
    void tokens(const Input& in, int64_t b, const float* w, const Tiles& row, float* y, int64_t stride) const {
        __m256 total[T][2];
        const float* x = in.floats.data() + b * in.stride;
        for (auto& t : total) t[0] = t[1] = _mm256_setzero_ps();
        for (int64_t k = 0; k < in.stride; ++k) {
            const __m256 first = _mm256_load_ps(w + k * kSide), second = _mm256_load_ps(w + k * kSide + 8);
            for (int t = 0; t < T; ++t) {
                const __m256 by = _mm256_broadcast_ss(x + t * in.stride + k);
                total[t][0] = _mm256_fmadd_ps(first, by, total[t][0]);
                total[t][1] = _mm256_fmadd_ps(second, by, total[t][1]);
            }
        }
        for (int t = 0; t < T; ++t) {
            float sums[kSide];
            _mm256_storeu_ps(sums, total[t][0]);
            _mm256_storeu_ps(sums + 8, total[t][1]);
            for (int i = 0; i < row.count; ++i)
                y[t * stride + row.rows[i]] = sums[i] * scales_[static_cast<size_t>(row.rows[i])];
        }
    }

    std::vector<Windows> windows_;
    std::vector<PairWindows> pairs_;
    const Levels* levels_ = nullptr;
};

}  // namespace

Shared trellis_avx2(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales) {
    return std::make_shared<TrellisAvx2>(rows, cols, std::move(sections), std::move(scales));
}

}  // namespace nstf::engine

#pragma GCC pop_options

#endif
