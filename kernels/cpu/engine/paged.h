// Attention over pages of keys and values, for one instruction set: paged.cpp includes this file once per set.
//
// Page by page with a running maximum (Dao et al. 2022, FlashAttention): no row of scores longer than a page is kept. A query's
// numbers do not depend on which other queries are worked on beside it.
#include "exp.h"

#include "../halves.h"
#include "hadamard.h"
static inline void fetch_line(const void* at) { __builtin_prefetch(at, 0, 2); }

#include "paged_half.h"
#include "paged_pack.h"
#include "paged_sums.h"

constexpr int64_t kFew = 8;  // queries that wait for memory rather than for arithmetic

// What a task needs beside its queries.
struct Room {
    Scratch numbers, bytes;
    float *scores, *sums, *turned, *page, *pairs, *fade, *weights;
    int8_t *planes, *fixed;
    int64_t plane;  // bytes of one
    // Keys that are scaled by position are multiplied with the same numbers on every page: [query][group of channels].
    Scaled steps[kQueries][8];
    float base[kQueries][8];

    explicit Room(int64_t size)
        : numbers(kQueries * (2 * kPage + 2 * up_to(size, 64) + kPage) + kPage * size + 4 * std::max(size, kPage * channel_groups(size))),
          bytes(kQueries * 4 * up_to(std::max(size, kPage), 16) / 4) {
        scores = numbers.data();
        weights = scores + kQueries * kPage;
        sums = weights + kQueries * kPage;
        turned = sums + kQueries * up_to(size, 64);
        fade = turned + kQueries * up_to(size, 64);
        page = fade + kQueries * kPage;
        pairs = page + kPage * size;
        planes = reinterpret_cast<int8_t*>(bytes.data());
        plane = up_to(std::max(size, kPage), 16);
        fixed = planes + kQueries * 2 * plane;
    }
};

// The queries of a task that see some of a page.
struct Active {
    int64_t count = 0;
    Going* going[kQueries];
    int64_t number[kQueries];  // among the task's queries
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

// Groups of channels of keys that are scaled by position.
struct KeyGroups {
    int64_t groups, width, padded;
    explicit KeyGroups(const PageTask& task)
        : groups(channel_groups(task.size)), width(task.size / groups), padded(up_to(width, rows_together(task.keys.bits))) {}
};

static void fix_queries(const PageTask& task, const float* turned, Room& room) {
    const KeyGroups k(task);
    for (int64_t i = 0; i < task.count; ++i) {
        const float* q = turned != nullptr ? turned + i * up_to(task.size, 64) : task.queries[i].q;
        for (int64_t g = 0; g < k.groups; ++g) {
            room.base[i][g] = sum_of(q + g * k.width, k.width);
            room.steps[i][g] = planes(q + g * k.width, k.width, k.padded, task.keys.bits,
                                      room.fixed + i * 2 * room.plane + g * 2 * k.padded);
        }
    }
}

// The codes of a side of the page that comes next, whose minima and scales are fetched now; without one, those of this page.
static const uint8_t* codes_ahead(const uint8_t* packed, const uint8_t* next, int64_t pairs) {
    if (next == nullptr) return packed + 4 * pairs;
    for (int64_t i = 0; i < 4 * pairs; i += 64) fetch_line(next + i);
    return next + 4 * pairs;
}

static void scores_of_codes(const PageTask& task, const Active& a, const PageSide& page, const uint8_t* next, int64_t from,
                            int64_t to, Room& room) {
    const int64_t size = task.size, pairs = pairs_of(task.keys, size);
    const int bits = task.keys.bits;
    const uint8_t *codes = page.packed + 4 * pairs, *ahead = codes_ahead(page.packed, next, pairs);
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
        code_sums(bits, codes, ahead, all_rows, stride, from, to, a.planes, padded, a.added, a.count);
        for (int64_t i = 0; i < a.count; ++i)
            settle(a.scores[i] + 16 * from, 0, a.added[i] + 16 * from, steps[i], nullptr, nullptr, base[i], 16 * (to - from));
        return;
    }
    const KeyGroups k(task);
    for (int64_t g = 0; g < k.groups; ++g) {
        const int8_t* fixed[kQueries];
        for (int64_t i = 0; i < a.count; ++i) fixed[i] = room.fixed + a.number[i] * 2 * room.plane + g * 2 * k.padded;
        const int64_t rows = k.padded / rows_together(bits);
        code_sums(bits, codes + g * rows * stride, ahead + g * rows * stride, rows, stride, from, to, fixed, k.padded, a.added,
                  a.count);
        for (int64_t i = 0; i < a.count; ++i) {
            const int64_t at = 16 * from, pair = g * kPage + at, n = a.number[i];
            settle(a.scores[i] + at, g == 0 ? 0.0f : 1.0f, a.added[i] + at, room.steps[n][g], step + pair, low + pair,
                   room.base[n][g], 16 * (to - from));
        }
    }
}

