// The rounding sweep of quantizers/rounding/sweep.py: scale search and error feedback, several rows at a time.
//
// One vector holds one column of 4, 8 or 16 rows, so every step is elementwise: no horizontal sums, any group size, and
// a row's result depends on nothing but that row (the same for any number of threads and any split of the rows).
// The feedback of finished columns is a blocked product with 16-column panels of U, which stay in the cache while a
// few tiles of rows pass over them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

#if defined(__GNUC__) || defined(__clang__)

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int MOST_LANES = 16;
constexpr int PANEL = 16;  // columns of a panel of U

enum ScaleMode { F16 = 0, F32 = 1, U8 = 2, E8M0 = 3 };

struct Job {
    const float* weight;      // [rows, cols]
    const float* importance;  // [cols], weights of the scale search
    const float* diagonal;    // [cols], weights of the loss, in sweep order
    const float* panels;      // packed U, null without feedback
    const int64_t* order;     // [cols], null for the columns' own order
    const float* table;       // [count] ascending, null for a uniform grid
    const float* middles;     // [count - 1]
    const float* ratios;
    int64_t rows, cols, width, groups;
    int count, ratio_count, mode;
    bool symmetric, signs, refit, frozen;
    float reach;
    float *scale, *zero, *largest;
    uint8_t* codes;
    double* loss;
};

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer buffer(int64_t floats) {
    void* p = std::aligned_alloc(64, (static_cast<size_t>(floats) * 4 + 63) / 64 * 64);
    if (!p) throw std::bad_alloc();
    return Buffer(static_cast<float*>(p));
}

struct Tile {  // buffers of LANES rows, [column in sweep order][row]; target has PANEL columns of slack
    Buffer weight, target, error;
    float largest[MOST_LANES];  // super-scales of 8-bit scales
    double loss[MOST_LANES];
    int64_t row;
    int live;  // rows that exist; the others repeat the last one
};

template <int LANES>
struct Register;
template <>
struct Register<4> {
    typedef float Float __attribute__((vector_size(16)));
    typedef int32_t Int __attribute__((vector_size(16)));
};
template <>
struct Register<8> {
    typedef float Float __attribute__((vector_size(32)));
    typedef int32_t Int __attribute__((vector_size(32)));
};
template <>
struct Register<16> {
    typedef float Float __attribute__((vector_size(64)));
    typedef int32_t Int __attribute__((vector_size(64)));
};

// `LANES` rows a tile; `N` columns of a panel in registers at a time. Vectors are exactly one register wide: wider ones
// make gcc 12 fall back to scalar code for every comparison.
template <int LANES, int N>
struct Sweep {
    using vf = typename Register<LANES>::Float;
    using vi = typename Register<LANES>::Int;

    struct Levels {  // the constants of one quantiser, and the row's super-scale for 8-bit scales
        const float *table, *middles;
        int count, mode;
        vf largest;
    };

