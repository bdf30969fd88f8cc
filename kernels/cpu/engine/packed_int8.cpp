// Packed codes times activations rounded to int8, with AVX-512 VNNI.
//
// 64 codes at a time become unsigned bytes, and one instruction multiplies each four of them with four activations and adds
// them up. One row of activations: a row of codes is read as it is stored; a scale of activations covers 8 columns. Several
// rows: 16 rows of codes are unpacked side by side once, and each activation meets all 16; its scale covers 32 columns.
// Codes are unsigned, so their zero points are taken off at the end, times the sums of the activations of a block of 32.
#include "leaves.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>

namespace nstf::engine {

// Before the pragma: this runs on every processor.
bool int8_available() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace nstf::engine

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,prefer-vector-width=512")

namespace nstf::engine {
namespace {

constexpr int64_t kChunk = 64, kBlock = 32;  // columns unpacked at a time; columns of a sum of activations
constexpr int kPanel = 16;                   // rows that are unpacked side by side
// Bytes between what is read and what is fetched into the second cache. The processor's own prefetcher loses its way
// between rows and stops at every page: on a matrix larger than the caches this is worth a factor of 2.5.
constexpr int64_t kAhead = 4096;
constexpr int64_t kSeveral = 4;              // rows of activations from which that pays

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }

// Codes of `bits` bits in their own order, from 8 * bits bytes: every eight of them lie in `bits` bytes.
struct Spread {
    __m512i bytes, shifts, mask;
    __mmask64 read;
    explicit Spread(int bits) {
        alignas(64) uint8_t index[64], shift[64];
        for (int i = 0; i < 64; ++i) {
            index[i] = static_cast<uint8_t>(std::min(63, i / 8 * bits + i % 8));
            shift[i] = static_cast<uint8_t>(i % 8 * bits);
        }
        bytes = load(index);
        shifts = load(shift);
        mask = _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
        read = bits == 8 ? ~__mmask64{0} : (__mmask64{1} << (8 * bits)) - 1;
    }
    __m512i operator()(const uint8_t* p) const { return spread(_mm512_maskz_loadu_epi8(read, p)); }
    // As many bytes as there are; the codes of the others are zero.
    __m512i some(const uint8_t* p, int64_t count) const {
        const __mmask64 there = count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
        return spread(_mm512_maskz_loadu_epi8(read & there, p));
    }

  private:
    __m512i spread(__m512i v) const {
        return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(bytes, v)), mask);
    }
};

// How a chunk of codes becomes bytes, and in which order: EVEN_ODD, the 32 even columns and then the odd ones.
struct Nibbles {
    static constexpr bool EVEN_ODD = true;
    __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0), mask = _mm512_set1_epi8(15);
    explicit Nibbles(const PackedMatrix&) {}
    static int64_t bytes(int) { return 32; }
    __m512i operator()(const uint8_t* p) const {
        const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), mask);
    }
};
struct Levels {  // a table of 16 values, rounded to int8 and moved up by 128
    static constexpr bool EVEN_ODD = true;
    Nibbles codes;
    __m512i table;
    explicit Levels(const PackedMatrix& w) : codes(w) {
        alignas(16) uint8_t bytes[16];
        const float top = largest(w);
        for (int i = 0; i < 16; ++i)
            bytes[i] = static_cast<uint8_t>(128 + (top > 0 ? std::lround(w.table[i] / top * 127) : 0));
        table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    }
    static float largest(const PackedMatrix& w) {
        float top = 0;
        for (float v : w.table) top = std::max(top, std::fabs(v));
        return top;
    }
    static int64_t bytes(int) { return 32; }
    __m512i operator()(const uint8_t* p) const { return _mm512_shuffle_epi8(table, codes(p)); }
};
struct Bytes {
    static constexpr bool EVEN_ODD = false;
    explicit Bytes(const PackedMatrix&) {}
    static int64_t bytes(int) { return 64; }
    __m512i operator()(const uint8_t* p) const { return load(p); }
};
struct OddBits {
    static constexpr bool EVEN_ODD = false;
    Spread spread;
    explicit OddBits(const PackedMatrix& w) : spread(w.bits) {}
    static int64_t bytes(int bits) { return 8 * bits; }
    __m512i operator()(const uint8_t* p) const { return spread(p); }
};

