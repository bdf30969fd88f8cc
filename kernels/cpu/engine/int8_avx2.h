// The pieces of packed_int8.h in AVX2. NSTF_VNNI: AVX-VNNI is there too, which adds up products of unsigned and signed bytes in
// 32 bits. Without it products are added in pairs of 16 bits, which holds them for codes of up to 7 bits; wider codes are
// signed, and their signs go to the activations.

#include "each.h"

#undef NSTF_PAIRED
#define NSTF_PAIRED 0
#undef NSTF_WORDS
#define NSTF_WORDS (!NSTF_VNNI)
#undef NSTF_HELD
#define NSTF_HELD 0

using Bytes = __m256i;
using Ints = __m256i;
using Narrow = __m256i;
using Floats = __m256;
constexpr int LANES = 8, TOKENS = 4, BLOCKS = 2;
constexpr int SHORT_ROWS = 2, LONG_ROWS = 1;
constexpr bool SIGNED = !NSTF_VNNI;
// Whether `more` adds to sums of 32 bits.
constexpr bool CHAINED = NSTF_VNNI;
constexpr uintptr_t KEY = 6, PANEL_KEY = 9;

inline Floats zero_floats() { return _mm256_setzero_ps(); }
inline Floats set(float f) { return _mm256_set1_ps(f); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline __m256i first_mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline void store_first(float* p, Floats v, int count) { _mm256_maskstore_ps(p, first_mask(count), v); }
inline Floats first_lanes(Floats v, int count) { return _mm256_and_ps(v, _mm256_castsi256_ps(first_mask(count))); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats negative_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline __m256i words_of_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Floats floats_of_bytes(const uint8_t* p) { return _mm256_cvtepi32_ps(words_of_bytes(p)); }
inline Floats powers_of_bytes(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(words_of_bytes(p), 23)); }
inline Floats floats_of_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline float float_of_half(uint16_t h) { return _cvtsh_ss(h); }
inline float sum_of(Floats v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
// The sums over the lanes of four vectors.
inline void store_four_sums(float* p, const Floats* v) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

inline Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bytes(void* p, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline Bytes four_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
// Sums in the order they are written: the compiler's own, a tree, needs more registers than there are.
inline __m256i in_turn(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}
inline Ints add_ints(Ints a, Ints b) { return in_turn(_mm256_add_epi32(a, b)); }
inline Ints sub_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints set_int(int32_t i) { return _mm256_set1_epi32(i); }
inline Ints as_ints(Bytes v) { return v; }
inline Bytes as_bytes(Ints v) { return v; }
inline Floats as_floats(Bytes v) { return _mm256_castsi256_ps(v); }
#if NSTF_VNNI
inline Ints widened(Narrow v) { return v; }
template <bool WIDE>
inline Narrow first(Bytes w, Bytes x) {
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, x);
}
template <bool WIDE>
inline Narrow more(Narrow sum, Bytes w, Bytes x) {
    return _mm256_dpbusd_avx_epi32(sum, w, x);
}
#else
inline Ints widened(Narrow v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }
// |w| is at most 128 and |x| 127, so a sum of two products is at most 32512.
template <bool WIDE>
inline Narrow first(Bytes w, Bytes x) {
    if (WIDE) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_maddubs_epi16(w, x);
}
template <bool WIDE>
inline Narrow more(Narrow sum, Bytes w, Bytes x) {
    return in_turn(_mm256_add_epi16(sum, first<WIDE>(w, x)));
}
#endif
#if NSTF_WORDS
// Codes as 16 bits: those at even places, and at odd ones. Activations in the same order: of each four 0, 2, 1, 3.
inline Bytes even_bytes(Bytes v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
inline Bytes odd_bytes(Bytes v) { return _mm256_srai_epi16(v, 8); }
// The same of unsigned ones.
inline Bytes even_codes(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi16(255)); }
inline Bytes odd_codes(Bytes v) { return _mm256_srli_epi16(v, 8); }
// 128 taken off each.
inline Bytes with_sign(Bytes v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
inline void store_words(const int8_t* codes, int16_t* words) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (int i = 0; i < kChunk; i += 16)
        store_bytes(words + i, _mm256_cvtepi8_epi16(
                                   _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)), order)));
}
// Products of levels and activations, added four at a time; sizes: of the levels, without signs.
inline Ints signed_products(Bytes sizes, Bytes w, Bytes x) { return widened(_mm256_maddubs_epi16(sizes, _mm256_sign_epi8(x, w))); }
inline Bytes two_words(const int16_t* p) { return four_bytes(reinterpret_cast<const int8_t*>(p)); }
inline Ints pairs(Bytes w, Bytes x) { return _mm256_madd_epi16(w, x); }
#endif
// Bytes shifted right by N bits, or left where it is negative, with bits of their neighbours; and masks.
template <int N>
inline Bytes shifted(Bytes v) { return N >= 0 ? _mm256_srli_epi16(v, N & 15) : _mm256_slli_epi16(v, -N & 15); }
inline Bytes masked(Bytes v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(mask))); }
inline Bytes with_masked(Bytes w, Bytes v, int mask) { return _mm256_or_si256(w, masked(v, mask)); }
inline Bytes any_of(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
inline Bytes table_bytes(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes looked_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }
// How many sums of two products of codes of `bits` bits 16 bits hold.
inline constexpr int run_of(int bits) {
    return NSTF_VNNI || bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
}

// The scales of the two blocks of a chunk, in the lanes that belong to each: half a vector, or vector k.
template <bool EVEN_ODD>
inline Floats block_scales(const float* s, const float* t, int k) {
    if (EVEN_ODD) return _mm256_blend_ps(_mm256_broadcast_ss(s), _mm256_broadcast_ss(t), 0xf0);
    return _mm256_broadcast_ss(k == 0 ? s : t);
}

// Codes of `bits` bits in their own order, 64 from 8 * bits bytes; reads up to 12 more.
struct Spread {
    // Kept as bytes: 16 codes a half, of which the even ones are shifted to the lower byte of a pair and the odd ones to the
    // upper one. Each lies in two bytes. There is no shift of 16 bits by different amounts; products do for it.
    __m256i even, odd, even_by, odd_by, mask;
    __m128i right;
    int half;
    explicit Spread(int bits) : half(2 * bits) {
        alignas(32) uint8_t pick[2][32];
        alignas(32) uint16_t by[2][16];
        for (int i = 0; i < 32; ++i) {
            const int bit = i % 16 * bits;
            pick[i % 2][i / 2 * 2] = static_cast<uint8_t>(bit / 8);
            pick[i % 2][i / 2 * 2 + 1] = static_cast<uint8_t>(std::min(15, bit / 8 + 1));
            // The even ones to the top, from where all are shifted down alike.
            by[i % 2][i / 2] = static_cast<uint16_t>(1 << (i % 2 == 0 ? 16 - bits - bit % 8 : 8 - bit % 8));
        }
        even = load_bytes(pick[0]), odd = load_bytes(pick[1]);
        even_by = load_bytes(by[0]), odd_by = load_bytes(by[1]);
        mask = _mm256_set1_epi16(static_cast<int16_t>(((1 << bits) - 1) << 8));
        right = _mm_cvtsi32_si128(16 - bits);
    }
    void operator()(const uint8_t* p, Bytes* out) const {
        for (int i = 0; i < 2; ++i, p += 2 * half) {
            const __m256i v = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + half)), 1);
            const __m256i low = _mm256_srl_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(v, even), even_by), right);
            const __m256i high = _mm256_and_si256(_mm256_mullo_epi16(_mm256_shuffle_epi8(v, odd), odd_by), mask);
            out[i] = _mm256_or_si256(low, high);
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
        const __m256i both = load_bytes(p), mask = _mm256_set1_epi8(15);
        out[0] = _mm256_and_si256(both, mask);
        out[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
};
struct Levels {  // a table of 16 values, rounded to int8
    static constexpr bool EVEN_ODD = true, TABLE = true, WIDE = true;
    static constexpr int BYTES = 32;
    Nibbles codes;
    __m256i table, sizes;
    explicit Levels(const PackedMatrix& w) : codes(w) {
        alignas(16) uint8_t rounded[16];
        round_table(w, SIGNED ? 0 : 128, rounded);
        table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(rounded)));
        sizes = _mm256_abs_epi8(table);
    }
    static int64_t bytes(int) { return 32; }
    static constexpr int run() { return run_of(8); }
    void operator()(const uint8_t* p, Bytes* out) const {
        codes(p, out);
        each<2>([&](auto i) __attribute__((always_inline)) { out[i] = _mm256_shuffle_epi8(table, out[i]); });
    }
    // The sizes of the levels are looked up too: Zen has no vpabsb beside multiplications, but shuffles.
    void with_sizes(const uint8_t* p, Bytes* out, Bytes* size) const {
        codes(p, out);
        each<2>([&](auto i) __attribute__((always_inline)) {
            size[i] = _mm256_shuffle_epi8(sizes, out[i]);
            out[i] = _mm256_shuffle_epi8(table, out[i]);
        });
    }
};
struct EightBits {
    static constexpr bool EVEN_ODD = false, TABLE = false, WIDE = true;
    static constexpr int BYTES = 64;
    explicit EightBits(const PackedMatrix&) {}
    static int64_t bytes(int) { return 64; }
    static constexpr int run() { return run_of(8); }
    void operator()(const uint8_t* p, Bytes* out) const {
        each<2>([&](auto i) __attribute__((always_inline)) {
            out[i] = load_bytes(p + 32 * i);
            if (SIGNED) out[i] = _mm256_xor_si256(out[i], _mm256_set1_epi8(-128));
        });
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

#include "transpose_avx2.h"

#include "int8_quantise.h"

// A block of 32 activations with one scale: the codes in their order, the scale, and the sum of all.
inline Bytes quantise_block(const float* x, float* scale, float* sum) {
    // Without their signs floats have the order of their bits, where NaN comes last. As floats the maximum would lose it.
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    Floats v[4];
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        v[i] = load(x + 8 * i);
        top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), no_sign));
    }
    top = _mm256_max_epi32(top, _mm256_permute2x128_si256(top, top, 1));
    top = _mm256_max_epi32(top, _mm256_shuffle_epi32(top, 0x4e));
    top = _mm256_max_epi32(top, _mm256_shuffle_epi32(top, 0xb1));
    const float largest = _mm256_cvtss_f32(_mm256_castsi256_ps(top));
    const Floats inverse = set(largest > 1e-30f ? 127.0f / largest : 0.0f);
    Ints q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(mul(v[i], inverse));
    *scale = largest * (1.0f / 127) + (largest - largest);  // NaN where `largest` is NaN or infinite
    *sum = *scale * sum_of(to_floats(_mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]))));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <bool EVEN_ODD>
inline void quantise(const float* x, bool fine, int8_t* codes, float* scales, float* sums) {
    if (fine) return quantise_plainly<EVEN_ODD>(x, fine, codes, scales, sums);
    for (int h = 0; h < 2; ++h) {
        const Bytes block = quantise_block(x + h * kBlock, scales + h, sums + h);
        if (!EVEN_ODD) {
            store_bytes(codes + h * kBlock, block);
            continue;
        }
        const __m256i apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(block, apart), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + h * 16), _mm256_castsi256_si128(halves));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 32 + h * 16), _mm256_extracti128_si256(halves, 1));
    }
}
