// Activations to int8 in loops that the compiler turns into vectors, for the sets of at most 16 registers' width that packed_int8.h
// is compiled for; included like it, after the pieces of the set.

// 64 activations: their codes, their scales and the sums of the two blocks. Scales: a lane for each sum of four columns where a
// set has vectors of its own for each, else for each eight columns (the even and the odd ones are in the same lane); not fine:
// one a block.
template <bool EVEN_ODD>
inline void quantise_plainly(const float* x, bool fine, int8_t* codes, float* scales, float* sums) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    alignas(64) float scale[8], inverse[8];
    alignas(64) int32_t q[kChunk];
    // Without their signs floats have the order of their bits, where NaN comes last. As floats the maximum would lose it.
    alignas(64) int32_t size[8];
    for (int g = 0; g < 8; ++g) {
        int32_t top = 0;
#pragma omp simd reduction(max : top)
        for (int i = 0; i < 8; ++i) top = std::max(top, __builtin_bit_cast(int32_t, x[8 * g + i]) & 0x7fffffff);
        size[g] = top;
    }
    if (!fine)
        for (int h = 0; h < 8; h += 4)
            size[h] = size[h + 1] = size[h + 2] = size[h + 3] =
                std::max(std::max(size[h], size[h + 1]), std::max(size[h + 2], size[h + 3]));
#pragma omp simd
    for (int g = 0; g < 8; ++g) {
        const float top = __builtin_bit_cast(float, size[g]);
        inverse[g] = top > 1e-30f ? 127.0f / top : 0.0f;
        scale[g] = top * (1.0f / 127) + (top - top);  // NaN where `top` is NaN or infinite
    }
    for (int h = 0; h < 2; ++h) {
        float total = 0;
        for (int g = 4 * h; g < 4 * h + 4; ++g) {
            int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < 8; ++i) {
                const float moved = x[8 * g + i] * inverse[g] + kRound;
                q[8 * g + i] = __builtin_bit_cast(int32_t, moved) - 0x4b400000;
                sum += q[8 * g + i];
            }
            total += static_cast<float>(sum) * scale[g];
        }
        sums[h] = total;
    }
    if (EVEN_ODD) {
#pragma omp simd
        for (int i = 0; i < 32; ++i) {
            codes[i] = static_cast<int8_t>(q[2 * i]);
            codes[32 + i] = static_cast<int8_t>(q[2 * i + 1]);
        }
    } else {
#pragma omp simd
        for (int i = 0; i < kChunk; ++i) codes[i] = static_cast<int8_t>(q[i]);
    }
    if (!fine) {
        scales[0] = scale[0];
        scales[1] = scale[4];
    } else if (EVEN_ODD) {
        std::copy_n(scale, 8, scales);
    } else {
        for (int i = 0; i < 16; ++i) scales[i] = scale[i / 2];
    }
}
