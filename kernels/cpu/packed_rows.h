// The row kernels, for one instruction set. packed_linear.cpp includes this file once per set, inside a namespace and
// with the compiler told to use that set, so there is no include guard, and nothing but halves.h, which is of the same
// kind, is included here.
//
// A row is read in chunks of PARTS * LANES codes. Activations are put in chunk order once per call (for 4-bit
// codes: the even columns of the chunk, then the odd ones), so that unpacking a chunk is a load, a shift and two
// table look-ups, with no shuffle. Sums are kept per group in vectors and scaled once per group. A chunk gives its codes
// minus the format's centre (2^(bits-1)), which is the zero of a symmetric format; other zero points are taken off at
// the end of the row, times the sum of the activations of their group.

#if NSTF_ISA == 512
struct Vec {
    __m512 v;
    static constexpr int LANES = 16;
    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec set(float f) { return {_mm512_set1_ps(f)}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    Vec fma(Vec b, Vec c) const { return {_mm512_fmadd_ps(v, b.v, c.v)}; }
    Vec mul(Vec b) const { return {_mm512_mul_ps(v, b.v)}; }
    Vec sub(Vec b) const { return {_mm512_sub_ps(v, b.v)}; }
    float sum() const { return _mm512_reduce_add_ps(v); }
};
static inline void interleave(Vec lo, Vec hi, float* out) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(lo.v, first, hi.v));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(lo.v, second, hi.v));
}
struct Table {
    __m512 t;
    explicit Table(const float* p) : t(_mm512_loadu_ps(p)) {}
    void scale(Vec s) { t = _mm512_mul_ps(t, s.v); }
    // vpermps looks at the low four bits of each index, so the upper nibble needs no mask.
    void chunk(const uint8_t* p, Vec* out) const {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        out[0] = {_mm512_permutexvar_ps(codes, t)};
        out[1] = {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), t)};
    }
};
// Eight-bit codes minus 128: the upper bit flipped, a byte is that as a signed number.
static inline Vec from_bytes(const uint8_t* p) {
    const __m128i flip = _mm_set1_epi8(static_cast<char>(0x80));
    const __m128i codes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), flip);
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
}
// Codes of any width: each lane picks the two bytes its code lies in, and shifts.
struct Picker {
    __m512i pick, shift;
    explicit Picker(int bits) {
        alignas(64) int picks[16], shifts[16];
        for (int i = 0; i < 16; ++i) {
            picks[i] = static_cast<int>(0x80800000u | (i * bits / 8 + 1) << 8 | i * bits / 8);
            shifts[i] = i * bits % 8;
        }
        pick = _mm512_load_si512(picks);
        shift = _mm512_load_si512(shifts);
    }
    // The code in the low bits of each lane, parts of its neighbours above it.
    __m512i operator()(const uint8_t* p) const {
        const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, pick), shift);
    }
};
struct Bits {
    Picker codes;
    __m512i mask, centre;
    explicit Bits(int bits)
        : codes(bits), mask(_mm512_set1_epi32((1 << bits) - 1)), centre(_mm512_set1_epi32(1 << (bits - 1))) {}
    Vec operator()(const uint8_t* p, int64_t) const {
        return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(codes(p), mask), centre))};
    }
};
// Two- and three-bit codes look their value up in a table repeated to 16 entries: the bits above do not matter.
struct FewBits {
    Picker codes;
    __m512 table;
    explicit FewBits(int bits) : codes(bits) {
        alignas(64) float values[16];
        for (int i = 0; i < 16; ++i) values[i] = static_cast<float>((i & ((1 << bits) - 1)) - (1 << (bits - 1)));
        table = _mm512_load_ps(values);
    }
    void scale(Vec s) { table = _mm512_mul_ps(table, s.v); }
    Vec operator()(const uint8_t* p, int64_t) const { return {_mm512_permutexvar_ps(codes(p), table)}; }
};
// E4M3 bits moved into a float16, which has room for both exponent and mantissa; the biases are left to the scale.
static inline Vec from_float8(const uint8_t* p) {
    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
    return {_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign))};
}
#elif NSTF_ISA == 2
struct Vec {
    __m256 v;
    static constexpr int LANES = 8;
    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec set(float f) { return {_mm256_set1_ps(f)}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    Vec fma(Vec b, Vec c) const { return {_mm256_fmadd_ps(v, b.v, c.v)}; }
    Vec mul(Vec b) const { return {_mm256_mul_ps(v, b.v)}; }
    Vec sub(Vec b) const { return {_mm256_sub_ps(v, b.v)}; }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
};
static inline void interleave(Vec lo, Vec hi, float* out) {
    const __m256 a = _mm256_unpacklo_ps(lo.v, hi.v), b = _mm256_unpackhi_ps(lo.v, hi.v);
    _mm256_storeu_ps(out, _mm256_permute2f128_ps(a, b, 0x20));
    _mm256_storeu_ps(out + 8, _mm256_permute2f128_ps(a, b, 0x31));
}
struct Table {
    __m256 low, high;
    explicit Table(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    void scale(Vec s) {
        low = _mm256_mul_ps(low, s.v);
        high = _mm256_mul_ps(high, s.v);
    }
    Vec look_up(__m256i index) const {
        const __m256 a = _mm256_permutevar8x32_ps(low, index), b = _mm256_permutevar8x32_ps(high, index);
        return {_mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)))};
    }
    void chunk(const uint8_t* p, Vec* out) const {
        const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        out[0] = look_up(codes);
        out[1] = look_up(_mm256_srli_epi32(codes, 4));
    }
};
static inline Vec from_bytes(const uint8_t* p) {
    const __m128i flip = _mm_set1_epi8(static_cast<char>(0x80));
    const __m128i codes = _mm_xor_si128(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), flip);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))};
}
struct Picker {
    __m256i pick, shift;
    explicit Picker(int bits) {
        alignas(32) int picks[8], shifts[8];
        for (int i = 0; i < 8; ++i) {
            picks[i] = static_cast<int>(0x80800000u | (i * bits / 8 + 1) << 8 | i * bits / 8);
            shifts[i] = i * bits % 8;
        }
        pick = _mm256_load_si256(reinterpret_cast<const __m256i*>(picks));
        shift = _mm256_load_si256(reinterpret_cast<const __m256i*>(shifts));
    }
    __m256i operator()(const uint8_t* p) const {
        const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, pick), shift);
    }
};
struct Bits {
    Picker codes;
    __m256i mask, centre;
    explicit Bits(int bits)
        : codes(bits), mask(_mm256_set1_epi32((1 << bits) - 1)), centre(_mm256_set1_epi32(1 << (bits - 1))) {}
    Vec operator()(const uint8_t* p, int64_t) const {
        return {_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(codes(p), mask), centre))};
    }
};
struct FewBits {
    Picker codes;
    __m256 table;
    explicit FewBits(int bits) : codes(bits) {
        alignas(32) float values[8];
        for (int i = 0; i < 8; ++i) values[i] = static_cast<float>((i & ((1 << bits) - 1)) - (1 << (bits - 1)));
        table = _mm256_load_ps(values);
    }
    void scale(Vec s) { table = _mm256_mul_ps(table, s.v); }
    Vec operator()(const uint8_t* p, int64_t) const { return {_mm256_permutevar8x32_ps(table, codes(p))}; }
};
static inline Vec from_float8(const uint8_t* p) {
    const __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i magnitude = _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x7f)), 7);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8);
    return {_mm256_cvtph_ps(_mm_or_si128(magnitude, sign))};
}
#else
struct Vec {
    float v;
    static constexpr int LANES = 1;
    static Vec zero() { return {0.0f}; }
    static Vec set(float f) { return {f}; }
    static Vec load(const float* p) { return {*p}; }
    void store(float* p) const { *p = v; }
    Vec fma(Vec b, Vec c) const { return {v * b.v + c.v}; }
    Vec mul(Vec b) const { return {v * b.v}; }
    Vec sub(Vec b) const { return {v - b.v}; }
    float sum() const { return v; }
};
static inline void interleave(Vec lo, Vec hi, float* out) {
    out[0] = lo.v;
    out[1] = hi.v;
}
struct Table {
    const float* t;
    float s = 1.0f;
    explicit Table(const float* p) : t(p) {}
    void scale(Vec by) { s = by.v; }
    void chunk(const uint8_t* p, Vec* out) const {
        out[0] = {t[*p & 15] * s};
        out[1] = {t[*p >> 4] * s};
    }
};
static inline Vec from_bytes(const uint8_t* p) { return {static_cast<float>(*p) - 128.0f}; }
// A chunk is one code, so where it starts within its first byte follows from its number.
struct Bits {
    int bits;
    float by = 1.0f;
    explicit Bits(int b) : bits(b) {}
    void scale(Vec s) { by = s.v; }
    Vec operator()(const uint8_t* p, int64_t chunk) const {
        const int code = (p[0] | p[1] << 8) >> (chunk * bits % 8) & ((1 << bits) - 1);
        return {static_cast<float>(code - (1 << (bits - 1))) * by};
    }
};
using FewBits = Bits;
static inline Vec from_float8(const uint8_t* p) {
    return {half_to_float(static_cast<uint16_t>((*p & 0x7f) << 7 | (*p & 0x80) << 8))};
}
#endif

