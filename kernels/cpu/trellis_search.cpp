#include "trellis_search.h"

#include "isa.h"
#include "trellis_window.h"

#if defined(__GNUC__) || defined(__clang__)

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#if NSTF_X86
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE inline __attribute__((always_inline))

namespace nstf::search {
namespace {

constexpr uint16_t kMost = 0x7fff;  // a path over the cheapest one
constexpr int kFree = 6;  // bits that are open between two kept rows of costs
constexpr int kPad = 96;  // apart by a multiple of 4 KiB, loads from one M would wait for stores to the other

struct Scratch {
    Buffer<uint16_t> costs = buffer<uint16_t>(kStates + kPad);
    Buffer<uint16_t> rows = buffer<uint16_t>(int64_t((kTile + kSeam) / 3 + 1) * kStates / 2);
    uint16_t *from = costs.get(), *to = from + kStates / 2 + kPad;  // M before and after the step
    int64_t stride = 0;
    int every = 1;
    uint16_t taken[kTile + kSeam];  // off the costs before each step
    // M before step t, in the order of Book::place, null where it is not kept; only tracing back reads it.
    uint16_t* row(int t) const { return (t + kSeam) % every ? nullptr : rows.get() + (t + kSeam) / every * stride; }
};

struct Track {  // one tile at one step
    int16_t target;
    uint16_t least;  // taken off the costs before; then the least cost after
    const uint16_t* from;
    uint16_t *to, *row;
};

// The states after the steps from the last kept row up to t, given the state after step t but for its oldest bits, `entry`: the
// cheapest, the lowest on ties. Returns the first of these steps.
int trace(const float* x, const Book& book, int t, int entry, const Scratch& s, int* states) {
    const int first = t - (t + kSeam) % s.every;
    int open = book.steps.at(t + 1);
    for (int u = first + 1; u <= t; u++) open += book.steps.at(u);
    // By the open bits. Few enough for the forward steps to be done again, as the vector code does them.
    uint16_t costs[1 << kFree], m[1 << kFree];
    uint8_t oldest[kFree][1 << kFree];
    for (int u = first; u <= t; u++) {
        const int16_t target = rounded(x[u & (kTile - 1)], kFarthest);
        const int entries = kStates >> book.steps.at(u), next = book.steps.at(u + 1);
        for (int f = 0; f < 1 << open; f++) {
            const int state = (entry << open | f) & (kStates - 1);
            const uint16_t before = u > first ? m[f] : s.row(u)[book.place(u - 1, state & (entries - 1))];
            costs[f] = uint16_t(std::min(uint16_t(before - s.taken[u + kSeam]), kMost) +
                                squared_one(target, book.values[size_t(state)], book.doublings));
        }
        open -= next;
        for (int f = 0; f < 1 << open; f++) {
            const uint16_t* of = costs + (f << next);
            const auto least = std::min_element(of, of + (1 << next));
            m[f] = *least, oldest[u - first][f] = uint8_t(least - of);
        }
    }
    for (int u = t, f = 0; u >= first; u--) {
        f = f << book.steps.at(u + 1) | oldest[u - first][f];
        open += book.steps.at(u + 1);
        states[u - first] = (entry << open | f) & (kStates - 1);
    }
    return first;
}

// What is known of the state before step t, given the one after it.
int entry_before(const Book& book, int t, int state) { return state & ((kStates >> book.steps.at(t)) - 1); }

// The state before step 0 of the path that is best after the first pass.
int seam_state(const float* x, const Book& book, const Scratch& s) {
    const uint16_t* last = s.from;
    int entry = int(std::min_element(last, last + (kStates >> book.steps.at(kSeam))) - last), states[kFree];
    for (int t = kSeam - 1;;) {
        const int first = trace(x, book, t, entry, s, states);
        if (first <= -1) return states[-1 - first];
        entry = entry_before(book, first, states[0]), t = first - 1;
    }
}

// The stream of the path that ends in a state.
void write(const float* x, const Book& book, int state, uint8_t* codes, const Scratch& s) {
    int end = 64 * book.quarter_bits, states[kFree];
    std::memset(codes, 0, size_t(end / 8));
    const auto put = [&](int t, int of) {
        const int k = book.steps.at(t);
        end -= k;
        put_bits(codes, end, of >> (kStateBits - k), k);
    };
    put(kTile - 1, state);
    for (int t = kTile - 2; t >= 0;) {
        const int first = trace(x, book, t, entry_before(book, t + 1, state), s, states);
        for (; t >= first; t--) put(t, states[t - first]);
        state = states[0];
    }
}

#if NSTF_X86

#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
constexpr int LANES = 16;
typedef uint16_t Cost __attribute__((vector_size(32)));
typedef int16_t Value __attribute__((vector_size(32)));
INLINE void stream(uint16_t* p, Cost v) { _mm256_stream_si256((__m256i*)p, (__m256i)v); }
INLINE Value doubled(Value d) { return (Value)_mm256_adds_epi16((__m256i)d, (__m256i)d); }
INLINE Cost square(Value d) { return (Cost)_mm256_mulhrs_epi16((__m256i)d, (__m256i)d); }
INLINE void unzip(Cost a, Cost b, Cost& even, Cost& odd) {
    const __m256i low = _mm256_set1_epi32(0xffff), p = (__m256i)a, q = (__m256i)b;
    even = (Cost)_mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(p, low), _mm256_and_si256(q, low)), 0xd8);
    odd = (Cost)_mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_srli_epi32(p, 16), _mm256_srli_epi32(q, 16)), 0xd8);
}
INLINE Cost low_words(Cost a, Cost b) { return (Cost)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
INLINE Cost high_words(Cost a, Cost b) { return (Cost)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
template <int N>
INLINE Cost piece(const uint16_t* p, int i) {  // so that they are in order in the end
    const __m128i low = _mm_loadu_si128((const __m128i*)(p + 8 * i)), high = _mm_loadu_si128((const __m128i*)(p + 8 * (N + i)));
    return (Cost)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
template <int N>
INLINE Cost in_order(Cost v) { return v; }
#include "trellis_search_body.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
constexpr int LANES = 32;
typedef uint16_t Cost __attribute__((vector_size(64)));
typedef int16_t Value __attribute__((vector_size(64)));
INLINE void stream(uint16_t* p, Cost v) { _mm512_stream_si512((__m512i*)p, (__m512i)v); }
INLINE Value doubled(Value d) { return (Value)_mm512_adds_epi16((__m512i)d, (__m512i)d); }
INLINE Cost square(Value d) { return (Cost)_mm512_mulhrs_epi16((__m512i)d, (__m512i)d); }
INLINE void unzip(Cost a, Cost b, Cost& even, Cost& odd) {
    const __m512i low = _mm512_set1_epi32(0xffff), p = (__m512i)a, q = (__m512i)b;
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    even = (Cost)_mm512_permutexvar_epi64(order, _mm512_packus_epi32(_mm512_and_si512(p, low), _mm512_and_si512(q, low)));
    odd = (Cost)_mm512_permutexvar_epi64(order, _mm512_packus_epi32(_mm512_srli_epi32(p, 16), _mm512_srli_epi32(q, 16)));
}
INLINE Cost low_words(Cost a, Cost b) { return (Cost)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
INLINE Cost high_words(Cost a, Cost b) { return (Cost)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
template <int N>
INLINE Cost piece(const uint16_t* p, int i) { return (Cost)_mm512_loadu_si512(p + i * LANES); }
template <int N>
INLINE Cost in_order(Cost v) {  // from [128 bits][vector][entry of a word's 128 bits] to [vector][128 bits][entry]
    constexpr int G = N > 8 ? 1 : 8 / N;
    Cost from;
#pragma GCC unroll 32
    for (int n = 0; n < LANES; n++) from[n] = uint16_t(8 * (n / G % 4) + n / (4 * G) * G + n % G);
    return (Cost)_mm512_permutexvar_epi16((__m512i)from, (__m512i)v);
}
#include "trellis_search_body.h"
}  // namespace avx512
#pragma GCC pop_options

#endif

namespace plain {
constexpr int LANES = 8;
typedef uint16_t Cost __attribute__((vector_size(16)));
typedef int16_t Value __attribute__((vector_size(16)));
typedef int32_t Wide __attribute__((vector_size(32)));
INLINE void stream(uint16_t* p, Cost v) { std::memcpy(p, &v, sizeof v); }
INLINE Value doubled(Value d) {
    const Value most = Value{} + int16_t(16383), high = Value{} + int16_t(32767), low = Value{} + int16_t(-32768);
    return d > most ? high : d < ~most ? low : Value(Cost(d) + Cost(d));
}
INLINE Cost square(Value d) {
    const Wide wide = __builtin_convertvector(d, Wide);
    return __builtin_convertvector(((wide * wide >> 14) + 1) >> 1, Cost);
}
INLINE void unzip(Cost a, Cost b, Cost& even, Cost& odd) {
    even = odd = Cost{};
    for (int l = 0; l < LANES / 2; l++) {
        even[l] = a[2 * l], even[l + LANES / 2] = b[2 * l];
        odd[l] = a[2 * l + 1], odd[l + LANES / 2] = b[2 * l + 1];
    }
}
INLINE Cost low_words(Cost a, Cost b) { return Cost{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]}; }
INLINE Cost high_words(Cost a, Cost b) { return Cost{a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]}; }
template <int N>
INLINE Cost piece(const uint16_t* p, int i) {
    Cost v;
    std::memcpy(&v, p + i * LANES, sizeof v);
    return v;
}
template <int N>
INLINE Cost in_order(Cost v) { return v; }
#include "trellis_search_body.h"
}  // namespace plain

#if NSTF_X86
#define NSTF_AVX512 "avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
__attribute__((target("avx2"))) void run_avx2(const float* x, int tiles, const Book& book, uint8_t* codes, Scratch* s) {
    tiles == 2 ? avx2::run<2>(x, book, codes, s) : avx2::run<1>(x, book, codes, s);
}
__attribute__((target(NSTF_AVX512))) void run_avx512(const float* x, int tiles, const Book& book, uint8_t* codes, Scratch* s) {
    tiles == 2 ? avx512::run<2>(x, book, codes, s) : avx512::run<1>(x, book, codes, s);
}
#endif
void run_plain(const float* x, int tiles, const Book& book, uint8_t* codes, Scratch* s) {
    tiles == 2 ? plain::run<2>(x, book, codes, s) : plain::run<1>(x, book, codes, s);
}

}  // namespace

int lanes(int most_lanes) {
#if NSTF_X86
    __builtin_cpu_init();
    if (most_lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return 32;
    if (most_lanes >= 8 && __builtin_cpu_supports("avx2")) return 16;
#endif
    (void)most_lanes;
    return 8;
}

Book::Book(int q, const float* codebook, int most_lanes)
    : steps(q), quarter_bits(q), doublings(std::max(0, (q - 13) / 4)), every(std::max(1, kFree / steps.k[3])),
      lanes(std::min(search::lanes(most_lanes), 1 << (kStateBits - 2 * steps.k[3]))) {
    windows = Windows::make(q, codebook);
    if (windows) return;
    values.resize(kStates);
    for (int state = 0; state < kStates; state++) values[size_t(state)] = rounded(codebook[state], kRange);
    for (int t = 0; t < 4; t++) {
        const int l = steps.at(t + 1);
        streams[t].resize(kStates);
        for (int state = 0; state < kStates; state++) {
            const int entry = place(t, state >> l), oldest = state & ((1 << l) - 1);
            streams[t][size_t(((entry / lanes << l) + oldest) * lanes + entry % lanes)] = values[size_t(state)];
        }
    }
}

Book::~Book() = default;

std::shared_ptr<const Book> kept_book(int quarter_bits, const float* codebook, int most_lanes) {
    struct Kept {
        std::vector<float> codebook;
        std::shared_ptr<const Book> book;
    };
    static std::mutex mutex;
    static std::map<std::pair<int, int>, Kept> all;  // by rate and lanes: one codebook each, the last
    const std::lock_guard<std::mutex> lock(mutex);
    Kept& kept = all[{quarter_bits, most_lanes}];
    if (!kept.book || std::memcmp(kept.codebook.data(), codebook, kStates * sizeof(float)) != 0) {
        kept.codebook.assign(codebook, codebook + kStates);
        kept.book = std::make_shared<const Book>(quarter_bits, codebook, most_lanes);
    }
    return kept.book;
}

void search(const float* x, int tiles, const Book& book, uint8_t* codes) {
    if (book.windows) {
        for (int i = 0; i < tiles; i++) search_windows(x + i * kTile, book, codes + i * 8 * book.quarter_bits);
        return;
    }
    static thread_local Scratch scratch[2];
#if NSTF_X86
    if (book.lanes == 32) return run_avx512(x, tiles, book, codes, scratch);
    if (book.lanes == 16) return run_avx2(x, tiles, book, codes, scratch);
#endif
    run_plain(x, tiles, book, codes, scratch);
}

}  // namespace nstf::search

#endif