// The scales of a row, [groups], and anything finite up to a whole vector: activations are zero there.
inline void row_scales(const PackedMatrix& w, int64_t r, float* out) {
    const int64_t n = w.groups;
    if (w.scale_kind == Scale::kSteps && (r + 1) * n + 16 <= w.rows * n) {
        const uint8_t* in = static_cast<const uint8_t*>(w.scale) + r * n;
        const __m512 step = _mm512_set1_ps(_cvtsh_ss(w.super_[r]) * (1.0f / 256));
        for (int64_t g = 0; g < n; g += 16) {
            const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + g)));
            _mm512_storeu_ps(out + g, _mm512_fmadd_ps(_mm512_cvtepi32_ps(c), step, step));
        }
        return;
    }
    for (int64_t g = 0; g < n; g += 16) {
        const __mmask16 there = static_cast<__mmask16>(n - g >= 16 ? 0xffff : (1 << (n - g)) - 1);
        __m512 s;
        if (w.scale_kind == Scale::kHalf) {
            const uint16_t* in = static_cast<const uint16_t*>(w.scale) + r * n + g;
            s = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, in));
        } else if (w.scale_kind == Scale::kFloat) {
            s = _mm512_maskz_loadu_ps(there, static_cast<const float*>(w.scale) + r * n + g);
        } else {
            const __m512i c = _mm512_cvtepu8_epi32(
                _mm_maskz_loadu_epi8(there, static_cast<const uint8_t*>(w.scale) + r * n + g));
            if (w.scale_kind == Scale::kSteps) {
                const __m512 step = _mm512_set1_ps(_cvtsh_ss(w.super_[r]) / 256.0f);
                s = _mm512_maskz_fmadd_ps(there, _mm512_cvtepi32_ps(c), step, step);
            } else {  // 2^(c - 127); the codes of a subnormal power and of NaN are left to the exact kernel
                s = _mm512_maskz_mov_ps(there, _mm512_castsi512_ps(_mm512_slli_epi32(c, 23)));
            }
        }
        _mm512_storeu_ps(out + g, s);
    }
}

template <class Codes>
class PackedInt8 : public Leaf {
  public:
    explicit PackedInt8(const PackedView& view)
        : Leaf(view.w.rows, view.w.cols), view_(view), w_(view_.w), codes_(w_), zero_codes_(w_.bits),
          chunks_((cols + kChunk - 1) / kChunk), blocks_(2 * chunks_), chunk_bytes_(Codes::bytes(w_.bits)) {
        const bool table = std::is_same_v<Codes, Levels>;
        centre_ = table ? 128.0f : static_cast<float>(1 << (w_.bits - 1));
        factor_ = table ? Levels::largest(w_) / 127 : 1.0f;
        group_of_.resize(static_cast<size_t>((blocks_ + 15) / 16 * 16));
        for (size_t j = 0; j < group_of_.size(); ++j)
            group_of_[j] = static_cast<int32_t>(std::min(w_.groups - 1, static_cast<int64_t>(j) * kBlock / w_.group));
    }

    uintptr_t key() const override { return Codes::EVEN_ODD ? 2 : 3; }
    int64_t unit() const override { return kPanel; }
    void decode(int64_t row, float* out) const override { view_.decode(w_, row, 1, out, 1); }
    void decode_rows(int64_t first, int64_t count, float* out) const override { view_.decode(w_, first, count, out, 1); }
    std::string kernel() const override { return "packed int8 x int8"; }

