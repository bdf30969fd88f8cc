// The Viterbi search of the trellis quantiser (quantizers/trellis.py) and the decoder of its codes.
//
// One tile at a time, 4, 8 or 16 neighbouring states a vector. Between two steps only the best cost of each group of
// predecessors is kept: M[j] = min over the k oldest bits of the 16-bit state, at most 128 KiB. The new states that
// continue the same 2^k entries of M lie one codebook period apart, so those entries stay in registers for all of them.
//
// Distances are fma(d, d, M), ties go to the lowest predecessor: another device that does the same gets the same codes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "parallel.h"
#include "trellis_tile.h"

namespace nb = nanobind;

#if defined(__GNUC__) || defined(__clang__)

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int STATE_BITS = 16, STATES = 1 << STATE_BITS, TILE = 256;
constexpr int SEAM = 48;  // steps on either side of the seam that the first pass looks at
constexpr int64_t STRIDE = STATES / 2;  // bytes of one step's predecessors

struct Free {
    void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T, Free>;

template <class T>
Buffer<T> buffer(int64_t count) {
    void* p = std::aligned_alloc(64, (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64);
    if (!p) throw std::bad_alloc();
    return Buffer<T>(static_cast<T*>(p));
}

struct Steps {  // bits of every step of a tile, by position modulo 4
    int k[4];
    explicit Steps(int quarter_bits) {
        for (int i = 0; i < 4; i++) k[i] = (i + 1) * quarter_bits / 4 - i * quarter_bits / 4;
    }
    int at(int t) const { return k[t & 3]; }
};

struct Scratch {
    Buffer<float> a = buffer<float>(STATES / 2 + 64), b = buffer<float>(STATES / 2 + 64);  // M now and after the step
    Buffer<uint8_t> back = buffer<uint8_t>(int64_t(TILE) * STATES / 2);                   // [step][state >> k]
};

struct Track {  // one tile at one step: its target, M before and after, and where the predecessors go
    float target;
    const float* from;
    float* to;
    uint8_t* back;
};

template <int LANES>
struct Register;
template <>
struct Register<4> {
    typedef float Float __attribute__((vector_size(16)));
    typedef int32_t Int __attribute__((vector_size(16)));
    typedef uint8_t Byte __attribute__((vector_size(4)));
};
template <>
struct Register<8> {
    typedef float Float __attribute__((vector_size(32)));
    typedef int32_t Int __attribute__((vector_size(32)));
    typedef uint8_t Byte __attribute__((vector_size(8)));
};
template <>
struct Register<16> {
    typedef float Float __attribute__((vector_size(64)));
    typedef int32_t Int __attribute__((vector_size(64)));
    typedef uint8_t Byte __attribute__((vector_size(16)));
};

template <int LANES>
struct Viterbi {
    using vf = typename Register<LANES>::Float;
    using vi = typename Register<LANES>::Int;
    using vb = typename Register<LANES>::Byte;

    INLINE vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
    INLINE void store(float* p, vf v) { *reinterpret_cast<vf*>(p) = v; }
    INLINE vf fused(vf d, vf m) {
        vf out;
        for (int l = 0; l < LANES; l++) out[l] = __builtin_fmaf(d[l], d[l], m[l]);
        return out;
    }

    // 2^L vectors of consecutive entries [lane][a] become one vector per a: a perfect unshuffle, a bit at a time.
    template <int L>
    INLINE void split(const float* from, vf* out) {
        constexpr int N = 1 << L;
        vf in[N];
        for (int i = 0; i < N; i++) in[i] = load(from + i * LANES);
        vi even, odd;
        for (int l = 0; l < LANES; l++) even[l] = 2 * l, odd[l] = 2 * l + 1;
#pragma GCC unroll 6
        for (int bit = 0; bit < L; bit++) {
            vf next[N];
            for (int i = 0; i < N / 2; i++) {
                next[i] = __builtin_shuffle(in[2 * i], in[2 * i + 1], even);
                next[N / 2 + i] = __builtin_shuffle(in[2 * i], in[2 * i + 1], odd);
            }
            for (int i = 0; i < N; i++) in[i] = next[i];
        }
        // Each round put its bit on top of the index, which after L rounds reads as a.
        for (int i = 0; i < N; i++) out[i] = in[i];
    }

    // A step that shifts K bits in: costs of all states from M, reduced over their L oldest bits for the next step.
    // `book` [a][state >> L]: the codebook by the L oldest bits.
    // T tiles at a time read the codebook once.
    template <int K, int L, int T>
    INLINE void step(const float* book, const Track* tracks) {
        constexpr int64_t MIDDLE = int64_t(1) << (STATE_BITS - K - L);  // values of the bits that neither step touches
        constexpr int64_t UPPER = int64_t(1) << (STATE_BITS - L);
        constexpr int N = 1 << L;
        vf x[T];
        for (int t = 0; t < T; t++) x[t] = tracks[t].target + vf{};
        for (int64_t middle = 0; middle < MIDDLE; middle += LANES) {
            vf m[T][N];
            for (int t = 0; t < T; t++) split<L>(tracks[t].from + (middle << L), m[t]);
            for (int64_t top = 0; top < (1 << K); top++) {
                int64_t j = top * MIDDLE + middle;
                const float* c = book + j;
                vf low[T];
                vi who[T];
                for (int t = 0; t < T; t++) {
                    low[t] = fused(x[t] - load(c), m[t][0]);
                    who[t] = vi{};
                }
#pragma GCC unroll 16
                for (int a = 1; a < N; a++) {
                    vf value = load(c + a * UPPER);
                    for (int t = 0; t < T; t++) {
                        vf cost = fused(x[t] - value, m[t][a]);
                        vi better = cost < low[t];
                        low[t] = better ? cost : low[t];
                        who[t] = better ? vi{} + a : who[t];
                    }
                }
                for (int t = 0; t < T; t++) {
                    store(tracks[t].to + j, low[t]);
                    *reinterpret_cast<vb*>(tracks[t].back + j) = __builtin_convertvector(who[t], vb);
                }
            }
        }
    }

    template <int T>
    INLINE void any_step(int k, int l, const float* book, const Track* tracks) {
        switch (k * 8 + l) {
#define STEP(K, L) \
    case K * 8 + L: return step<K, L, T>(book, tracks);
            STEP(1, 1) STEP(1, 2) STEP(2, 1) STEP(2, 2) STEP(2, 3) STEP(3, 2) STEP(3, 3) STEP(3, 4) STEP(4, 3)
            STEP(4, 4) STEP(4, 5) STEP(5, 4) STEP(5, 5) STEP(5, 6) STEP(6, 5) STEP(6, 6)
#undef STEP
        }
    }

    // The codes of T tiles one after another. `books`: by bits, see `step`.
    template <int T>
    INLINE void run(const float* x, const Steps& steps, const float* const* books, uint8_t* codes, int64_t bytes,
                    Scratch* s) {
        // First pass: around the seam, from nowhere, to find the state in which the tile may start and end.
        int k = steps.at(SEAM), seam[T];
        for (int i = 0; i < T; i++) std::fill_n(s[i].a.get(), int64_t(1) << (STATE_BITS - steps.at(-SEAM)), 0.0f);
        forward<T>(x, -SEAM, SEAM, steps, books, s);
        for (int i = 0; i < T; i++) {
            const float* last = s[i].a.get();
            int64_t j = std::min_element(last, last + (int64_t(1) << (STATE_BITS - k))) - last;
            seam[i] = int(j << k) | s[i].back.get()[(2 * SEAM - 1) * STRIDE + j];
            for (int t = SEAM - 1; t >= 0; t--) seam[i] = previous(seam[i], t, t + SEAM - 1, steps, s[i]);
        }
        // Second pass: the whole tile, from that state to that state.
        k = steps.at(0);
        for (int i = 0; i < T; i++) {
            std::fill_n(s[i].a.get(), int64_t(1) << (STATE_BITS - k), std::numeric_limits<float>::infinity());
            s[i].a.get()[seam[i] >> k] = 0.0f;
        }
        forward<T>(x, 0, TILE, steps, books, s);
        for (int i = 0; i < T; i++) write(seam[i], steps, codes + i * bytes, bytes, s[i]);
    }

    // The stream of the path that ends in a state.
    INLINE void write(int state, const Steps& steps, uint8_t* codes, int64_t bytes, const Scratch& s) {
        std::memset(codes, 0, size_t(bytes));
        int end = int(bytes) * 8;
        for (int t = TILE - 1; t >= 0; t--) {
            int k = steps.at(t);
            end -= k;
            int bits = state >> (STATE_BITS - k);
            for (int i = 0; i < k; i++)
                codes[(end + i) >> 3] = uint8_t(codes[(end + i) >> 3] | ((bits >> i & 1) << ((end + i) & 7)));
            if (t > 0) state = previous(state, t, t - 1, steps, s);
        }
    }

    // The state before step t, given the state after it; `at`: where that step's predecessors were stored.
    INLINE int previous(int state, int t, int at, const Steps& steps, const Scratch& s) {
        int k = steps.at(t), j = state & ((1 << (STATE_BITS - k)) - 1);
        return (j << k) | s.back.get()[at * STRIDE + j];
    }

    // Steps first..end-1 (of the circular tiles) from M in s.a; leaves M in s.a.
    template <int T>
    INLINE void forward(const float* x, int first, int end, const Steps& steps, const float* const* books,
                        Scratch* s) {
        for (int t = first; t < end; t++) {
            Track tracks[T];
            for (int i = 0; i < T; i++)
                tracks[i] = {x[i * TILE + (t & (TILE - 1))], s[i].a.get(), s[i].b.get(),
                             s[i].back.get() + (t - first) * STRIDE};
            int l = steps.at(t + 1);
            any_step<T>(steps.at(t), l, books[l], tracks);
            for (int i = 0; i < T; i++) std::swap(s[i].a, s[i].b);
        }
    }

    INLINE void run_any(const float* x, int tiles, const Steps& steps, const float* const* books, uint8_t* codes,
                        int64_t bytes, Scratch* s) {
        if (tiles == 2)
            run<2>(x, steps, books, codes, bytes, s);
        else
            run<1>(x, steps, books, codes, bytes, s);
    }
};

using Run = void (*)(const float*, int, const Steps&, const float* const*, uint8_t*, int64_t, Scratch*);

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))) void run_avx512(const float* x, int tiles, const Steps& s,
                                                                             const float* const* books, uint8_t* codes,
                                                                             int64_t bytes, Scratch* scratch) {
    Viterbi<16>::run_any(x, tiles, s, books, codes, bytes, scratch);
}
__attribute__((target("avx2,fma"))) void run_avx2(const float* x, int tiles, const Steps& s, const float* const* books,
                                                  uint8_t* codes, int64_t bytes, Scratch* scratch) {
    Viterbi<8>::run_any(x, tiles, s, books, codes, bytes, scratch);
}
#endif
void run_plain(const float* x, int tiles, const Steps& s, const float* const* books, uint8_t* codes, int64_t bytes,
               Scratch* scratch) {
    Viterbi<4>::run_any(x, tiles, s, books, codes, bytes, scratch);
}

