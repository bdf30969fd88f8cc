// What a transformer does beside its matrices, for one instruction set: ops.cpp includes this file once per set, so there is
// no include guard, and only files of the same kind are included here. Loops are plain; the compiler
// turns them into vectors of the set's width.

#include "exp.h"

// y = x / rms(x) * weight.
static void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* y) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) total += x[i] * x[i];
    const float by = 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) y[i] = x[i] * by * weight[i];
}

// x += y.
static void add(float* x, const float* y, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) x[i] += y[i];
}

// gate = act(gate) * up; SiLU, or GELU by tanh.
static void gated(float* gate, const float* up, int64_t size, bool gelu) {
    const ExpEnds ends;
    const float low = ends.low, high = ends.high;
    if (gelu) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = gate[i], z = 0.7978845608f * (g + 0.044715f * g * g * g);
            gate[i] = g / (1.0f + fast_exp(-2.0f * z, low, high)) * up[i];  // 1 + tanh z = 2 / (1 + e^-2z)
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) gate[i] = gate[i] / (1.0f + fast_exp(-gate[i], low, high)) * up[i];
    }
}

// Pairs (i, i + size / 2) turned by an angle each.
static void rope(float* x, const float* cosine, const float* sine, int64_t size) {
    const int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

#include "../halves.h"
#include "products.h"

static void to_halves(const float* in, int64_t count, int64_t step, uint16_t* out) {
    for (int64_t i = 0; i < count; ++i) {
#if NSTF_ISA >= 2
        out[i * step] = static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(in[i]), _MM_FROUND_TO_NEAREST_INT)));
#else
        out[i * step] = float_to_half(in[i]);
#endif
    }
}

static void from_bfloats(const uint16_t* in, int64_t count, float* out) {
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) out[k] = bfloat_to_float(in[k]);
}

static const Ops kOps = {rms_norm, add, gated, rope, to_halves, halves_to_floats, from_bfloats, products,
                         mixtures, multiply_add, hadamard};
