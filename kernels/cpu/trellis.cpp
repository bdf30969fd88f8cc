// The trellis in Python: the Viterbi search (trellis_search.h), the decoder of its codes, and a product with them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "parallel.h"
#include "trellis_search.h"
#include "trellis_tile.h"

namespace nb = nanobind;

#if defined(__GNUC__) || defined(__clang__)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE static inline __attribute__((always_inline))

namespace {

using nstf::search::Buffer;
using nstf::search::buffer;

constexpr int STATES = nstf::search::kStates, TILE = nstf::search::kTile;

template <int LANES>
struct Register;
template <>
struct Register<4> {
    typedef float Float __attribute__((vector_size(16)));
};
template <>
struct Register<8> {
    typedef float Float __attribute__((vector_size(32)));
};
template <>
struct Register<16> {
    typedef float Float __attribute__((vector_size(64)));
};

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
    const auto book = nstf::search::kept_book(quarter_bits, codebook.data(), most_lanes);
    auto one = [&](int64_t pair) {
        const int64_t tile = 2 * pair;
        const int count = int(std::min<int64_t>(2, tiles - tile));
        nstf::search::search(targets.data() + tile * TILE, count, *book, codes.data() + tile * 8 * quarter_bits);
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

// `most_lanes` keeps narrower code reachable for tests.
Multiply multiply_machine(int most_lanes) {
#if defined(__x86_64__)
    const int lanes = nstf::search::lanes(most_lanes);
    if (lanes == 32) return multiply_avx512;
    if (lanes == 16 && __builtin_cpu_supports("fma")) return multiply_avx2;
#endif
    (void)most_lanes;
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
