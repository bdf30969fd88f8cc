// The inner loops of convolution.h for one instruction set; included by packed_int8_*.cpp after the pieces of the set and
// int8_several.h, so there is no include guard.

// Rows of codes and vectors of pixels that meet: their sums fill half of the registers.
constexpr int CONV_ROWS = LANES == 16 ? 8 : 4, CONV_VECTORS = LANES == 4 ? 4 : 2;
constexpr int64_t WORD = 4 * kPixels;  // bytes of a tile's word

struct ConvRows {
    const uint8_t* codes;  // [rows][stride]
    int64_t stride;
    const float *scales, *zeros;  // [rows][groups]
};

// R rows times V vectors of pixels. One group's sums stay in registers; the results, if there are several groups, in `out`.
template <int R, int V, int RUN, bool WIDE>
static void convolve(const ByteRows& form, int64_t blocks, const ConvRows& w, const int8_t* x, const int32_t* sums, float* out) {
    const int64_t groups = form.groups, of_group = (form.group + kBlock - 1) / kBlock;
    for (int64_t g = 0; g < groups; ++g) {
        Ints sum[R][V];
        each<R>([&](auto r) __attribute__((always_inline)) {
            each<V>([&](auto v) __attribute__((always_inline)) {
                sum[r][v] = form.zeros ? set_int(0) : as_ints(load_bytes(sums + g * kPixels + v * LANES));
            });
        });
        const int64_t end = g + 1 == groups ? blocks : (g + 1) * of_group;
        for (int64_t j = g * of_group; j < end; ++j) {
            const uint8_t* codes = w.codes + j * kBlock;
            const int8_t* from = x + j * 8 * WORD;
            each<8 / RUN>([&](auto turn) __attribute__((always_inline)) {
                constexpr int FIRST = decltype(turn)::value * RUN;
                Narrow part[R][V];
                each<RUN>([&](auto k) __attribute__((always_inline)) {
                    constexpr int64_t at = FIRST + decltype(k)::value;
                    Bytes pixels[V];
                    each<V>([&](auto v) __attribute__((always_inline)) { pixels[v] = load_bytes(from + at * WORD + v * 4 * LANES); });
                    each<R>([&](auto r) __attribute__((always_inline)) {
                        const Bytes code = four_bytes(reinterpret_cast<const int8_t*>(codes + r * w.stride + at * 4));
                        each<V>([&](auto v) __attribute__((always_inline)) {
                            if constexpr (CHAINED) sum[r][v] = more<WIDE>(sum[r][v], code, pixels[v]);
                            else part[r][v] = k == 0 ? first<WIDE>(code, pixels[v]) : more<WIDE>(part[r][v], code, pixels[v]);
                        });
                    });
                });
                if constexpr (!CHAINED)
                    each<R>([&](auto r) __attribute__((always_inline)) {
                        each<V>([&](auto v) __attribute__((always_inline)) { sum[r][v] = add_ints(sum[r][v], widened(part[r][v])); });
                    });
            });
        }
        each<R>([&](auto r) __attribute__((always_inline)) {
            const Floats scale = set(w.scales[r * groups + g]);
            each<V>([&](auto v) __attribute__((always_inline)) {
                float* to = out + r * kPixels + v * LANES;
                Floats total = g == 0 ? mul(to_floats(sum[r][v]), scale) : fma(to_floats(sum[r][v]), scale, load(to));
                if (form.zeros)
                    total = negative_fma(set(w.zeros[r * groups + g]), to_floats(as_ints(load_bytes(sums + g * kPixels + v * LANES))),
                                         total);
                store(to, total);
            });
        });
    }
}