static void mix_codes(const PageTask& task, const Active& a, const PageSide& page, const uint8_t* next, const float* fade,
                      Room& room) {
    const int64_t size = task.size, pairs = pairs_of(task.values, size);
    const int bits = task.values.bits;
    const uint8_t *codes = page.packed + 4 * pairs, *ahead = codes_ahead(page.packed, next, pairs);
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
        code_sums(bits, codes, ahead, rows, stride, first, last, a.planes, kPage, a.added, a.count);
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
    const ExpEnds ends;
    const float low = ends.low, high = ends.high;
#pragma omp simd
    for (int64_t l = 0; l < kPage; ++l) weights[l] = fast_exp(weights[l] - top, low, high);
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

// Pages lie anywhere in memory, and the processor's own prefetcher stops at the end of each: a few queries are waiting for
// memory most of the time.
static inline void fetch(const void* page, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) fetch_line(static_cast<const char*>(page) + i);
}

static void fetch_side(const PageSide& page, const Format& format, int64_t size, bool key, bool half) {
    if (half && page.half != nullptr) fetch(page.half, half_bytes(size));
    if (!half && page.packed != nullptr) fetch(page.packed, packed_bytes(format, size, key));
}

#include "paged_four.h"

static inline const uint16_t* halves_or(const void* next, const PageSide& page) {
    return next != nullptr ? static_cast<const uint16_t*>(next) : page.half;
}

