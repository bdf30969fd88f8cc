// The likeliest token: a pass over the vocabulary for every token that is decoded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace nstf {

// Index of the first largest of n >= 1 values; of the first NaN where there is one, so that nothing is chosen past it.
// Block by block, since a loop that keeps the index beside the value does not become vectors.
inline int64_t argmax(const float* values, int64_t n) {
    constexpr int64_t kBlock = 1024;
    float best = -std::numeric_limits<float>::infinity();
    int64_t found = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const float* block = values + begin;
        const int64_t count = std::min(kBlock, n - begin);
        float most = block[0];
        int nan = 0;
#pragma omp simd reduction(max : most) reduction(| : nan)
        for (int64_t i = 0; i < count; ++i) {
            most = block[i] > most ? block[i] : most;
            nan |= block[i] != block[i];
        }
        if (nan) return begin + (std::find_if(block, block + count, [](float v) { return v != v; }) - block);
        if (most > best) {
            best = most;
            found = begin;
        }
    }
    const int64_t end = std::min(found + kBlock, n);
    return std::find(values + found, values + end, best) - values;
}

}  // namespace nstf
