// What a transformer does beside its matrices, for one instruction set: ops.cpp includes this file once per set, so there is
// no include guard and no #include here. Loops are plain; the compiler turns them into vectors of the set's width.

// Twelve multiplications: as exact as a float needs for an activation, and a loop of it becomes vectors.
static inline float fast_exp(float x) {
    x = std::min(88.0f, std::max(-87.0f, x)) * 1.44269504f;
    const float whole = __builtin_floorf(x + 0.5f), part = x - whole;
    float p = 1.5403530e-4f;
    p = p * part + 1.3333558e-3f;
    p = p * part + 9.6181291e-3f;
    p = p * part + 5.5504109e-2f;
    p = p * part + 2.4022651e-1f;
    p = p * part + 6.9314718e-1f;
    p = p * part + 1.0f;
    const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
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

static void halves(const uint16_t* in, int64_t count, float* out) {
    int64_t i = 0;
#if NSTF_ISA >= 2
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < count; ++i) out[i] = half_to_float(in[i]);
}

static void to_halves(const float* in, int64_t count, int64_t step, uint16_t* out) {
    for (int64_t i = 0; i < count; ++i) {
#if NSTF_ISA >= 2
        out[i * step] = static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(in[i]), _MM_FROUND_TO_NEAREST_INT)));
#else
        out[i * step] = float_to_half(in[i]);
#endif
    }
}

// Attention of `heads` query heads that share a key head, for `tokens` tokens at positions first.. of one sequence.
// q: [token][q_stride] with the heads side by side; keys: float16 [block of 16 positions][size][16]; values: float16
// [position][size]; out: like q. A query at position p sees max(0, p - window + 1) to p; window 0: everything.
static void attend(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                   int64_t window, float scale, const uint16_t* keys, const uint16_t* values, float* out,
                   int64_t out_stride, float* scores, float* room) {
    constexpr int64_t B = 16;
    const int64_t last = first + tokens, length = (last + B - 1) / B * B;
    const int64_t from = (window > 0 && first - window + 1 > 0 ? first - window + 1 : 0) / B * B;
    for (int64_t j = from; j < last; j += B) {
        halves(keys + j * size, size * B, room);
        for (int64_t t = 0; t < tokens; ++t) {
            if (j > first + t) continue;
            for (int64_t h = 0; h < heads; ++h) {
                const float* query = q + t * q_stride + h * size;
                float sum[B] = {};
                for (int64_t d = 0; d < size; ++d) {
                    const float by = query[d];
                    const float* k = room + d * B;
#pragma omp simd
                    for (int64_t l = 0; l < B; ++l) sum[l] += by * k[l];
                }
                float* to = scores + (t * heads + h) * length + j;
                for (int64_t l = 0; l < B; ++l) to[l] = sum[l] * scale;
            }
        }
    }
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t end = first + t + 1, start = window > 0 && end > window ? end - window : 0;
        for (int64_t h = 0; h < heads; ++h) {
            float* s = scores + (t * heads + h) * length;
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
            float* to = out + t * out_stride + h * size;
            for (int64_t d = 0; d < size; ++d) to[d] = 0;
        }
    }
    for (int64_t j = from; j < last; j += B) {
        const int64_t count = std::min(B, last - j);
        halves(values + j * size, size * count, room);
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t end = std::min(count, first + t + 1 - j);
            const int64_t start = window > 0 ? std::max<int64_t>(0, first + t + 1 - window - j) : 0;
            for (int64_t h = 0; h < heads; ++h) {
                const float* s = scores + (t * heads + h) * length + j;
                float* to = out + t * out_stride + h * size;
                for (int64_t l = start; l < end; ++l) {
                    const float by = s[l];
                    const float* v = room + l * size;
#pragma omp simd
                    for (int64_t d = 0; d < size; ++d) to[d] += by * v[d];
                }
            }
        }
    }
}

static const Ops kOps = {rms_norm, add, gated, rope, to_halves, attend};
