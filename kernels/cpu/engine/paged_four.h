// Pages of codes and up to four queries at a time, for processors with VNNI (see paged.h, which includes this file).
//
// The same numbers as the loops of paged.h, up to rounding: only what is added up across a vector is added up for four queries
// together, since most of the time went there rather than into products. A query's numbers do not depend on the other three.
#if NSTF_VNNI

constexpr int kFour = 4;

template <bool Most>
static inline __m512 joined(__m512 a, __m512 b) {
    return Most ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b);
}
// The sum or the largest of each vector.
template <bool Most>
static inline __m128 across(const __m512 (&x)[kFour]) {
    const __m512 a = joined<Most>(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = joined<Most>(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512 all = joined<Most>(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m512 half = joined<Most>(all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return _mm512_castps512_ps128(joined<Most>(half, _mm512_shuffle_f32x4(half, half, 0xb1)));
}

// [4 * 16] numbers as signed bytes; they fit.
static inline __m512i bytes_of(const __m512i (&x)[4]) {
    const __m512i low = _mm512_packs_epi32(x[0], x[1]), high = _mm512_packs_epi32(x[2], x[3]);
    // Packing goes by quarters of a vector.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}

// What `planes` makes (paged_sums.h), of Q queries: [query][plane][16 V] bytes, steps and rests. Numbers that are none are left
// to the sums that are taken beside.
template <int Bits, int Q, int V>
static inline void four_planes(const __m512 (&x)[Q][V], int8_t* out, float* step, float* rest) {
    constexpr bool two = planes_for(Bits) == 2;
    constexpr float kMost = two ? 127 * 128 : 127;
    __m512 most[kFour] = {}, lost[kFour] = {};
    for (int i = 0; i < Q; ++i)
        for (int v = 0; v < V; ++v) most[i] = _mm512_max_ps(_mm512_abs_ps(x[i][v]), most[i]);
    const __m128 top = across<true>(most);
    const __mmask8 some = _mm_cmp_ps_mask(top, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
    alignas(16) float by[kFour];
    _mm_store_ps(by, _mm_maskz_div_ps(some, _mm_set1_ps(kMost), top));
    _mm_storeu_ps(step, _mm_maskz_mul_ps(some, top, _mm_set1_ps(1 / kMost)));
    for (int i = 0; i < Q; ++i)
        for (int v = 0; v < V; v += 4) {
            __m512i whole[4], low[4];
            for (int j = 0; j < 4; ++j) {
                whole[j] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i][v + j], _mm512_set1_ps(by[i])));
                if (two) {
                    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole[j], _mm512_set1_epi32(64)), 7);
                    low[j] = _mm512_sub_epi32(whole[j], _mm512_slli_epi32(high, 7));
                    whole[j] = high;
                } else {
                    const __m512 near = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[j]), _mm512_set1_ps(step[i]));
                    lost[i] = _mm512_add_ps(lost[i], _mm512_sub_ps(x[i][v + j], near));
                }
            }
            int8_t* to = out + i * 32 * V + 16 * v;
            _mm512_storeu_si512(to, bytes_of(whole));
            if (two) _mm512_storeu_si512(to + 16 * V, bytes_of(low));
        }
    const __m128 middle = _mm_set1_ps(two ? 0 : 0.5f * static_cast<float>((1 << Bits) - 1));
    _mm_storeu_ps(rest, _mm_mul_ps(across<false>(lost), middle));
}

// Codes of fewer bits, one a byte: [4 * rows][columns] as pages of 8 bits have them. Worth it for many queries.
template <int Bits>
static void unpack_codes(const uint8_t* codes, int64_t rows, int64_t stride, uint8_t* out) {
    constexpr int kUnits = 8 / Bits;
    const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < stride; c += 64) {
            const __m512i v = _mm512_loadu_si512(codes + r * stride + c);
            for (int u = 0; u < kUnits; ++u)
                _mm512_storeu_si512(out + (r * kUnits + u) * stride + c,
                                    _mm512_and_si512(_mm512_srli_epi16(v, static_cast<unsigned>(u * Bits)), mask));
        }
}

// A page as a task's queries go through it: codes, minima and scales as floats, bits of a code as it stands. ahead: the codes of
// the next page where they are to be fetched meanwhile, else these.
struct FourSide {
    const uint8_t *codes, *ahead;
    const float *low, *step;
    int stored;
};

