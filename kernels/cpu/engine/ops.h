// What a transformer does beside its matrices, for one instruction set: ops.cpp includes this file once per set, so there is
// no include guard, and only files of the same kind are included here. Loops are plain; the compiler
// turns them into vectors of the set's width.

// Twelve multiplications: as exact as a float needs for an activation, and a loop of it becomes vectors.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
    const float shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
    const float part = x * 1.44269504f - whole;
    float p = 1.5403530e-4f;
    p = p * part + 1.3333558e-3f;
    p = p * part + 9.6181291e-3f;
    p = p * part + 5.5504109e-2f;
    p = p * part + 2.4022651e-1f;
    p = p * part + 6.9314718e-1f;
    p = p * part + 1.0f;
    const int32_t bits = (__builtin_bit_cast(int32_t, shifted) + (127 - 0x4b400000)) << 23;
    const float power = __builtin_bit_cast(float, bits);
    return p * power;
}

// y = x / rms(x) * weight.
static void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* y) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) total += x[i] * x[i];
    const float by = 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) y[i] = x[i] * by * weight[i];
}

// x += y.
static void add(float* x, const float* y, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) x[i] += y[i];
}

// gate = act(gate) * up; SiLU, or GELU by tanh.
static void gated(float* gate, const float* up, int64_t size, bool gelu) {
    if (gelu) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = gate[i], z = 0.7978845608f * (g + 0.044715f * g * g * g);
            gate[i] = g / (1.0f + fast_exp(-2.0f * z)) * up[i];  // 1 + tanh z = 2 / (1 + e^-2z)
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) gate[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
    }
}

// Pairs (i, i + size / 2) turned by an angle each.
static void rope(float* x, const float* cosine, const float* sine, int64_t size) {
    const int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

#include "../halves.h"
#include "products.h"

static void to_halves(const float* in, int64_t count, int64_t step, uint16_t* out) {
    for (int64_t i = 0; i < count; ++i) {
#if NSTF_ISA >= 2
        out[i * step] = static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(in[i]), _MM_FROUND_TO_NEAREST_INT)));
#else
        out[i * step] = float_to_half(in[i]);
#endif
    }
}

constexpr int64_t kKeys = 16;  // positions of a block of keys

// Scores of Q queries and a block of keys [size][16].
template <int Q>
static void score(const float* const* q, int64_t size, const float* keys, float scale, float* const* to) {
#if NSTF_ISA == 512
    __m512 sum[Q];
    for (int i = 0; i < Q; ++i) sum[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < size; ++d) {
        const __m512 k = _mm512_loadu_ps(keys + d * kKeys);
        for (int i = 0; i < Q; ++i) sum[i] = _mm512_fmadd_ps(k, _mm512_set1_ps(q[i][d]), sum[i]);
    }
    for (int i = 0; i < Q; ++i) _mm512_storeu_ps(to[i], _mm512_mul_ps(sum[i], _mm512_set1_ps(scale)));
#else
    for (int i = 0; i < Q; ++i) {
        float sum[kKeys] = {};
        for (int64_t d = 0; d < size; ++d) {
#pragma omp simd
            for (int64_t l = 0; l < kKeys; ++l) sum[l] += q[i][d] * keys[d * kKeys + l];
        }
        for (int64_t l = 0; l < kKeys; ++l) to[i][l] = sum[l] * scale;
    }
#endif
}

// out += weight * value over `count` positions, for two queries.
static void mix(const float* const* weights, float* const* out, int64_t size, const float* values, int64_t count) {
    int64_t d = 0;
#if NSTF_ISA == 512
    for (; d + 64 <= size; d += 64) {
        __m512 sum[2][4];
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < 4; ++k) sum[i][k] = _mm512_loadu_ps(out[i] + d + 16 * k);
        for (int64_t l = 0; l < count; ++l)
            for (int k = 0; k < 4; ++k) {
                const __m512 v = _mm512_loadu_ps(values + l * size + d + 16 * k);
                for (int i = 0; i < 2; ++i) sum[i][k] = _mm512_fmadd_ps(v, _mm512_set1_ps(weights[i][l]), sum[i][k]);
            }
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < 4; ++k) _mm512_storeu_ps(out[i] + d + 16 * k, sum[i][k]);
    }
#endif
    for (int i = 0; i < 2; ++i)
        for (int64_t l = 0; l < count; ++l) {
            const float by = weights[i][l];
#pragma omp simd
            for (int64_t k = d; k < size; ++k) out[i][k] += by * values[l * size + k];
        }
}

