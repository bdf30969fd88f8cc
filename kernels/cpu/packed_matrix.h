// A matrix of packed codes as the row kernels see it; see packed_rows.h for what is done with it.
#pragma once

#include <cstdint>

namespace nstf {

enum class Code : int { kTable4, kBytes, kBits, kFloat8 };  // 16-entry table; 8-bit and other integers; E4M3
enum class Scale : int { kHalf, kFloat, kSteps, kPower };  // f16; f32; super * (u8 + 1) / 256; 2^(u8 - 127)

struct PackedMatrix {
    int64_t rows = 0, cols = 0;
    int64_t stride = 0;  // of y, from one row of activations to the next; 0: rows
    int64_t group = 0, groups = 0;  // columns per group (at most cols), groups per row
    int bits = 4;
    Code code = Code::kTable4;
    Scale scale_kind = Scale::kHalf;
    const uint8_t* codes = nullptr;  // [rows, row_bytes]
    const uint8_t* codes_end = nullptr;
    int64_t row_bytes = 0;
    const void* scale = nullptr;       // [rows, groups]
    const uint16_t* super_ = nullptr;  // f16 [rows], for Scale::kSteps
    const uint8_t* zeros = nullptr;    // packed zero points [rows, zero_bytes], or null
    int64_t zero_bytes = 0;
    float factor = 1.0f;   // every scale is multiplied by this (an exact power of two)
    float table[16] = {};  // for Code::kTable4; of int, the centre 8 is taken off
};

// y[m, r] = sum_k x[m, k] * W[r, k].  x: [batch, cols] contiguous, y: [batch, stride].
using MatmulFn = void (*)(const PackedMatrix&, const float* x, int64_t batch, float* y, int threads);
// out[i, k] = W[start + i, k] for `count` rows.
using DecodeFn = void (*)(const PackedMatrix&, int64_t start, int64_t count, float* out, int threads);

// A matrix with the kernels chosen for it.
struct PackedView {
    PackedMatrix w;
    MatmulFn matmul = nullptr;
    DecodeFn decode = nullptr;
    const char* isa = "";  // that they are written for
};

}  // namespace nstf
