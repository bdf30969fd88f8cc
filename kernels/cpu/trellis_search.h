// The Viterbi search of the trellis quantiser (quantizers/trellis.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace nstf::search {

constexpr int kStateBits = 16, kStates = 1 << kStateBits, kTile = 256;
constexpr int kSeam = 48;  // steps on either side of the seam that decide in which state a tile starts and ends

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

// Costs are 16-bit integers: squared distances in which kRange is 2^15 (doubled some times before they are squared), plus what
// the path cost so far over the cheapest one. Differences wrap around at kRange, so targets end where that still costs more
// than the true distance.
constexpr float kRange = 5, kFarthest = 4.5f;

inline int16_t rounded(float v, float most) {
    return int16_t(std::lrintf(std::min(most, std::max(-most, v)) * (32767 / kRange)));
}

// As the vector code does it.
inline int squared_one(int16_t x, int16_t c, int doublings) {
    int d = int16_t(x - c);
    for (int i = 0; i < doublings; i++) d = std::min(32767, std::max(-32768, 2 * d));
    return ((d * d >> 14) + 1) >> 1;
}

inline void put_bits(uint8_t* codes, int at, int bits, int count) {
    for (int i = 0; i < count; i++) codes[(at + i) >> 3] = uint8_t(codes[(at + i) >> 3] | (bits >> i & 1) << ((at + i) & 7));
}

// Lanes of 16 bits in the widest vectors here, of at most `most_lanes` lanes of 32 bits: 32, 16 or 8. Narrower code is kept
// reachable for tests.
int lanes(int most_lanes);

class Windows;

// A codebook as the search of one rate reads it.
struct Book {
    Steps steps;
    int quarter_bits;
    int doublings;  // of differences before they are squared: the distances of high rates are small
    int every;      // steps between the costs that are kept for tracing back
    int lanes;      // the codes are the same with all of them
    std::vector<int16_t> values;  // by state
    std::unique_ptr<const Windows> windows;  // where the values are in order: nothing below is there then
    // By position modulo 4, in the order in which a step reads them: [middle bits][newest bits][oldest bits][lane], the lanes
    // being the lowest of the middle bits.
    std::vector<int16_t> streams[4];

    // Where the row of costs after step t holds those of an entry: rows are written in that order too.
    int place(int t, int entry) const {
        const int k = steps.at(t), middles = 1 << (kStateBits - k - steps.at(t + 1));
        const int top = entry / middles, middle = entry % middles;
        return ((middle / lanes << k) + top) * lanes + middle % lanes;
    }

    Book(int quarter_bits, const float* codebook, int most_lanes);
    ~Book();
};

// The book of a codebook, kept: making one takes as long as searching a tile.
std::shared_ptr<const Book> kept_book(int quarter_bits, const float* codebook, int most_lanes);

// The codes of one or two tiles: x [tiles, 256] -> codes [tiles, 8 q].
void search(const float* x, int tiles, const Book& book, uint8_t* codes);

}  // namespace nstf::search