#include "halves.h"

// Codes of `bits` bits, as floats.
static inline void unpack(const uint8_t* in, int64_t in_bytes, int bits, int64_t count, float* __restrict out) {
    if (bits == 4) {
        for (int64_t i = 0; i < count / 2; ++i) {
            out[2 * i] = static_cast<float>(in[i] & 15);
            out[2 * i + 1] = static_cast<float>(in[i] >> 4);
        }
        if (count % 2) out[count - 1] = static_cast<float>(in[count / 2] & 15);
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i * bits / 8;
        const unsigned high = at + 1 < in_bytes ? in[at + 1] : 0u;
        out[i] = static_cast<float>(((in[at] | high << 8) >> (i * bits % 8)) & ((1u << bits) - 1));
    }
}

// How the codes of a row become values. PARTS: vectors a chunk gives. READ: bytes that are loaded for one.
// SCALES: the scale of a group goes into the table; otherwise it is applied to the sum of the group.
struct TableCodes {
    static constexpr int PARTS = 2, READ = Vec::LANES;
    static constexpr bool SCALES = true;
    Table table;
    explicit TableCodes(const PackedMatrix& w) : table(w.table) {}
    void scale(Vec s) { table.scale(s); }
    const uint8_t* at(const uint8_t* row, int64_t chunk) const { return row + chunk * Vec::LANES; }
    void chunk(const uint8_t* p, int64_t, Vec* out) const { table.chunk(p, out); }
};
struct FewBitCodes {
    static constexpr int PARTS = 1, READ = Vec::LANES == 1 ? 2 : 16;
    static constexpr bool SCALES = true;
    FewBits codes;
    int bits;
    explicit FewBitCodes(const PackedMatrix& w) : codes(w.bits), bits(w.bits) {}
    void scale(Vec s) { codes.scale(s); }
    const uint8_t* at(const uint8_t* row, int64_t chunk) const { return row + chunk * Vec::LANES * bits / 8; }
    void chunk(const uint8_t* p, int64_t chunk, Vec* out) const { out[0] = codes(p, chunk); }
};
struct BitCodes {
    static constexpr int PARTS = 1, READ = Vec::LANES == 1 ? 2 : 16;
    static constexpr bool SCALES = false;
    Bits codes;
    int bits;
    explicit BitCodes(const PackedMatrix& w) : codes(w.bits), bits(w.bits) {}
    void scale(Vec) {}
    const uint8_t* at(const uint8_t* row, int64_t chunk) const { return row + chunk * Vec::LANES * bits / 8; }
    void chunk(const uint8_t* p, int64_t chunk, Vec* out) const { out[0] = codes(p, chunk); }
};
struct ByteCodes {
    static constexpr int PARTS = 1, READ = Vec::LANES;
    static constexpr bool SCALES = false;
    explicit ByteCodes(const PackedMatrix&) {}
    void scale(Vec) {}
    const uint8_t* at(const uint8_t* row, int64_t chunk) const { return row + chunk * Vec::LANES; }
    void chunk(const uint8_t* p, int64_t, Vec* out) const { out[0] = from_bytes(p); }
};
struct Float8Codes {
    static constexpr int PARTS = 1, READ = Vec::LANES;
    static constexpr bool SCALES = false;
    explicit Float8Codes(const PackedMatrix&) {}
    void scale(Vec) {}
    const uint8_t* at(const uint8_t* row, int64_t chunk) const { return row + chunk * Vec::LANES; }
    void chunk(const uint8_t* p, int64_t, Vec* out) const { out[0] = from_float8(p); }
};

