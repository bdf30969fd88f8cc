// The Viterbi search of the trellis quantiser (quantizers/trellis.py) and the decoder of its codes.
//
// One vector holds one state of 4, 8 or 16 tiles, so every step is elementwise and a tile's codes depend on nothing but
// that tile. Between two steps only the best cost of each group of predecessors is kept: M[j] = min over the k oldest
// bits of the 16-bit state. A block of M stays in registers while all new states that continue it are tried.
//
// Distances are fma(d, d, M), ties go to the lowest predecessor: another device that does the same gets the same codes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "parallel.h"

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
constexpr int CHUNK = 8;  // predecessors held in registers

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
    Buffer<float> a, b;      // M of this step and of the next, [state >> k][lane]
    Buffer<uint8_t> back;    // predecessors, [step][state >> k][lane]
    int64_t stride;          // bytes of one step in `back`
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

    // Step t, which shifts K bits in: costs of all states from M, reduced over the L oldest bits for step t + 1.
    template <int K, int L>
    INLINE void step(const float* codebook, vf x, const float* from, float* to, uint8_t* back) {
        constexpr int PARTS = (1 << L) > CHUNK ? (1 << L) / CHUNK : 1, WIDE = (1 << L) / PARTS;
        constexpr int64_t MIDDLE = int64_t(1) << (STATE_BITS - K - L);  // values of the bits that neither step touches
        for (int64_t middle = 0; middle < MIDDLE; middle++) {
            vf best[1 << K];
            vi index[1 << K];
            for (int part = 0; part < PARTS; part++) {
                vf m[WIDE];
                for (int a = 0; a < WIDE; a++) m[a] = load(from + ((middle << L) + part * WIDE + a) * LANES);
                for (int top = 0; top < (1 << K); top++) {
                    const float* c = codebook + (((top * MIDDLE + middle) << L) + part * WIDE);
                    vf low;
                    vi who;
                    if (part == 0) {
                        vf d = x - c[0];
                        low = fused(d, m[0]), who = vi{};
                    } else {
                        low = best[top], who = index[top];
                    }
#pragma GCC unroll 8
                    for (int a = part == 0 ? 1 : 0; a < WIDE; a++) {
                        vf d = x - c[a];
                        vf cost = fused(d, m[a]);
                        vi better = cost < low;
                        low = better ? cost : low;
                        who = better ? vi{} + (part * WIDE + a) : who;
                    }
                    if (PARTS == 1 || part == PARTS - 1) {
                        int64_t j = top * MIDDLE + middle;
                        store(to + j * LANES, low);
                        *reinterpret_cast<vb*>(back + j * LANES) = __builtin_convertvector(who, vb);
                    } else {
                        best[top] = low, index[top] = who;
                    }
                }
            }
        }
    }

    INLINE void any_step(int k, int l, const float* c, vf x, const float* from, float* to, uint8_t* back) {
        switch (k * 8 + l) {
#define STEP(K, L) \
    case K * 8 + L: return step<K, L>(c, x, from, to, back);
            STEP(1, 1) STEP(1, 2) STEP(2, 1) STEP(2, 2) STEP(2, 3) STEP(3, 2) STEP(3, 3) STEP(3, 4) STEP(4, 3)
            STEP(4, 4) STEP(4, 5) STEP(5, 4) STEP(5, 5) STEP(5, 6) STEP(6, 5) STEP(6, 6)
#undef STEP
        }
    }

    // Codes of LANES tiles; `targets` [lane][256], `live` of them exist.
    INLINE void run(const float* targets, int live, const Steps& steps, const float* codebook, uint8_t* codes,
                    int64_t bytes, Scratch& s) {
        float x[TILE][LANES] __attribute__((aligned(64)));
        for (int t = 0; t < TILE; t++)
            for (int l = 0; l < LANES; l++) x[t][l] = targets[std::min(l, live - 1) * TILE + t];
        int seam[LANES];
        // First pass: around the seam, from nowhere, to find the state in which the tile may start and end.
        int64_t size = int64_t(1) << (STATE_BITS - steps.at(-SEAM));
        std::memset(s.a.get(), 0, size_t(size) * LANES * sizeof(float));
        forward(x, -SEAM, SEAM, steps, codebook, s);
        const float* last = s.a.get();
        size = int64_t(1) << (STATE_BITS - steps.at(SEAM));
        for (int l = 0; l < LANES; l++) {
            int64_t j = 0;
            for (int64_t i = 1; i < size; i++)
                if (last[i * LANES + l] < last[j * LANES + l]) j = i;
            int state = int(j << steps.at(SEAM)) | s.back.get()[(2 * SEAM - 1) * s.stride + j * LANES + l];
            for (int t = SEAM - 1; t >= 0; t--) state = previous(state, t, t + SEAM - 1, l, steps, s);
            seam[l] = state;
        }
        // Second pass: the whole tile, from that state to that state.
        size = int64_t(1) << (STATE_BITS - steps.at(0));
        std::fill_n(s.a.get(), size * LANES, std::numeric_limits<float>::infinity());
        for (int l = 0; l < LANES; l++) s.a.get()[int64_t(seam[l] >> steps.at(0)) * LANES + l] = 0.0f;
        forward(x, 0, TILE, steps, codebook, s);
        for (int l = 0; l < live; l++) {
            uint8_t* out = codes + l * bytes;
            std::memset(out, 0, size_t(bytes));
            int state = seam[l], end = int(bytes) * 8;
            for (int t = TILE - 1; t >= 0; t--) {
                int k = steps.at(t);
                end -= k;
                int bits = state >> (STATE_BITS - k);
                for (int i = 0; i < k; i++)
                    out[(end + i) >> 3] = uint8_t(out[(end + i) >> 3] | ((bits >> i & 1) << ((end + i) & 7)));
                if (t > 0) state = previous(state, t, t - 1, l, steps, s);
            }
        }
    }

    // The state before step t, given the state after it; `at`: where that step's predecessors were stored.
    INLINE int previous(int state, int t, int at, int lane, const Steps& steps, const Scratch& s) {
        int k = steps.at(t), j = state & ((1 << (STATE_BITS - k)) - 1);
        return (j << k) | s.back.get()[at * s.stride + int64_t(j) * LANES + lane];
    }

    // Steps first..end-1 (of the circular tile) from M in s.a; leaves M in s.a.
    INLINE void forward(const float (*x)[LANES], int first, int end, const Steps& steps, const float* codebook,
                        Scratch& s) {
        for (int t = first; t < end; t++) {
            any_step(steps.at(t), steps.at(t + 1), codebook, load(x[t & (TILE - 1)]), s.a.get(), s.b.get(),
                     s.back.get() + (t - first) * s.stride);
            std::swap(s.a, s.b);
        }
    }
};

