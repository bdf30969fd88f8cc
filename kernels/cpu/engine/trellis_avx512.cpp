// Trellis codes in AVX-512. Up to 3 bits: the four bytes of each product times int8 activations as they are: VNNI adds four such
// products in one instruction, and 32 weights take 11.
#include "trellis.h"

#if NSTF_X86

#include <immintrin.h>

#include <cmath>
#include <stdexcept>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,prefer-vector-width=512")

namespace nstf::engine {
namespace {

struct Windows : RowWindows {
    using RowWindows::RowWindows;
    // The 16-bit states of row r of the tile at `codes`, a lane each, with other bits above them.
    __m512i states(const uint8_t* codes, int r) const {
        const __m128i bytes = window(codes, r * quarter_bits / 2, 8 * quarter_bits);
        return _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), _mm512_loadu_si512(pick[r & 1])),
                                 _mm512_loadu_si512(shift[r & 1]));
    }
};

// The same for two rows at a time, 16 bits a state, where 16 bytes hold both: up to 3 bits.
struct PairWindows {
    uint8_t low[64], high[64];  // the first two of the four bytes a state lies in, and the others
    int16_t shift[32];
    explicit PairWindows(int q) {
        for (int i = 0; i < 32; ++i) {
            const int bit = (i + 1) * q / 4;
            for (int k = 0; k < 2; ++k) {
                low[2 * i + k] = static_cast<uint8_t>(bit / 8 + k);
                high[2 * i + k] = static_cast<uint8_t>(std::min(15, bit / 8 + 2 + k));
            }
            shift[i] = static_cast<int16_t>(bit % 8);
        }
    }
};

// Activations: int8 per 16 columns, each twice; its scale; and 510 times the sum over all columns.
class TrellisInt8 : public Trellis {
  public:
    TrellisInt8(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales)
        : Trellis(rows, cols, std::move(sections), std::move(scales)) {
        for (const TrellisSection& s : sections_) {
            windows_.emplace_back(s.quarter_bits);
            pairs_.emplace_back(s.quarter_bits);
            if (s.quarter_bits > kMostSummed) levels_ = &quantiles(s.codebook);
        }
    }
    uintptr_t key() const override { return 5; }
    std::string kernel() const override { return "trellis int8, avx512-vbmi"; }

