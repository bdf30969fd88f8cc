// Trellis codes in AVX2: 16 values at a time, 16 bits each, times activations of 16 bits. Up to 3 bits a value is the sum of the
// four bytes of a product, and 16 weights of one row take 16 instructions; above, a quantile that is computed, and 38.
#include "trellis.h"

#if NSTF_X86

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "trellis_quantiles.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")

namespace nstf::engine {
namespace {

#include "each.h"
#include "transpose_avx2.h"

// Values are computed of some rows of a tile side by side, step by step: each is a long chain of instructions that wait for one
// another, and a processor does not look far enough ahead to find those of the next rows.
constexpr int kTogether = 4;

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
// Sums in the order they are written: the compiler's own, a tree, needs more registers than there are.
inline __m256i added(__m256i a, __m256i b) {
    __m256i sum = _mm256_add_epi32(a, b);
    __asm__("" : "+x"(sum));
    return sum;
}
inline __m256i twice(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i words(int w) { return _mm256_set1_epi16(static_cast<int16_t>(w)); }

// The 16 states of a row of a tile, 16 bits each; 16 bytes of the stream hold them all.
struct States {
    // A state lies in three bytes: pairs of them, the first two and the last two, times powers of two that shift them into their
    // place, since there is no shift of 16 bits by different amounts. Kept as bytes: containers of vectors would be compiled
    // without their instruction set. By the parity of the row: with an odd number of half bytes a row, every other row starts in
    // the middle of one.
    uint8_t low[2][32], high[2][32];
    uint16_t by[2][16];
    int quarter_bits;
    explicit States(int q) : quarter_bits(q) {
        for (int odd = 0; odd < 2; ++odd)
            for (int i = 0; i < 16; ++i) {
                // From the byte that holds the first of the 16 bits before the row's first code.
                const int bit = (4 * odd * q & 7) + (i + 1) * q / 4, byte = (bit - 1) / 8;
                for (int k = 0; k < 2; ++k) {
                    low[odd][2 * i + k] = static_cast<uint8_t>(byte + k);
                    high[odd][2 * i + k] = static_cast<uint8_t>(std::min(15, byte + 2 + k));
                }
                by[odd][i] = static_cast<uint16_t>(1 << (16 - (bit - 8 * byte)));  // shifts of 1 to 8 bits
            }
    }
    // Of kTogether rows from `row` on, which is even.
    NSTF_INLINE void operator()(const uint8_t* codes, int row, __m256i* out) const {
        each<kTogether>([&](auto i) __attribute__((always_inline)) {
            const __m256i bytes = _mm256_broadcastsi128_si256(window(codes, (row + i) * quarter_bits / 2, 8 * quarter_bits));
            const __m256i shift = load(by[i % 2]);
            out[i] = _mm256_or_si256(_mm256_mulhi_epu16(_mm256_shuffle_epi8(bytes, load(low[i % 2])), shift),
                                     _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, load(high[i % 2])), shift));
        });
    }
};

// Up to 3 bits: the sums of the bytes of the states' products, of which 510 stands for zero.
struct Sums {
    static constexpr int CENTRE = 510;
    static constexpr float UNIT = 1.0f / 148;
    explicit Sums(const float*) {}
    NSTF_INLINE void operator()(__m256i* values) const {
        const __m256i by_low = words(kMultiplier & 0xffff), by_high = words(kMultiplier >> 16), ones = _mm256_set1_epi8(1);
        each<kTogether>([&](auto i) __attribute__((always_inline)) {
            const __m256i lower = _mm256_mullo_epi16(values[i], by_low);
            const __m256i upper = _mm256_add_epi16(_mm256_mulhi_epu16(values[i], by_low), _mm256_mullo_epi16(values[i], by_high));
            values[i] = _mm256_add_epi16(_mm256_maddubs_epi16(lower, ones), _mm256_maddubs_epi16(upper, ones));
        });
    }
};

// Above: quantiles (trellis_quantiles.h).
struct Quantiles {
    static constexpr int CENTRE = 0;
    static constexpr float UNIT = kQuantileUnit;
    __m256i c0_low, c0_high, c1, c2;
    explicit Quantiles(const float* codebook) {
        const QuantileTable& table = quantile_table(codebook, kLevelMultiplier);
        c0_low = twice(table.c0_low), c0_high = twice(table.c0_high), c1 = twice(table.c1), c2 = twice(table.c2);
    }
    // States become values.
    NSTF_INLINE void operator()(__m256i* v) const {
        constexpr int N = kTogether;
        __m256i side[N], even[N], odd[N], in_low[N], in_high[N], t[N], at0[N], slope[N];
        const auto step = [](auto f) __attribute__((always_inline)) { each<kTogether>(f); };
        step([&](auto i) __attribute__((always_inline)) { v[i] = _mm256_mullo_epi16(v[i], words(kLevelMultiplier)); });
        step([&](auto i) __attribute__((always_inline)) {
            side[i] = _mm256_srai_epi16(v[i], 15);  // -1 above the middle
            v[i] = _mm256_or_si256(_mm256_xor_si256(v[i], side[i]), words(15));
        });
        // As floats: the lower five bits of the exponent and eleven of the mantissa, even and odd lanes apart.
        step([&](auto i) __attribute__((always_inline)) {
            even[i] = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_blend_epi16(v[i], _mm256_setzero_si256(), 0xaa)));
            odd[i] = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srli_epi32(v[i], 16)));
        });
        step([&](auto i) __attribute__((always_inline)) {
            v[i] = _mm256_blend_epi16(_mm256_srli_epi32(even[i], 12), _mm256_slli_epi32(odd[i], 4), 0xaa);
        });
        // Shuffles look at the lower four bits, and where the highest one is set give zero: a byte of each 16 bits.
        step([&](auto i) __attribute__((always_inline)) {
            in_low[i] = _mm256_or_si256(_mm256_srli_epi16(v[i], 11), words(0x8000));
            in_high[i] = _mm256_or_si256(_mm256_srli_epi16(v[i], 3), words(0x0080));
            t[i] = _mm256_slli_epi16(_mm256_and_si256(v[i], words(2047)), 2);
        });
        step([&](auto i) __attribute__((always_inline)) {
            slope[i] = _mm256_mulhi_epu16(_mm256_shuffle_epi8(c2, in_high[i]), t[i]);
            at0[i] = _mm256_or_si256(_mm256_shuffle_epi8(c0_low, in_low[i]), _mm256_shuffle_epi8(c0_high, in_high[i]));
        });
        step([&](auto i) __attribute__((always_inline)) {
            slope[i] = _mm256_mulhi_epu16(_mm256_sub_epi16(_mm256_shuffle_epi8(c1, in_high[i]), slope[i]), t[i]);
        });
        step([&](auto i) __attribute__((always_inline)) {
            v[i] = _mm256_sign_epi16(_mm256_sub_epi16(slope[i], at0[i]), _mm256_or_si256(side[i], words(1)));
        });
    }
};