// One row: its codes, and per group its scale and its zero point minus the centre. Both are padded with zeros to
// whole vectors; `zero` is null when every group has the centre for its zero.
struct Row {
    const uint8_t* bytes;
    const float* scale;
    const float* zero;
};

static inline int64_t whole_vectors(int64_t n) { return (n + Vec::LANES - 1) / Vec::LANES * Vec::LANES; }

// The scales and zeros of the rows a thread works on; `slot`: rows worked on together each have their own place.
struct Scratch {
    std::vector<float> scale, zero;

    Row row(const PackedMatrix& w, int64_t r, int slot) {
        const int64_t padded = whole_vectors(w.groups);
        if (static_cast<int64_t>(scale.size()) < 2 * padded) scale.resize(static_cast<size_t>(2 * padded));
        float* s = scale.data() + slot * padded;
        scales(w, r, s);
        std::fill(s + w.groups, s + padded, 0.0f);
        const uint8_t* bytes = w.codes + r * w.row_bytes;
        if (w.zeros == nullptr) return {bytes, s, nullptr};
        if (static_cast<int64_t>(zero.size()) < 2 * padded) zero.resize(static_cast<size_t>(2 * padded));
        float* z = zero.data() + slot * padded;
        unpack(w.zeros + r * w.zero_bytes, w.zero_bytes, w.bits, w.groups, z);
        const float centre = static_cast<float>(1 << (w.bits - 1));
        for (int64_t g = 0; g < w.groups; ++g) z[g] -= centre;
        std::fill(z + w.groups, z + padded, 0.0f);
        return {bytes, s, z};
    }