    void reserve(const float*, int64_t batch, Input& in) const override {
        in.batch = batch;
        in.stride = chunks_ * kChunk;
        in.scales_stride = batch < kSeveral ? chunks_ * 16 : blocks_;
        in.sums_stride = (blocks_ + 15) / 16 * 16;
        in.codes.grow(batch * in.stride);
        in.scales.grow(batch * in.scales_stride);
        in.sums.grow(batch * in.sums_stride);
    }

    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        for (int64_t b = first; b < end; ++b) {
            std::fill_n(in.sums.data() + b * in.sums_stride, in.sums_stride, 0.0f);
            for (int64_t c = 0; c < chunks_; ++c)
                quantise(x + b * cols, c, in.batch < kSeveral, in.codes.data() + b * in.stride + c * kChunk,
                         in.scales.data() + b * in.scales_stride, in.sums.data() + b * in.sums_stride);
        }
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        if (batch >= kSeveral) {
            for (int64_t r = first; r < end; r += kPanel) panel(in, batch, r, std::min<int64_t>(kPanel, end - r), y, stride);
            return;
        }
        Room& room = Room::mine(*this);
        int64_t r = first;
        for (; r + 4 <= end; r += 4) rows<4>(in, batch, r, room, y, stride);
        for (; r < end; ++r) rows<1>(in, batch, r, room, y, stride);
    }

  private:
    // What a thread works in: scales and zero points of up to 16 rows by block, and a copy of the last rows.
    struct Room {
        Buffer<float> groups, scales, zeros;
        Buffer<uint8_t> copies, panel;
        static Room& mine(const PackedInt8& m) {
            thread_local Room room;
            const int64_t blocks = (m.blocks_ + 15) / 16 * 16;
            room.groups.grow((m.w_.groups + 15) / 16 * 16 + 16);
            room.scales.grow(kPanel * blocks);
            room.zeros.grow(kPanel * blocks);
            room.copies.grow(kPanel * (m.w_.row_bytes + 64 + m.chunk_bytes_));
            return room;
        }
    };

    // 64 activations: their codes in the order of this kind, their scales (a lane for each of the 16 sums of a chunk, or one
    // a block) and the sums of the two blocks.
    void quantise(const float* x, int64_t c, bool fine, int8_t* codes, float* scales, float* sums) const {
        __m512 v[4], top[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t left = cols - c * kChunk - 16 * i;
            const __mmask16 there = static_cast<__mmask16>(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
            v[i] = _mm512_maskz_loadu_ps(there, x + c * kChunk + 16 * i);
            __m512 m = _mm512_abs_ps(v[i]);
            m = _mm512_max_ps(m, _mm512_permute_ps(m, 0xb1));
            m = _mm512_max_ps(m, _mm512_permute_ps(m, 0x4e));
            top[i] = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, 0xb1));  // of eight columns
        }
        if (!fine)
            for (int i = 0; i < 4; i += 2) {
                const __m512 m = _mm512_max_ps(top[i], top[i + 1]);
                top[i] = top[i + 1] = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, 0x4e));
            }
        __m512i q = _mm512_setzero_si512();
        __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        alignas(64) float eight[8];
        for (int i = 0; i < 4; ++i) {
            const __m512 scale = _mm512_mul_ps(top[i], _mm512_set1_ps(1.0f / 127));
            const __mmask16 some = _mm512_cmp_ps_mask(top[i], _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
            const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(127.0f), top[i]);
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
            total[i / 2] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(rounded), scale, total[i / 2]);
            const __m128i bytes = _mm512_cvtepi32_epi8(rounded);
            q = i == 0 ? _mm512_castsi128_si512(bytes) : i == 1 ? _mm512_inserti32x4(q, bytes, 1)
                : i == 2 ? _mm512_inserti32x4(q, bytes, 2) : _mm512_inserti32x4(q, bytes, 3);
            eight[2 * i] = _mm512_cvtss_f32(scale);
            eight[2 * i + 1] = _mm512_cvtss_f32(_mm512_shuffle_f32x4(scale, scale, 2));
        }
        if (Codes::EVEN_ODD) {
            alignas(64) static const uint8_t order[64] = {
                0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23,
                25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
            q = _mm512_permutexvar_epi8(load(order), q);
        }
        _mm512_storeu_si512(codes, q);
        sums[2 * c] = _mm512_reduce_add_ps(total[0]);
        sums[2 * c + 1] = _mm512_reduce_add_ps(total[1]);
        if (!fine) {
            scales[2 * c] = eight[0];
            scales[2 * c + 1] = eight[4];
        } else {
            const __m256 s = _mm256_load_ps(eight);
            __m512 lanes = _mm512_broadcast_f32x8(s);
            if (!Codes::EVEN_ODD)
                lanes = _mm512_permutexvar_ps(
                    _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), lanes);
            _mm512_storeu_ps(scales + 16 * c, lanes);
        }
    }

    // Scales of a row by block, and where the matrix has zero points those times them; returns the row's codes.
    const uint8_t* row(int64_t r, int slot, Room& room) const {
        const int64_t padded = (blocks_ + 15) / 16 * 16;
        float *groups = room.groups.data(), *scales = room.scales.data() + slot * padded;
        const bool same = w_.group == kBlock;
        row_scales(w_, r, same ? scales : groups);
        if (!same)
            for (int64_t j = 0; j < padded; j += 16)
                _mm512_storeu_ps(scales + j, _mm512_i32gather_ps(load(group_of_.data() + j), groups, 4));
        if (w_.zeros != nullptr) zero_points(r, room.zeros.data() + slot * padded, scales, groups);
        const uint8_t* codes = w_.codes + r * w_.row_bytes;
        if (codes + chunks_ * chunk_bytes_ + 64 <= w_.codes_end) return codes;
        uint8_t* copy = room.copies.data() + slot * (w_.row_bytes + 64 + chunk_bytes_);
        std::copy_n(codes, w_.row_bytes, copy);
        return copy;
    }

    // Zero points of a row times its scales, by block.
    void zero_points(int64_t r, float* zeros, const float* scales, float* groups) const {
        const bool same = w_.group == kBlock;
        const int64_t padded = (blocks_ + 15) / 16 * 16;
        const uint8_t* in = w_.zeros + r * w_.zero_bytes;
        alignas(64) uint8_t points[64];
        for (int64_t g = 0; g < w_.groups; g += 64) {
            const int64_t at = g / 8 * w_.bits;
            _mm512_store_si512(points, w_.bits == 8 ? _mm512_maskz_loadu_epi8(mask(w_.groups - g), in + g)
                                                    : zero_codes_.some(in + at, w_.zero_bytes - at));
            for (int64_t i = 0; i < std::min<int64_t>(64, w_.groups - g); i += 16)
                _mm512_storeu_ps(groups + g + i, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
                                                     _mm_load_si128(reinterpret_cast<__m128i*>(points + i)))));
        }
        for (int64_t j = 0; j < padded; j += 16) {
            const __m512 z = same && j + 16 <= (w_.groups + 15) / 16 * 16
                                 ? _mm512_loadu_ps(groups + j)
                                 : _mm512_i32gather_ps(load(group_of_.data() + j), groups, 4);
            _mm512_storeu_ps(zeros + j, _mm512_mul_ps(z, _mm512_loadu_ps(scales + j)));
        }
    }

    static __mmask64 mask(int64_t count) { return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1; }

    template <int R>
    void rows(const Input& in, int64_t batch, int64_t r, Room& room, float* y, int64_t stride) const {
        const int64_t padded = (blocks_ + 15) / 16 * 16;
        // The 16 lanes of a chunk that belong to its second block.
        constexpr __mmask16 second = Codes::EVEN_ODD ? 0xf0f0 : 0xff00;
        const uint8_t* codes[R];
        for (int i = 0; i < R; ++i) codes[i] = row(r + i, i, room);
        const float *scales = room.scales.data(), *zeros = room.zeros.data();
        const __m512 factor = _mm512_set1_ps(factor_);
        for (int64_t b = 0; b < batch; ++b) {
            const int8_t* q = in.codes.data() + b * in.stride;
            const float* fine = in.scales.data() + b * in.scales_stride;
            __m512 total[R];
            for (int i = 0; i < R; ++i) total[i] = _mm512_setzero_ps();
            for (int64_t c = 0; c < chunks_; ++c) {
                const __m512i x = load(q + c * kChunk);
                // Rows lie one after the other, so what is R rows of this chunk further on in memory comes later.
                for (int64_t i = 0; i < R * chunk_bytes_; i += 64)
                    __builtin_prefetch(codes[0] + kAhead + c * R * chunk_bytes_ + i, 0, 2);
                const __m512 by = _mm512_loadu_ps(fine + 16 * c);
                for (int i = 0; i < R; ++i) {
                    const __m512i sum =
                        _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes_(codes[i] + c * chunk_bytes_), x);
                    const float* s = scales + i * padded + 2 * c;
                    const __m512 scale = _mm512_mask_mov_ps(_mm512_set1_ps(s[0]), second, _mm512_set1_ps(s[1]));
                    total[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(by, scale), total[i]);
                }
            }
            const float* sums = in.sums.data() + b * in.sums_stride;
            // Without zero points of its own, the middle of a format is that of every group.
            const float* by_block = w_.zeros == nullptr ? scales : zeros;
            const __m512 middle = _mm512_set1_ps(w_.zeros == nullptr ? centre_ : 1.0f);
            for (int i = 0; i < R; ++i) {
                __m512 lost = _mm512_setzero_ps();
                for (int64_t j = 0; j < blocks_; j += 16)
                    lost = _mm512_fmadd_ps(_mm512_loadu_ps(by_block + i * padded + j), _mm512_loadu_ps(sums + j), lost);
                total[i] = _mm512_mul_ps(_mm512_fnmadd_ps(lost, middle, total[i]), factor);
            }
            if (R == 4) {
                _mm_storeu_ps(y + b * stride + r, four_sums(total));
            } else {
                for (int i = 0; i < R; ++i) y[b * stride + r + i] = _mm512_reduce_add_ps(total[i]);
            }
        }
    }

    // The sums over the lanes of four vectors.
    static __m128 four_sums(const __m512* v) {
        auto folded = [](__m512 a) __attribute__((always_inline)) {
            return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        };
        const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(folded(v[0]), folded(v[1])), _mm256_hadd_ps(folded(v[2]), folded(v[3])));
        return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    }

    // 16 vectors of 16 numbers, transposed.
    static void transpose(__m512i* v) {
        __m512i t[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int k = 0; k < 2; ++k) {
                v[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + 2 + k]);
                v[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + 2 + k]);
            }
        for (int k = 0; k < 4; ++k) {
            const __m512i a = _mm512_shuffle_i32x4(v[k], v[4 + k], 0x88), b = _mm512_shuffle_i32x4(v[k], v[4 + k], 0xdd);
            const __m512i c = _mm512_shuffle_i32x4(v[8 + k], v[12 + k], 0x88);
            const __m512i d = _mm512_shuffle_i32x4(v[8 + k], v[12 + k], 0xdd);
            t[k] = _mm512_shuffle_i32x4(a, c, 0x88);
            t[8 + k] = _mm512_shuffle_i32x4(a, c, 0xdd);
            t[4 + k] = _mm512_shuffle_i32x4(b, d, 0x88);
            t[12 + k] = _mm512_shuffle_i32x4(b, d, 0xdd);
        }
        std::copy_n(t, 16, v);
    }

    // `count` rows of codes for all activations.
    void panel(const Input& in, int64_t batch, int64_t r, int64_t count, float* y, int64_t stride) const {
        Room& room = Room::mine(*this);
        const int64_t padded = (blocks_ + 15) / 16 * 16;
        uint8_t* panel = room.panel.grow(chunks_ * 1024 + blocks_ * 128);
        float* scales = reinterpret_cast<float*>(panel + chunks_ * 1024);  // [block][16], then the zero points
        float* zeros = scales + blocks_ * kPanel;
        const uint8_t* rows[kPanel];
        for (int i = 0; i < kPanel; ++i) rows[i] = row(r + std::min<int64_t>(i, count - 1), i, room);
        for (int64_t c = 0; c < chunks_; ++c) {
            __m512i v[kPanel];
            for (int i = 0; i < kPanel; ++i) v[i] = codes_(rows[i] + c * chunk_bytes_);
            transpose(v);
            for (int i = 0; i < kPanel; ++i) _mm512_store_si512(panel + c * 1024 + i * 64, v[i]);
        }
        for (int64_t j = 0; j < blocks_; ++j)
            for (int i = 0; i < kPanel; ++i) {
                const float scale = factor_ * room.scales.data()[i * padded + j];
                scales[j * kPanel + i] = scale;
                zeros[j * kPanel + i] = w_.zeros == nullptr ? centre_ * scale : factor_ * room.zeros.data()[i * padded + j];
            }
        const __mmask16 there = static_cast<__mmask16>((1 << count) - 1);
        int64_t b = 0;
        for (; b + 8 <= batch; b += 8) tokens<8>(in, b, panel, scales, zeros, there, y + b * stride + r, stride);
        for (; b + 4 <= batch; b += 4) tokens<4>(in, b, panel, scales, zeros, there, y + b * stride + r, stride);
        for (; b < batch; ++b) tokens<1>(in, b, panel, scales, zeros, there, y + b * stride + r, stride);
    }

    template <int T>
    void tokens(const Input& in, int64_t b, const uint8_t* panel, const float* scales, const float* zeros,
                __mmask16 there, float* y, int64_t stride) const {
        const int8_t* q[T];
        const float *by[T], *sums[T];
        __m512 total[T];
        for (int t = 0; t < T; ++t) {
            q[t] = in.codes.data() + (b + t) * in.stride;
            by[t] = in.scales.data() + (b + t) * in.scales_stride;
            sums[t] = in.sums.data() + (b + t) * in.sums_stride;
            total[t] = _mm512_setzero_ps();
        }
        for (int64_t j = 0; j < blocks_; ++j) {
            const int half = static_cast<int>(j % 2);
            __m512i sum[T];
            for (int t = 0; t < T; ++t) sum[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                // The words of this block among the 16 of its chunk.
                const int64_t d = Codes::EVEN_ODD ? (i & 3) + 4 * half + (i >> 2) * 8 : i + 8 * half;
                const __m512i w = _mm512_load_si512(panel + j / 2 * 1024 + d * 64);
                for (int t = 0; t < T; ++t) {
                    int32_t four;
                    std::memcpy(&four, q[t] + j / 2 * kChunk + d * 4, 4);
                    sum[t] = _mm512_dpbusd_epi32(sum[t], w, _mm512_set1_epi32(four));
                }
            }
            const __m512 s = _mm512_load_ps(scales + j * kPanel), z = _mm512_load_ps(zeros + j * kPanel);
            for (int t = 0; t < T; ++t) {
                const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[t]), _mm512_set1_ps(by[t][j]));
                total[t] = _mm512_fmadd_ps(scaled, s, total[t]);
                total[t] = _mm512_fnmadd_ps(z, _mm512_set1_ps(sums[t][j]), total[t]);
            }
        }
        for (int t = 0; t < T; ++t) _mm512_mask_storeu_ps(y + t * stride, there, total[t]);
    }

    PackedView view_;
    const PackedMatrix& w_;
    Codes codes_;
    Spread zero_codes_;
    int64_t chunks_, blocks_, chunk_bytes_;
    float centre_, factor_;
    std::vector<int32_t> group_of_;
};