    INLINE vf splat(float x) { return x + vf{}; }
    INLINE vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
    INLINE void store(float* p, vf v) { *reinterpret_cast<vf*>(p) = v; }
    INLINE vf minimum(vf a, vf b) { return a < b ? a : b; }
    INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }
    INLINE vf magnitude(vf a) { return (vf)((vi)a & 0x7fffffff); }
    INLINE vf clamp(vf x, float low, float high) { return minimum(maximum(x, splat(low)), splat(high)); }
    // To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
    INLINE vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; }

    // To float16 precision, ties to even; below 2^-14 the steps are 2^-24.
    INLINE vf to_half(vf x) {
        x = clamp(x, -65504.0f, 65504.0f);
        vi bits = (vi)x;
        bits += 0xfff + ((bits >> 13) & 1);
        bits &= ~0x1fff;
        vf small = (x + 0.75f) - 0.75f;
        return magnitude(x) < 6.103515625e-05f ? small : (vf)bits;
    }

    INLINE vf power_of_two_below(vf x) { return (vf)((vi)x & 0x7f800000); }

    INLINE vf round_scale(const Levels& q, vf s) {
        if (q.mode == F16) return to_half(s);
        if (q.mode == U8) {
            vf steps = q.largest == 0.0f ? splat(0.0f) : 256.0f / q.largest;
            return q.largest * clamp(nearest(clamp(s * steps, -1.0f, 300.0f)), 1.0f, 256.0f) * (1.0f / 256);
        }
        if (q.mode == E8M0) {
            vf power = power_of_two_below(s);
            return power == 0.0f ? splat(5.877471754111438e-39f) : power;
        }
        return s;
    }

    INLINE vf inverse(vf s) { return s == 0.0f ? splat(0.0f) : 1.0f / s; }

    // The level nearest to x (given as x / scale) at scale 1, less nothing: code - zero, or the table's value.
    INLINE vf point(const Levels& q, vf x, vf zero) {
        if (!q.table) return nearest(clamp(x + zero, 0.0f, float(q.count - 1))) - zero;
        if (q.count <= 16) {
            vf v = splat(q.table[0]);
            for (int k = 1; k < q.count; k++) v = x > splat(q.middles[k - 1]) ? splat(q.table[k]) : v;
            return v;
        }
        vf v = x;
        for (int l = 0; l < LANES; l++) {
            const float* base = q.middles;
            for (int n = q.count - 1; n > 0;) {  // how many midpoints lie below x
                int half = (n + 1) / 2;
                bool above = x[l] > base[half - 1];
                base = above ? base + half : base;
                n = above ? n - half : half - 1;
            }
            v[l] = q.table[base - q.middles];
        }
        return v;
    }

    INLINE int code_of(const Levels& q, float value, float zero) {
        if (!q.table) return int(value + zero);
        return int(std::lower_bound(q.table, q.table + q.count, value) - q.table);
    }

    struct Best {
        vf loss, scale, zero;
    };

    INLINE void offer(const Levels& q, const float* x, const float* h, int64_t n, vf scale, vf zero, Best& best) {
        vf loss = splat(0.0f), inv = inverse(scale);
        for (int64_t i = 0; i < n; i++) {
            vf xi = load(x + i * LANES), d = xi - scale * point(q, xi * inv, zero);
            loss += d * d * splat(h[i]);
        }
        vi better = loss < best.loss;
        best.loss = better ? loss : best.loss;
        best.scale = better ? scale : best.scale;
        best.zero = better ? zero : best.zero;
    }

    // Scale and zero of one group of LANES rows; x: [n][LANES].
    INLINE Best search(const Job& job, const Levels& q, const float* x, const float* h, int64_t n) {
        Best best{splat(std::numeric_limits<float>::infinity()), splat(0.0f), splat(0.0f)};
        if (!job.table && !job.symmetric) {
            vf low = splat(0.0f), high = splat(0.0f);
            for (int64_t i = 0; i < n; i++) {
                low = minimum(low, load(x + i * LANES));
                high = maximum(high, load(x + i * LANES));
            }
            vf base = (high - low) / job.reach;
            for (int k = 0; k < job.ratio_count; k++) {
                vf scale = round_scale(q, base * job.ratios[k]);
                vf middle = scale == 0.0f ? splat(0.0f) : -low * job.ratios[k] / scale;
                middle = nearest(clamp(middle, -1e6f, 1e6f));
                offer(q, x, h, n, scale, clamp(middle, 0.0f, float(q.count - 1)), best);
                offer(q, x, h, n, scale, clamp(middle - 1.0f, 0.0f, float(q.count - 1)), best);
                offer(q, x, h, n, scale, clamp(middle + 1.0f, 0.0f, float(q.count - 1)), best);
            }
        } else {
            vf zero = splat(job.table ? 0.0f : float(job.count / 2)), peak = splat(0.0f);
            for (int64_t i = 0; i < n; i++) {
                vf xi = load(x + i * LANES);
                peak = magnitude(xi) > magnitude(peak) ? xi : peak;
            }
            vf base = (job.signs ? -peak : magnitude(peak)) / job.reach;
            if (job.mode == E8M0) base = power_of_two_below(magnitude(peak)) * 0.25f;
            for (int k = 0; k < job.ratio_count; k++) {
                offer(q, x, h, n, round_scale(q, base * job.ratios[k]), zero, best);
                if (job.signs) offer(q, x, h, n, round_scale(q, -base * job.ratios[k]), zero, best);
            }
        }
        if (job.refit) {
            for (int pass = 0; pass < 2; pass++) {
                vf inv = inverse(best.scale), with_x = splat(0.0f), with_self = splat(0.0f);
                for (int64_t i = 0; i < n; i++) {
                    vf xi = load(x + i * LANES), p = point(q, xi * inv, best.zero);
                    vf ph = p * splat(h[i]);
                    with_x += ph * xi;
                    with_self += ph * p;
                }
                vf fitted = with_x / maximum(with_self, splat(1e-30f));
                offer(q, x, h, n, round_scale(q, fitted), best.zero, best);
            }
        }
        return best;
    }

    // target[0..16) += sum_{i in [from, to)} error[i] * panel[i][0..16), N columns at a time in registers.
    INLINE void feed(float* target, const float* error, const float* panel, int64_t from, int64_t to) {
        for (int c = 0; c < PANEL; c += N) {
            vf sum[N];
            for (int k = 0; k < N; k++) sum[k] = splat(0.0f);
            for (int64_t i = from; i < to; i++) {
                vf e = load(error + i * LANES);
                const float* u = panel + i * PANEL + c;
                for (int k = 0; k < N; k++) sum[k] += e * u[k];
            }
            for (int k = 0; k < N; k++) {
                float* t = target + (c + k) * LANES;
                store(t, load(t) + sum[k]);
            }
        }
    }

    INLINE Levels levels_of(const Job& job, const Tile& tile) {
        Levels q{job.table, job.middles, job.count, job.mode, splat(0.0f)};
        for (int l = 0; l < LANES; l++) q.largest[l] = tile.largest[l];
        return q;
    }

    INLINE void round_block(const Job& job, Tile& tile, const float* panel, int64_t from, int64_t to) {
        vf lost = splat(0.0f);
        const Levels q = levels_of(job, tile);
        int64_t group = -1;
        vf scale = splat(0.0f), zero = scale, inv = scale;
        for (int64_t j = from; j < to; j++) {
            int64_t column = job.order ? job.order[j] : j;
            if (column / job.width != group) {
                group = column / job.width;
                for (int l = 0; l < LANES; l++) {
                    int64_t row = tile.row + std::min(l, tile.live - 1);
                    scale[l] = job.scale[row * job.groups + group];
                    zero[l] = job.zero[row * job.groups + group];
                }
                inv = inverse(scale);
            }
            vf x = load(tile.target.get() + j * LANES), p = point(q, x * inv, zero), value = scale * p;
            vf eta = x - value, error = load(tile.weight.get() + j * LANES) - value;
            lost += eta * eta * splat(job.diagonal[j]);
            for (int l = 0; l < tile.live; l++)
                job.codes[(tile.row + l) * job.cols + column] = uint8_t(code_of(q, p[l], zero[l]));
            if (panel) {
                store(tile.error.get() + j * LANES, error);
                const float* u = panel + j * PANEL;
                for (int64_t c = j + 1; c < to; c++) {
                    float* t = tile.target.get() + c * LANES;
                    store(t, load(t) + error * u[c - from]);
                }
            }
        }
        for (int l = 0; l < LANES; l++) tile.loss[l] += double(lost[l]) / 2;
    }

    INLINE void enter_tile(const Job& job, Tile& tile, int64_t row) {
        tile.row = row;
        tile.live = int(std::min<int64_t>(LANES, job.rows - row));
        for (int l = 0; l < LANES; l++) {
            const float* w = job.weight + (row + std::min(l, tile.live - 1)) * job.cols;
            float* to = tile.weight.get() + l;
            for (int64_t j = 0; j < job.cols; j++) to[j * LANES] = w[job.order ? job.order[j] : j];
            tile.loss[l] = 0;
        }
        std::memcpy(tile.target.get(), tile.weight.get(), size_t(job.cols) * LANES * sizeof(float));
        std::memset(tile.target.get() + job.cols * LANES, 0, size_t(PANEL) * LANES * sizeof(float));
        std::memset(tile.largest, 0, sizeof tile.largest);
        if (job.mode != U8) return;
        vf largest = splat(0.0f);
        if (job.frozen) {
            for (int l = 0; l < LANES; l++) largest[l] = job.largest[row + std::min(l, tile.live - 1)];
        } else {
            Levels free = levels_of(job, tile);
            free.mode = F32;
            for (int64_t from = 0; from < job.cols; from += job.width) {
                int64_t n = std::min(job.width, job.cols - from);
                largest = maximum(
                    largest, search(job, free, tile.weight.get() + from * LANES, job.importance + from, n).scale);
            }
            largest = to_half(largest * 1.05f);
            for (int l = 0; l < tile.live; l++) job.largest[row + l] = largest[l];
        }
        for (int l = 0; l < LANES; l++) tile.largest[l] = largest[l];
    }

    // A few tiles of rows through all columns. Panels start at multiples of PANEL from the start of each group (of the
    // row when the scales are frozen); `panels` holds them one after another, each with its rows of U up to its end.
    INLINE void run_tiles(const Job& job, Tile* tiles, int count, int64_t row) {
        int used = 0;
        for (; used < count && row + used * LANES < job.rows; used++) enter_tile(job, tiles[used], row + used * LANES);
        const float* panel = job.panels;
        int64_t width = job.frozen ? job.cols : job.width;
        for (int64_t start = 0; start < job.cols; start += width) {
            int64_t end = std::min(start + width, job.cols);
            if (!job.frozen) {
                const float* p = panel;
                for (int64_t from = start; p && start && from < end; from += PANEL) {
                    for (int t = 0; t < used; t++)
                        feed(tiles[t].target.get() + from * LANES, tiles[t].error.get(), p, 0, start);
                    p += std::min(from + PANEL, end) * PANEL;
                }
                for (int t = 0; t < used; t++) {
                    Best best = search(job, levels_of(job, tiles[t]), tiles[t].target.get() + start * LANES,
                                       job.importance + start, end - start);
                    for (int l = 0; l < tiles[t].live; l++) {
                        int64_t at = (tiles[t].row + l) * job.groups + start / job.width;
                        job.scale[at] = best.scale[l];
                        job.zero[at] = best.zero[l];
                    }
                }
            }
            for (int64_t from = start; from < end; from += PANEL) {
                int64_t to = std::min(from + PANEL, end);
                for (int t = 0; t < used; t++) {
                    if (panel) feed(tiles[t].target.get() + from * LANES, tiles[t].error.get(), panel, start, from);
                    round_block(job, tiles[t], panel, from, to);
                }
                if (panel) panel += to * PANEL;
            }
        }
        for (int t = 0; t < used; t++)
            for (int l = 0; l < tiles[t].live; l++) job.loss[tiles[t].row + l] = tiles[t].loss[l];
    }

    // Codes as points (values at scale 1) into `weight`, what they leave of the weights into `error`.
    INLINE void enter_refit(const Job& job, Tile& tile, int64_t row) {
        tile.row = row;
        tile.live = int(std::min<int64_t>(LANES, job.rows - row));
        for (int l = 0; l < LANES; l++) {
            int64_t from = row + std::min(l, tile.live - 1);
            tile.largest[l] = job.largest[from];
            tile.loss[l] = 0;
            for (int64_t j = 0; j < job.cols; j++) {
                int64_t group = from * job.groups + j / job.width;
                int code = job.codes[from * job.cols + j];
                float point = job.table ? job.table[std::min(code, job.count - 1)] : float(code) - job.zero[group];
                tile.weight.get()[j * LANES + l] = point;
                tile.error.get()[j * LANES + l] = job.weight[from * job.cols + j] - job.scale[group] * point;
            }
        }
        std::memset(tile.target.get(), 0, size_t(job.cols + PANEL) * LANES * sizeof(float));
    }

    // One Gauss-Seidel pass over the groups of a few tiles of rows; the drop of the loss goes to `job.loss`.
    INLINE void refit_tiles(const Job& job, Tile* tiles, int count, int64_t row) {
        int used = 0;
        for (; used < count && row + used * LANES < job.rows; used++)
            enter_refit(job, tiles[used], row + used * LANES);
        for (int64_t from = 0; from < job.cols; from += PANEL)
            for (int t = 0; t < used; t++)
                feed(tiles[t].target.get() + from * LANES, tiles[t].error.get(), job.panels + from * job.cols, 0,
                     job.cols);
        for (int64_t start = 0; start < job.cols; start += job.width) {
            int64_t end = std::min(start + job.width, job.cols), first = start / PANEL * PANEL;
            for (int t = 0; t < used; t++)  // `error` has served; it now holds the group's points times H
                std::memset(tiles[t].error.get() + first * LANES, 0,
                            size_t(job.cols + PANEL - first) * LANES * sizeof(float));
            for (int64_t from = first; from < job.cols; from += PANEL)
                for (int t = 0; t < used; t++)
                    feed(tiles[t].error.get() + from * LANES, tiles[t].weight.get(), job.panels + from * job.cols,
                         start, end);
            for (int t = 0; t < used; t++) refit_group(job, tiles[t], start, end);
        }
        for (int t = 0; t < used; t++)
            for (int l = 0; l < tiles[t].live; l++) job.loss[tiles[t].row + l] = tiles[t].loss[l];
    }

    INLINE void refit_group(const Job& job, Tile& tile, int64_t start, int64_t end) {
        vf along = splat(0.0f), across = along, old = along;
        for (int64_t j = start; j < end; j++) {
            vf p = load(tile.weight.get() + j * LANES);
            along += p * load(tile.target.get() + j * LANES);
            across += p * load(tile.error.get() + j * LANES);
        }
        int64_t group = start / job.width;
        for (int l = 0; l < LANES; l++)
            old[l] = job.scale[(tile.row + std::min(l, tile.live - 1)) * job.groups + group];
        vf step = across > 0.0f ? along / maximum(across, splat(1e-30f)) : splat(0.0f);
        vf fresh = round_scale(levels_of(job, tile), old + step), delta = fresh - old;
        vf drop = delta * (along - delta * across * 0.5f);
        vi keep = drop > 0.0f;
        delta = keep ? delta : splat(0.0f);
        fresh = keep ? fresh : old;
        drop = keep ? drop : splat(0.0f);
        for (int64_t j = end; j < job.cols; j++) {
            float* slope = tile.target.get() + j * LANES;
            store(slope, load(slope) - delta * load(tile.error.get() + j * LANES));
        }
        for (int l = 0; l < tile.live; l++) {
            job.scale[(tile.row + l) * job.groups + group] = fresh[l];
            tile.loss[l] += double(drop[l]);
        }
    }
};

