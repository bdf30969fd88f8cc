// What the int8 kernels of all instruction sets share that needs none of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "leaves.h"

namespace nstf::engine {

constexpr int64_t kChunk = 64, kBlock = 32;  // columns unpacked at a time; columns of a sum of activations
constexpr int kPanel = 16;                   // rows that are unpacked side by side
constexpr int64_t kSeveral = 4;              // rows of activations from which that pays
// Bytes between what is read and what is fetched into the caches. The processor's own prefetcher loses its way between rows and
// stops at every page, so that without this, one row of activations reaches a quarter of the bandwidth on a Zen 4. Into the
// first cache where that can hold what is on its way: short rows, or a single one; else into the second.
constexpr int64_t kNext = 512, kNear = 2048, kFar = 4096;
constexpr int64_t kLongRow = 2048;  // bytes
// Bytes that are read beyond the end of what is needed, at most.
constexpr int64_t kBeyond = 64;

// The largest value of a table.
inline float largest(const PackedMatrix& w) {
    float top = 0;
    for (float v : w.table) top = std::max(top, std::fabs(v));
    return top;
}

// A table of 16 values rounded to int8, and `moved` up.
inline void round_table(const PackedMatrix& w, int moved, uint8_t* bytes) {
    const float top = largest(w);
    for (int i = 0; i < 16; ++i)
        bytes[i] = static_cast<uint8_t>(moved + (top > 0 ? std::lround(w.table[i] / top * 127) : 0));
}

// Whether the table is that of plain integers, from -8.
inline bool uniform(const PackedMatrix& w) {
    for (int i = 0; i < 16; ++i)
        if (w.table[i] != static_cast<float>(i - 8)) return false;
    return true;
}

// `bytes` bytes from `p`, which is `p` itself where kBeyond more may be read.
inline const uint8_t* readable(const uint8_t* p, int64_t bytes, const uint8_t* end, uint8_t* room) {
    if (p + bytes + kBeyond <= end) return p;
    std::memcpy(room, p, static_cast<size_t>(std::min<int64_t>(bytes, end - p)));
    return room;
}

// The leaf of a matrix in one instruction set; each of the files packed_int8_*.cpp holds some.
using MakeInt8 = Shared (*)(const PackedView&);
// The same in panels (panel_int8.h), whose codes `copies` brings, or null.
using MakePanels = Shared (*)(const PackedView&, Copies&);
#if NSTF_X86
Shared panels_avx512_vbmi(const PackedView&, Copies&);
Shared panels_avx512_vnni(const PackedView&, Copies&);
Shared panels_avx2_vnni(const PackedView&, Copies&);
Shared panels_avx2(const PackedView&, Copies&);
Shared packed_int8_avx512_vbmi(const PackedView&);
Shared packed_int8_avx512_vnni(const PackedView&);
Shared packed_int8_avx2_vnni(const PackedView&);
Shared packed_int8_avx2(const PackedView&);
#elif defined(__aarch64__)
Shared packed_int8_neon(const PackedView&);
#if NSTF_DOTPROD
Shared packed_int8_neon_dot(const PackedView&);
#endif
#endif

}  // namespace nstf::engine
