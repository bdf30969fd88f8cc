// Products with keys and values as float16 or float32 numbers, for one instruction set (see paged.h, which includes this file).

constexpr int64_t kBlock = 16;  // positions of a block of keys

static inline Vec wide(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline Vec wide(const uint16_t* p) {
#if NSTF_ISA == 512
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif NSTF_ISA == 2
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    Vec v;
    for (int64_t i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
    return v;
#endif
}

// Scores of Q queries and N blocks of keys [size][16]. ahead: the same blocks of the page that comes next, fetched meanwhile.
template <int Q, int N, class T>
static void score(const float* const* q, int64_t size, const T* keys, const T* ahead, float* const* to) {
    constexpr int kVecs = static_cast<int>(kBlock / kLanes);
    Vec sum[Q][N * kVecs];
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N * kVecs; ++n) sum[i][n] = Vec{};
    for (int64_t d = 0; d < size; ++d) {
        Vec k[N * kVecs];
        for (int n = 0; n < N; ++n) {
            for (int v = 0; v < kVecs; ++v) k[n * kVecs + v] = wide(keys + (n * size + d) * kBlock + v * kLanes);
            if (sizeof(T) == 2 && d % 2 == 0) fetch_line(ahead + (n * size + d) * kBlock);
        }
        for (int i = 0; i < Q; ++i)
            for (int n = 0; n < N * kVecs; ++n) sum[i][n] = fused(k[n], all_of(q[i][d]), sum[i][n]);
    }
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N * kVecs; ++n) *reinterpret_cast<Loose*>(to[i] + n * kLanes) = sum[i][n];
}

#if NSTF_ISA == 512
constexpr int kScoreBlocks = 4;
#else
constexpr int kScoreBlocks = 1;
#endif

// Of the blocks from..to-1 of a page.
template <int Q, class T>
static void score_blocks(const float* const* q, int64_t size, const T* keys, const T* ahead, int64_t from, int64_t end,
                         float* const* to) {
    float* at[Q];
    auto move = [&](int64_t b) {
        for (int i = 0; i < Q; ++i) at[i] = to[i] + b * kBlock;
    };
    int64_t b = from;
    for (; b + kScoreBlocks <= end; b += kScoreBlocks)
        move(b), score<Q, kScoreBlocks>(q, size, keys + b * kBlock * size, ahead + b * kBlock * size, at);
    for (; b < end; ++b) move(b), score<Q, 1>(q, size, keys + b * kBlock * size, ahead + b * kBlock * size, at);
}

template <class T>
static void score_all(const float* const* q, int64_t count, int64_t size, const T* keys, const T* ahead, int64_t from, int64_t to,
                      float* const* out) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4, ahead = keys) score_blocks<4>(q + i, size, keys, ahead, from, to, out + i);
    if (count - i == 3) score_blocks<3>(q + i, size, keys, ahead, from, to, out + i);
    if (count - i == 2) score_blocks<2>(q + i, size, keys, ahead, from, to, out + i);
    if (count - i == 1) score_blocks<1>(q + i, size, keys, ahead, from, to, out + i);
}

// sums = sums * fade + weights x values of the positions from..to-1, for Q queries and N vectors. ahead: as for `score`.
template <int Q, int N, class T>
static void mix(const float* const* weights, const float* fade, const T* values, const T* ahead, int64_t size, int64_t from,
                int64_t to, float* const* sums, int64_t d) {
    Vec sum[Q][N];
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N; ++n) sum[i][n] = wide(sums[i] + d + n * kLanes) * fade[i];
    for (int64_t l = from; l < to; ++l) {
        Vec v[N];
        for (int n = 0; n < N; ++n) {
            v[n] = wide(values + l * size + d + n * kLanes);
            if (sizeof(T) == 2 && (d + n * kLanes) % 32 == 0) fetch_line(ahead + l * size + d + n * kLanes);
        }
        for (int i = 0; i < Q; ++i)
            for (int n = 0; n < N; ++n) sum[i][n] = fused(v[n], all_of(weights[i][l]), sum[i][n]);
    }
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N; ++n) *reinterpret_cast<Loose*>(sums[i] + d + n * kLanes) = sum[i][n];
}

static inline float one(float x) { return x; }
static inline float one(uint16_t x) { return half_to_float(x); }

template <int Q, class T>
static void mix_vectors(const float* const* weights, const float* fade, const T* values, const T* ahead, int64_t size,
                        int64_t from, int64_t to, float* const* sums) {
    constexpr int kWide = NSTF_ISA == 2 ? 2 : 4;
    int64_t d = 0;
    for (; d + kWide * kLanes <= size; d += kWide * kLanes) mix<Q, kWide>(weights, fade, values, ahead, size, from, to, sums, d);
    for (; d + kLanes <= size; d += kLanes) mix<Q, 1>(weights, fade, values, ahead, size, from, to, sums, d);
    for (; d < size; ++d)
        for (int i = 0; i < Q; ++i) {
            float sum = sums[i][d] * fade[i];
            for (int64_t l = from; l < to; ++l) sum = fused(one(values[l * size + d]), weights[i][l], sum);
            sums[i][d] = sum;
        }
}

template <class T>
static void mix_all(const float* const* weights, const float* fade, int64_t count, const T* values, const T* ahead, int64_t size,
                    int64_t from, int64_t to, float* const* sums) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4, ahead = values)
        mix_vectors<4>(weights + i, fade + i, values, ahead, size, from, to, sums + i);
    if (count - i == 3) mix_vectors<3>(weights + i, fade + i, values, ahead, size, from, to, sums + i);
    if (count - i == 2) mix_vectors<2>(weights + i, fade + i, values, ahead, size, from, to, sums + i);
    if (count - i == 1) mix_vectors<1>(weights + i, fade + i, values, ahead, size, from, to, sums + i);
}