using Pass = void (*)(const Job&, Tile*, int, int64_t);
struct Machine {
    Pass sweep, refit;
    int lanes;
};

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
AVX512 void sweep_avx512(const Job& j, Tile* t, int n, int64_t r) { Sweep<16, 16>::run_tiles(j, t, n, r); }
AVX512 void refit_avx512(const Job& j, Tile* t, int n, int64_t r) { Sweep<16, 16>::refit_tiles(j, t, n, r); }
AVX2 void sweep_avx2(const Job& j, Tile* t, int n, int64_t r) { Sweep<8, 8>::run_tiles(j, t, n, r); }
AVX2 void refit_avx2(const Job& j, Tile* t, int n, int64_t r) { Sweep<8, 8>::refit_tiles(j, t, n, r); }
#endif
void sweep_plain(const Job& j, Tile* t, int n, int64_t r) { Sweep<4, 8>::run_tiles(j, t, n, r); }
void refit_plain(const Job& j, Tile* t, int n, int64_t r) { Sweep<4, 8>::refit_tiles(j, t, n, r); }

// `most_lanes` keeps narrower code reachable for tests.
Machine machine(int most_lanes) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most_lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return {sweep_avx512, refit_avx512, 16};
    if (most_lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {sweep_avx2, refit_avx2, 8};
#endif
    (void)most_lanes;
    return {sweep_plain, refit_plain, 4};
}