    static void scales(const PackedMatrix& w, int64_t r, float* __restrict out) {
        const int64_t n = w.groups;
        if (w.scale_kind == Scale::kHalf) {
            halves_to_floats(static_cast<const uint16_t*>(w.scale) + r * n, n, out);
        } else if (w.scale_kind == Scale::kFloat) {
            std::memcpy(out, static_cast<const float*>(w.scale) + r * n, static_cast<size_t>(n) * sizeof(float));
        } else {
            const uint8_t* __restrict in = static_cast<const uint8_t*>(w.scale) + r * n;
            if (w.scale_kind == Scale::kSteps) {
                const float top = half_to_float(w.super_[r]);
                for (int64_t g = 0; g < n; ++g) out[g] = top * (static_cast<float>(in[g] + 1) / 256.0f);
            } else {
                for (int64_t g = 0; g < n; ++g) out[g] = power_of_two(in[g]);
            }
        }
        if (w.factor != 1.0f)
            for (int64_t g = 0; g < n; ++g) out[g] *= w.factor;
    }
};

// Codes that a chunk holds.
template <class Codes>
constexpr int chunk_codes() {
    return Codes::PARTS * Vec::LANES;
}

// Chunk number `chunk` of a row. Past the end of the row its bytes belong to the next one, and the activations there
// are zero; only at the end of the matrix (SAFE: known not to be there) are they copied out.
template <bool SAFE, class Codes>
static inline void read_chunk(const PackedMatrix& w, const Codes& codes, const uint8_t* row, int64_t chunk, Vec* out) {
    const uint8_t* p = codes.at(row, chunk);
    if (SAFE || p + Codes::READ <= w.codes_end) return codes.chunk(p, chunk, out);
    uint8_t spare[16] = {};
    std::memcpy(spare, p, static_cast<size_t>(std::max<int64_t>(0, w.codes_end - p)));
    codes.chunk(spare, chunk, out);
}

// Activations as the row kernels want them. x: [batch, stride] in chunk order, padded with zeros; sums: [batch, groups
// padded to whole vectors], the sum of each group, when the matrix has zero points.
struct Activations {
    std::vector<float> x, sums;
    int64_t stride = 0, sums_stride = 0;
};

// One reader for each of the rows that are worked on together.
template <class Codes, int RT>
struct Readers {
    Codes first, second;
    explicit Readers(const Codes& codes) : first(codes), second(codes) {}
    Codes& operator[](int i) { return RT > 1 && i == 1 ? second : first; }
};