template <int RUN, bool WIDE>
static void convolve_all(const ByteRows& form, int64_t blocks, const ConvRows& w, int rows, const int8_t* x, const int32_t* sums, int pixels,
                         float* out) {
    const int vectors = (pixels + LANES - 1) / LANES;
    const auto across = [&](auto wide, int r) {
        constexpr int R = decltype(wide)::value;
        const ConvRows own = {w.codes + r * w.stride, w.stride, w.scales + r * form.groups, w.zeros + r * form.groups};
        float* to = out + r * kPixels;
        int v = 0;
        for (; v + CONV_VECTORS <= vectors; v += CONV_VECTORS)
            convolve<R, CONV_VECTORS, RUN, WIDE>(form, blocks, own, x + v * 4 * LANES, sums + v * LANES, to + v * LANES);
        if (CONV_VECTORS > 2 && v + 2 <= vectors) {
            convolve<R, 2, RUN, WIDE>(form, blocks, own, x + v * 4 * LANES, sums + v * LANES, to + v * LANES);
            v += 2;
        }
        for (; v < vectors; ++v)
            convolve<R, 1, RUN, WIDE>(form, blocks, own, x + v * 4 * LANES, sums + v * LANES, to + v * LANES);
    };
    int r = 0;
    for (; r + CONV_ROWS <= rows; r += CONV_ROWS) across(std::integral_constant<int, CONV_ROWS>{}, r);
    for (; CONV_ROWS > 4 && r + 4 <= rows; r += 4) across(std::integral_constant<int, 4>{}, r);
    for (; r < rows; ++r) across(std::integral_constant<int, 1>{}, r);
}

static void convolution_tile(const ByteRows& form, int64_t blocks, const uint8_t* codes, const float* scales, const float* zeros,
                             int rows, const int8_t* x, const int32_t* sums, int pixels, float* out) {
    const ConvRows w = {codes, form.chunks * kChunk, scales, zeros};
    const auto ordered = [&](auto run, auto wide) {
        constexpr int RUN = decltype(run)::value;
        constexpr bool WIDE = decltype(wide)::value;
        convolve_all<RUN, WIDE>(form, blocks, w, rows, x, sums, pixels, out);
    };
    using std::integral_constant;
    if constexpr (CHAINED) {
        ordered(integral_constant<int, 8>{}, std::false_type{});  // one instruction for codes of any width
    } else if (form.wide) {
        if (form.run >= 2) ordered(integral_constant<int, 2>{}, std::true_type{});
        else ordered(integral_constant<int, 1>{}, std::true_type{});
    } else {
        switch (form.run) {
            case 8: ordered(integral_constant<int, 8>{}, std::false_type{}); break;
            case 4: ordered(integral_constant<int, 4>{}, std::false_type{}); break;
            case 2: ordered(integral_constant<int, 2>{}, std::false_type{}); break;
            default: ordered(integral_constant<int, 1>{}, std::false_type{});
        }
    }
}

static void convolution_sums(const ByteRows& form, int64_t blocks, const int8_t* x, int32_t by, int32_t* out) {
    const int64_t of_group = (form.group + kBlock - 1) / kBlock;
    static const int8_t one[4] = {1, 1, 1, 1};
    const Bytes ones = four_bytes(one);
    for (int64_t g = 0; g < form.groups; ++g) {
        const int64_t end = g + 1 == form.groups ? blocks : (g + 1) * of_group;
        alignas(64) int32_t sum[kPixels];
        for (int v = 0; v < kPixels / LANES; ++v) {
            Ints total = set_int(0);
            for (int64_t word = 8 * g * of_group; word < 8 * end; ++word)
                total = add_ints(total, widened(first<false>(ones, load_bytes(x + word * WORD + v * 4 * LANES))));
            store_bytes(sum + v * LANES, as_bytes(total));
        }
        for (int p = 0; p < kPixels; ++p) out[g * kPixels + p] = by * sum[p];
    }
}

static void convolution_range(const float* x, int64_t count, float* least, float* most) {
    float low = 0, high = 0, odd = 0;  // odd: NaN when there is one, or an infinity
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : odd)
    for (int64_t i = 0; i < count; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        odd += x[i] - x[i];
    }
    *least = low + odd, *most = high + odd;
}

static void convolution_quantise(const float* x, int64_t count, float inverse, float zero, int8_t* out) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float moved = (x[i] * inverse + zero) + kRound;
        out[i] = static_cast<int8_t>(__builtin_bit_cast(int32_t, moved));
    }
}

static void convolution_quantise_quads(const float* x, int64_t plane, int64_t count, float inverse, float zero, int8_t* out) {
    constexpr float kRound = 12582912.0f;
    const auto code = [=](float v) __attribute__((always_inline)) {
        const float moved = (v * inverse + zero) + kRound;
        return __builtin_bit_cast(uint32_t, moved) & 0xff;
    };
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t word = code(x[i]) | code(x[i + plane]) << 8 | code(x[i + 2 * plane]) << 16 | code(x[i + 3 * plane]) << 24;
        std::memcpy(out + 4 * i, &word, 4);
    }
}

