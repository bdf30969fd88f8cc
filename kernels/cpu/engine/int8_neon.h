// The pieces of packed_int8.h in NEON of AArch64. NSTF_DOT: the dot product instructions are there too (ARMv8.2), which add up
// products of four bytes; without them products are 16 bits wide and added one by one. All codes are signed bytes.

#include "each.h"

#undef NSTF_PAIRED
#define NSTF_PAIRED 0
#undef NSTF_WORDS
#define NSTF_WORDS 0

using Bytes = int8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;
constexpr int LANES = 4, TOKENS = 4, BLOCKS = 2;
constexpr int SHORT_ROWS = 4, LONG_ROWS = 4;
constexpr bool SIGNED = true;
// Whether `more` adds to sums of 32 bits.
constexpr bool CHAINED = NSTF_DOT;
constexpr uintptr_t KEY = 2;

inline Floats zero_floats() { return vdupq_n_f32(0); }
inline Floats set(float f) { return vdupq_n_f32(f); }
inline Floats load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Floats v) { vst1q_f32(p, v); }
inline void store_first(float* p, Floats v, int count) {
    alignas(16) float four[4];
    vst1q_f32(four, v);
    for (int i = 0; i < count; ++i) p[i] = four[i];
}
inline Floats first_lanes(Floats v, int count) {
    const int32_t lanes[4] = {0, 1, 2, 3};
    const uint32x4_t there = vcltq_s32(vld1q_s32(lanes), vdupq_n_s32(count));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), there));
}
inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats negative_fma(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
inline Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }
inline uint32x4_t words_of_bytes(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
inline Floats floats_of_bytes(const uint8_t* p) { return vcvtq_f32_u32(words_of_bytes(p)); }
inline Floats powers_of_bytes(const uint8_t* p) { return vreinterpretq_f32_u32(vshlq_n_u32(words_of_bytes(p), 23)); }
inline Floats floats_of_halves(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
inline float float_of_half(uint16_t h) { return half_to_float(h); }
inline float sum_of(Floats v) { return vaddvq_f32(v); }
// The sums over the lanes of four vectors.
inline void store_four_sums(float* p, const Floats* v) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
}

inline Bytes load_bytes(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
inline void store_bytes(void* p, Bytes v) { vst1q_s8(static_cast<int8_t*>(p), v); }
inline Bytes four_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
inline Ints add_ints(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return vsubq_s32(a, b); }
inline Ints set_int(int32_t i) { return vdupq_n_s32(i); }
inline Ints as_ints(Bytes v) { return vreinterpretq_s32_s8(v); }
inline Bytes as_bytes(Ints v) { return vreinterpretq_s8_s32(v); }
inline Floats as_floats(Bytes v) { return vreinterpretq_f32_s8(v); }
#if NSTF_DOT
using Narrow = int32x4_t;
inline Ints widened(Narrow v) { return v; }
template <bool WIDE>
inline Narrow first(Bytes w, Bytes x) {
    return vdotq_s32(vdupq_n_s32(0), w, x);
}
template <bool WIDE>
inline Narrow more(Narrow sum, Bytes w, Bytes x) {
    return vdotq_s32(sum, w, x);
}
#else
struct Narrow {
    int16x8_t low, high;
};
// Four neighbours each are added.
inline Ints widened(Narrow v) { return vpaddq_s32(vpaddlq_s16(v.low), vpaddlq_s16(v.high)); }
template <bool WIDE>
inline Narrow first(Bytes w, Bytes x) {
    return {vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)};
}
template <bool WIDE>
inline Narrow more(Narrow sum, Bytes w, Bytes x) {
    return {vmlal_s8(sum.low, vget_low_s8(w), vget_low_s8(x)), vmlal_high_s8(sum.high, w, x)};
}
#endif
// How many products of codes of `bits` bits 16 bits hold.
inline constexpr int run_of(int bits) {
    return NSTF_DOT || bits <= 5 ? 8 : bits == 6 ? 4 : 2;
}

// The scale of the block of vector k of the sums of a chunk.
template <bool EVEN_ODD>
inline Floats block_scales(const float* s, const float* t, int k) {
    return vdupq_n_f32((EVEN_ODD ? k : k / 2) == 0 ? *s : *t);
}

// Codes of `bits` bits in their own order, 64 from 8 * bits bytes; reads up to 12 more.
struct Spread {
    // 16 codes at a time, of which the even ones are shifted to the lower byte of a pair and the odd ones to the upper one. Each
    // lies in two bytes.
    uint8x16_t even, odd;
    int16x8_t even_by, odd_by;
    uint8x16_t mask;
    int step;
    explicit Spread(int bits) : step(2 * bits) {
        uint8_t pick[2][16];
        int16_t by[2][8];
        for (int i = 0; i < 16; ++i) {
            const int bit = i * bits;
            pick[i % 2][i / 2 * 2] = static_cast<uint8_t>(bit / 8);
            pick[i % 2][i / 2 * 2 + 1] = static_cast<uint8_t>(std::min(15, bit / 8 + 1));
            by[i % 2][i / 2] = static_cast<int16_t>(i % 2 == 0 ? -(bit % 8) : 8 - bit % 8);
        }
        even = vld1q_u8(pick[0]), odd = vld1q_u8(pick[1]);
        even_by = vld1q_s16(by[0]), odd_by = vld1q_s16(by[1]);
        mask = vdupq_n_u8(static_cast<uint8_t>((1 << bits) - 1));
    }
    void operator()(const uint8_t* p, Bytes* out) const {
        const uint16x8_t lower = vdupq_n_u16(0xff);
        for (int i = 0; i < 4; ++i, p += step) {
            const uint8x16_t v = vld1q_u8(p);
            const uint16x8_t low = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(v, even)), even_by);
            const uint16x8_t high = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(v, odd)), odd_by);
            const uint8x16_t both = vreinterpretq_u8_u16(vbslq_u16(lower, low, high));
            out[i] = vreinterpretq_s8_u8(vandq_u8(both, mask));
        }
    }
};

