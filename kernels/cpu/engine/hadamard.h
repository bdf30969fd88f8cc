// Vectors of an instruction set, and the Hadamard transform (see ops.h and paged.h, which include this file).

#if NSTF_ISA == 512
constexpr int64_t kLanes = 16;
#elif NSTF_ISA == 2
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Loose __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));  // anywhere in memory

// a * b + c, rounded once where the set can. Written out: which of two products a compiler makes part of their sum differs from one
// size of a loop to the next, and the numbers of a sequence may not depend on what is worked on beside it.
static inline Vec fused(Vec a, Vec b, Vec c) {
#if NSTF_ISA == 512
    return reinterpret_cast<Vec>(
        _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif NSTF_ISA == 2
    return reinterpret_cast<Vec>(
        _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
    return reinterpret_cast<Vec>(
        vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}
static inline float fused(float a, float b, float c) {
#if NSTF_ISA >= 2 || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
static inline Vec all_of(float x) {
#if NSTF_ISA == 512
    return reinterpret_cast<Vec>(_mm512_set1_ps(x));
#elif NSTF_ISA == 2
    return reinterpret_cast<Vec>(_mm256_set1_ps(x));
#else
    Vec v;
    for (int64_t l = 0; l < kLanes; ++l) v[l] = x;
    return v;
#endif
}

#if NSTF_ISA >= 2
// The stage within a vector that adds and subtracts lanes H apart.
template <int H>
static inline Vec within(Vec v) {
    typedef int32_t Lanes __attribute__((vector_size(kLanes * sizeof(int32_t))));
    Lanes partner;
    Vec sign;
    for (int l = 0; l < kLanes; ++l) partner[l] = l ^ H, sign[l] = l & H ? -1.0f : 1.0f;
    return v * sign + __builtin_shuffle(v, partner);
}
#endif

// Blocks of x times the orthonormal Hadamard matrix, in place: stages that add and subtract numbers `half` apart. Two stages at a
// time between a load and a store, in the order of one after the other, so the sums are the same.
static void hadamard(float* x, int64_t size, int block) {
    const float by = 1.0f / std::sqrt(static_cast<float>(block));
    for (float* at = x; at < x + size; at += block) {
        int half = 1;
        const auto vector = [&](int64_t i) __attribute__((always_inline)) -> Loose* { return reinterpret_cast<Loose*>(at + i); };
#if NSTF_ISA >= 2
        if (block >= kLanes) {
            for (int i = 0; i < block; i += kLanes) {
                Vec v = *vector(i);
                v = within<4>(within<2>(within<1>(v)));
                if constexpr (kLanes > 8) v = within<8>(v);
                *vector(i) = v * by;
            }
            half = kLanes;
        }
#endif
        const float scale = half == 1 ? by : 1.0f;
        for (; half >= kLanes && 4 * half <= block; half *= 4)
            for (int i = 0; i < block; i += 4 * half)
                for (int j = i; j < i + half; j += kLanes) {
                    const Vec a = *vector(j), b = *vector(j + half), c = *vector(j + 2 * half), d = *vector(j + 3 * half);
                    const Vec u = a + b, v = a - b, w = c + d, z = c - d;
                    *vector(j) = u + w, *vector(j + half) = v + z;
                    *vector(j + 2 * half) = u - w, *vector(j + 3 * half) = v - z;
                }
        for (; half < block; half *= 2)
            for (int i = 0; i < block; i += 2 * half) {
                float *a = at + i, *b = at + i + half;
#pragma omp simd
                for (int j = 0; j < half; ++j) {
                    const float u = a[j], v = b[j];
                    a[j] = u + v;
                    b[j] = u - v;
                }
            }
        if (scale != 1.0f)
            for (int i = 0; i < block; ++i) at[i] *= scale;
    }
}
