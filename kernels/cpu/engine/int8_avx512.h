// The pieces of packed_int8.h in AVX-512 with VNNI. NSTF_VBMI: VBMI is there too, which picks bytes and bits from all over a
// vector; without it (Cascade Lake) odd widths take seven instructions instead of two.

#include "each.h"

#undef NSTF_PAIRED
#define NSTF_PAIRED 1
#undef NSTF_WORDS
#define NSTF_WORDS 0
#undef NSTF_HELD
#define NSTF_HELD 1

using Bytes = __m512i;
using Ints = __m512i;
using Narrow = __m512i;
using Floats = __m512;
constexpr int LANES = 16, TOKENS = 8, BLOCKS = 1;
constexpr int SHORT_ROWS = 4, LONG_ROWS = 4;
constexpr bool SIGNED = false;
// Whether `more` adds to sums of 32 bits.
constexpr bool CHAINED = true;
constexpr uintptr_t KEY = 2, PANEL_KEY = 10;

inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Floats set(float f) { return _mm512_set1_ps(f); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void store_first(float* p, Floats v, int count) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1 << count) - 1), v);
}
inline Floats first_lanes(Floats v, int count) { return _mm512_maskz_mov_ps(static_cast<__mmask16>((1 << count) - 1), v); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats negative_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline __m512i words_of_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats floats_of_bytes(const uint8_t* p) { return _mm512_cvtepi32_ps(words_of_bytes(p)); }
inline Floats powers_of_bytes(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(words_of_bytes(p), 23)); }
inline Floats floats_of_halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline float float_of_half(uint16_t h) { return _cvtsh_ss(h); }
inline float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
inline __m256 folded(Floats v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
// The sums over the lanes of four vectors.
inline void store_four_sums(float* p, const Floats* v) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(folded(v[0]), folded(v[1])), _mm256_hadd_ps(folded(v[2]), folded(v[3])));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
inline Bytes four_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints set_int(int32_t i) { return _mm512_set1_epi32(i); }
inline Ints as_ints(Bytes v) { return v; }
inline Bytes as_bytes(Ints v) { return v; }
inline Floats as_floats(Bytes v) { return _mm512_castsi512_ps(v); }
inline Ints widened(Narrow v) { return v; }
inline constexpr int run_of(int) { return 8; }
template <bool WIDE>
inline Narrow first(Bytes w, Bytes x) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
}
template <bool WIDE>
inline Narrow more(Narrow sum, Bytes w, Bytes x) {
    return _mm512_dpbusd_epi32(sum, w, x);
}

// Bytes shifted right by N bits, or left where it is negative, with bits of their neighbours; and masks.
template <int N>
inline Bytes shifted(Bytes v) { return N >= 0 ? _mm512_srli_epi16(v, N & 15) : _mm512_slli_epi16(v, -N & 15); }
inline Bytes masked(Bytes v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask))); }
inline Bytes with_masked(Bytes w, Bytes v, int mask) {
    return _mm512_ternarylogic_epi32(w, v, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8);
}
// A vector that the compiler does not read again.
inline Bytes held(Bytes v) {
    __asm__("" : "+v"(v));
    return v;
}
inline Bytes any_of(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes table_bytes(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes looked_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }

// The scales of the two blocks of a chunk, in the lanes that belong to each.
template <bool EVEN_ODD>
inline Floats block_scales(const float* s, const float* t, int) {
    constexpr __mmask16 second = EVEN_ODD ? 0xf0f0 : 0xff00;
    return _mm512_mask_mov_ps(_mm512_set1_ps(*s), second, _mm512_set1_ps(*t));
}

// Two chunks at once: vector 0 has four columns of each eight that follow each other, vector 1 the other four, so that each of
// the 16 sums is of eight columns with one scale of activations. The instructions that turn sums into floats and scale them are
// needed half as often, and no code is loaded twice. Codes whose even columns come first: the even ones, and the odd ones.
// Codes in their own order: the first four of eight, and the last four.
template <bool EVEN_ODD>
inline void pair_bytes(const int8_t* q, Bytes* x) {
    if (EVEN_ODD) {
        const auto half = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 32 * i)); };
        x[0] = _mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(2), 1);
        x[1] = _mm512_inserti64x4(_mm512_castsi256_si512(half(1)), half(3), 1);
    } else {
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i a = load_bytes(q), b = load_bytes(q + 64);
        x[0] = _mm512_permutex2var_epi32(a, even, b);
        x[1] = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    }
}
template <bool EVEN_ODD>
inline Floats pair_scales(const float* fine) {
    if (EVEN_ODD)
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(fine)), _mm256_loadu_ps(fine + 16), 1);
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_ps(load(fine), even, load(fine + 16));
}
// The scales of four blocks, each in the four lanes of its sums.
inline Floats four_blocks(const float* s) {
    const __m512i each = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(s)), each);
}
// s[index[i]] of 16 numbers.
inline Floats picked(const float* s, const int32_t* index) { return _mm512_permutexvar_ps(load_bytes(index), load(s)); }

