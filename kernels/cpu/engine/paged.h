// Attention over pages of keys and values, for one instruction set: paged.cpp includes this file once per set.
//
// Page by page with a running maximum (Dao et al. 2022, FlashAttention): no row of scores longer than a page is kept. A query's
// numbers do not depend on which other queries are worked on beside it.
#include "exp.h"

#include "../halves.h"
#include "hadamard.h"
#include "paged_pack.h"
#include "paged_sums.h"

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

// Scores of Q queries and N blocks of keys [size][16].
template <int Q, int N, class T>
static void score(const float* const* q, int64_t size, const T* keys, float* const* to) {
    constexpr int kVecs = static_cast<int>(kBlock / kLanes);
    Vec sum[Q][N * kVecs];
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N * kVecs; ++n) sum[i][n] = Vec{};
    for (int64_t d = 0; d < size; ++d) {
        Vec k[N * kVecs];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < kVecs; ++v) k[n * kVecs + v] = wide(keys + (n * size + d) * kBlock + v * kLanes);
        for (int i = 0; i < Q; ++i)
            for (int n = 0; n < N * kVecs; ++n) sum[i][n] += k[n] * q[i][d];
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
static void score_blocks(const float* const* q, int64_t size, const T* keys, int64_t from, int64_t end, float* const* to) {
    float* at[Q];
    auto move = [&](int64_t b) {
        for (int i = 0; i < Q; ++i) at[i] = to[i] + b * kBlock;
    };
    int64_t b = from;
    for (; b + kScoreBlocks <= end; b += kScoreBlocks)
        move(b), score<Q, kScoreBlocks>(q, size, keys + b * kBlock * size, at);
    for (; b < end; ++b) move(b), score<Q, 1>(q, size, keys + b * kBlock * size, at);
}

template <class T>
static void score_all(const float* const* q, int64_t count, int64_t size, const T* keys, int64_t from, int64_t to,
                      float* const* out) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) score_blocks<4>(q + i, size, keys, from, to, out + i);
    if (count - i == 3) score_blocks<3>(q + i, size, keys, from, to, out + i);
    if (count - i == 2) score_blocks<2>(q + i, size, keys, from, to, out + i);
    if (count - i == 1) score_blocks<1>(q + i, size, keys, from, to, out + i);
}

// sums = sums * fade + weights x values of the positions from..to-1, for Q queries and N vectors.
template <int Q, int N, class T>
static void mix(const float* const* weights, const float* fade, const T* values, int64_t size, int64_t from, int64_t to,
                float* const* sums, int64_t d) {
    Vec sum[Q][N];
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N; ++n) sum[i][n] = wide(sums[i] + d + n * kLanes) * fade[i];
    for (int64_t l = from; l < to; ++l) {
        Vec v[N];
        for (int n = 0; n < N; ++n) v[n] = wide(values + l * size + d + n * kLanes);
        for (int i = 0; i < Q; ++i)
            for (int n = 0; n < N; ++n) sum[i][n] += v[n] * weights[i][l];
    }
    for (int i = 0; i < Q; ++i)
        for (int n = 0; n < N; ++n) *reinterpret_cast<Loose*>(sums[i] + d + n * kLanes) = sum[i][n];
}

static inline float one(float x) { return x; }
static inline float one(uint16_t x) { return half_to_float(x); }

template <int Q, class T>
static void mix_vectors(const float* const* weights, const float* fade, const T* values, int64_t size, int64_t from, int64_t to,
                        float* const* sums) {
    constexpr int kWide = NSTF_ISA == 2 ? 2 : 4;
    int64_t d = 0;
    for (; d + kWide * kLanes <= size; d += kWide * kLanes) mix<Q, kWide>(weights, fade, values, size, from, to, sums, d);
    for (; d + kLanes <= size; d += kLanes) mix<Q, 1>(weights, fade, values, size, from, to, sums, d);
    for (; d < size; ++d)
        for (int i = 0; i < Q; ++i) {
            float sum = sums[i][d] * fade[i];
            for (int64_t l = from; l < to; ++l) sum += one(values[l * size + d]) * weights[i][l];
            sums[i][d] = sum;
        }
}

template <class T>
static void mix_all(const float* const* weights, const float* fade, int64_t count, const T* values, int64_t size, int64_t from,
                    int64_t to, float* const* sums) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) mix_vectors<4>(weights + i, fade + i, values, size, from, to, sums + i);
    if (count - i == 3) mix_vectors<3>(weights + i, fade + i, values, size, from, to, sums + i);
    if (count - i == 2) mix_vectors<2>(weights + i, fade + i, values, size, from, to, sums + i);
    if (count - i == 1) mix_vectors<1>(weights + i, fade + i, values, size, from, to, sums + i);
}

