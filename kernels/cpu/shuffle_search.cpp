// Rounding to shuffle codes (kernels/formats/shuffle.py): 16 columns of a matrix one after another, with the feedback of the
// columns before (LDLQ), each segment of 256 rows the nearest path through a trellis of 256 states (Viterbi).
//
// A step has a new symbol a, the one before b and the one before that c. Row costs are functions of (a ^ c, b) and of (a ^ b, a ^ c),
// so for each a the cheapest c is found for all 16 b at once, in vectors of 16-bit integers: those are the same for every
// instruction set. kernels/torch/shuffle_search.py is the definition.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "isa.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

#if defined(__GNUC__) && !defined(__clang__)

#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE inline __attribute__((always_inline))

namespace nstf::shuffle {
namespace {

constexpr int kBlock = 16, kGroup = 32, kSegment = 256, kSymbols = 16;
// Costs of a row end at kFarthest and those of a path, over the cheapest one, at kMost, so that no sum leaves 16 bits.
constexpr float kFarthest = 16383;
constexpr uint16_t kMost = 32767;

typedef uint16_t Costs __attribute__((vector_size(32)));  // a lane for each b
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t Integers __attribute__((vector_size(32)));
typedef uint16_t Narrow __attribute__((vector_size(16)));
struct Values {
    alignas(64) float at[kSymbols];
    float operator[](int i) const { return at[i]; }
};

// Which rows of a group belong to which of its 2 q steps. `phases` rows repeat.
struct Steps {
    int count, phases;
    int first[kGroup * 2], rows[kGroup * 2];  // of a step; at most two rows
    explicit Steps(int q) : count(2 * q), phases(16) {
        for (int n = q; phases > 1 && n % 2 == 0; n /= 2) phases /= 2;
        std::fill(rows, rows + 2 * kGroup, 0);
        std::fill(first, first + 2 * kGroup, 0);
        for (int r = kGroup - 1; r >= 0; --r) {
            const int step = ((r + 1) * q + 15) / 16 - 1;
            first[step] = r;
            ++rows[step];
        }
    }
};

struct Tables {
    Steps steps;
    std::vector<std::array<Values, kSymbols>> values;  // [phase]: of a first row [a ^ c][b], of a second one [a ^ c][a ^ b]
    float low = 0, high = 0;
    Tables(int q, const float* tables) : steps(q), values(static_cast<size_t>(steps.phases)) {
        bool second[kGroup] = {};
        for (int s = 0; s < steps.count; ++s)
            if (steps.rows[s] == 2) second[steps.first[s] + 1] = true;
        for (int p = 0; p < steps.phases; ++p) {
            const float *a = tables + p * 32, *b = a + 16;
            for (int k = 0; k < kSymbols; ++k)
                for (int j = 0; j < kSymbols; ++j) {
                    const float v = second[p] ? a[j] + b[k] : a[k] + b[j];
                    values[static_cast<size_t>(p)][static_cast<size_t>(k)].at[j] = v;
                    low = std::min(low, v);
                    high = std::max(high, v);
                }
        }
    }
};

struct Scratch {
    alignas(64) Costs paths[2 * kSegment + 1][kSymbols];  // before each step: [c], a lane for each b
    float x[kSegment], errors[kSegment][kBlock];
    uint8_t symbols[2 * kSegment + 2];
};

INLINE Costs lower(const Costs& a, const Costs& b) { return a < b ? a : b; }

INLINE void row_costs(float x, float weight, const std::array<Values, kSymbols>& values, Costs* out) {
    const Eight most = Eight{} + kFarthest;
    for (int k = 0; k < kSymbols; ++k) {
        Narrow half[2];
        for (int i = 0; i < 2; ++i) {
            Eight v;
            std::memcpy(&v, values[static_cast<size_t>(k)].at + 8 * i, sizeof v);
            const Eight d = x - v, cost = d * d * weight;
            half[i] = __builtin_convertvector(__builtin_convertvector(cost < most ? cost : most, Integers), Narrow);
        }
        std::memcpy(out + k, half, sizeof *out);
    }
}

template <int A>
INLINE Costs turned(const Costs& v) {  // lane b from lane a ^ b
    constexpr Costs order = {0 ^ A, 1 ^ A, 2 ^ A,  3 ^ A,  4 ^ A,  5 ^ A,  6 ^ A,  7 ^ A,
                             8 ^ A, 9 ^ A, 10 ^ A, 11 ^ A, 12 ^ A, 13 ^ A, 14 ^ A, 15 ^ A};
    return __builtin_shuffle(v, order);
}

template <int A, bool SECOND>
INLINE Costs cheapest(const Costs* paths, const Costs* first, const Costs* second) {
    Costs best = Costs{} + uint16_t(0xffff);
#pragma GCC unroll 16
    for (int k = 0; k < kSymbols; ++k) {
        Costs cost = first[k];
        if (SECOND) cost += turned<A>(second[k]);
        best = lower(best, paths[A ^ k] + cost);
    }
    return best;
}

template <bool SECOND, int... A>
INLINE void all_symbols(const Costs* paths, const Costs* first, const Costs* second, Costs* out,
                        std::integer_sequence<int, A...>) {
    ((out[A] = cheapest<A, SECOND>(paths, first, second)), ...);
}

// 16 vectors of 16 numbers, transposed: 8 x 8 blocks in each half of the vectors, then the halves.
INLINE void transpose(Costs* v) {
    constexpr Costs low = {0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27};
    constexpr Costs high = {4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31};
    constexpr Costs left = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    constexpr Costs right = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    Costs t[kSymbols];
    for (int round = 0; round < 3; ++round) {
        for (int half = 0; half < kSymbols; half += 8)
            for (int i = 0; i < 4; ++i) {
                t[half + 2 * i] = __builtin_shuffle(v[half + i], v[half + i + 4], low);
                t[half + 2 * i + 1] = __builtin_shuffle(v[half + i], v[half + i + 4], high);
            }
        std::copy_n(t, kSymbols, v);
    }
    for (int i = 0; i < 8; ++i) {
        v[i] = __builtin_shuffle(t[i], t[i + 8], left);
        v[i + 8] = __builtin_shuffle(t[i], t[i + 8], right);
    }
}

// The costs of all paths through every step of a column.
INLINE void forward(const Tables& tables, const float* x, const float* weights, int rows, Scratch& s) {
    const Steps& steps = tables.steps;
    const Costs most = Costs{} + kMost;
    for (int c = 0; c < kSymbols; ++c) s.paths[0][c] = most;
    s.paths[0][0][0] = 0;  // a segment starts after zeros
    for (int g = 0, t = 0; g < rows; g += kGroup)
        for (int step = 0; step < steps.count; ++step, ++t) {
            Costs first[kSymbols], second[kSymbols], out[kSymbols];
            const int r = steps.first[step], count = steps.rows[step], phase = r % steps.phases;
            if (count > 0) row_costs(x[g + r], weights[g + r], tables.values[static_cast<size_t>(phase)], first);
            else std::fill_n(first, kSymbols, Costs{});
            constexpr auto all = std::make_integer_sequence<int, kSymbols>{};
            if (count == 2) {
                row_costs(x[g + r + 1], weights[g + r + 1],
                          tables.values[static_cast<size_t>((r + 1) % steps.phases)], second);
                all_symbols<true>(s.paths[t], first, second, out, all);
            } else {
                all_symbols<false>(s.paths[t], first, second, out, all);
            }
            Costs least = out[0];
            for (int a = 1; a < kSymbols; ++a) least = lower(least, out[a]);
            least = lower(least, turned<8>(least));
            least = lower(least, turned<4>(least));
            least = lower(least, turned<2>(least));
            least = lower(least, turned<1>(least));
            for (int a = 0; a < kSymbols; ++a) out[a] = lower(out[a] - least, most);
            transpose(out);
            std::copy_n(out, kSymbols, s.paths[t + 1]);
        }
}

INLINE int one_cost(float x, float weight, float value) {
    const float d = x - value, cost = d * d * weight;
    return static_cast<int>(cost < kFarthest ? cost : kFarthest);
}

// The symbols of the cheapest path, from symbols[2] on, and the values they stand for.
void backward(const Tables& tables, const float* x, const float* weights, int rows, Scratch& s, float* values) {
    const Steps& steps = tables.steps;
    int t = rows / kGroup * steps.count, best = 0x10000, a = 0, b = 0;
    for (int i = 0; i < kSymbols; ++i)
        for (int j = 0; j < kSymbols; ++j)
            if (const int cost = s.paths[t][i][j]; cost < best) best = cost, a = j, b = i;
    for (int g = rows - kGroup; g >= 0; g -= kGroup)
        for (int step = steps.count - 1; step >= 0; --step) {
            --t;
            const int r = steps.first[step], count = steps.rows[step];
            const auto& first = tables.values[static_cast<size_t>(r % steps.phases)];
            const auto& second = tables.values[static_cast<size_t>((r + 1) % steps.phases)];
            int least = 0x40000, c = 0;
            for (int i = 0; i < kSymbols; ++i) {
                int cost = s.paths[t][i][b];
                if (count > 0) cost += one_cost(x[g + r], weights[g + r], first[static_cast<size_t>(a ^ i)][b]);
                if (count == 2) cost += one_cost(x[g + r + 1], weights[g + r + 1], second[static_cast<size_t>(a ^ i)][a ^ b]);
                if (cost < least) least = cost, c = i;
            }
            if (count > 0) values[g + r] = first[static_cast<size_t>(a ^ c)][b];
            if (count == 2) values[g + r + 1] = second[static_cast<size_t>(a ^ c)][a ^ b];
            s.symbols[t + 2] = static_cast<uint8_t>(a);
            a = b;
            b = c;
        }
}

void forward_plain(const Tables& tables, const float* x, const float* weights, int rows, Scratch& s) {
    forward(tables, x, weights, rows, s);
}
#if NSTF_X86
__attribute__((target("avx2"))) void forward_avx2(const Tables& tables, const float* x, const float* weights, int rows,
                                                  Scratch& s) {
    forward(tables, x, weights, rows, s);
}
#endif

struct Block {
    const float *target, *weight;  // [rows][16]
    const float *scale, *importance;  // [rows]
    const float* feedback;  // [16][16]: what an error of the first column adds to the target of the second
    float* rounded;         // [rows][16]
    uint8_t* codes;         // [groups][2 q][8]: two columns a byte
};

void round_segment(const Tables& tables, const Block& block, int64_t start, int rows, bool wide) {
    thread_local std::vector<Scratch> room(1);
    Scratch& s = room[0];
    float values[kSegment];
    const int count = tables.steps.count;
    for (int j = 0; j < kBlock; ++j) {
        for (int r = 0; r < rows; ++r) {
            float target = block.target[(start + r) * kBlock + j];
            for (int i = 0; i < j; ++i) target += s.errors[r][i] * block.feedback[i * kBlock + j];
            const float scale = block.scale[start + r];
            s.x[r] = std::min(tables.high, std::max(tables.low, scale > 0 ? target / scale : 0.0f));
        }
        const float* importance = block.importance + start;
#if NSTF_X86
        if (wide) forward_avx2(tables, s.x, importance, rows, s);
        else
#endif
            forward_plain(tables, s.x, importance, rows, s);
        backward(tables, s.x, importance, rows, s, values);
        for (int r = 0; r < rows; ++r) {
            const int64_t at = (start + r) * kBlock + j;
            block.rounded[at] = values[r] * block.scale[start + r];
            s.errors[r][j] = block.weight[at] - block.rounded[at];
        }
        uint8_t* codes = block.codes + start / kGroup * count * kBlock / 2 + j / 2;
        for (int i = 0; i < rows / kGroup * count; ++i) {
            uint8_t& both = codes[i * kBlock / 2];
            both = static_cast<uint8_t>(j % 2 == 0 ? s.symbols[2 + i] : both | s.symbols[2 + i] << 4);
        }
    }
    (void)wide;
}

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;

void shuffle_round(Floats target, Floats weight, Floats scale, Floats importance, Floats feedback, int quarter_bits,
                   Floats tables, Out rounded, Codes codes, int threads) {
    const int64_t rows = static_cast<int64_t>(scale.size());
    if (quarter_bits < 8 || quarter_bits > 20) throw std::invalid_argument("quarter_bits must be 8 to 20");
    if (tables.size() != static_cast<size_t>(Steps(quarter_bits).phases) * 32)
        throw std::invalid_argument("shuffle codes: tables of another size");
    const Tables made(quarter_bits, tables.data());
    const size_t size = static_cast<size_t>(rows) * kBlock;
    if (rows % kGroup || target.size() != size || weight.size() != size || rounded.size() != size ||
        importance.size() != scale.size() || feedback.size() != kBlock * kBlock ||
        codes.size() != static_cast<size_t>(rows / kGroup * quarter_bits * kBlock))
        throw std::invalid_argument("shuffle codes: the shapes do not fit together");
    const Block block{target.data(), weight.data(), scale.data(), importance.data(), feedback.data(), rounded.data(), codes.data()};
    const bool wide = has_avx2(isa());
    nb::gil_scoped_release release;
    auto task = [&](int64_t i) {
        const int64_t start = i * kSegment;
        round_segment(made, block, start, static_cast<int>(std::min<int64_t>(kSegment, rows - start)), wide);
    };
    parallel_for(std::max(1, threads), (rows + kSegment - 1) / kSegment, task);
}

}  // namespace
}  // namespace nstf::shuffle

void bind_shuffle(nb::module_& m) {
    m.def("shuffle_round", &nstf::shuffle::shuffle_round, "target"_a, "weight"_a, "scale"_a, "importance"_a, "feedback"_a,
          "quarter_bits"_a, "tables"_a, "rounded"_a, "codes"_a, "threads"_a,
          "16 columns rounded to shuffle codes; fills rounded [rows, 16] and codes [rows / 32, 2 quarter_bits, 8].");
}

#else

void bind_shuffle(nb::module_&) {}

#endif
