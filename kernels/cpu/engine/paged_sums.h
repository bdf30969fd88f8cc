// Sums over the rows of codes in few bits, for one instruction set (see paged.cpp, which includes this file).
//
// x is given in two planes of signed bytes, x ~ step * (128 * high + low): 15 bits, so that what is lost is far less than what
// the codes lost, and products of bytes suffice. Everything is a sum of integers, so the order does not matter.

constexpr float kPlaneSteps = 127 * 128;

// [2][padded] planes of x; returns the step, NaN where a number of x is none.
static float planes(const float* x, int64_t count, int64_t padded, int8_t* out) {
    float top = 0, bad = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
#pragma omp simd reduction(+ : bad)
    for (int64_t i = 0; i < count; ++i) bad += x[i] * 0.0f;
    const float by = top > 1e-30f && bad == 0 ? kPlaneSteps / top : 0;
    if (by == 0) {
        std::memset(out, 0, static_cast<size_t>(2 * padded));
        return bad;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const int32_t whole = static_cast<int32_t>(std::nearbyint(x[i] * by)), high = (whole + 64) >> 7;
        out[i] = static_cast<int8_t>(high);
        out[padded + i] = static_cast<int8_t>(whole - 128 * high);
    }
    for (int64_t i = count; i < padded; ++i) out[i] = out[padded + i] = 0;
    return top / kPlaneSteps;
}

static inline int32_t four_at(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return four;
}

// out[q][column] = the sum over all rows of code times x, for Q queries and N blocks of 16 columns. codes: `rows` times 64 bytes
// per block, `stride` bytes apart; low: where the second plane begins.
#if NSTF_VNNI
constexpr int kColumns = 2;
template <int Bits, int Q, int N>
static void columns(const uint8_t* codes, int64_t rows, int64_t stride, const int8_t* const* x, int64_t low, float* const* out) {
    constexpr int kUnits = 8 / Bits;
    __m512i high[Q][N], lower[Q][N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) high[q][n] = lower[q][n] = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
    for (int64_t r = 0; r < rows; ++r) {
        __m512i v[N];
        for (int n = 0; n < N; ++n) v[n] = _mm512_loadu_si512(codes + r * stride + 64 * n);
        for (int u = 0; u < kUnits; ++u) {
            const int64_t k = 4 * (r * kUnits + u);
            __m512i c[N];
            for (int n = 0; n < N; ++n)
                c[n] = kUnits == 1 ? v[n] : _mm512_and_si512(_mm512_srli_epi16(v[n], static_cast<unsigned>(u * Bits)), mask);
            for (int q = 0; q < Q; ++q) {
                const __m512i a = _mm512_set1_epi32(four_at(x[q] + k)), b = _mm512_set1_epi32(four_at(x[q] + low + k));
                for (int n = 0; n < N; ++n) {
                    high[q][n] = _mm512_dpbusd_epi32(high[q][n], c[n], a);
                    lower[q][n] = _mm512_dpbusd_epi32(lower[q][n], c[n], b);
                }
            }
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n)
            _mm512_storeu_ps(out[q] + 16 * n,
                             _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[q][n], 7), lower[q][n])));
}
#elif NSTF_ISA >= 2
constexpr int kColumns = 1;
template <int Bits, int Q, int N>
static void columns(const uint8_t* codes, int64_t rows, int64_t stride, const int8_t* const* x, int64_t low, float* const* out) {
    constexpr int kUnits = 8 / Bits;
    const __m256i mask = _mm256_set1_epi8(Bits == 2 ? 3 : 15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    for (int h = 0; h < 2; ++h) {  // eight columns
        __m256i sum[Q][2];
        for (int q = 0; q < Q; ++q) sum[q][0] = sum[q][1] = _mm256_setzero_si256();
        for (int64_t r = 0; r < rows; ++r) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + r * stride + 32 * h));
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
                    for (int i = 0; i < 2; ++i) {
                        __m256i short_sum = _mm256_setzero_si256();
                        for (int u = 0; u < kUnits; ++u) {
                            const __m256i four = _mm256_set1_epi32(four_at(x[q] + i * low + 4 * (r * kUnits + u)));
                            short_sum = _mm256_add_epi16(short_sum, _mm256_maddubs_epi16(c[u], four));
                        }
                        sum[q][i] = _mm256_add_epi32(sum[q][i], _mm256_madd_epi16(short_sum, ones));
                    }
            }
        }
        for (int q = 0; q < Q; ++q)
            _mm256_storeu_ps(out[q] + 8 * h,
                             _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(sum[q][0], 7), sum[q][1])));
    }
}
#else
constexpr int kColumns = 1;
template <int Bits, int Q, int N>
static void columns(const uint8_t* codes, int64_t rows, int64_t stride, const int8_t* const* x, int64_t low, float* const* out) {
    constexpr int kUnits = 8 / Bits;
    for (int q = 0; q < Q; ++q) {
        int32_t sum[16] = {};
        for (int64_t r = 0; r < rows; ++r)
            for (int u = 0; u < kUnits; ++u) {
                int32_t by[4];
                for (int i = 0; i < 4; ++i) {
                    const int64_t k = 4 * (r * kUnits + u) + i;
                    by[i] = 128 * x[q][k] + x[q][low + k];
                }
                const uint8_t* at = codes + r * stride;
#pragma omp simd
                for (int c = 0; c < 16; ++c)
                    for (int i = 0; i < 4; ++i) sum[c] += ((at[4 * c + i] >> (u * Bits)) & ((1 << Bits) - 1)) * by[i];
            }
        for (int c = 0; c < 16; ++c) out[q][c] = static_cast<float>(sum[c]);
    }
}
#endif

template <int Bits, int Q>
static void column_blocks(const uint8_t* codes, int64_t rows, int64_t stride, int64_t from, int64_t to, const int8_t* const* x,
                          int64_t low, float* const* out) {
    float* at[Q];
    int64_t n = from;
    auto move = [&] {
        for (int q = 0; q < Q; ++q) at[q] = out[q] + 16 * n;
    };
    for (; n + kColumns <= to; n += kColumns) move(), columns<Bits, Q, kColumns>(codes + 64 * n, rows, stride, x, low, at);
    for (; n < to; ++n) move(), columns<Bits, Q, 1>(codes + 64 * n, rows, stride, x, low, at);
}

template <int Bits>
static void bit_sums(const uint8_t* codes, int64_t rows, int64_t stride, int64_t from, int64_t to, const int8_t* const* x,
                     int64_t low, float* const* out, int64_t queries) {
    int64_t q = 0;
    for (; q + 4 <= queries; q += 4) column_blocks<Bits, 4>(codes, rows, stride, from, to, x + q, low, out + q);
    if (queries - q == 3) column_blocks<Bits, 3>(codes, rows, stride, from, to, x + q, low, out + q);
    if (queries - q == 2) column_blocks<Bits, 2>(codes, rows, stride, from, to, x + q, low, out + q);
    if (queries - q == 1) column_blocks<Bits, 1>(codes, rows, stride, from, to, x + q, low, out + q);
}

// Of the blocks of 16 columns from..to-1, for any number of queries.
static void code_sums(int bits, const uint8_t* codes, int64_t rows, int64_t stride, int64_t from, int64_t to,
                      const int8_t* const* x, int64_t low, float* const* out, int64_t queries) {
    if (bits == 8) bit_sums<8>(codes, rows, stride, from, to, x, low, out, queries);
    if (bits == 4) bit_sums<4>(codes, rows, stride, from, to, x, low, out, queries);
    if (bits == 2) bit_sums<2>(codes, rows, stride, from, to, x, low, out, queries);
}
