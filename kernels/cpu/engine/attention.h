// Attention over a cache of keys and values, for one instruction set (see ops.h, which includes this file).

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

// scores[start..end-1] become the exponentials of their distance to the largest one; returns their sum.
static float exponentials(float* scores, int64_t start, int64_t end) {
    float top = -3e38f, total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t j = start; j < end; ++j) top = scores[j] > top ? scores[j] : top;
#pragma omp simd reduction(+ : total)
    for (int64_t j = start; j < end; ++j) {
        scores[j] = fast_exp(scores[j] - top);
        total += scores[j];
    }
    return total;
}

// Attention of `heads` query heads that share a key head, for `tokens` tokens at positions first.. of one sequence.
// q: [token][q_stride] with the heads side by side; out: like q. A query at position p sees max(0, p - window + 1) to p;
// window 0: everything. cells: the cache; `keys` gives the 16 positions from j on as [size][16], `values` some positions as
// [position][size].
template <class Cells>
static void attend_cells(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                         int64_t window, float scale, const Cells& cells, float* out, int64_t out_stride, float* scores,
                         float* room) {
    const int64_t last = first + tokens, length = (last + kKeys - 1) / kKeys * kKeys, count = tokens * heads;
    const int64_t from = (window > 0 && first - window + 1 > 0 ? first - window + 1 : 0) / kKeys * kKeys;
    auto query = [&](int64_t i) { return q + i / heads * q_stride + i % heads * size; };
    for (int64_t j = from; j < last; j += kKeys) {
        cells.keys(j, room);
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
        const float by = 1.0f / exponentials(s, start, end);
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
        cells.values(j, rows, room);
        for (int64_t i = 0; i < count; i += 2) {
            const int64_t k = std::min(i + 1, count - 1);
            const float* weights[2] = {scores + i * length + j, scores + k * length + j};
            float* to[2] = {out + i / heads * out_stride + i % heads * size, out + k / heads * out_stride + k % heads * size};
            if (k == i) to[1] = spare;  // an odd one out
            mix(weights, to, size, room, rows);
        }
    }
}

// keys: float16 [block of 16 positions][size][16]; values: float16 [position][size].
struct HalfCells {
    const uint16_t *keys_, *values_;
    int64_t size;
    void keys(int64_t j, float* room) const { halves_to_floats(keys_ + j * size, size * kKeys, room); }
    void values(int64_t j, int64_t rows, float* room) const { halves_to_floats(values_ + j * size, size * rows, room); }
};
static void attend(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                   int64_t window, float scale, const uint16_t* keys, const uint16_t* values, float* out,
                   int64_t out_stride, float* scores, float* room) {
    attend_cells(q, q_stride, tokens, heads, size, first, window, scale, HalfCells{keys, values, size}, out, out_stride,
                 scores, room);
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
    const float total = exponentials(scores, start, position + 1);
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