// `most_lanes` keeps narrower code reachable for tests.
Run machine(int most_lanes) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most_lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return run_avx512;
    if (most_lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_avx2;
#endif
    (void)most_lanes;
    return run_plain;
}

using Targets = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstCodes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tiles = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

void check(int quarter_bits, int threads, const Vector& codebook, int64_t bytes) {
    require(quarter_bits >= 4 && quarter_bits <= 24, "trellis: quarter_bits must be 4 to 24");
    require(threads > 0 && codebook.shape(0) == STATES, "trellis: bad thread count or codebook");
    require(bytes == 8 * quarter_bits, "trellis: codes have another shape");
}

void trellis_viterbi(Targets targets, int quarter_bits, Vector codebook, Codes codes, int threads, int most_lanes) {
    check(quarter_bits, threads, codebook, int64_t(codes.shape(1)));
    int64_t tiles = int64_t(targets.shape(0));
    require(int64_t(targets.shape(1)) == TILE && int64_t(codes.shape(0)) == tiles, "trellis: a tile has 256 weights");
    if (tiles == 0) return;
    nb::gil_scoped_release release;
    Run run = machine(most_lanes);
    Steps steps(quarter_bits);
    int64_t bytes = 8 * quarter_bits;
    Buffer<float> held[8];
    const float* books[8] = {};
    for (int l : steps.k) {
        if (books[l]) continue;
        held[l] = buffer<float>(STATES);
        for (int64_t state = 0; state < STATES; state++) {
            int64_t oldest = state & ((1 << l) - 1);
            held[l].get()[(oldest << (STATE_BITS - l)) + (state >> l)] = codebook.data()[state];
        }
        books[l] = held[l].get();
    }
    auto one = [&](int64_t pair) {
        static thread_local Scratch scratch[2];
        int64_t tile = 2 * pair;
        int count = int(std::min<int64_t>(2, tiles - tile));
        run(targets.data() + tile * TILE, count, steps, books, codes.data() + tile * bytes, bytes, scratch);
    };
    nstf::parallel_for(threads, (tiles + 1) / 2, one);
}