// Activations: integers, a scale for 16 columns, and the sum over all columns. One row of them takes 16 bits; of several rows, whose
// products with the values of a tile are added as integers, 13.
class TrellisAvx2 : public Trellis {
  public:
    TrellisAvx2(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales)
        : Trellis(rows, cols, std::move(sections), std::move(scales)) {
        for (const TrellisSection& s : sections_) {
            states_.emplace_back(s.quarter_bits);
            if (s.quarter_bits > kMostSummed) quantile_table(s.codebook, kLevelMultiplier);  // throws for another codebook
        }
    }
    uintptr_t key() const override { return 8; }
    std::string kernel() const override { return "trellis int16, avx2"; }

    void reserve(const float*, int64_t batch, Input& in) const override {
        in.batch = batch;
        in.stride = across_ * kSide;
        in.scales_stride = across_;
        in.sums_stride = 1;
        in.wide.grow(batch * in.stride);
        in.scales.grow(batch * across_);
        in.sums.grow(batch);
    }

    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        const float most = in.batch > 1 ? 4095 : 32767;
        float last[kSide] = {};  // a tile that is not whole
        for (int64_t b = first; b < end; ++b) {
            double total = 0;
            for (int64_t t = 0; t < across_; ++t) {
                const float* from = x + b * cols + t * kSide;
                if ((t + 1) * kSide > cols) {
                    std::copy_n(from, cols % kSide, last);
                    from = last;
                }
                int16_t* to = in.wide.data() + b * in.stride + t * kSide;
                in.scales.data()[b * across_ + t] = rounded(from, most, to);
                int32_t sum = 0;
                for (int i = 0; i < kSide; ++i) sum += to[i];
                total += static_cast<double>(in.scales.data()[b * across_ + t]) * sum;
            }
            in.sums.data()[b] = static_cast<float>(total);
        }
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t place = first; place < end; place += kSide) {
            const Tiles row = tiles(place);
            const States& states = states_[static_cast<size_t>(row.section - sections_.data())];
            if (row.section->quarter_bits <= kMostSummed) tile_row<Sums>(in, batch, row, states, y, stride);
            else tile_row<Quantiles>(in, batch, row, states, y, stride);
        }
    }

  private:
    // 16 activations as integers up to `most`; returns what 1 stands for.
    static float rounded(const float* x, float most, int16_t* to) {
        const __m256 v[2] = {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
        // Of the bits, in whose order NaN comes last: a maximum of floats would lose it.
        const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
        __m256i top = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(v[0]), no_sign),
                                       _mm256_and_si256(_mm256_castps_si256(v[1]), no_sign));
        top = _mm256_max_epi32(top, _mm256_permute2x128_si256(top, top, 1));
        top = _mm256_max_epi32(top, _mm256_shuffle_epi32(top, 0x4e));
        top = _mm256_max_epi32(top, _mm256_shuffle_epi32(top, 0xb1));
        const float largest = _mm256_cvtss_f32(_mm256_castsi256_ps(top));
        const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? most / largest : 0);
        const __m256i q = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v[0], inverse)),
                                             _mm256_cvtps_epi32(_mm256_mul_ps(v[1], inverse)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(q, 0xd8));
        return largest / most + (largest - largest);  // NaN where `largest` is NaN or infinite
    }
    static float sum_of(__m256 v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }

    template <class Values>
    void tile_row(const Input& in, int64_t batch, const Tiles& row, const States& states, float* y, int64_t stride) const {
        const Values values(row.section->codebook);
        if (batch == 1) one(in, row, states, values, y);
        else several(in, batch, row, states, values, y, stride);
    }

    template <class Values>
    void one(const Input& in, const Tiles& row, const States& states, const Values& values, float* y) const {
        const int64_t bytes = row.bytes();
        __m256 total[kSide];
        for (auto& t : total) t = _mm256_setzero_ps();
        uint8_t room[kRoom];
        for (int64_t t = 0; t < across_; ++t) {
            const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row.codes + t * bytes + 4096 + i, 0, 2);
            const __m256i x = load(in.wide.data() + t * kSide);
            const __m256 scale = _mm256_set1_ps(in.scales.data()[t]);
            for (int r = 0; r < kSide; r += kTogether) {
                __m256i v[kTogether];
                states(codes, r, v);
                values(v);
                each<kTogether>([&](auto i) __attribute__((always_inline)) {
                    total[r + i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(v[i], x)), scale, total[r + i]);
                });
            }
        }
        for (int i = 0; i < row.count; ++i) {
            const int32_t r = row.rows[i];
            y[r] = (sum_of(total[i]) - Values::CENTRE * in.sums.data()[0]) * Values::UNIT * scales_[static_cast<size_t>(r)];
        }
    }

    // The row of tiles decoded and turned once, [pair of columns][16 rows][2], for all activations.
    template <class Values>
    void several(const Input& in, int64_t batch, const Tiles& row, const States& states, const Values& values, float* y,
                 int64_t stride) const {
        thread_local Buffer<int16_t> weights;
        int16_t* w = weights.grow(in.stride * kSide);
        const int64_t bytes = row.bytes();
        uint8_t room[kRoom];
        for (int64_t t = 0; t < across_; ++t) {
            const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
            for (int h = 0; h < 2; ++h) {
                __m256i v[8];
                for (int r = 0; r < 8; r += kTogether) {
                    states(codes, 8 * h + r, v + r);
                    values(v + r);
                    for (int i = 0; i < kTogether; ++i) v[r + i] = _mm256_sub_epi16(v[r + i], words(Values::CENTRE));
                }
                transpose(v);
                for (int k = 0; k < 8; ++k)
                    _mm256_store_si256(reinterpret_cast<__m256i*>(w + (t * 8 + k) * 32 + h * 16), v[k]);
            }
        }
        float by[kSide] = {};
        for (int i = 0; i < row.count; ++i) by[i] = Values::UNIT * scales_[static_cast<size_t>(row.rows[i])];
        int64_t b = 0;
        for (; b + 4 <= batch; b += 4) tokens<4>(in, b, w, row, by, y + b * stride, stride);
        for (; b < batch; ++b) tokens<1>(in, b, w, row, by, y + b * stride, stride);
    }

    template <int T>
    void tokens(const Input& in, int64_t b, const int16_t* w, const Tiles& row, const float* by, float* y,
                int64_t stride) const {
        const int16_t* x = in.wide.data() + b * in.stride;
        const float* scales = in.scales.data() + b * across_;
        __m256 total[T][2];
        for (auto& t : total) t[0] = t[1] = _mm256_setzero_ps();
        for (int64_t tile = 0; tile < across_; ++tile) {
            __m256i sum[T][2];
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                const __m256i w0 = load(w + (tile * 8 + k) * 32), w1 = load(w + (tile * 8 + k) * 32 + 16);
                for (int t = 0; t < T; ++t) {
                    int32_t two;
                    std::memcpy(&two, x + t * in.stride + tile * kSide + 2 * k, 4);
                    const __m256i pair = _mm256_set1_epi32(two);
                    const __m256i p0 = _mm256_madd_epi16(w0, pair), p1 = _mm256_madd_epi16(w1, pair);
                    sum[t][0] = k == 0 ? p0 : added(sum[t][0], p0);
                    sum[t][1] = k == 0 ? p1 : added(sum[t][1], p1);
                }
            }
            for (int t = 0; t < T; ++t) {
                const __m256 scale = _mm256_broadcast_ss(scales + t * across_ + tile);
                for (int h = 0; h < 2; ++h) total[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t][h]), scale, total[t][h]);
            }
        }
        for (int t = 0; t < T; ++t) {
            float sums[kSide];
            for (int h = 0; h < 2; ++h) _mm256_storeu_ps(sums + 8 * h, _mm256_mul_ps(total[t][h], _mm256_loadu_ps(by + 8 * h)));
            for (int i = 0; i < row.count; ++i) y[t * stride + row.rows[i]] = sums[i];
        }
    }

    std::vector<States> states_;
};

}  // namespace

Shared trellis_avx2(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales) {
    return std::make_shared<TrellisAvx2>(rows, cols, std::move(sections), std::move(scales));
}

}  // namespace nstf::engine

#pragma GCC pop_options

#endif
