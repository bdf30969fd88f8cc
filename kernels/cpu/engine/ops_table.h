// The operations of ops.h, for the instruction set of this processor.
#pragma once

#include <cstdint>

namespace nstf::engine {

struct Ops {
    void (*rms_norm)(const float* x, const float* weight, int64_t size, float epsilon, float* y);
    void (*add)(float* x, const float* y, int64_t size);
    void (*gated)(float* gate, const float* up, int64_t size, bool gelu);
    void (*rope)(float* x, const float* cosine, const float* sine, int64_t size);
    void (*to_halves)(const float* in, int64_t count, int64_t step, uint16_t* out);
    void (*from_halves)(const uint16_t* in, int64_t count, float* out);
    void (*from_bfloats)(const uint16_t* in, int64_t count, float* out);
    // Of products.h.
    void (*products)(const float* x, int64_t batch, int64_t x_stride, const float* w, int64_t rows, int64_t cols, float* y,
                     int64_t stride);
    void (*mixtures)(const float* x, int64_t batch, int64_t x_stride, const float* w, int64_t w_stride, int64_t count,
                     int64_t cols, float* y, int64_t stride);
    void (*multiply_add)(const float* a, const float* b, int64_t size, float* y);
    void (*hadamard)(float* x, int64_t size, int block);
};

const Ops& ops();

}  // namespace nstf::engine