// What a task needs beside its queries.
struct Room {
    Scratch numbers, bytes;
    float *scores, *sums, *turned, *page, *pairs, *fade, *weights;
    int8_t* planes;
    int64_t plane;  // bytes of one

    explicit Room(int64_t size)
        : numbers(kQueries * (2 * kPage + 2 * up_to(size, 64) + kPage) + kPage * size + 4 * std::max(size, kPage * channel_groups(size))),
          bytes(kQueries * 2 * up_to(std::max(size, kPage), 16) / 4) {
        scores = numbers.data();
        weights = scores + kQueries * kPage;
        sums = weights + kQueries * kPage;
        turned = sums + kQueries * up_to(size, 64);
        fade = turned + kQueries * up_to(size, 64);
        page = fade + kQueries * kPage;
        pairs = page + kPage * size;
        planes = reinterpret_cast<int8_t*>(bytes.data());
        plane = up_to(std::max(size, kPage), 16);
    }
};

// The queries of a task that see some of a page.
struct Active {
    int64_t count = 0;
    Going* going[kQueries];
    uint64_t visible[kQueries];
    const float* q[kQueries];
    float *scores[kQueries], *weights[kQueries], *sums[kQueries], *added[kQueries];
    const int8_t* planes[kQueries];
};

// The loops of few-bit pages as functions of plain pointers: within the larger functions GCC leaves some of them scalar.

// y = x * by; returns the sum of x * least.
static float fold(const float* x, const float* least, const float* by, int64_t count, float* y) {
    Vec sum = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Vec v = wide(x + i);
        sum += v * wide(least + i);
        *reinterpret_cast<Loose*>(y + i) = v * wide(by + i);
    }
    float total = 0;
    for (int64_t l = 0; l < kLanes; ++l) total += sum[l];
    for (; i < count; ++i) total += x[i] * least[i], y[i] = x[i] * by[i];
    return total;
}

static float sum_of(const float* x, int64_t count) {
    Vec sum = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sum += wide(x + i);
    float total = 0;
    for (int64_t l = 0; l < kLanes; ++l) total += sum[l];
    for (; i < count; ++i) total += x[i];
    return total;
}

// y = y * fade + (x * step + rest) * by + least * base; by and least null: 1.
static void settle(float* y, float fade, const float* x, Scaled to, const float* by, const float* least, float base,
                   int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Vec v = wide(x + i) * to.step + to.rest;
        v = by == nullptr ? v + base : v * wide(by + i) + wide(least + i) * base;
        *reinterpret_cast<Loose*>(y + i) = fade == 0 ? v : wide(y + i) * fade + v;
    }
    for (; i < count; ++i) {
        const float v = by == nullptr ? to.of(x[i]) + base : to.of(x[i]) * by[i] + least[i] * base;
        y[i] = fade == 0 ? v : y[i] * fade + v;
    }
}

static void scores_of_codes(const PageTask& task, const Active& a, const PageSide& page, int64_t from, int64_t to, Room& room) {
    const int64_t size = task.size, pairs = pairs_of(task.keys, size);
    const int bits = task.keys.bits;
    const uint8_t* codes = page.packed + 4 * pairs;
    const int64_t stride = kPage / 16 * 64, padded = packed_rows(task.keys, size, true), all_rows = padded / rows_together(bits);
    float *low = room.pairs, *step = low + pairs;
    Scaled steps[kQueries];
    halves_to_floats(reinterpret_cast<const uint16_t*>(page.packed), 2 * pairs, low);
    if (task.keys.channel) {
        float base[kQueries], scaled[512];  // heads are no larger
        for (int64_t i = 0; i < a.count; ++i) {
            base[i] = fold(a.q[i], low, step, size, scaled);
            steps[i] = planes(scaled, size, padded, bits, room.planes + i * 2 * room.plane);
        }
        code_sums(bits, codes, all_rows, stride, from, to, a.planes, padded, a.added, a.count);
        for (int64_t i = 0; i < a.count; ++i)
            settle(a.scores[i] + 16 * from, 0, a.added[i] + 16 * from, steps[i], nullptr, nullptr, base[i], 16 * (to - from));
        return;
    }
    const int64_t groups = channel_groups(size), width = size / groups, rows = up_to(width, rows_together(bits)) / rows_together(bits);
    for (int64_t g = 0; g < groups; ++g) {
        float base[kQueries];
        for (int64_t i = 0; i < a.count; ++i) {
            base[i] = sum_of(a.q[i] + g * width, width);
            steps[i] = planes(a.q[i] + g * width, width, rows * rows_together(bits), bits, room.planes + i * 2 * room.plane);
        }
        code_sums(bits, codes + g * rows * stride, rows, stride, from, to, a.planes, rows * rows_together(bits), a.added, a.count);
        for (int64_t i = 0; i < a.count; ++i) {
            const int64_t at = 16 * from, pair = g * kPage + at;
            settle(a.scores[i] + at, g == 0 ? 0.0f : 1.0f, a.added[i] + at, steps[i], step + pair, low + pair, base[i],
                   16 * (to - from));
        }
    }
}

