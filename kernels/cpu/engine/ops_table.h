// The operations of ops.h, for the instruction set of this processor.
#pragma once

#include <cstdint>

namespace nstf::engine {

// One head's keys and values in int8, with a scale for every position (layouts: attention_int8.h).
struct Int8Head {
    const int8_t* keys;
    const float* key_scales;
    const int8_t* values;
    const float* value_scales;
};

struct Ops {
    void (*rms_norm)(const float* x, const float* weight, int64_t size, float epsilon, float* y);
    void (*add)(float* x, const float* y, int64_t size);
    void (*gated)(float* gate, const float* up, int64_t size, bool gelu);
    void (*rope)(float* x, const float* cosine, const float* sine, int64_t size);
    void (*to_halves)(const float* in, int64_t count, int64_t step, uint16_t* out);
    void (*from_halves)(const uint16_t* in, int64_t count, float* out);
    void (*attend)(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                   int64_t window, float scale, const uint16_t* keys, const uint16_t* values, float* out,
                   int64_t out_stride, float* scores, float* room);
    // Null where heads that share keys had better be worked on together.
    void (*attend_one)(const float* q, int64_t size, int64_t position, int64_t window, float scale,
                       const uint16_t* keys, const uint16_t* values, float* out, float* scores);
    // Numbers of one head as bytes, the two of a pair `within` from each other and pairs `step`; returns their scale.
    float (*to_int8)(const float* in, int64_t count, int64_t within, int64_t step, int8_t* out);
    void (*attend_int8)(const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t size, int64_t first,
                        int64_t window, float scale, const Int8Head& head, float* out, int64_t out_stride, float* scores,
                        float* room);
    void (*attend_one_int8)(const float* q, int64_t size, int64_t position, int64_t window, float scale,
                            const Int8Head& head, float* out, float* scores);
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