// Codes of `bits` bits in their own order, 64 from 8 * bits bytes.
#if NSTF_VBMI
struct Spread {
    __m512i bytes, shifts, mask, pair_bytes[2], pair_shifts[2];
    __mmask64 read;
    bool two;  // whether two chunks take more than 64 bytes
    explicit Spread(int bits) {
        // Every eight of them lie in `bits` bytes.
        alignas(64) uint8_t index[64], shift[64];
        for (int i = 0; i < 64; ++i) {
            index[i] = static_cast<uint8_t>(std::min(63, i / 8 * bits + i % 8));
            shift[i] = static_cast<uint8_t>(i % 8 * bits);
        }
        bytes = load_bytes(index);
        shifts = load_bytes(shift);
        mask = _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
        read = bits == 8 ? ~__mmask64{0} : (__mmask64{1} << (8 * bits)) - 1;
        two = bits > 4;
        for (int h = 0; h < 2; ++h) {
            // Four codes of each eight lie in at most four of their bytes: two such fours fill the eight bytes a shift chooses from.
            const int start = h * bits / 2;
            for (int i = 0; i < 64; ++i) {
                index[i] = static_cast<uint8_t>(std::min(16 * bits - 1, i / 4 * bits + start + i % 4));
                shift[i] = static_cast<uint8_t>(i % 8 / 4 * 32 + (4 * h + i % 4) * bits - 8 * start);
            }
            pair_bytes[h] = load_bytes(index);
            pair_shifts[h] = load_bytes(shift);
        }
    }
    void pair(const uint8_t* p, Bytes* out) const {
        const __m512i low = load_bytes(p), high = two ? load_bytes(p + 64) : low;
        for (int h = 0; h < 2; ++h) {
            const __m512i v = _mm512_permutex2var_epi8(low, pair_bytes[h], high);
            out[h] = _mm512_and_si512(_mm512_multishift_epi64_epi8(pair_shifts[h], v), mask);
        }
    }
    void operator()(const uint8_t* p, Bytes* out) const {
        const __m512i v = _mm512_permutexvar_epi8(bytes, _mm512_maskz_loadu_epi8(read, p));
        out[0] = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, v), mask);
    }
};
#else
struct Spread {
    __m512i words, even, odd, right, left, mask;
    __mmask64 read;
    explicit Spread(int bits) {
        // 16 codes a quarter: its 2 * bits bytes start with a word of four bytes or in the middle of one. Each code lies in two
        // bytes, those of the even ones are shifted into the lower byte of a pair and those of the odd ones into the upper one.
        alignas(64) uint8_t pick[2][64];
        alignas(64) uint16_t shift[2][32];
        alignas(64) int32_t word[16];
        for (int i = 0; i < 64; ++i) {
            const int lane = i / 16, start = lane * 2 * bits % 4, bit = i % 16 * bits;
            pick[i % 2][i / 2 * 2] = static_cast<uint8_t>(start + bit / 8);
            pick[i % 2][i / 2 * 2 + 1] = static_cast<uint8_t>(std::min(15, start + bit / 8 + 1));
            shift[i % 2][i / 2] = static_cast<uint16_t>(i % 2 == 0 ? bit % 8 : 8 - bit % 8);
        }
        for (int i = 0; i < 16; ++i) word[i] = std::min(15, i / 4 * 2 * bits / 4 + i % 4);
        words = load_bytes(word);
        even = load_bytes(pick[0]), odd = load_bytes(pick[1]);
        right = load_bytes(shift[0]), left = load_bytes(shift[1]);
        mask = _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
        read = bits == 8 ? ~__mmask64{0} : (__mmask64{1} << (8 * bits)) - 1;
    }
    void operator()(const uint8_t* p, Bytes* out) const {
        const __m512i v = _mm512_permutexvar_epi32(words, _mm512_maskz_loadu_epi8(read, p));
        const __m512i low = _mm512_srlv_epi16(_mm512_shuffle_epi8(v, even), right);
        const __m512i high = _mm512_sllv_epi16(_mm512_shuffle_epi8(v, odd), left);
        // Bytes of low and high in turn.
        const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), low, high, 0xca);
        out[0] = _mm512_and_si512(both, mask);
    }
};
#endif