static void mix_codes(const PageTask& task, const Active& a, const PageSide& page, const float* fade, Room& room) {
    const int64_t size = task.size, pairs = pairs_of(task.values, size);
    const int bits = task.values.bits;
    const uint8_t* codes = page.packed + 4 * pairs;
    const int64_t columns = packed_columns(size, false), stride = columns / 16 * 64, rows = kPage / rows_together(bits);
    float *low = room.pairs, *step = low + pairs, base[kQueries];
    Scaled steps[kQueries];
    halves_to_floats(reinterpret_cast<const uint16_t*>(page.packed), 2 * pairs, low);
    const int64_t groups = task.values.channel ? 1 : channel_groups(size), width = size / groups;
    for (int64_t g = 0; g < groups; ++g) {
        for (int64_t i = 0; i < a.count; ++i) {
            const float* w = a.weights[i];
            float scaled[kPage];
            if (task.values.channel) {
                base[i] = sum_of(w, kPage);
                steps[i] = planes(w, kPage, kPage, bits, room.planes + i * 2 * room.plane);
            } else {
                base[i] = fold(w, low + g * kPage, step + g * kPage, kPage, scaled);
                steps[i] = planes(scaled, kPage, kPage, bits, room.planes + i * 2 * room.plane);
            }
        }
        const int64_t first = g * width / 16, last = groups == 1 ? columns / 16 : (g + 1) * width / 16;
        code_sums(bits, codes, rows, stride, first, last, a.planes, kPage, a.added, a.count);
        for (int64_t i = 0; i < a.count; ++i) {
            const int64_t at = g * width;
            const bool channel = task.values.channel;
            settle(a.sums[i] + at, fade[i], a.added[i] + at, steps[i], channel ? step : nullptr, low, base[i], width);
        }
    }
}

#if NSTF_ISA == 512
// e^x for x that is not above 0; NaN stays NaN.
static inline __m512 power(__m512 x) {
    const __m512 t = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x), _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(t, whole);
    __m512 p = _mm512_set1_ps(1.3333558e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}
// Scores become weights; returns what the query's sums so far are to be multiplied with. by: of the scores; unit: of the weights.
static float weigh(Going& g, const float* scores, uint64_t visible, float by, float unit, float* weights) {
    __m512 s[4], most = _mm512_set1_ps(-3e38f), sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
        const auto seen = static_cast<__mmask16>(visible >> (16 * i));
        s[i] = _mm512_mask_mul_ps(_mm512_set1_ps(-3e38f), seen, _mm512_loadu_ps(scores + 16 * i), _mm512_set1_ps(by));
        most = _mm512_max_ps(s[i], most);
    }
    const float here = _mm512_reduce_max_ps(most), top = here > g.top ? here : g.top;
    const float fade = g.top == top ? 1.0f : fast_exp(g.top - top);
    for (int i = 0; i < 4; ++i) {
        const auto seen = static_cast<__mmask16>(visible >> (16 * i));
        s[i] = _mm512_maskz_mov_ps(seen, power(_mm512_sub_ps(s[i], _mm512_set1_ps(top))));
        sum = _mm512_add_ps(sum, s[i]);
        _mm512_storeu_ps(weights + 16 * i, _mm512_mul_ps(s[i], _mm512_set1_ps(unit)));
    }
    g.top = top;
    g.total = g.total * fade + _mm512_reduce_add_ps(sum);
    return fade;
}
#else
// Scores become weights; returns what the query's sums so far are to be multiplied with. by: of the scores; unit: of the weights.
static float weigh(Going& g, const float* scores, uint64_t visible, float by, float unit, float* weights) {
    float top = g.top, total = 0;
    const bool all = visible == ~uint64_t{0};
    float seen[kPage];
    if (all) {
#pragma omp simd reduction(max : top)
        for (int64_t l = 0; l < kPage; ++l) {
            weights[l] = scores[l] * by;
            top = weights[l] > top ? weights[l] : top;
        }
    } else {
        for (int64_t l = 0; l < kPage; ++l) {
            seen[l] = visible >> l & 1 ? 1.0f : 0.0f;
            weights[l] = visible >> l & 1 ? scores[l] * by : -3e38f;
            top = weights[l] > top ? weights[l] : top;
        }
    }
    const float fade = g.top == top ? 1.0f : fast_exp(g.top - top);
#pragma omp simd
    for (int64_t l = 0; l < kPage; ++l) weights[l] = fast_exp(weights[l] - top);
    if (!all) {
        for (int64_t l = 0; l < kPage; ++l) weights[l] *= seen[l];
    }
#pragma omp simd reduction(+ : total)
    for (int64_t l = 0; l < kPage; ++l) total += weights[l];
    g.top = top;
    g.total = g.total * fade + total;
    if (unit != 1)
        for (int64_t l = 0; l < kPage; ++l) weights[l] *= unit;
    return fade;
}
#endif

