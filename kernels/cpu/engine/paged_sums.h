// Sums over the rows of codes in few bits, for one instruction set (see paged.cpp, which includes this file).
//
// What codes are multiplied with is given as signed bytes, so that products of bytes suffice: for codes of 8 bits in two planes,
// x ~ step * (128 * high + low), which is 15 bits; for fewer bits in one, x ~ step * high, whose rounding is a fraction of what
// such codes lost. What rounding takes from the sum of x is given back times the middle of the codes. Everything else is a sum
// of integers, so the order does not matter.

constexpr int planes_for(int bits) { return bits == 8 ? 2 : 1; }

// What sums of codes times the planes are multiplied with, and what is added.
struct Scaled {
    float step, rest;
    float of(float sum) const { return sum * step + rest; }
};

// [1 or 2][padded] planes of x. Where a number of x is none, so are the sums.
static Scaled planes(const float* x, int64_t count, int64_t padded, int bits, int8_t* out) {
    float top = 0, bad = 0, lost = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
#pragma omp simd reduction(+ : bad)
    for (int64_t i = 0; i < count; ++i) bad += x[i] * 0.0f;
    const bool two = planes_for(bits) == 2;
    const float most = two ? 127 * 128 : 127, by = top > 1e-30f && bad == 0 ? most / top : 0, step = top / most;
    if (by == 0) {
        std::memset(out, 0, static_cast<size_t>(2 * padded));
        return {0, bad};
    }
    for (int64_t i = count; i < padded; ++i) out[i] = 0;
    if (!two) {
#if NSTF_ISA == 512
        __m512 rest = _mm512_setzero_ps();
        for (int64_t i = 0; i < count; i += 16) {
            const auto some = static_cast<__mmask16>(count - i < 16 ? (1 << (count - i)) - 1 : 0xffff);
            const __m512 v = _mm512_maskz_loadu_ps(some, x + i);
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(by)));
            _mm512_mask_cvtepi32_storeu_epi8(out + i, some, whole);
            rest = _mm512_add_ps(rest, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(step), v));
        }
        lost = _mm512_reduce_add_ps(rest);
#else
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(x[i] * by)));
#pragma omp simd reduction(+ : lost)
        for (int64_t i = 0; i < count; ++i) lost += x[i] - static_cast<float>(out[i]) * step;
#endif
        return {step, lost * 0.5f * static_cast<float>((1 << bits) - 1)};
    }
#if NSTF_ISA == 512
    for (int64_t i = 0; i < count; i += 16) {
        const auto some = static_cast<__mmask16>(count - i < 16 ? (1 << (count - i)) - 1 : 0xffff);
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), _mm512_set1_ps(by)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        _mm512_mask_cvtepi32_storeu_epi8(out + i, some, high);
        _mm512_mask_cvtepi32_storeu_epi8(out + padded + i, some, _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7)));
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const int32_t whole = static_cast<int32_t>(std::nearbyint(x[i] * by)), high = (whole + 64) >> 7;
        out[i] = static_cast<int8_t>(high);
        out[padded + i] = static_cast<int8_t>(whole - 128 * high);
    }
#endif
    for (int64_t i = count; i < padded; ++i) out[padded + i] = 0;
    return {step, 0};
}

static inline int32_t four_at(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return four;
}