void trellis_decode(ConstCodes codes, int quarter_bits, Vector codebook, Values out, int threads) {
    check(quarter_bits, threads, codebook, int64_t(codes.shape(1)));
    int64_t tiles = int64_t(codes.shape(0)), bytes = 8 * quarter_bits;
    require(int64_t(out.shape(1)) == TILE && int64_t(out.shape(0)) == tiles, "trellis: a tile has 256 weights");
    nb::gil_scoped_release release;
    constexpr int64_t BLOCK = 64;
    auto one = [&](int64_t block) {
        for (int64_t i = block * BLOCK; i < std::min(tiles, (block + 1) * BLOCK); i++)
            nstf::decode_tile(codes.data() + i * bytes, quarter_bits, codebook.data(), out.data() + i * TILE);
    };
    nstf::parallel_for(threads, (tiles + BLOCK - 1) / BLOCK, one);
}

// y[b][r] = sum over columns of value * x, for the 16 rows of a row of tiles; the weights are decoded a tile at a time.
template <int LANES>
INLINE void multiply_row(const uint8_t* codes, int64_t across, int64_t bytes, const float* codebook,
                         const float* x, int64_t batch, int64_t width, float* sums) {
    using vf = typename Register<LANES>::Float;
    constexpr int SIDE = 16, PARTS = SIDE / LANES;
    float values[TILE] __attribute__((aligned(64)));
    vf* total = reinterpret_cast<vf*>(sums);  // [batch][row]
    for (int64_t i = 0; i < batch * SIDE; i++) total[i] = vf{};
    for (int64_t tile = 0; tile < across; tile++) {
        nstf::decode_tile(codes + tile * bytes, int(bytes / 8), codebook, values);
        for (int64_t b = 0; b < batch; b++) {
            vf in[PARTS];
            std::memcpy(in, x + b * width + tile * SIDE, sizeof in);
            for (int r = 0; r < SIDE; r++)
                for (int part = 0; part < PARTS; part++)
                    total[b * SIDE + r] += reinterpret_cast<const vf*>(values)[r * PARTS + part] * in[part];
        }
    }
    for (int64_t i = 0; i < batch * SIDE; i++) {
        float sum = 0;
        for (int l = 0; l < LANES; l++) sum += total[i][l];
        sums[i] = sum;  // never ahead of what is still to be read
    }
}