    void reserve(const float*, int64_t batch, Input& in) const override {
        in.batch = batch;
        in.stride = across_ * kSide;
        in.sums_stride = 1;
        in.floats.grow(batch * in.stride);
        in.codes.grow(batch * in.stride * 2);
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
                // Of the bits, in whose order NaN comes last: a maximum of floats would lose it.
                const int32_t size = _mm512_reduce_max_epi32(_mm512_castps_si512(_mm512_abs_ps(v)));
                const float top = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(size)));
                const float scale = top / 127 + (top - top), inverse = top > 1e-30f ? 127 / top : 0;
                // NaN becomes the least integer, two of which have no sum; the scale is NaN then, whatever the codes are.
                const __m512i q = _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse))),
                                                   _mm512_set1_epi32(-128));
                in.scales.data()[b * across_ + t] = scale / 148;
                total += static_cast<double>(scale / 148) * _mm512_reduce_add_epi32(q);
                const __m256i words = _mm512_cvtepi32_epi16(_mm512_and_si512(q, _mm512_set1_epi32(255)));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(in.codes.data() + (b * in.stride + t * kSide) * 2),
                                    _mm256_or_si256(words, _mm256_slli_epi16(words, 8)));
            }
            in.sums.data()[b] = static_cast<float>(510 * total);
        }
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t place = first; place < end; place += kSide) {
            const Tiles row = tiles(place);
            const size_t s = static_cast<size_t>(row.section - sections_.data());
            if (batch > 1) several(in, batch, row, s, y, stride);
            else if (row.section->quarter_bits <= kMostSummed) summed(in, row, pairs_[s], y);
            else looked_up(in, row, s, y);
        }
    }

  private:
    // The codebook above 3 bits: the upper 12 bits of a multiple of the state choose a quantile of the normal distribution.
    // A look-up costs a gather, a cycle for each weight, so it is computed: by symmetry from the place v = 1..2048 counted
    // from the nearer tail, a parabola for each half octave of v. Off by at most 0.002, where rounding to 6 bits is by 0.017.
    struct Quantiles {
        float c0[32], c1[32], c2[32];
    };
    static const Quantiles& quantiles(const float* codebook) {
        static const Quantiles found = [&] {
            std::vector<double> at(2049);
            for (uint32_t i = 0; i < 65536; ++i) {
                const uint32_t level = (i * kLevelMultiplier & 0xffff) >> 4;
                if (level >= 2048) at[4096 - level] = codebook[i];
            }
            Quantiles q = {};
            for (int half = 0; half < 24; ++half) {
                const double octave = std::ldexp(1.0, half / 2);
                const int first = static_cast<int>(std::ceil(octave * (half % 2 ? 1.5 : 1)));
                const int last = std::min(2048, static_cast<int>(std::ceil(octave * (half % 2 ? 2 : 1.5))) - 1);
                if (first > last) continue;
                // Through three points of the piece, or as many as there are.
                const double x[3] = {double(first), std::floor((first + last) / 2.0), double(last)};
                const double y0 = at[static_cast<size_t>(x[0])], y1 = at[static_cast<size_t>(x[1])];
                const double y2 = at[static_cast<size_t>(x[2])];
                const double slope = last > first ? (y2 - y0) / (x[2] - x[0]) : 0;
                const double bend = x[1] > x[0] && x[2] > x[1]
                                        ? (slope - (y1 - y0) / (x[1] - x[0])) / (x[2] - x[1]) : 0;
                // y0 + slope (v - x0) + bend (v - x0) (v - x2)
                const size_t i = static_cast<size_t>((254 + half) & 31);  // the upper bits of v as a float
                q.c0[i] = static_cast<float>(y0 - slope * x[0] + bend * x[0] * x[2]);
                q.c1[i] = static_cast<float>(slope - bend * (x[0] + x[2]));
                q.c2[i] = static_cast<float>(bend);
            }
            return q;
        }();
        for (uint32_t i = 0; i < 65536; ++i)
            if (std::fabs(quantile(found, i) - codebook[i]) > 2.5e-3f)
                throw std::invalid_argument("trellis: not the codebook of this rate");
        return found;
    }
    static float quantile(const Quantiles& q, uint32_t state) {
        const int level = static_cast<int>((state * kLevelMultiplier & 0xffff) >> 4);
        const float v = static_cast<float>(std::min(4096 - level, level + 1));
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        const size_t i = bits >> 22 & 31;
        const float value = (q.c2[i] * v + q.c1[i]) * v + q.c0[i];
        return level < 2048 ? -value : value;
    }

    // What comes 4 KiB later, into the second cache.
    static void fetch(const uint8_t* codes, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(codes + 4096 + i, 0, 2);
    }

    // Two rows of a tile at a time: the products' lower and upper halves are two vectors of bytes, and their sum over both
    // is all that is needed.
    void summed(const Input& in, const Tiles& row, const PairWindows& windows, float* y) const {
        const __m512i pick_low = _mm512_loadu_si512(windows.low), pick_high = _mm512_loadu_si512(windows.high);
        const __m512i shift = _mm512_loadu_si512(windows.shift);
        const __m512i by_low = _mm512_set1_epi16(static_cast<int16_t>(kMultiplier & 0xffff));
        const __m512i by_high = _mm512_set1_epi16(static_cast<int16_t>(kMultiplier >> 16));
        const int64_t bytes = row.bytes(), step = row.section->quarter_bits;
        __m512 total[kSide / 2];
        for (auto& t : total) t = _mm512_setzero_ps();
        uint8_t room[kRoom];
        for (int64_t t = 0; t < across_; ++t) {
            const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
            fetch(row.codes + t * bytes, bytes);
            const __m512i x = _mm512_broadcast_i64x4(
                _mm256_load_si256(reinterpret_cast<const __m256i*>(in.codes.data() + t * kSide * 2)));
            const __m512 scale = _mm512_set1_ps(in.scales.data()[t]);
#pragma GCC unroll 8
            for (int r = 0; r < kSide / 2; ++r) {
                const __m512i all = _mm512_broadcast_i32x4(window(codes, r * step, bytes));
                const __m512i state = _mm512_shrdv_epi16(_mm512_shuffle_epi8(all, pick_low),
                                                         _mm512_shuffle_epi8(all, pick_high), shift);
                const __m512i low = _mm512_mullo_epi16(state, by_low);
                const __m512i high =
                    _mm512_add_epi16(_mm512_mulhi_epu16(state, by_low), _mm512_mullo_epi16(state, by_high));
                const __m512i sum =
                    _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low, x), high, x);
                total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total[r]);
            }
        }
        for (int i = 0; i < row.count; ++i) {
            const int32_t r = row.rows[i];
            const __m512 both = total[i / 2];
            const __m256 half = i % 2 == 0 ? _mm512_castps512_ps256(both) : _mm512_extractf32x8_ps(both, 1);
            const float sum = _mm512_reduce_add_ps(_mm512_zextps256_ps512(half));
            y[r] = (sum - in.sums.data()[0]) * scales_[static_cast<size_t>(r)];
        }
    }

    // The quantiles of 16 states, with the tables in registers.
    struct Looked {
        __m512 c0[2], c1[2], c2[2];
        explicit Looked(const Quantiles& q) {
            for (int i = 0; i < 2; ++i) {
                c0[i] = _mm512_loadu_ps(q.c0 + 16 * i);
                c1[i] = _mm512_loadu_ps(q.c1 + 16 * i);
                c2[i] = _mm512_loadu_ps(q.c2 + 16 * i);
            }
        }
        // `state`: 16 bits a lane, anything above them.
        __m512 operator()(__m512i state) const {
            const __m512i product = _mm512_mullo_epi16(state, _mm512_set1_epi32(kLevelMultiplier));
            const __m512i level = _mm512_srli_epi32(product, 4);
            const __m512i place = _mm512_min_epi32(_mm512_sub_epi32(_mm512_set1_epi32(4096), level),
                                                   _mm512_add_epi32(level, _mm512_set1_epi32(1)));
            const __m512 v = _mm512_cvtepi32_ps(place);
            const __m512i piece = _mm512_srli_epi32(_mm512_castps_si512(v), 22);
            const __m512 a0 = _mm512_permutex2var_ps(c0[0], piece, c0[1]), a1 = _mm512_permutex2var_ps(c1[0], piece, c1[1]);
            const __m512 a2 = _mm512_permutex2var_ps(c2[0], piece, c2[1]);
            const __m512i value = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_fmadd_ps(a2, v, a1), v, a0));
            // Levels below the middle are negative: value ^ (~product << 16 & sign).
            const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
            return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(value, _mm512_slli_epi32(product, 16), sign, 0xd2));
        }
    };

    static __m512 sums_of_bytes(__m512i state) {
        const __m512i low = _mm512_and_si512(state, _mm512_set1_epi32(0xffff));
        const __m512i product = _mm512_mullo_epi32(low, _mm512_set1_epi32(static_cast<int>(kMultiplier)));
        const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), product, _mm512_set1_epi32(0x01010101));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(510)));
    }
    float unit(size_t s) const { return sections_[s].quarter_bits > kMostSummed ? 1.0f : 1.0f / 148; }

    void looked_up(const Input& in, const Tiles& row, size_t s, float* y) const {
        const int64_t bytes = row.bytes();
        const Looked look(*levels_);
        const Windows& windows = windows_[s];
        uint8_t room[kRoom];
        // Eight rows at a time: their sums and the tables fill the registers.
        for (int half = 0; half < 2; ++half) {
            __m512 total[kSide / 2];
            for (auto& t : total) t = _mm512_setzero_ps();
            for (int64_t t = 0; t < across_; ++t) {
                const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
                const __m512 x = _mm512_loadu_ps(in.floats.data() + t * kSide);
#pragma GCC unroll 8
                for (int r = 0; r < kSide / 2; ++r)
                    total[r] = _mm512_fmadd_ps(look(windows.states(codes, half * 8 + r)), x, total[r]);
            }
            for (int i = half * 8; i < std::min(row.count, half * 8 + 8); ++i) {
                const int32_t r = row.rows[i];
                y[r] = _mm512_reduce_add_ps(total[i % 8]) * unit(s) * scales_[static_cast<size_t>(r)];
            }
        }
    }

    // The row of tiles decoded and turned once, [column][16 rows], for all activations.
    void several(const Input& in, int64_t batch, const Tiles& row, size_t s, float* y, int64_t stride) const {
        thread_local Buffer<float> weights;
        float* w = weights.grow(in.stride * kSide);
        const int64_t bytes = row.bytes();
        const Looked look(levels_ ? *levels_ : Quantiles{});
        const bool summed = row.section->quarter_bits <= kMostSummed;
        uint8_t room[kRoom];
        for (int64_t t = 0; t < across_; ++t) {
            const uint8_t* codes = readable(row.codes + t * bytes, bytes, row.end, room);
            alignas(64) float tile[kTile];
            for (int r = 0; r < kSide; ++r) {
                const __m512i states = windows_[s].states(codes, r);
                _mm512_store_ps(tile + r * kSide, summed ? sums_of_bytes(states) : look(states));
            }
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
    std::vector<PairWindows> pairs_;
    const Quantiles* levels_ = nullptr;
};

}  // namespace

Shared trellis_avx512(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales) {
    return std::make_shared<TrellisInt8>(rows, cols, std::move(sections), std::move(scales));
}

}  // namespace nstf::engine

#pragma GCC pop_options

#endif