// out[q][column] = the sum over all rows of code times x, for Q queries and N blocks of 16 columns. codes: `rows` times 64 bytes
// per block, `stride` bytes apart; low: where the second plane begins; ahead: the same codes of the page that comes next, which
// are fetched row by row meanwhile.
#if NSTF_VNNI
constexpr int kColumns = 2;
template <int Bits, int Q, int N>
static void columns(const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, const int8_t* const* x, int64_t low,
                    float* const* out) {
    constexpr int kUnits = 8 / Bits, kPlanes = planes_for(Bits);
    __m512i sum[kPlanes][Q][N];
    for (int i = 0; i < kPlanes; ++i)
        for (int q = 0; q < Q; ++q)
            for (int n = 0; n < N; ++n) sum[i][q][n] = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
    for (int64_t r = 0; r < rows; ++r) {
        __m512i v[N];
        for (int n = 0; n < N; ++n) v[n] = _mm512_loadu_si512(codes + r * stride + 64 * n), fetch_line(ahead + r * stride + 64 * n);
        for (int u = 0; u < kUnits; ++u) {
            const int64_t k = 4 * (r * kUnits + u);
            __m512i c[N];
            for (int n = 0; n < N; ++n)
                c[n] = kUnits == 1 ? v[n] : _mm512_and_si512(_mm512_srli_epi16(v[n], static_cast<unsigned>(u * Bits)), mask);
            for (int i = 0; i < kPlanes; ++i)
                for (int q = 0; q < Q; ++q) {
                    const __m512i four = _mm512_set1_epi32(four_at(x[q] + i * low + k));
                    for (int n = 0; n < N; ++n) sum[i][q][n] = _mm512_dpbusd_epi32(sum[i][q][n], c[n], four);
                }
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) {
            __m512i total = sum[0][q][n];
            if (kPlanes == 2) total = _mm512_add_epi32(_mm512_slli_epi32(total, 7), sum[kPlanes - 1][q][n]);
            _mm512_storeu_ps(out[q] + 16 * n, _mm512_cvtepi32_ps(total));
        }
}
#elif NSTF_ISA >= 2
constexpr int kColumns = 1;
template <int Bits, int Q, int N>
static void columns(const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, const int8_t* const* x, int64_t low,
                    float* const* out) {
    constexpr int kUnits = 8 / Bits, kPlanes = planes_for(Bits);
    const __m256i mask = _mm256_set1_epi8(Bits == 2 ? 3 : 15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    for (int h = 0; h < 2; ++h) {  // eight columns
        __m256i sum[Q][2];
        for (int q = 0; q < Q; ++q) sum[q][0] = sum[q][1] = _mm256_setzero_si256();
        for (int64_t r = 0; r < rows; ++r) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + r * stride + 32 * h));
            if (h == 0) fetch_line(ahead + r * stride);
            if (Bits == 8) {  // two halves of a byte: products of whole ones would not fit 16 bits
                const __m256i low_half = _mm256_and_si256(v, mask);
                const __m256i high_half = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
                for (int q = 0; q < Q; ++q)
                    for (int i = 0; i < 2; ++i) {
                        const __m256i four = _mm256_set1_epi32(four_at(x[q] + i * low + 4 * r));
                        const __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(low_half, four), ones);
                        const __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(high_half, four), sixteens);
                        sum[q][i] = _mm256_add_epi32(sum[q][i], _mm256_add_epi32(a, b));
                    }
            } else {
                __m256i c[kUnits];
                for (int u = 0; u < kUnits; ++u) c[u] = _mm256_and_si256(_mm256_srli_epi16(v, u * Bits), mask);
                for (int q = 0; q < Q; ++q)
                    for (int i = 0; i < kPlanes; ++i) {
                        __m256i short_sum = _mm256_setzero_si256();
                        for (int u = 0; u < kUnits; ++u) {
                            const __m256i four = _mm256_set1_epi32(four_at(x[q] + i * low + 4 * (r * kUnits + u)));
                            short_sum = _mm256_add_epi16(short_sum, _mm256_maddubs_epi16(c[u], four));
                        }
                        sum[q][i] = _mm256_add_epi32(sum[q][i], _mm256_madd_epi16(short_sum, ones));
                    }
            }
        }
        for (int q = 0; q < Q; ++q) {
            __m256i total = sum[q][0];
            if (kPlanes == 2) total = _mm256_add_epi32(_mm256_slli_epi32(total, 7), sum[q][1]);
            _mm256_storeu_ps(out[q] + 8 * h, _mm256_cvtepi32_ps(total));
        }
    }
}
#else
constexpr int kColumns = 1;
template <int Bits, int Q, int N>
static void columns(const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, const int8_t* const* x, int64_t low,
                    float* const* out) {
    constexpr int kUnits = 8 / Bits;
    for (int q = 0; q < Q; ++q) {
        int32_t sum[16] = {};
        for (int64_t r = 0; r < rows; ++r) {
            if (q == 0) fetch_line(ahead + r * stride);
            for (int u = 0; u < kUnits; ++u) {
                int32_t by[4];
                for (int i = 0; i < 4; ++i) {
                    const int64_t k = 4 * (r * kUnits + u) + i;
                    by[i] = planes_for(Bits) == 2 ? 128 * x[q][k] + x[q][low + k] : x[q][k];
                }
                const uint8_t* at = codes + r * stride;
#pragma omp simd
                for (int c = 0; c < 16; ++c)
                    for (int i = 0; i < 4; ++i) sum[c] += ((at[4 * c + i] >> (u * Bits)) & ((1 << Bits) - 1)) * by[i];
            }
        }
        for (int c = 0; c < 16; ++c) out[q][c] = static_cast<float>(sum[c]);
    }
}
#endif

template <int Bits, int Q>
static void column_blocks(const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, int64_t from, int64_t to,
                          const int8_t* const* x, int64_t low, float* const* out) {
    float* at[Q];
    int64_t n = from;
    auto move = [&] {
        for (int q = 0; q < Q; ++q) at[q] = out[q] + 16 * n;
    };
    for (; n + kColumns <= to; n += kColumns)
        move(), columns<Bits, Q, kColumns>(codes + 64 * n, ahead + 64 * n, rows, stride, x, low, at);
    for (; n < to; ++n) move(), columns<Bits, Q, 1>(codes + 64 * n, ahead + 64 * n, rows, stride, x, low, at);
}

template <int Bits>
static void bit_sums(const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, int64_t from, int64_t to,
                     const int8_t* const* x, int64_t low, float* const* out, int64_t queries) {
    int64_t q = 0;
    for (; q + 4 <= queries; q += 4, ahead = codes)
        column_blocks<Bits, 4>(codes, ahead, rows, stride, from, to, x + q, low, out + q);
    if (queries - q == 3) column_blocks<Bits, 3>(codes, ahead, rows, stride, from, to, x + q, low, out + q);
    if (queries - q == 2) column_blocks<Bits, 2>(codes, ahead, rows, stride, from, to, x + q, low, out + q);
    if (queries - q == 1) column_blocks<Bits, 1>(codes, ahead, rows, stride, from, to, x + q, low, out + q);
}

// Of the blocks of 16 columns from..to-1, for any number of queries.
static void code_sums(int bits, const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, int64_t from, int64_t to,
                      const int8_t* const* x, int64_t low, float* const* out, int64_t queries) {
    if (bits == 8) bit_sums<8>(codes, ahead, rows, stride, from, to, x, low, out, queries);
    if (bits == 4) bit_sums<4>(codes, ahead, rows, stride, from, to, x, low, out, queries);
    if (bits == 2) bit_sums<2>(codes, ahead, rows, stride, from, to, x, low, out, queries);
}
