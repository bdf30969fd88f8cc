// The Viterbi search where values are in order: the rates whose values are quantiles at a multiple of the state.
//
// Let p be the state times the multiplier, modulo 2^16. Values rise with p, and a state far from the target lies on no good
// path, so a step looks at a window of p only. With K bits shifted in by the step, M (the least cost for the 16 - K newer bits
// of the state before) is kept by r = p mod 2^(16 - K), the same for all states that follow. With L bits in the next step,
// write p = 2^L h + c: c stands for the L oldest bits, over which the next M is the minimum, and that M's own r is
// h + shift[c] mod 2^(16 - L), shift[c] = (c - oldest * multiplier) / 2^L. So
//     next M[h + shift[c]] = min over c of  distance(h, c) + M[(2^L h + c) mod 2^(16 - K)],
// for each c a run of h on both sides, once M is transposed to [c][h]. A result looks at those c whose h is nearest to the
// middle of the window.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "trellis_search.h"

namespace nstf::search {

constexpr int kBlock = 32;        // results that are found together, from the same c
constexpr int kMostSources = 12;  // c's that a result is the minimum over, at most

struct Source {
    int32_t m;         // in the transposed M
    int32_t distance;  // in the distances, from the middle of the window
};

// The steps of one K and L.
struct WindowStep {
    int k, l;
    int results, period;          // 2^(16 - L), 2^(16 - K - L): how many h there are, and after how many M is the same again
    int stride;                   // of a c in the transposed M: a period and the first block again, as runs pass the end
    std::vector<int16_t> values;  // [2^max(0, L - 4)][h]
    std::vector<Source> sources;  // [results / kBlock][kMostSources], from the middle of the window outwards
    int span[kMostSources + 1];   // by number of sources: how far their h are from the middle, whole blocks
    int reach[kMostSources + 1];  // by number of sources: how far from the middle all h are looked at

    void prepare(int k_bits, int l_bits, const std::vector<int16_t>& by_p);
    int sets() const { return l > 4 ? 1 << (l - 4) : 1; }
    int most() const { return std::min(kMostSources, 1 << l); }
};

struct Window {
    int16_t middle;  // in blocks of h
    int16_t sources;
};

class Windows {
public:
    // Null where the values are not in order.
    static std::unique_ptr<const Windows> make(int quarter_bits, const float* codebook);

    const WindowStep& step(int t) const { return steps_[t & 3]; }
    Window window(int t, int16_t target) const { return windows_[t & 3][size_t(target + 32768) >> kCellBits]; }
    int doublings() const { return doublings_; }

private:
    static constexpr int kCellBits = 6;
    int doublings_ = 0;
    WindowStep steps_[4];
    std::vector<Window> windows_[4];  // by target
};

// The codes of a tile: x [256] -> codes [8 q].
void search_windows(const float* x, const Book& book, uint8_t* codes);

}  // namespace nstf::search