// U in panels as `run_tiles` walks them; columns past the end of a group are zero.
Buffer pack(const float* upper, int64_t cols, int64_t width) {
    int64_t size = 0;
    for (int64_t start = 0; start < cols; start += width)
        for (int64_t from = start; from < std::min(start + width, cols); from += PANEL)
            size += std::min({from + PANEL, start + width, cols}) * PANEL;
    Buffer out = buffer(size);
    float* p = out.get();
    for (int64_t start = 0; start < cols; start += width)
        for (int64_t from = start; from < std::min(start + width, cols); from += PANEL) {
            int64_t to = std::min({from + PANEL, start + width, cols});
            for (int64_t i = 0; i < to; i++, p += PANEL)
                for (int64_t c = 0; c < PANEL; c++) p[c] = from + c < to ? upper[i * cols + from + c] : 0.0f;
        }
    return out;
}

// H in panels of all rows, one after another; columns past the end are zero.
Buffer pack_square(const float* matrix, int64_t cols) {
    int64_t panels = (cols + PANEL - 1) / PANEL;
    Buffer out = buffer(panels * PANEL * cols);
    float* p = out.get();
    for (int64_t from = 0; from < cols; from += PANEL)
        for (int64_t i = 0; i < cols; i++, p += PANEL)
            for (int64_t c = 0; c < PANEL; c++) p[c] = from + c < cols ? matrix[i * cols + from + c] : 0.0f;
    return out;
}