static void convolution_copy_tile(const PixelRun* runs, int found, const int32_t* places, int64_t words, int8_t* out) {
    constexpr int64_t kVector = sizeof(Bytes);
    for (int64_t w = 0; w < words; ++w, out += WORD) {
        if (places[w] < 0) {
            std::memset(out, 0, WORD);
            continue;
        }
        for (int i = 0; i < found; ++i) {
            const int8_t* from = runs[i].from + places[w];
            int8_t* to = out + 4 * runs[i].at;
            for (int64_t b = 0; b < 4 * runs[i].count; b += kVector) store_bytes(to + b, load_bytes(from + b));
        }
    }
}

// Not std::clamp: NaN stays NaN.
static inline float between(float v, float least, float most) {
    v = v < least ? least : v;
    return v > most ? most : v;
}

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// One row; with ADDS something is added.
template <bool ADDS>
static NSTF_INLINE void finish_row(const float* x, float by, float more, const ConvolutionRow& row, const float* added, int64_t count,
                                   float* y, Lanes* ends, float* rest) {
    const Lanes least = Lanes{} + row.least, most = Lanes{} + row.most, times = Lanes{} + by, plus = Lanes{} + more;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes v = *reinterpret_cast<const Lanes*>(x + i) * times + plus;
        if (ADDS) v += *reinterpret_cast<const Lanes*>(added + i);
        v = v < least ? least : v;
        v = v > most ? most : v;
        *reinterpret_cast<Lanes*>(y + i) = v;
        ends[0] = v < ends[0] ? v : ends[0];
        ends[1] = v > ends[1] ? v : ends[1];
        ends[2] += v - v;
    }
    for (; i < count; ++i) {
        float v = x[i] * by + more;
        if (ADDS) v += added[i];
        y[i] = v = between(v, row.least, row.most);
        rest[0] = v < rest[0] ? v : rest[0], rest[1] = v > rest[1] ? v : rest[1], rest[2] += v - v;
    }
}

static void convolution_finish(const float* x, float scale, float shift, const ConvolutionRow* rows, int count_rows, const float* added,
                               int64_t stride, int64_t count, float* y, float* extremes) {
    Lanes ends[3] = {Lanes{} + extremes[0], Lanes{} + extremes[1], Lanes{} + extremes[2]};
    for (int r = 0; r < count_rows; ++r, x += kPixels, y += stride) {
        const float by = scale * rows[r].gain, more = rows[r].bias - shift * rows[r].by * by;
        if (added == nullptr) finish_row<false>(x, by, more, rows[r], nullptr, count, y, ends, extremes);
        else finish_row<true>(x, by, more, rows[r], added + r * stride, count, y, ends, extremes);
    }
    for (int i = 0; i < LANES; ++i) {
        extremes[0] = ends[0][i] < extremes[0] ? ends[0][i] : extremes[0];
        extremes[1] = ends[1][i] > extremes[1] ? ends[1][i] : extremes[1];
        extremes[2] += ends[2][i];
    }
}

static void convolution_add(float* y, const float* added, int64_t count, float least, float most) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = between(y[i] + added[i], least, most);
}

static void convolution_turn(const float* x, int rows, int pixels, float* y, int64_t stride) {
    for (int r = 0; r < rows; r += LANES)
        for (int p = 0; p < pixels; p += LANES) {
            Bytes v[LANES];
            for (int i = 0; i < LANES; ++i) v[i] = load_bytes(x + (r + i) * kPixels + p);
            transpose(v);
            for (int i = 0; i < std::min(LANES, pixels - p); ++i)
                store_first(y + (p + i) * stride + r, as_floats(v[i]), std::min(LANES, rows - r));
        }
}

static inline float larger(float a, float b) { return a > b || a != a ? a : b; }

static void convolution_largest(const float* const* rows, int64_t row_count, int64_t count, float* y) {
    const float* first = rows[0];
    for (int64_t r = 1; r < row_count || r == 1; r += 2) {  // two more at a time
        const float *a = rows[std::min(r, row_count - 1)], *b = rows[std::min(r + 1, row_count - 1)];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) y[i] = larger(larger(first[i], a[i]), b[i]);
        first = y;
    }
}

static const ConvolutionKernels kConvolution = {
    convolution_sums,      convolution_tile,   convolution_range, convolution_quantise, convolution_quantise_quads,
    convolution_copy_tile, convolution_finish, convolution_add,   convolution_turn,     convolution_largest};
