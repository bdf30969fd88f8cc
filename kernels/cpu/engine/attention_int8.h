// Attention over keys and values in int8, for one instruction set (see ops.h, which includes this file).
//
// A key or a value of a head is its numbers as signed bytes with one scale. Both are multiplied as they are: queries and the
// weights of 16 positions are rounded to 14 bits, and one instruction multiplies pairs of 16-bit numbers and adds the two
// products. Hence the layouts: keys [block of 16 positions][pair of numbers][position][2], values [pair of positions][number][2].

static inline int32_t pair_at(const int16_t* wide) {
    int32_t pair;
    std::memcpy(&pair, wide, sizeof pair);
    return pair;
}

// Sums of 16 pairs of products.
#if NSTF_ISA == 512
struct Sixteen {
    __m512i sum;
    Sixteen() { sum = _mm512_setzero_si512(); }  // written out: GCC compiles implicit ones for the baseline
    // p: 16 pairs of bytes; pair: two 16-bit numbers.
    void add(const int8_t* p, int32_t pair) {
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(wide, _mm512_set1_epi32(pair)));
    }
    void store(float* out) const { _mm512_storeu_ps(out, _mm512_cvtepi32_ps(sum)); }
};
#elif NSTF_ISA == 2
struct Sixteen {
    __m256i sum[2];
    Sixteen() { sum[0] = sum[1] = _mm256_setzero_si256(); }
    void add(const int8_t* p, int32_t pair) {
        for (int i = 0; i < 2; ++i) {
            const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(wide, _mm256_set1_epi32(pair)));
        }
    }
    void store(float* out) const {
        for (int i = 0; i < 2; ++i) _mm256_storeu_ps(out + 8 * i, _mm256_cvtepi32_ps(sum[i]));
    }
};
#else
struct Sixteen {
    int32_t sum[16] = {};
    void add(const int8_t* p, int32_t pair) {
        int16_t two[2];
        std::memcpy(two, &pair, 4);
        for (int i = 0; i < 16; ++i) sum[i] += p[2 * i] * two[0] + p[2 * i + 1] * two[1];
    }
    void store(float* out) const {
        for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(sum[i]);
    }
};
#endif

// What queries and weights are rounded to: 512 products of it and a byte still fit 32 bits.
constexpr float kSteps = 8191;

// Between what is read and what is fetched, values after keys: the processor's own prefetcher stops at every page.
constexpr int64_t kAheadBytes = 4096;

// `count` numbers as 16-bit ones; returns their scale.
static float to_wide(const float* x, int64_t count, int16_t* out) {
    float top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
    const float by = top > 1e-30f ? kSteps / top : 0;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int16_t>(std::nearbyint(x[i] * by));
    return top / kSteps;
}

// Numbers of one head as bytes, two at `step[0]` from each other and pairs at `step[1]`; returns their scale.
static float to_int8(const float* in, int64_t count, int64_t within, int64_t step, int8_t* out) {
    float top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) top = std::fabs(in[i]) > top ? std::fabs(in[i]) : top;
    const float by = top > 1e-30f ? 127 / top : 0;
    for (int64_t i = 0; i < count; ++i) out[i / 2 * step + i % 2 * within] = static_cast<int8_t>(std::nearbyint(in[i] * by));
    return top / 127;
}

struct Int8Cells {
    Int8Head head;
    int64_t size;
    void keys(int64_t j, float* room) const {
        const int8_t* in = head.keys + j * size;
        const float* scales = head.key_scales + j;
        for (int64_t d = 0; d < size; d += 2, in += 2 * kKeys)
            for (int64_t i = 0; i < 2; ++i) {
#pragma omp simd
                for (int64_t l = 0; l < kKeys; ++l) room[(d + i) * kKeys + l] = static_cast<float>(in[2 * l + i]) * scales[l];
            }
    }
    void values(int64_t j, int64_t rows, float* room) const {
        for (int64_t l = 0; l < rows; ++l) {
            const int8_t* in = head.values + (j + l) / 2 * 2 * size + (j + l) % 2;
            const float scale = head.value_scales[j + l];
#pragma omp simd
            for (int64_t d = 0; d < size; ++d) room[l * size + d] = static_cast<float>(in[2 * d]) * scale;
        }
    }
};
static void attend_int8(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                        int64_t window, float scale, const Int8Head& head, float* out, int64_t out_stride, float* scores,
                        float* room) {
    attend_cells(q, q_stride, tokens, heads, size, first, window, scale, Int8Cells{head, size}, out, out_stride, scores, room);
}

// One query head at one position.
static void attend_one_int8(const float* q, int64_t size, int64_t position, int64_t window, float scale,
                            const Int8Head& head, float* out, float* scores) {
    const int64_t start = window > 0 && position + 1 > window ? position + 1 - window : 0, from = start / kKeys * kKeys;
    const int64_t end = (position / kKeys + 1) * kKeys * size;  // bytes of keys, and of values
    int16_t wide[512];  // heads are no larger
    const float by = to_wide(q, size, wide) * scale;
    for (int64_t j = from; j <= position; j += kKeys) {
        const int8_t* k = head.keys + j * size;
        const int64_t ahead = j * size + kAheadBytes;
        const int8_t* next = ahead < end ? head.keys + ahead : head.values + from * size + (ahead - end);
        Sixteen even, odd;
        int64_t p = 0;
        for (; p + 2 <= size / 2; p += 2) {
            __builtin_prefetch(next + p * 32, 0, 2);
            even.add(k + p * 32, pair_at(wide + 2 * p));
            odd.add(k + p * 32 + 32, pair_at(wide + 2 * p + 2));
        }
        if (p < size / 2) even.add(k + p * 32, pair_at(wide + 2 * p));
        float sums[2][kKeys];
        even.store(sums[0]);
        odd.store(sums[1]);
#pragma omp simd
        for (int64_t l = 0; l < kKeys; ++l) scores[j + l] = (sums[0][l] + sums[1][l]) * (head.key_scales[j + l] * by);
    }
    const float total = exponentials(scores, start, position + 1);
    std::fill(scores + from, scores + start, 0.0f);
    std::fill(scores + position + 1, scores + position / kKeys * kKeys + kKeys, 0.0f);
    std::fill(out, out + size, 0.0f);
    for (int64_t j = from; j <= position; j += kKeys) {
        float weights[kKeys];
#pragma omp simd
        for (int64_t l = 0; l < kKeys; ++l) weights[l] = scores[j + l] * head.value_scales[j + l];
        const float step = to_wide(weights, kKeys, wide);
        const int8_t* v = head.values + j * size;
        const int64_t ahead = j * size + kAheadBytes < end ? kAheadBytes : 0;
        int64_t d = 0;
        for (; d + 16 <= size; d += 16) {
            Sixteen sum;
            for (int64_t p = 0; p < kKeys / 2; ++p) {
                if (d % 32 == 0) __builtin_prefetch(v + (p * size + d) * 2 + ahead, 0, 2);
                sum.add(v + (p * size + d) * 2, pair_at(wide + 2 * p));
            }
            float sums[16];
            sum.store(sums);
#pragma omp simd
            for (int64_t i = 0; i < 16; ++i) out[d + i] += sums[i] * step;
        }
        for (; d < size; ++d) {
            float sum = 0;
            for (int64_t l = 0; l < kKeys; ++l) sum += weights[l] * static_cast<float>(v[(l / 2 * size + d) * 2 + l % 2]);
            out[d] += sum;
        }
    }
    const float share = 1.0f / total;
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) out[d] *= share;
}