// sum[q][n] = the sum over all rows of code times x, of four blocks of 16 columns. x, low: as in `columns`. Stored: bits of a
// code as it stands at `codes`. ahead: the same codes of the next page, fetched row by row meanwhile.
template <int Bits, int Stored, int Q>
static inline void four_sums(const uint8_t* codes, const uint8_t* ahead, int64_t rows, int64_t stride, const int8_t* const* x,
                             int64_t low, __m512i (&sum)[Q][4]) {
    constexpr int kUnits = 8 / Stored, kPlanes = planes_for(Bits);
    constexpr int kLines = 4 / (kUnits * kPlanes);  // fetched at a time
    const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < 4; ++n) sum[q][n] = _mm512_setzero_si512();
    for (int i = 0; i < kPlanes; ++i) {
        if (i > 0)
            for (int q = 0; q < Q; ++q)
                for (int n = 0; n < 4; ++n) sum[q][n] = _mm512_slli_epi32(sum[q][n], 7);
        for (int64_t r = 0; r < rows; ++r) {
            __m512i v[4];
            for (int n = 0; n < 4; ++n) v[n] = _mm512_loadu_si512(codes + r * stride + 64 * n);
            for (int u = 0; u < kUnits; ++u) {
                __m512i c[4];
                for (int n = 0; n < kLines; ++n) fetch_line(ahead + r * stride + 64 * ((i * kUnits + u) * kLines + n));
                for (int n = 0; n < 4; ++n)
                    c[n] = kUnits == 1 ? v[n] : _mm512_and_si512(_mm512_srli_epi16(v[n], static_cast<unsigned>(u * Stored)), mask);
                for (int q = 0; q < Q; ++q) {
                    const __m512i four = _mm512_set1_epi32(four_at(x[q] + i * low + 4 * (r * kUnits + u)));
                    for (int n = 0; n < 4; ++n) sum[q][n] = _mm512_dpbusd_epi32(sum[q][n], c[n], four);
                }
            }
        }
    }
}

// Scores [Q][64] of queries first.. of a page whose keys have V vectors of channels. low, step: of the page. by: of the scores.
template <int Bits, int Stored, int Q, int V>
static void four_scores(const PageTask& task, const Active& a, int64_t first, const FourSide& side, float by, const Room& room,
                        float* scores) {
    const float *low = side.low, *step = side.step;
    constexpr int64_t kRows = 16 * V / (32 / Stored), kStride = 256;
    const int8_t* at[Q];
    __m512i sum[Q][4];
    if (task.keys.channel) {
        alignas(64) int8_t bytes[Q * 32 * V];
        float steps[kFour], rests[kFour], bases[kFour];
        __m512 x[Q][V], base[kFour] = {};
        for (int i = 0; i < Q; ++i)
            for (int v = 0; v < V; ++v) {
                const __m512 q = _mm512_loadu_ps(a.q[first + i] + 16 * v);
                x[i][v] = _mm512_mul_ps(q, _mm512_loadu_ps(step + 16 * v));
                base[i] = _mm512_fmadd_ps(q, _mm512_loadu_ps(low + 16 * v), base[i]);
            }
        _mm_storeu_ps(bases, across<false>(base));
        four_planes<Bits, Q, V>(x, bytes, steps, rests);
        for (int i = 0; i < Q; ++i) at[i] = bytes + i * 32 * V;
        four_sums<Bits, Stored, Q>(side.codes, side.ahead, kRows, kStride, at, 16 * V, sum);
        for (int i = 0; i < Q; ++i)
            for (int n = 0; n < 4; ++n)
                _mm512_storeu_ps(scores + 64 * i + 16 * n,
                                 _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][n]), _mm512_set1_ps(steps[i] * by),
                                                 _mm512_set1_ps((rests[i] + bases[i]) * by)));
        return;
    }
    for (int g = 0; g < V / 4; ++g) {
        for (int i = 0; i < Q; ++i) at[i] = room.fixed + a.number[first + i] * 2 * room.plane + g * 2 * 64;
        const int64_t rows = kRows / (V / 4), from = g * rows * kStride;
        four_sums<Bits, Stored, Q>(side.codes + from, side.ahead + from, rows, kStride, at, 64, sum);
        for (int i = 0; i < Q; ++i) {
            const int64_t n = a.number[first + i];
            const __m512 own = _mm512_set1_ps(room.steps[n][g].step * by), rest = _mm512_set1_ps(room.steps[n][g].rest * by);
            const __m512 base = _mm512_set1_ps(room.base[n][g] * by);
            for (int p = 0; p < 4; ++p) {
                const __m512 far = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][p]), own, rest);
                __m512 s = _mm512_mul_ps(_mm512_loadu_ps(low + 64 * g + 16 * p), base);
                s = _mm512_fmadd_ps(far, _mm512_loadu_ps(step + 64 * g + 16 * p), s);
                float* to = scores + 64 * i + 16 * p;
                _mm512_storeu_ps(to, g == 0 ? s : _mm512_add_ps(s, _mm512_loadu_ps(to)));
            }
        }
    }
}

