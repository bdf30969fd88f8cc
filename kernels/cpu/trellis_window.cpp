#include "trellis_window.h"

#include "isa.h"

#if defined(__GNUC__) || defined(__clang__)

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#if NSTF_X86
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE inline __attribute__((always_inline))

namespace nstf::search {
namespace {

// The multiplier of kernels/formats/trellis.py, and its inverse modulo 2^16.
constexpr uint32_t kMultiplier = 25115;
constexpr uint32_t inverse_of(uint32_t odd) {
    uint32_t x = odd;  // right in the lowest three bits; each round doubles how many are
    for (int i = 0; i < 4; i++) x *= 2 - odd * x;
    return x & 0xffff;
}
constexpr uint32_t kInverse = inverse_of(kMultiplier);
static_assert(uint16_t(kMultiplier * kInverse) == 1, "not the inverse");

int state_of(int p) { return uint16_t(uint32_t(p) * kInverse); }

// Distances are kept for h this far from the middle of the window, for up to 4 sets of values.
constexpr int kFarH = (kStates >> 4) + 2 * kBlock, kDistances = 2 * kFarH;

struct Scratch {
    Buffer<uint16_t> rows = buffer<uint16_t>(int64_t(kTile + 1 + kSeam) * kStates / 8);
    Buffer<uint16_t> m = buffer<uint16_t>(kStates / 8 + kBlock * 64);
    Buffer<uint16_t> distances = buffer<uint16_t>(int64_t(kDistances) * 4);
    uint16_t taken[kTile + kSeam];  // off the costs before each step
    int64_t stride = 0;
    uint16_t* distance() const { return distances.get() + kFarH; }
    uint16_t* row(int t) const { return rows.get() + (t + kSeam) * stride; }  // M before step t
};

#if NSTF_X86

// Runs begin anywhere, so that longer vectors would lie across two lines of the cache each: AVX-512 was no faster (Zen 4).
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
constexpr int LANES = 16;
typedef uint16_t Cost __attribute__((vector_size(32)));
typedef int16_t Value __attribute__((vector_size(32)));
INLINE Value doubled(Value d) { return (Value)_mm256_adds_epi16((__m256i)d, (__m256i)d); }
INLINE Cost square(Value d) { return (Cost)_mm256_mulhrs_epi16((__m256i)d, (__m256i)d); }
INLINE Cost plus(Cost a, Cost b) { return (Cost)_mm256_adds_epu16((__m256i)a, (__m256i)b); }
INLINE Cost low_words(Cost a, Cost b) { return (Cost)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
INLINE Cost high_words(Cost a, Cost b) { return (Cost)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
template <int WIDTH>
INLINE Cost pieces(const uint16_t* p) {
    if (WIDTH >= LANES) return (Cost)_mm256_loadu_si256((const __m256i*)p);
    const __m128i low = _mm_loadu_si128((const __m128i*)p), high = _mm_loadu_si128((const __m128i*)(p + 8 * WIDTH));
    return (Cost)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
INLINE void store_piece(uint16_t* p, Cost v, int i) {
    _mm_storeu_si128((__m128i*)p, i ? _mm256_extracti128_si256((__m256i)v, 1) : _mm256_castsi256_si128((__m256i)v));
}
#include "trellis_window_body.h"
}  // namespace avx2
#pragma GCC pop_options

#endif

namespace plain {
constexpr int LANES = 8;
typedef uint16_t Cost __attribute__((vector_size(16)));
typedef int16_t Value __attribute__((vector_size(16)));
typedef int32_t Wide __attribute__((vector_size(32)));
INLINE Value doubled(Value d) {
    const Value most = Value{} + int16_t(16383), high = Value{} + int16_t(32767), low = Value{} + int16_t(-32768);
    return d > most ? high : d < ~most ? low : Value(Cost(d) + Cost(d));
}
INLINE Cost square(Value d) {
    const Wide wide = __builtin_convertvector(d, Wide);
    return __builtin_convertvector(((wide * wide >> 14) + 1) >> 1, Cost);
}
INLINE Cost plus(Cost a, Cost b) {
    const Cost sum = a + b;
    return sum | Cost(sum < a);
}
INLINE Cost low_words(Cost a, Cost b) { return Cost{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]}; }
INLINE Cost high_words(Cost a, Cost b) { return Cost{a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]}; }
template <int WIDTH>
INLINE Cost pieces(const uint16_t* p) {
    Cost v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_piece(uint16_t* p, Cost v, int) { std::memcpy(p, &v, sizeof v); }
#include "trellis_window_body.h"
}  // namespace plain

#if NSTF_X86
__attribute__((target("avx2"))) uint16_t step_avx2(const Windows& windows, int t, int16_t target, uint16_t least, Scratch& s) {
    return avx2::any_step(windows, t, target, least, s);
}
#endif
uint16_t step_plain(const Windows& windows, int t, int16_t target, uint16_t least, Scratch& s) {
    return plain::any_step(windows, t, target, least, s);
}

// A tile that is being searched.
struct Search {
    const Windows& windows;
    Scratch& s;
    decltype(&step_plain) step;
    int16_t targets[kTile];

    int16_t target(int t) const { return targets[t & (kTile - 1)]; }

    // Steps first..end-1 from the M in row `first`. For the first `whole` steps nothing is taken off the costs, so that the
    // dearest stay so.
    void forward(int first, int end, int whole) {
        uint16_t least = 0;
        for (int t = first; t < end; t++) {
            if (t < first + whole) least = 0;
            s.taken[t + kSeam] = least;
            least = step(windows, t, target(t), least, s);
        }
    }

    // p after step t, given where its M is in row t + 1: the cheapest, the first of them in the order of the sources.
    int cheapest(int t, int entry) const {
        const WindowStep& at = windows.step(t);
        const Window window = windows.window(t, target(t));
        const int from = (entry - window.middle * kBlock) & (at.results - 1), mask = (kStates >> at.k) - 1;
        int least = 1 << 30, which = 0;
        for (int n = 0; n < window.sources; n++) {
            const Source& source = at.sources[size_t(from / kBlock * kMostSources + n)];
            const int c = source.m / at.stride, set = c >> 4;
            const int h = window.middle * kBlock + source.distance - set * kDistances + from % kBlock;
            if (h < 0 || h >= at.results) continue;
            const int16_t value = at.values[size_t(set * at.results + h)];
            const int beyond = std::abs(int16_t(target(t) - value)) - (32767 >> windows.doublings());
            const int p = (h << at.l) + c, d = squared_one(target(t), value, windows.doublings()) + std::max(0, beyond);
            const int cost = std::min(0xffff, d + uint16_t(s.row(t)[p & mask] - s.taken[t + kSeam]));
            if (cost < least) least = cost, which = p;
        }
        return which;
    }

    // p after step t - 1, given p after step t.
    int previous(int t, int p) const { return cheapest(t - 1, p & ((kStates >> windows.step(t).k) - 1)); }
};

constexpr int kTail = kStates / 512;

// The window for targets low..high that has all values as near as `far`; values: by p.
Window window_of(const WindowStep& step, const std::vector<int16_t>& values, int low, int high, int far) {
    const auto begin = values.begin(), end = values.end();
    int first = int(std::lower_bound(begin, end, low - far) - begin);
    int last = int(std::upper_bound(begin, end, high + far) - begin) - 1;
    // Few states have a value near an end, so that one beside an outlier is often the best that can be had.
    if (first <= kTail) last = std::max(last, kStates / 8);
    if (last >= kStates - 1 - kTail) first = std::min(first, kStates - 1 - kStates / 8);
    first = std::min(first, kStates - 1) >> step.l, last = std::max(last, 0) >> step.l;
    // Far enough from the ends that every result has a source.
    const int edge = step.span[1] / kBlock, blocks = step.results / kBlock;
    const int middle = std::min(blocks - edge, std::max(edge, (first + last + kBlock) / (2 * kBlock)));
    const int half = std::max(last - middle * kBlock, middle * kBlock - first) + 1;
    // Where values are sparse a path needs a choice all the same.
    int sources = step.l == 3 ? 3 : 2;
    while (sources < step.most() && step.reach[sources] < half) sources++;
    return {int16_t(middle), int16_t(sources)};
}

}  // namespace

void WindowStep::prepare(int k_bits, int l_bits, const std::vector<int16_t>& by_p) {
    k = k_bits, l = l_bits;
    results = kStates >> l, period = kStates >> (k + l), stride = period + kBlock;
    for (int set = 0; set < sets(); set++)
        for (int h = 0; h < results; h++) values.push_back(by_p[size_t((h << l) + 16 * set)]);
    std::fill(span, span + kMostSources + 1, 0);
    std::fill(reach, reach + kMostSources + 1, results);
    struct Run {  // the h of a block, from the middle of the window
        int h, c;
        int far() const { return std::abs(2 * h + kBlock - 1); }
    };
    for (int block = 0; block < results / kBlock; block++) {
        std::vector<Run> runs;
        for (int c = 0; c < 1 << l; c++) {
            const int oldest = state_of(c) & ((1 << l) - 1), shift = (c - oldest * int(kMultiplier)) >> l;
            const int h = (block * kBlock - shift) & (results - 1);
            runs.push_back({h > results / 2 ? h - results : h, c});
        }
        const auto nearer = [](const Run& a, const Run& b) { return a.far() != b.far() ? a.far() < b.far() : a.c < b.c; };
        std::sort(runs.begin(), runs.end(), nearer);
        for (int n = 0; n < std::min(int(runs.size()), kMostSources + 1); n++) {
            const auto [h, c] = runs[size_t(n)];
            reach[n] = std::min(reach[n], (runs[size_t(n)].far() - kBlock + 1) / 2);
            if (n == kMostSources) break;
            sources.push_back({c * stride + (h & (period - 1)), h + (c >> 4) * kDistances});
            const int most = std::max(h + kBlock - 1, -h), blocks = (most + kBlock - 1) / kBlock;
            for (int more = n + 1; more <= kMostSources; more++) span[more] = std::max(span[more], blocks * kBlock);
        }
        sources.resize(size_t((block + 1) * kMostSources));
    }
}

std::unique_ptr<const Windows> Windows::make(int quarter_bits, const float* codebook) {
    const Steps bits(quarter_bits);
    if (bits.k[0] < 3) return nullptr;
    std::vector<int16_t> by_p;
    for (int p = 0; p < kStates; p++) {
        const int16_t value = rounded(codebook[state_of(p)], kRange);
        if (p > 0 && (value < by_p.back() || (p % 16 > 0 && value != by_p.back()))) return nullptr;
        by_p.push_back(value);
    }
    auto made = std::make_unique<Windows>();
    // With more, two outliers one after another would take costs to their end.
    made->doublings_ = std::min(2, (quarter_bits - 9) / 4);
    // Of the standard deviation that errors have at this rate, from 1.13 * 4^-bits. On 256 tiles of N(0, 1) the squared error is
    // within 0.07 % of what the widest windows find; 2.0 times costs up to 0.2 % more.
    const float reach = 2.4f * std::sqrt(1.13f * std::pow(0.25f, float(quarter_bits) / 4));
    const int far = rounded(reach, kRange), cell = 1 << kCellBits;
    for (int t = 0; t < 4; t++) {
        made->steps_[t].prepare(bits.at(t), bits.at(t + 1), by_p);
        for (int low = -32768; low < 32768; low += cell)
            made->windows_[t].push_back(window_of(made->steps_[t], by_p, low, low + cell - 1, far));
    }
    return made;
}

void search_windows(const float* x, const Book& book, uint8_t* codes) {
    static thread_local Scratch s;
    const Windows& windows = *book.windows;
    Search search{windows, s, step_plain, {}};
#if NSTF_X86
    if (book.lanes >= 16) search.step = step_avx2;
#endif
    for (int t = 0; t < kTile; t++) search.targets[t] = rounded(x[t], kFarthest);
    s.stride = kStates >> book.steps.k[0];
    // First pass: around the seam, from nowhere, to find the state in which the tile may start and end.
    std::fill_n(s.row(-kSeam), kStates >> book.steps.at(-kSeam), uint16_t(0));
    search.forward(-kSeam, kSeam, 0);
    const uint16_t* last = s.row(kSeam);
    int p = search.cheapest(kSeam - 1, int(std::min_element(last, last + windows.step(kSeam - 1).results) - last));
    for (int t = kSeam - 1; t >= 0; t--) p = search.previous(t, p);
    // Second pass: the whole tile, from that state to that state.
    const int k = book.steps.at(0);
    std::fill_n(s.row(0), kStates >> k, uint16_t(0xffff));
    s.row(0)[(uint32_t(state_of(p) >> k) * kMultiplier) & uint32_t((kStates >> k) - 1)] = 0;
    search.forward(0, kTile, kStateBits / k + 1);
    std::memset(codes, 0, size_t(8 * book.quarter_bits));
    for (int t = kTile - 1, end = 64 * book.quarter_bits; t >= 0; t--) {
        const int count = book.steps.at(t);
        end -= count;
        put_bits(codes, end, state_of(p) >> (kStateBits - count), count);
        if (t > 0) p = search.previous(t, p);
    }
}

}  // namespace nstf::search

#endif