void run_all(const Job& job, Pass pass, int lanes, int threads) {
    // Tiles that share a panel: as many as leave every thread some work, 64 rows at most.
    int64_t tiles = (job.rows + lanes - 1) / lanes;
    int per = int(std::clamp<int64_t>(tiles / (2 * threads), 1, 64 / lanes));
    int64_t blocks = (tiles + per - 1) / per;
    threads = int(std::min<int64_t>(threads, blocks));
    std::vector<std::vector<Tile>> scratch(static_cast<size_t>(threads));
    for (auto& own : scratch) {
        own.resize(static_cast<size_t>(per));
        for (Tile& t : own) {
            t.weight = buffer(job.cols * lanes);
            t.target = buffer((job.cols + PANEL) * lanes);
            t.error = buffer((job.cols + PANEL) * lanes);
        }
    }
    std::atomic<int64_t> next{0};
    auto work = [&](size_t who) {
        for (int64_t b; (b = next++) < blocks;) pass(job, scratch[who].data(), per, b * per * lanes);
    };
    std::vector<std::thread> pool;
    try {
        for (int i = 1; i < threads; i++) pool.emplace_back(work, size_t(i));
    } catch (const std::exception&) {  // a limit on threads or memory: those that are there do the work, one at least
    }
    work(0);
    for (auto& t : pool) t.join();
}

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Losses = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