// Scores become weights, in place; fade: what each query's sums so far are to be multiplied with.
template <int Q>
static void four_weights(const Active& a, int64_t first, float* scores, float* fade) {
    __m512 s[Q][4], most[kFour] = {}, total[kFour] = {};
    alignas(16) float tops[kFour] = {}, totals[kFour] = {};
    for (int i = 0; i < Q; ++i) {
        most[i] = _mm512_set1_ps(-3e38f);
        for (int p = 0; p < 4; ++p) {
            const auto seen = static_cast<__mmask16>(a.visible[first + i] >> (16 * p));
            s[i][p] = _mm512_mask_loadu_ps(_mm512_set1_ps(-3e38f), seen, scores + 64 * i + 16 * p);
            most[i] = _mm512_max_ps(s[i][p], most[i]);
        }
        tops[i] = a.going[first + i]->top, totals[i] = a.going[first + i]->total;
    }
    const __m128 before = _mm_load_ps(tops), top = _mm_max_ps(across<true>(most), before);
    const __m128 faded = _mm512_castps512_ps128(power(_mm512_castps128_ps512(_mm_sub_ps(before, top))));
    _mm_store_ps(tops, top);
    _mm_storeu_ps(fade, faded);
    for (int i = 0; i < Q; ++i)
        for (int p = 0; p < 4; ++p) {
            const auto seen = static_cast<__mmask16>(a.visible[first + i] >> (16 * p));
            const __m512 w = _mm512_maskz_mov_ps(seen, power(_mm512_sub_ps(s[i][p], _mm512_set1_ps(tops[i]))));
            total[i] = _mm512_add_ps(total[i], w);
            _mm512_storeu_ps(scores + 64 * i + 16 * p, w);
        }
    _mm_store_ps(totals, _mm_fmadd_ps(_mm_load_ps(totals), faded, across<false>(total)));
    for (int i = 0; i < Q; ++i) a.going[first + i]->top = tops[i], a.going[first + i]->total = totals[i];
}

// The queries' sums, faded, and their weights [Q][64] times the page's values.
template <int Bits, int Stored, int Q>
static void four_mix(const PageTask& task, const Active& a, int64_t first, const FourSide& side, const float* weights,
                     const float* fade) {
    const float *low = side.low, *step = side.step;
    const int64_t stride = task.size / 16 * 64;
    constexpr int64_t kRows = kPage / (32 / Stored);
    alignas(64) int8_t bytes[Q * 128];
    float steps[kFour], rests[kFour], bases[kFour];
    const int8_t* at[Q];
    for (int i = 0; i < Q; ++i) at[i] = bytes + 128 * i;
    for (int64_t g = 0; g < task.size / 64; ++g) {  // of 64 channels
        if (g == 0 || !task.values.channel) {
            __m512 x[Q][4], base[kFour] = {};
            for (int i = 0; i < Q; ++i)
                for (int p = 0; p < 4; ++p) {
                    const __m512 w = _mm512_loadu_ps(weights + 64 * i + 16 * p);
                    if (task.values.channel) {
                        x[i][p] = w;
                        base[i] = _mm512_add_ps(base[i], w);
                    } else {
                        x[i][p] = _mm512_mul_ps(w, _mm512_loadu_ps(step + 64 * g + 16 * p));
                        base[i] = _mm512_fmadd_ps(w, _mm512_loadu_ps(low + 64 * g + 16 * p), base[i]);
                    }
                }
            _mm_storeu_ps(bases, across<false>(base));
            four_planes<Bits, Q, 4>(x, bytes, steps, rests);
        }
        __m512i sum[Q][4];
        four_sums<Bits, Stored, Q>(side.codes + 256 * g, side.ahead + 256 * g, kRows, stride, at, 64, sum);
        for (int i = 0; i < Q; ++i) {
            const __m512 own = _mm512_set1_ps(steps[i]), base = _mm512_set1_ps(bases[i]), rest = _mm512_set1_ps(rests[i]);
            for (int n = 0; n < 4; ++n) {
                float* to = a.sums[first + i] + 64 * g + 16 * n;
                __m512 v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][n]), own, task.values.channel ? rest : _mm512_add_ps(rest, base));
                if (task.values.channel)
                    v = _mm512_fmadd_ps(v, _mm512_loadu_ps(step + 64 * g + 16 * n), _mm512_mul_ps(_mm512_loadu_ps(low + 64 * g + 16 * n), base));
                _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(fade[i]), v));
            }
        }
    }
}