// y[m][i] for RT rows and the activations m .. m + MT.
template <bool SAFE, class Codes, int RT, int MT>
static void dot(const PackedMatrix& w, const Codes& codes, const Row* rows, const Activations& in, int64_t first,
                float* y) {
    constexpr int P = Codes::PARTS, per = chunk_codes<Codes>();
    const float* x = in.x.data() + first * in.stride;
    const int64_t chunks = (w.cols + per - 1) / per, per_group = w.groups == 1 ? chunks : w.group / per;
    Vec total[RT][MT][P];
    for (auto& row : total)
        for (auto& m : row)
            for (auto& t : m) t = Vec::zero();
    for (int64_t g = 0, c = 0; g < w.groups; ++g) {
        const int64_t end = std::min(c + per_group, chunks);
        Vec part[RT][MT][P];
        Readers<Codes, RT> readers(codes);
        for (int i = 0; i < RT; ++i) {
            if (Codes::SCALES) readers[i].scale(Vec::set(rows[i].scale[g]));
            for (int m = 0; m < MT; ++m)
                for (int p = 0; p < P; ++p) part[i][m][p] = Codes::SCALES ? total[i][m][p] : Vec::zero();
        }
        for (; c < end; ++c) {
            for (int i = 0; i < RT; ++i) {
                Vec value[P];
                read_chunk<SAFE>(w, readers[i], rows[i].bytes, c, value);
                for (int p = 0; p < P; ++p)
                    for (int m = 0; m < MT; ++m)
                        part[i][m][p] =
                            value[p].fma(Vec::load(x + m * in.stride + c * per + p * Vec::LANES), part[i][m][p]);
            }
        }
        for (int i = 0; i < RT; ++i) {
            const Vec scale = Vec::set(rows[i].scale[g]);
            for (int m = 0; m < MT; ++m)
                for (int p = 0; p < P; ++p)
                    total[i][m][p] = Codes::SCALES ? part[i][m][p] : part[i][m][p].fma(scale, total[i][m][p]);
        }
    }
    if (rows[0].zero != nullptr) {
        for (int i = 0; i < RT; ++i)
            for (int64_t g = 0; g < w.groups; g += Vec::LANES) {
                const Vec shift = Vec::load(rows[i].scale + g).mul(Vec::load(rows[i].zero + g));
                for (int m = 0; m < MT; ++m) {
                    const Vec sum = Vec::load(in.sums.data() + (first + m) * in.sums_stride + g);
                    total[i][m][0] = total[i][m][0].sub(shift.mul(sum));
                }
            }
    }
    for (int i = 0; i < RT; ++i)
        for (int m = 0; m < MT; ++m) {
            float sum = total[i][m][0].sum();
            for (int p = 1; p < P; ++p) sum += total[i][m][p].sum();
            y[(first + m) * (w.stride > 0 ? w.stride : w.rows) + i] = sum;
        }
}

template <bool SAFE, int RT, class Codes>
static void dots(const PackedMatrix& w, const Codes& codes, const Row* rows, const Activations& in, int64_t batch,
                 float* y) {
    int64_t m = 0;
    for (; m + 4 <= batch; m += 4) dot<SAFE, Codes, RT, 4>(w, codes, rows, in, m, y);
    if (batch - m == 3) dot<SAFE, Codes, RT, 3>(w, codes, rows, in, m, y);
    if (batch - m == 2) dot<SAFE, Codes, RT, 2>(w, codes, rows, in, m, y);
    if (batch - m == 1) dot<SAFE, Codes, RT, 1>(w, codes, rows, in, m, y);
}

template <class Codes>
static Activations prepare(const PackedMatrix& w, const float* x, int64_t batch) {
    constexpr int P = Codes::PARTS, L = Vec::LANES, per = P * L;
    Activations out;
    out.stride = (w.cols + per - 1) / per * per;
    out.x.assign(static_cast<size_t>(batch * out.stride), 0.0f);
    for (int64_t m = 0; m < batch; ++m) {
        const float* in = x + m * w.cols;
        float* to = out.x.data() + m * out.stride;
        int64_t k = 0;
        for (; k + per <= w.cols; k += per)
            for (int p = 0; p < P; ++p)
                for (int l = 0; l < L; ++l) to[k + p * L + l] = in[k + l * P + p];
        for (int64_t i = k; i < w.cols; ++i) to[k + (i - k) % P * L + (i - k) / P] = in[i];
    }
    if (w.zeros == nullptr) return out;
    out.sums_stride = whole_vectors(w.groups);
    out.sums.assign(static_cast<size_t>(batch * out.sums_stride), 0.0f);
    for (int64_t m = 0; m < batch; ++m)
        for (int64_t g = 0; g < w.groups; ++g) {
            float sum = 0.0f;
            for (int64_t k = g * w.group; k < std::min((g + 1) * w.group, w.cols); ++k) sum += x[m * w.cols + k];
            out.sums[static_cast<size_t>(m * out.sums_stride + g)] = sum;
        }
    return out;
}