template <class T>
int64_t extent(const T& a, size_t axis) {
    return int64_t(a.shape(axis));
}

void check(const Matrix& weight, int64_t width, const Vector& table, int bits, int mode, int threads,
           const OutMatrix& scale, const OutMatrix& zero, const OutMatrix& largest, const Codes& codes,
           const Losses& loss) {
    int64_t rows = extent(weight, 0), cols = extent(weight, 1);
    require(rows > 0 && cols > 0 && width > 0 && width <= cols, "ldlq: empty matrix or bad group width");
    int64_t groups = (cols + width - 1) / width, points = extent(table, 0);
    require(points <= 256 && points != 1, "ldlq: a table has 2 to 256 values");
    require(points || (bits >= 1 && bits <= 8), "ldlq: bits must be 1 to 8");
    require(mode >= F16 && mode <= E8M0 && threads > 0, "ldlq: bad scale mode or thread count");
    require(extent(scale, 0) == rows && extent(scale, 1) == groups && extent(zero, 0) == rows &&
                extent(zero, 1) == groups && extent(largest, 0) == rows && extent(largest, 1) == 1 &&
                extent(codes, 0) == rows && extent(codes, 1) == cols && extent(loss, 0) == rows,
            "ldlq: scales, codes or losses have another shape");
}