template <int Q>
static void four_page(const PageTask& task, const Active& a, int64_t first, const FourSide& keys, const FourSide& values, float by,
                      const Room& room) {
    alignas(64) float scores[Q * kPage];
    float fade[kFour];
    const auto score = [&](auto one, auto two) {
        (task.size == 64 ? one : two)(task, a, first, keys, by, room, scores);
    };
    const int bits = task.keys.bits;
    if (bits == 8) score(four_scores<8, 8, Q, 4>, four_scores<8, 8, Q, 8>);
    if (bits == 4 && keys.stored == 4) score(four_scores<4, 4, Q, 4>, four_scores<4, 4, Q, 8>);
    if (bits == 4 && keys.stored == 8) score(four_scores<4, 8, Q, 4>, four_scores<4, 8, Q, 8>);
    if (bits == 2 && keys.stored == 2) score(four_scores<2, 2, Q, 4>, four_scores<2, 2, Q, 8>);
    if (bits == 2 && keys.stored == 8) score(four_scores<2, 8, Q, 4>, four_scores<2, 8, Q, 8>);
    four_weights<Q>(a, first, scores, fade);
    const auto mix = [&](auto fn) { fn(task, a, first, values, scores, fade); };
    const int other = task.values.bits;
    if (other == 8) mix(four_mix<8, 8, Q>);
    if (other == 4 && values.stored == 4) mix(four_mix<4, 4, Q>);
    if (other == 4 && values.stored == 8) mix(four_mix<4, 8, Q>);
    if (other == 2 && values.stored == 2) mix(four_mix<2, 2, Q>);
    if (other == 2 && values.stored == 8) mix(four_mix<2, 8, Q>);
}

static bool in_fours(const PageTask& task) {
    return task.keys.bits < 16 && task.values.bits < 16 && (task.size == 64 || task.size == 128);
}

// pairs: [2 * pairs_of]; bytes: [64 * size], for codes of fewer bits where `many` queries go through them.
static FourSide four_side(const Format& format, int64_t size, bool key, const uint8_t* packed, const uint8_t* next, float unit,
                          bool many, float* pairs, uint8_t* bytes) {
    const int64_t count = pairs_of(format, size), rows = (key ? size : kPage) / rows_together(format.bits);
    for (int64_t i = 0; i < 2 * count; i += 16) {
        const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 2 * i)));
        _mm512_storeu_ps(pairs + i, _mm512_mul_ps(x, _mm512_set1_ps(unit)));
    }
    FourSide side{packed + 4 * count, codes_ahead(packed, next, count), pairs, pairs + count, format.bits};
    if (!many || format.bits == 8) return side;
    const int64_t stride = (key ? kPage : size) / 16 * 64;
    if (format.bits == 4) unpack_codes<4>(side.codes, rows, stride, bytes);
    if (format.bits == 2) unpack_codes<2>(side.codes, rows, stride, bytes);
    side.codes = side.ahead = bytes, side.stored = 8;
    return side;
}

// One page whose keys and values are codes, for all queries that see some of it. next: sides of the page that comes next, or null.
static void pages_in_fours(const PageTask& task, const Active& a, const PageSide& keys, const PageSide& values,
                           const uint8_t* next_keys, const uint8_t* next_values, Room& room) {
    const bool many = a.count > kFour;
    auto* bytes = reinterpret_cast<uint8_t*>(room.page);
    const FourSide own = four_side(task.keys, task.size, true, keys.packed, next_keys, 1, many, room.pairs, bytes);
    const FourSide other = four_side(task.values, task.size, false, values.packed, next_values, values.unit, many,
                                     room.pairs + 2 * pairs_of(task.keys, task.size), bytes + kPage * task.size);
    const float by = task.scale * keys.unit;
    int64_t i = 0;
    for (; i + 4 <= a.count; i += 4) four_page<4>(task, a, i, own, other, by, room);
    if (a.count - i == 3) four_page<3>(task, a, i, own, other, by, room);
    if (a.count - i == 2) four_page<2>(task, a, i, own, other, by, room);
    if (a.count - i == 1) four_page<1>(task, a, i, own, other, by, room);
}
#endif