// Attention of `heads` query heads that share a key head, for `tokens` tokens at positions first.. of one sequence.
// q: [token][q_stride] with the heads side by side; keys: float16 [block of 16 positions][size][16]; values: float16
// [position][size]; out: like q. A query at position p sees max(0, p - window + 1) to p; window 0: everything.
static void attend(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                   int64_t window, float scale, const uint16_t* keys, const uint16_t* values, float* out,
                   int64_t out_stride, float* scores, float* room) {
    const int64_t last = first + tokens, length = (last + kKeys - 1) / kKeys * kKeys, count = tokens * heads;
    const int64_t from = (window > 0 && first - window + 1 > 0 ? first - window + 1 : 0) / kKeys * kKeys;
    auto query = [&](int64_t i) { return q + i / heads * q_stride + i % heads * size; };
    for (int64_t j = from; j < last; j += kKeys) {
        halves_to_floats(keys + j * size, size * kKeys, room);
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) {
            const float* eight[8];
            float* to[8];
            for (int n = 0; n < 8; ++n) eight[n] = query(i + n), to[n] = scores + (i + n) * length + j;
            score<8>(eight, size, room, scale, to);
        }
        for (; i < count; ++i) {
            const float* one = query(i);
            float* to = scores + i * length + j;
            score<1>(&one, size, room, scale, &to);
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t end = first + i / heads + 1, start = window > 0 && end > window ? end - window : 0;
        float* s = scores + i * length;
        float top = -3e38f, total = 0;
#pragma omp simd reduction(max : top)
        for (int64_t j = start; j < end; ++j) top = s[j] > top ? s[j] : top;
#pragma omp simd reduction(+ : total)
        for (int64_t j = start; j < end; ++j) {
            s[j] = fast_exp(s[j] - top);
            total += s[j];
        }
        const float by = 1.0f / total;
#pragma omp simd
        for (int64_t j = start; j < end; ++j) s[j] *= by;
        // What a query does not see weighs nothing.
        std::fill(s + from, s + std::max(from, start), 0.0f);
        std::fill(s + end, s + length, 0.0f);
        float* to = out + i / heads * out_stride + i % heads * size;
        std::fill(to, to + size, 0.0f);
    }
    float spare[512] = {};  // heads are no larger
    for (int64_t j = from; j < last; j += kKeys) {
        const int64_t rows = std::min(kKeys, last - j);
        halves_to_floats(values + j * size, size * rows, room);
        for (int64_t i = 0; i < count; i += 2) {
            const int64_t k = std::min(i + 1, count - 1);
            const float* weights[2] = {scores + i * length + j, scores + k * length + j};
            float* to[2] = {out + i / heads * out_stride + i % heads * size, out + k / heads * out_stride + k % heads * size};
            if (k == i) to[1] = spare;  // an odd one out
            mix(weights, to, size, room, rows);
        }
    }
}

#if NSTF_ISA == 512
// One query head at one position: float16 keys and values become numbers in registers, so heads that share them need not be
// worked on together, which spreads few heads evenly over the cores.
static void attend_one(const float* q, int64_t size, int64_t position, int64_t window, float scale, const uint16_t* keys,
                       const uint16_t* values, float* out, float* scores) {
    const int64_t start = window > 0 && position + 1 > window ? position + 1 - window : 0;
    const auto half = [](const uint16_t* p) __attribute__((always_inline)) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    for (int64_t j = start / 16 * 16; j <= position; j += 16) {
        const uint16_t* k = keys + j * size;
        __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        int64_t d = 0;
        for (; d + 4 <= size; d += 4) {
            __builtin_prefetch(k + (size + d) * 16, 0, 2);
            __builtin_prefetch(k + (size + d + 2) * 16, 0, 2);
            for (int i = 0; i < 4; ++i) sum[i] = _mm512_fmadd_ps(half(k + (d + i) * 16), _mm512_set1_ps(q[d + i]), sum[i]);
        }
        for (; d < size; ++d) sum[0] = _mm512_fmadd_ps(half(k + d * 16), _mm512_set1_ps(q[d]), sum[0]);
        const __m512 total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
        _mm512_storeu_ps(scores + j, _mm512_mul_ps(total, _mm512_set1_ps(scale)));
    }
    float top = -3e38f, total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t j = start; j <= position; ++j) top = scores[j] > top ? scores[j] : top;
#pragma omp simd reduction(+ : total)
    for (int64_t j = start; j <= position; ++j) {
        scores[j] = fast_exp(scores[j] - top);
        total += scores[j];
    }
    const __m512 by = _mm512_set1_ps(1.0f / total);
    int64_t d = 0;
    for (; d + 64 <= size; d += 64) {
        __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t j = start; j <= position; ++j) {
            const uint16_t* v = values + j * size + d;
            __builtin_prefetch(v + 32 * size, 0, 2);
            __builtin_prefetch(v + 32 * size + 32, 0, 2);
            const __m512 s = _mm512_set1_ps(scores[j]);
            for (int i = 0; i < 4; ++i) sum[i] = _mm512_fmadd_ps(half(v + 16 * i), s, sum[i]);
        }
        for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + d + 16 * i, _mm512_mul_ps(sum[i], by));
    }
    for (; d + 16 <= size; d += 16) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        int64_t j = start;
        for (; j + 2 <= position + 1; j += 2) {
            even = _mm512_fmadd_ps(half(values + j * size + d), _mm512_set1_ps(scores[j]), even);
            odd = _mm512_fmadd_ps(half(values + (j + 1) * size + d), _mm512_set1_ps(scores[j + 1]), odd);
        }
        if (j <= position) even = _mm512_fmadd_ps(half(values + j * size + d), _mm512_set1_ps(scores[j]), even);
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_add_ps(even, odd), by));
    }
    for (; d < size; ++d) {
        float sum = 0;
        for (int64_t j = start; j <= position; ++j) sum += scores[j] * half_to_float(values[j * size + d]);
        out[d] = sum / total;
    }
}
#else
constexpr auto attend_one = nullptr;
#endif

static const Ops kOps = {rms_norm, add, gated, rope, to_halves, halves_to_floats, attend,
                           attend_one, products, mixtures, multiply_add};