static void attend(const PageTask& task) {
    const int64_t size = task.size;
    const int block = static_cast<int>(size & -size);
    const auto after = [&](int64_t p) {  // the next page that is looked at
        return p >= task.gap_from && p < task.gap_to ? std::min(task.gap_to, task.last - 1) : p;
    };
    if (task.first >= task.gap_from && task.last <= task.gap_to) return;
    const auto halves_of = [&](const Format& format, int64_t p) { return p >= task.whole || format.bits == 16; };
    // Fetches a side of page p, or says where it is if it is stored like that of page `now` and is to be fetched beside the
    // products with that one. now: -1 before the first.
    const auto fetch_now = [&](const PageSide* pages, const Format& format, bool key, int64_t p, int64_t now) {
        const void* at = nullptr;
        if (task.count > kFew || p >= task.last) return at;
        const bool half = halves_of(format, p);
        if (now < 0 || half != halves_of(format, now))
            fetch_side(pages[p], format, size, key, half);
        else
            at = half ? static_cast<const void*>(pages[p].half) : pages[p].packed;
        return at;
    };
    fetch_now(task.key_pages, task.keys, true, after(task.first), -1);
    fetch_now(task.value_pages, task.values, false, after(task.first), -1);
    Room room(size);
    const bool turn_keys = task.keys.rotate && task.keys.bits < 16 && task.first < task.whole;
    bool turned_values = task.values.rotate && task.values.bits < 16 && task.first < task.whole;
    if (turn_keys)
        for (int64_t i = 0; i < task.count; ++i) {
            float* to = room.turned + i * up_to(size, 64);
            std::copy_n(task.queries[i].q, size, to);
            hadamard(to, size, block);
        }
    if (task.keys.bits < 16 && !task.keys.channel && task.first < task.whole)
        fix_queries(task, turn_keys ? room.turned : nullptr, room);
    const auto back = [&] {
        if (turned_values)
            for (int64_t i = 0; i < task.count; ++i) hadamard(task.queries[i].sums, size, block);
        turned_values = false;
    };
    for (int64_t p = task.first; p < task.last; ++p) {
        p = after(p);
        if (p >= task.whole) back();
        const PageSide &keys = task.key_pages[p], &values = task.value_pages[p];
        const bool half_keys = halves_of(task.keys, p), half_values = halves_of(task.values, p);
        const int64_t next = p + 1 < task.last ? after(p + 1) : task.last;
        Active a;
        uint64_t any = 0;
        for (int64_t i = 0; i < task.count; ++i) {
            Going& g = task.queries[i];
            const uint64_t visible = g.rule.visible(p * kPage);
            if (visible == 0) continue;
            any |= visible;
            const int64_t n = a.count++;
            a.going[n] = &g;
            a.number[n] = i;
            a.visible[n] = visible;
            a.q[n] = half_keys || !turn_keys ? g.q : room.turned + i * up_to(size, 64);
            a.scores[n] = room.scores + n * kPage;
            a.weights[n] = room.weights + n * kPage;
            a.sums[n] = g.sums;
            a.added[n] = room.sums + n * up_to(size, 64);
            a.planes[n] = room.planes + n * 2 * room.plane;
        }
        if (a.count == 0) continue;
        const bool few = a.count <= 4, in_place = NSTF_ISA >= 2 && few;
        const void* next_keys = fetch_now(task.key_pages, task.keys, true, next, (half_keys ? in_place : few) ? p : -1);
        const void* next_values = fetch_now(task.value_pages, task.values, false, next, (half_values ? in_place : few) ? p : -1);
        const auto* next_key_codes = static_cast<const uint8_t*>(next_keys);
        const auto* next_value_codes = static_cast<const uint8_t*>(next_values);
#if NSTF_VNNI
        if (!half_keys && !half_values && in_fours(task)) {
            pages_in_fours(task, a, keys, values, next_key_codes, next_value_codes, room);
            continue;
        }
#endif
        const int64_t from = __builtin_ctzll(any), to = kPage - __builtin_clzll(any), first = from / kBlock, last = (to + kBlock - 1) / kBlock;
        if (!half_keys) {
            scores_of_codes(task, a, keys, next_key_codes, first, last, room);
        } else if (in_place) {
            score_all(a.q, a.count, size, keys.half, halves_or(next_keys, keys), first, last, a.scores);
        } else {
            halves_to_floats(keys.half + first * kBlock * size, (last - first) * kBlock * size, room.page + first * kBlock * size);
            score_all(a.q, a.count, size, room.page, room.page, first, last, a.scores);
        }
        for (int64_t i = 0; i < a.count; ++i)
            room.fade[i] = weigh(*a.going[i], a.scores[i], a.visible[i], task.scale * keys.unit, values.unit, a.weights[i]);
        if (!half_values) {
            mix_codes(task, a, values, next_value_codes, room.fade, room);
        } else if (in_place) {
            mix_all(a.weights, room.fade, a.count, values.half, halves_or(next_values, values), size, from, to, a.sums);
        } else {
            halves_to_floats(values.half + from * size, (to - from) * size, room.page + from * size);
            mix_all(a.weights, room.fade, a.count, room.page, room.page, size, from, to, a.sums);
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

static const PageOps kPageOps = {attend, pack, pack_one, unpack_keys, diagonals, turn};
