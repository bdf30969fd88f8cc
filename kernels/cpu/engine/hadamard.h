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

#if NSTF_ISA >= 2
// One stage within a vector: each lane's partner is brought to it. A template, since a loop over stages is not unrolled and would
// make its vectors of constants lane by lane.
template <int Half>
static inline Vec butterfly(Vec v) {
    typedef int32_t Lanes __attribute__((vector_size(kLanes * sizeof(int32_t))));
    Lanes partner;
    Vec sign;
    for (int l = 0; l < kLanes; ++l) partner[l] = l ^ Half, sign[l] = l & Half ? -1.0f : 1.0f;
    return v * sign + __builtin_shuffle(v, partner);
}
#endif

// Blocks of x times the orthonormal Hadamard matrix, in place: stages that add and subtract numbers `half` apart.
static void hadamard(float* x, int64_t size, int block) {
    const float by = 1.0f / std::sqrt(static_cast<float>(block));
    for (float* at = x; at < x + size; at += block) {
        int half = 1;
#if NSTF_ISA >= 2
        if (block >= kLanes) {
            for (int i = 0; i < block; i += kLanes) {
                Vec v = butterfly<4>(butterfly<2>(butterfly<1>(*reinterpret_cast<const Loose*>(at + i))));
#if NSTF_ISA == 512
                v = butterfly<8>(v);
#endif
                *reinterpret_cast<Loose*>(at + i) = v * by;
            }
            half = kLanes;
        }
#endif
        const float scale = half == 1 ? by : 1.0f;
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