using Run = void (*)(const float*, int, const Steps&, const float*, uint8_t*, int64_t, Scratch&);
struct Machine {
    Run run;
    int lanes;
};

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))) void run_avx512(const float* x, int live, const Steps& s,
                                                                             const float* c, uint8_t* codes,
                                                                             int64_t bytes, Scratch& scratch) {
    Viterbi<16>::run(x, live, s, c, codes, bytes, scratch);
}
__attribute__((target("avx2,fma"))) void run_avx2(const float* x, int live, const Steps& s, const float* c,
                                                  uint8_t* codes, int64_t bytes, Scratch& scratch) {
    Viterbi<8>::run(x, live, s, c, codes, bytes, scratch);
}
#endif
void run_plain(const float* x, int live, const Steps& s, const float* c, uint8_t* codes, int64_t bytes,
               Scratch& scratch) {
    Viterbi<4>::run(x, live, s, c, codes, bytes, scratch);
}

// `most_lanes` keeps narrower code reachable for tests.
Machine machine(int most_lanes) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most_lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return {run_avx512, 16};
    if (most_lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {run_avx2, 8};
#endif
    (void)most_lanes;
    return {run_plain, 4};
}

using Targets = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstCodes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
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
    Machine m = machine(most_lanes);
    Steps steps(quarter_bits);
    int64_t groups = (tiles + m.lanes - 1) / m.lanes, bytes = 8 * quarter_bits;
    int64_t states = int64_t(1) << (STATE_BITS - quarter_bits / 4);
    auto one = [&](int64_t g) {
        static thread_local Scratch scratch{};
        static thread_local int64_t held = 0;
        if (held < states * m.lanes) {
            held = states * m.lanes;
            scratch.a = buffer<float>(held), scratch.b = buffer<float>(held);
            scratch.back = buffer<uint8_t>(held * TILE);
        }
        scratch.stride = states * m.lanes;
        int live = int(std::min<int64_t>(m.lanes, tiles - g * m.lanes));
        m.run(targets.data() + g * m.lanes * TILE, live, steps, codebook.data(), codes.data() + g * m.lanes * bytes,
              bytes, scratch);
    };
    nstf::parallel_for(threads, groups, one);
}

void trellis_decode(ConstCodes codes, int quarter_bits, Vector codebook, Values out, int threads) {
    check(quarter_bits, threads, codebook, int64_t(codes.shape(1)));
    int64_t tiles = int64_t(codes.shape(0)), bytes = 8 * quarter_bits;
    require(int64_t(out.shape(1)) == TILE && int64_t(out.shape(0)) == tiles, "trellis: a tile has 256 weights");
    nb::gil_scoped_release release;
    Steps steps(quarter_bits);
    constexpr int64_t BLOCK = 64;
    auto one = [&](int64_t block) {
        for (int64_t i = block * BLOCK; i < std::min(tiles, (block + 1) * BLOCK); i++) {
            const uint8_t* in = codes.data() + i * bytes;
            float* to = out.data() + i * TILE;
            uint8_t ring[8 * 24 + 8];  // two bytes before the stream: where the first states reach back to
            ring[0] = in[bytes - 2], ring[1] = in[bytes - 1];
            std::memcpy(ring + 2, in, size_t(bytes));
            int end = 0;
            for (int t = 0; t < TILE; t++) {
                end += steps.at(t);  // the state is bits [end - 16, end) of the stream, [end, end + 16) of the ring
                uint32_t word;
                std::memcpy(&word, ring + (end >> 3), 4);
                to[t] = codebook.data()[word >> (end & 7) & 0xffff];
            }
        }
    };
    nstf::parallel_for(threads, (tiles + BLOCK - 1) / BLOCK, one);
}

}  // namespace

void bind_trellis(nb::module_& m) {
    using namespace nb::literals;
    m.def("trellis_viterbi", &trellis_viterbi, "targets"_a, "quarter_bits"_a, "codebook"_a, "codes"_a, "threads"_a,
          "most_lanes"_a = 16, "Fills the codes of the best tail-biting path of every tile.");
    m.def("trellis_decode", &trellis_decode, "codes"_a, "quarter_bits"_a, "codebook"_a, "out"_a, "threads"_a,
          "Fills the values the codes of every tile stand for.");
}

#else  // another compiler: torch does it, slowly

void bind_trellis(nb::module_&) {}

#endif