struct Nibbles {
    static constexpr bool EVEN_ODD = true, TABLE = false, WIDE = false;
    static constexpr int BYTES = 32;
    explicit Nibbles(const PackedMatrix&) {}
    static int64_t bytes(int) { return 32; }
    static constexpr int run() { return run_of(4); }
    void operator()(const uint8_t* p, Bytes* out) const {
        for (int i = 0; i < 2; ++i) {
            const uint8x16_t both = vld1q_u8(p + 16 * i);
            out[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            out[2 + i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    }
};
struct Levels {  // a table of 16 values, rounded to int8
    static constexpr bool EVEN_ODD = true, TABLE = true, WIDE = true;
    static constexpr int BYTES = 32;
    Nibbles codes;
    int8x16_t table;
    explicit Levels(const PackedMatrix& w) : codes(w) {
        uint8_t rounded[16];
        round_table(w, 0, rounded);
        table = vreinterpretq_s8_u8(vld1q_u8(rounded));
    }
    static int64_t bytes(int) { return 32; }
    static constexpr int run() { return run_of(8); }
    void operator()(const uint8_t* p, Bytes* out) const {
        codes(p, out);
        for (int i = 0; i < 4; ++i) out[i] = vqtbl1q_s8(table, vreinterpretq_u8_s8(out[i]));
    }
};
struct EightBits {
    static constexpr bool EVEN_ODD = false, TABLE = false, WIDE = true;
    static constexpr int BYTES = 64;
    explicit EightBits(const PackedMatrix&) {}
    static int64_t bytes(int) { return 64; }
    static constexpr int run() { return run_of(8); }
    void operator()(const uint8_t* p, Bytes* out) const {
        for (int i = 0; i < 4; ++i) out[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128)));
    }
};
struct OddBits {
    static constexpr bool EVEN_ODD = false, TABLE = false, WIDE = false;
    static constexpr int BYTES = 0;
    Spread spread;
    int together;
    explicit OddBits(const PackedMatrix& w) : spread(w.bits), together(run_of(w.bits)) {}
    static int64_t bytes(int bits) { return 8 * bits; }
    int run() const { return together; }
    void operator()(const uint8_t* p, Bytes* out) const { spread(p, out); }
};

// Four vectors of four numbers, transposed.
inline void transpose(int8x16_t* v) {
    int32x4_t t[4];
    for (int i = 0; i < 4; ++i) t[i] = vreinterpretq_s32_s8(v[i]);
    const int32x4_t a = vtrn1q_s32(t[0], t[1]), b = vtrn2q_s32(t[0], t[1]);
    const int32x4_t c = vtrn1q_s32(t[2], t[3]), d = vtrn2q_s32(t[2], t[3]);
    v[0] = vreinterpretq_s8_s32(vcombine_s32(vget_low_s32(a), vget_low_s32(c)));
    v[1] = vreinterpretq_s8_s32(vcombine_s32(vget_low_s32(b), vget_low_s32(d)));
    v[2] = vreinterpretq_s8_s32(vcombine_s32(vget_high_s32(a), vget_high_s32(c)));
    v[3] = vreinterpretq_s8_s32(vcombine_s32(vget_high_s32(b), vget_high_s32(d)));
}

#include "int8_quantise.h"

template <bool EVEN_ODD>
inline void quantise(const float* x, bool fine, int8_t* codes, float* scales, float* sums) {
    quantise_plainly<EVEN_ODD>(x, fine, codes, scales, sums);
}