static void attend(const PageTask& task) {
    const int64_t size = task.size;
    const int block = static_cast<int>(size & -size);
    Room room(size);
    const bool turn_keys = task.keys.rotate && task.keys.bits < 16 && task.first < task.whole;
    bool turned_values = task.values.rotate && task.values.bits < 16 && task.first < task.whole;
    if (turn_keys)
        for (int64_t i = 0; i < task.count; ++i) {
            float* to = room.turned + i * up_to(size, 64);
            std::copy_n(task.queries[i].q, size, to);
            hadamard(to, size, block);
        }
    const auto back = [&] {
        if (turned_values)
            for (int64_t i = 0; i < task.count; ++i) hadamard(task.queries[i].sums, size, block);
        turned_values = false;
    };
    for (int64_t p = task.first; p < task.last; ++p) {
        if (p >= task.gap_from && p < task.gap_to) p = std::min(task.gap_to, task.last - 1);
        if (p >= task.whole) back();
        const PageSide &keys = task.key_pages[p], &values = task.value_pages[p];
        const bool half_keys = p >= task.whole || task.keys.bits == 16, half_values = p >= task.whole || task.values.bits == 16;
        Active a;
        uint64_t any = 0;
        for (int64_t i = 0; i < task.count; ++i) {
            Going& g = task.queries[i];
            const uint64_t visible = g.rule.visible(p * kPage);
            if (visible == 0) continue;
            any |= visible;
            const int64_t n = a.count++;
            a.going[n] = &g;
            a.visible[n] = visible;
            a.q[n] = half_keys || !turn_keys ? g.q : room.turned + i * up_to(size, 64);
            a.scores[n] = room.scores + n * kPage;
            a.weights[n] = room.weights + n * kPage;
            a.sums[n] = g.sums;
            a.added[n] = room.sums + n * up_to(size, 64);
            a.planes[n] = room.planes + n * 2 * room.plane;
        }
        if (a.count == 0) continue;
        const int64_t from = __builtin_ctzll(any), to = kPage - __builtin_clzll(any), first = from / kBlock, last = (to + kBlock - 1) / kBlock;
        const bool few = NSTF_ISA >= 2 && a.count <= 4;
        if (!half_keys) {
            scores_of_codes(task, a, keys, first, last, room);
        } else if (few) {
            score_all(a.q, a.count, size, keys.half, first, last, a.scores);
        } else {
            halves_to_floats(keys.half + first * kBlock * size, (last - first) * kBlock * size, room.page + first * kBlock * size);
            score_all(a.q, a.count, size, room.page, first, last, a.scores);
        }
        for (int64_t i = 0; i < a.count; ++i)
            room.fade[i] = weigh(*a.going[i], a.scores[i], a.visible[i], task.scale * keys.unit, values.unit, a.weights[i]);
        if (!half_values) {
            mix_codes(task, a, values, room.fade, room);
        } else if (few) {
            mix_all(a.weights, room.fade, a.count, values.half, size, from, to, a.sums);
        } else {
            halves_to_floats(values.half + from * size, (to - from) * size, room.page + from * size);
            mix_all(a.weights, room.fade, a.count, room.page, size, from, to, a.sums);
        }
    }
    back();
}

static void diagonals(const float* queries, const float* page, int64_t size, int64_t rows, int64_t stride, float* out,
                      int64_t groups) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t b = 0; b < kPage / kBlock; ++b) {
            float sum[kBlock] = {};
            const float *q = queries + r * size * kBlock, *k = page + b * size * kBlock;
            for (int64_t d = 0; d < size; ++d) {
#pragma omp simd
                for (int64_t l = 0; l < kBlock; ++l) sum[l] += q[d * kBlock + l] * k[d * kBlock + l];
            }
            for (int64_t g = 0; g < kBlock / stride; ++g) {
                float total = 0;
                for (int64_t l = 0; l < stride; ++l) total += sum[g * stride + l];
                out[r * groups + b * (kBlock / stride) + g] = total;
            }
        }
}

static void turn(float* head, int64_t size) { hadamard(head, size, static_cast<int>(size & -size)); }

static const PageOps kPageOps = {attend, pack, unpack_keys, diagonals, turn};