// 2^(c - 127) is made of its exponent alone, which is wrong for two codes.
bool plain_powers(const PackedMatrix& w) {
    if (w.scale_kind != Scale::kPower) return true;
    const uint8_t* codes = static_cast<const uint8_t*>(w.scale);
    for (int64_t i = 0; i < w.rows * w.groups; ++i)
        if (codes[i] == 0 || codes[i] == 255) return false;
    return true;
}

bool uniform(const PackedMatrix& w) {
    for (int i = 0; i < 16; ++i)
        if (w.table[i] != static_cast<float>(i - 8)) return false;
    return true;
}

}  // namespace

Shared packed_int8(const PackedView& view) {
    const PackedMatrix& w = view.w;
    if (!int8_available() || w.code == Code::kFloat8 || !plain_powers(w)) return nullptr;
    if (w.code == Code::kBytes) return std::make_shared<PackedInt8<Bytes>>(view);
    if (w.code == Code::kBits) return std::make_shared<PackedInt8<OddBits>>(view);
    if (uniform(w)) return std::make_shared<PackedInt8<Nibbles>>(view);
    return std::make_shared<PackedInt8<Levels>>(view);
}

}  // namespace nstf::engine

#pragma GCC pop_options

#else

namespace nstf::engine {
bool int8_available() { return false; }
Shared packed_int8(const PackedView&) { return nullptr; }
}  // namespace nstf::engine

#endif