template <class Codes>
static void matmul_codes(const PackedMatrix& w, const float* x, int64_t batch, float* y, int threads) {
    constexpr int RT = 2;
    const Activations in = prepare<Codes>(w, x, batch);
    const Codes codes(w);
    const int64_t block = rows_per_task(w, w.rows, threads);
    auto task = [&](int64_t index) {
        thread_local Scratch scratch;
        int64_t r = index * block;
        const int64_t end = std::min(r + block, w.rows);
        for (; r + RT <= end; r += RT) {
            const Row rows[RT] = {scratch.row(w, r, 0), scratch.row(w, r + 1, 1)};
            // The last chunk of a row reads at most one vector's codes and READ bytes beyond it.
            if (rows[1].bytes + w.row_bytes + 2 * Codes::READ <= w.codes_end)
                dots<true, RT>(w, codes, rows, in, batch, y + r);
            else
                dots<false, RT>(w, codes, rows, in, batch, y + r);
        }
        for (; r < end; ++r) {
            const Row row = scratch.row(w, r, 0);
            dots<false, 1>(w, codes, &row, in, batch, y + r);
        }
    };
    parallel_for(threads, (w.rows + block - 1) / block, task);
}

template <class Codes>
static void decode_codes(const PackedMatrix& w, int64_t start, int64_t count, float* out, int threads) {
    constexpr int P = Codes::PARTS, per = chunk_codes<Codes>();
    const Codes codes(w);
    const int64_t block = rows_per_task(w, count, threads);
    auto task = [&](int64_t index) {
        thread_local Scratch scratch;
        for (int64_t i = index * block; i < std::min((index + 1) * block, count); ++i) {
            const Row row = scratch.row(w, start + i, 0);
            float* to = out + i * w.cols;
            for (int64_t g = 0; g < w.groups; ++g) {
                const int64_t end = std::min((g + 1) * w.group, w.cols);
                const Vec scale = Vec::set(row.scale[g]), zero = Vec::set(row.zero == nullptr ? 0.0f : row.zero[g]);
                for (int64_t k = g * w.group; k < end; k += per) {
                    Vec value[P];
                    read_chunk<false>(w, codes, row.bytes, k / per, value);
                    for (auto& v : value) v = v.sub(zero).mul(scale);
                    float room[per];
                    float* at = k + per <= end ? to + k : room;
                    if (P == 2) interleave(value[0], value[P - 1], at);
                    else value[0].store(at);
                    if (at == room) std::memcpy(to + k, room, static_cast<size_t>(end - k) * sizeof(float));
                }
            }
        }
    };
    parallel_for(threads, (count + block - 1) / block, task);
}

static void matmul(const PackedMatrix& w, const float* x, int64_t batch, float* y, int threads) {
    if (w.code == Code::kTable4) return matmul_codes<TableCodes>(w, x, batch, y, threads);
    if (w.code == Code::kBytes) return matmul_codes<ByteCodes>(w, x, batch, y, threads);
    if (w.code == Code::kBits && w.bits <= 3) return matmul_codes<FewBitCodes>(w, x, batch, y, threads);
    if (w.code == Code::kBits) return matmul_codes<BitCodes>(w, x, batch, y, threads);
    return matmul_codes<Float8Codes>(w, x, batch, y, threads);
}

static void decode(const PackedMatrix& w, int64_t start, int64_t count, float* out, int threads) {
    if (w.code == Code::kTable4) return decode_codes<TableCodes>(w, start, count, out, threads);
    if (w.code == Code::kBytes) return decode_codes<ByteCodes>(w, start, count, out, threads);
    if (w.code == Code::kBits) return decode_codes<BitCodes>(w, start, count, out, threads);
    return decode_codes<Float8Codes>(w, start, count, out, threads);
}