using Multiply = void (*)(const uint8_t*, int64_t, int64_t, const float*, const float*, int64_t, int64_t,
                          float*);
#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))) void multiply_avx512(
    const uint8_t* codes, int64_t across, int64_t bytes, const float* c, const float* x, int64_t batch,
    int64_t width, float* sums) {
    multiply_row<16>(codes, across, bytes, c, x, batch, width, sums);
}
__attribute__((target("avx2,fma"))) void multiply_avx2(const uint8_t* codes, int64_t across, int64_t bytes, const float* c, const float* x, int64_t batch,
                                                       int64_t width, float* sums) {
    multiply_row<8>(codes, across, bytes, c, x, batch, width, sums);
}
#endif
void multiply_plain(const uint8_t* codes, int64_t across, int64_t bytes, const float* c, const float* x,
                    int64_t batch, int64_t width, float* sums) {
    multiply_row<4>(codes, across, bytes, c, x, batch, width, sums);
}

Multiply multiply_machine(int most_lanes) {
    Run run = machine(most_lanes);
#if defined(__x86_64__)
    if (run == run_avx512) return multiply_avx512;
    if (run == run_avx2) return multiply_avx2;
#endif
    return multiply_plain;
}

void trellis_matmul(Tiles codes, int quarter_bits, Vector codebook, Targets x, Values out, int threads, int most_lanes) {
    check(quarter_bits, threads, codebook, int64_t(codes.shape(2)));
    int64_t down = int64_t(codes.shape(0)), across = int64_t(codes.shape(1)), bytes = 8 * quarter_bits;
    int64_t batch = int64_t(x.shape(0)), width = int64_t(x.shape(1));
    require(width == across * 16 && int64_t(out.shape(0)) == batch && int64_t(out.shape(1)) == down * 16,
            "trellis: activations or results have another shape");
    nb::gil_scoped_release release;
    Multiply multiply = multiply_machine(most_lanes);
    auto one = [&](int64_t row) {
        static thread_local Buffer<float> sums;
        static thread_local int64_t held = 0;
        if (held < batch) sums = buffer<float>((held = batch) * TILE);
        multiply(codes.data() + row * across * bytes, across, bytes, codebook.data(), x.data(), batch, width,
                 sums.get());
        for (int64_t b = 0; b < batch; b++)
            std::memcpy(out.data() + b * down * 16 + row * 16, sums.get() + b * 16, 16 * sizeof(float));
    };
    nstf::parallel_for(threads, down, one);
}

}  // namespace

void bind_trellis(nb::module_& m) {
    using namespace nb::literals;
    m.def("trellis_viterbi", &trellis_viterbi, "targets"_a, "quarter_bits"_a, "codebook"_a, "codes"_a, "threads"_a,
          "most_lanes"_a = 16, "Fills the codes of the best tail-biting path of every tile.");
    m.def("trellis_decode", &trellis_decode, "codes"_a, "quarter_bits"_a, "codebook"_a, "out"_a, "threads"_a,
          "Fills the values the codes of every tile stand for.");
    m.def("trellis_matmul", &trellis_matmul, "codes"_a, "quarter_bits"_a, "codebook"_a, "x"_a, "out"_a, "threads"_a,
          "most_lanes"_a = 16, "Fills x times the transposed values of one section, without its row scales.");
}

#else  // another compiler: torch does it, slowly

void bind_trellis(nb::module_&) {}

#endif