void ldlq_sweep(Matrix weight, Vector importance, Vector diagonal, Matrix upper, Order order, Vector table,
                Vector middles, Vector ratios, int64_t width, int bits, bool symmetric, bool signs, bool refit,
                bool frozen, int mode, float reach, OutMatrix scale, OutMatrix zero, OutMatrix largest, Codes codes,
                Losses loss, int threads, int most_lanes) {
    check(weight, width, table, bits, mode, threads, scale, zero, largest, codes, loss);
    int64_t rows = extent(weight, 0), cols = extent(weight, 1), points = extent(table, 0);
    require(extent(importance, 0) == cols && extent(diagonal, 0) == cols, "ldlq: importance or diagonal is too short");
    require(extent(upper, 0) == extent(upper, 1) && (extent(upper, 0) == 0 || extent(upper, 0) == cols),
            "ldlq: the feedback matrix has another shape");
    require(extent(order, 0) == 0 || (extent(order, 0) == cols && frozen), "ldlq: an order needs frozen scales");
    require(points == 0 || extent(middles, 0) == points - 1, "ldlq: midpoints do not match the table");
    require(extent(ratios, 0) > 0, "ldlq: no ratios to search");
    for (int64_t j = 0; j < extent(order, 0); j++)
        require(order.data()[j] >= 0 && order.data()[j] < cols, "ldlq: order is not a permutation");
    nb::gil_scoped_release release;
    Buffer panels;
    if (extent(upper, 0)) panels = pack(upper.data(), cols, frozen ? cols : width);
    Job job{};
    job.weight = weight.data(), job.importance = importance.data(), job.diagonal = diagonal.data();
    job.panels = panels.get(), job.order = extent(order, 0) ? order.data() : nullptr;
    job.table = points ? table.data() : nullptr, job.middles = middles.data(), job.ratios = ratios.data();
    job.rows = rows, job.cols = cols, job.width = width, job.groups = (cols + width - 1) / width;
    job.count = points ? int(points) : 1 << bits, job.ratio_count = int(extent(ratios, 0)), job.mode = mode;
    job.symmetric = symmetric, job.signs = signs, job.refit = refit, job.frozen = frozen, job.reach = reach;
    job.scale = scale.data(), job.zero = zero.data(), job.largest = largest.data();
    job.codes = codes.data(), job.loss = loss.data();
    Machine m = machine(most_lanes);
    run_all(job, m.sweep, m.lanes, threads);
}

void ldlq_refit(Matrix weight, Matrix hessian, Vector table, int64_t width, int bits, int mode, OutMatrix scale,
                OutMatrix zero, OutMatrix largest, Codes codes, Losses gain, int threads, int most_lanes) {
    check(weight, width, table, bits, mode, threads, scale, zero, largest, codes, gain);
    int64_t rows = extent(weight, 0), cols = extent(weight, 1), points = extent(table, 0);
    require(extent(hessian, 0) == cols && extent(hessian, 1) == cols, "ldlq: the Hessian has another shape");
    nb::gil_scoped_release release;
    Buffer panels = pack_square(hessian.data(), cols);
    Job job{};
    job.weight = weight.data(), job.panels = panels.get(), job.table = points ? table.data() : nullptr;
    job.rows = rows, job.cols = cols, job.width = width, job.groups = (cols + width - 1) / width;
    job.count = points ? int(points) : 1 << bits, job.mode = mode;
    job.scale = scale.data(), job.zero = zero.data(), job.largest = largest.data();
    job.codes = codes.data(), job.loss = gain.data();
    Machine m = machine(most_lanes);
    run_all(job, m.refit, m.lanes, threads);
}

}  // namespace

void bind_ldlq(nb::module_& m) {
    using namespace nb::literals;
    m.def("ldlq_sweep", &ldlq_sweep, "weight"_a, "importance"_a, "diagonal"_a, "upper"_a, "order"_a, "table"_a,
          "middles"_a, "ratios"_a, "width"_a, "bits"_a, "symmetric"_a, "signs"_a, "refit"_a, "frozen"_a, "mode"_a,
          "reach"_a, "scale"_a, "zero"_a, "largest"_a, "codes"_a, "loss"_a, "threads"_a, "most_lanes"_a = 16,
          "One rounding sweep over a matrix; fills codes and loss, and scale, zero and largest unless frozen.");
    m.def("ldlq_refit", &ldlq_refit, "weight"_a, "hessian"_a, "table"_a, "width"_a, "bits"_a, "mode"_a, "scale"_a,
          "zero"_a, "largest"_a, "codes"_a, "gain"_a, "threads"_a, "most_lanes"_a = 16,
          "Refits the scales of given codes in place, group after group; fills by how much each row's loss fell.");
}

#else  // another compiler: the torch sweep is used

void bind_ldlq(nb::module_&) {}

#endif