struct Nibbles {
    static constexpr bool EVEN_ODD = true, TABLE = false, WIDE = false, PAIR = true;
    static constexpr int BYTES = 32;
    __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0), mask = _mm512_set1_epi8(15);
    explicit Nibbles(const PackedMatrix&) {}
    static int64_t bytes(int) { return 32; }
    static constexpr int run() { return 8; }
    void operator()(const uint8_t* p, Bytes* out) const {
        const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        out[0] = _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), mask);
    }
    void pair(const uint8_t* p, Bytes* out) const {
        const __m512i both = load_bytes(p);
        out[0] = _mm512_and_si512(both, mask);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
};
struct Levels {  // a table of 16 values, rounded to int8 and moved up by 128
    static constexpr bool EVEN_ODD = true, TABLE = true, WIDE = true, PAIR = true;
    static constexpr int BYTES = 32;
    Nibbles codes;
    __m512i table;
    explicit Levels(const PackedMatrix& w) : codes(w) {
        alignas(16) uint8_t rounded[16];
        round_table(w, 128, rounded);
        table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(rounded)));
    }
    static int64_t bytes(int) { return 32; }
    static constexpr int run() { return 8; }
    void operator()(const uint8_t* p, Bytes* out) const {
        codes(p, out);
        out[0] = _mm512_shuffle_epi8(table, out[0]);
    }
    void pair(const uint8_t* p, Bytes* out) const {
        codes.pair(p, out);
        out[0] = _mm512_shuffle_epi8(table, out[0]);
        out[1] = _mm512_shuffle_epi8(table, out[1]);
    }
};
struct EightBits {
    static constexpr bool EVEN_ODD = false, TABLE = false, WIDE = true, PAIR = false;
    static constexpr int BYTES = 64;
    explicit EightBits(const PackedMatrix&) {}
    static int64_t bytes(int) { return 64; }
    static constexpr int run() { return 8; }
    void operator()(const uint8_t* p, Bytes* out) const { out[0] = load_bytes(p); }
};
struct OddBits {
    static constexpr bool EVEN_ODD = false, TABLE = false, WIDE = false, PAIR = NSTF_VBMI;
    static constexpr int BYTES = 0;
    Spread spread;
    explicit OddBits(const PackedMatrix& w) : spread(w.bits) {}
    static int64_t bytes(int bits) { return 8 * bits; }
    static constexpr int run() { return 8; }
    void operator()(const uint8_t* p, Bytes* out) const { spread(p, out); }
    void pair(const uint8_t* p, Bytes* out) const {
#if NSTF_VBMI
        spread.pair(p, out);
#endif
    }
};

// 64 activations: their codes, their scales (a lane for each of the 16 sums of a chunk, or one a block) and the sums of the
// two blocks. A scale over NaN or infinity is NaN, and so are the products it belongs to.
template <bool EVEN_ODD>
inline void quantise(const float* x, bool fine, int8_t* codes, float* scales, float* sums) {
    // Without their signs floats have the order of their bits, where NaN comes last. As floats the maximum would lose it.
    __m512 v[4], top[4];
    __m512i size[4];
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_loadu_ps(x + 16 * i);
        __m512i m = _mm512_castps_si512(_mm512_abs_ps(v[i]));
        m = _mm512_max_epi32(m, _mm512_shuffle_epi32(m, _MM_PERM_CDAB));
        m = _mm512_max_epi32(m, _mm512_shuffle_epi32(m, _MM_PERM_BADC));
        size[i] = _mm512_max_epi32(m, _mm512_shuffle_i32x4(m, m, 0xb1));  // of eight columns
    }
    if (!fine)
        for (int i = 0; i < 4; i += 2) {
            const __m512i m = _mm512_max_epi32(size[i], size[i + 1]);
            size[i] = size[i + 1] = _mm512_max_epi32(m, _mm512_shuffle_i32x4(m, m, 0x4e));
        }
    for (int i = 0; i < 4; ++i) top[i] = _mm512_castsi512_ps(size[i]);
    __m512i q = _mm512_setzero_si512();
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    alignas(64) float eight[8];
    for (int i = 0; i < 4; ++i) {
        const __m512 scale = _mm512_fmadd_ps(top[i], _mm512_set1_ps(1.0f / 127), _mm512_sub_ps(top[i], top[i]));
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
    if (EVEN_ODD) {
        // Pairs of 16 bits hold an even column and the odd one after it.
        const __m256i even = _mm512_cvtepi16_epi8(q), odd = _mm512_cvtepi16_epi8(_mm512_srli_epi16(q, 8));
        q = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
    }
    _mm512_storeu_si512(codes, q);
    sums[0] = _mm512_reduce_add_ps(total[0]);
    sums[1] = _mm512_reduce_add_ps(total[1]);
    if (!fine) {
        scales[0] = eight[0];
        scales[1] = eight[4];
    } else {
        __m512 lanes = _mm512_broadcast_f32x8(_mm256_load_ps(eight));
        if (!EVEN_ODD)
            lanes = _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), lanes);
        _mm512_storeu_ps(scales, lanes);
    }
}

// 16 vectors of 16 numbers, transposed.
inline void transpose(__m512i* v) {
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
