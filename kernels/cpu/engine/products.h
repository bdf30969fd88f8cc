// Products of small float32 matrices that lie in the caches, for one instruction set (see ops.h, which includes this file).

#include "hadamard.h"

// T rows of activations times R rows of weights.
template <int T, int R>
static void dots(const float* x, int64_t x_stride, const float* w, int64_t cols, float* y, int64_t stride) {
    Vec sum[T][R] = {};
    int64_t k = 0;
    for (; k + kLanes <= cols; k += kLanes)
        for (int r = 0; r < R; ++r) {
            const Vec weights = *reinterpret_cast<const Loose*>(w + r * cols + k);
            for (int t = 0; t < T; ++t)
                sum[t][r] = fused(weights, *reinterpret_cast<const Loose*>(x + t * x_stride + k), sum[t][r]);
        }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) {
            // Halves added up: one number after the other would take as long as some hundred columns.
            float lanes[kLanes];
            *reinterpret_cast<Loose*>(lanes) = sum[t][r];
            for (int64_t half = kLanes / 2; half > 0; half /= 2)
                for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
            float total = lanes[0];
            for (int64_t j = k; j < cols; ++j) total = fused(w[r * cols + j], x[t * x_stride + j], total);
            y[t * stride + r] = total;
        }
}

// y[b, r] = sum_k x[b, k] w[r, k]. x: [batch][x_stride], w: [rows][cols], y: [batch][stride].
static void products(const float* x, int64_t batch, int64_t x_stride, const float* w, int64_t rows, int64_t cols, float* y,
                     int64_t stride) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        int64_t b = 0;
        for (; b + 4 <= batch; b += 4) dots<4, 4>(x + b * x_stride, x_stride, w + r * cols, cols, y + b * stride + r, stride);
        for (; b < batch; ++b) dots<1, 4>(x + b * x_stride, x_stride, w + r * cols, cols, y + b * stride + r, stride);
    }
    for (; r < rows; ++r)
        for (int64_t b = 0; b < batch; ++b)
            dots<1, 1>(x + b * x_stride, x_stride, w + r * cols, cols, y + b * stride + r, stride);
}

// T rows of sums, C vectors wide.
template <int T, int C>
static void mixed(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t count, float* y,
                  int64_t stride) {
    Vec sum[T][C];
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < C; ++c) sum[t][c] = *reinterpret_cast<const Loose*>(y + t * stride + c * kLanes);
    for (int64_t k = 0; k < count; ++k)
        for (int c = 0; c < C; ++c) {
            const Vec weights = *reinterpret_cast<const Loose*>(w + k * w_stride + c * kLanes);
            for (int t = 0; t < T; ++t) sum[t][c] = fused(weights, all_of(x[t * x_stride + k]), sum[t][c]);
        }
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < C; ++c) *reinterpret_cast<Loose*>(y + t * stride + c * kLanes) = sum[t][c];
}

// y[b, n] += sum_k x[b, k] w[k, n]. x: [batch][x_stride], w: [count][w_stride], y: [batch][stride]; n below `cols`.
static void mixtures(const float* x, int64_t batch, int64_t x_stride, const float* w, int64_t w_stride, int64_t count,
                     int64_t cols, float* y, int64_t stride) {
    int64_t n = 0;
    auto tokens = [&](auto wide) {
        constexpr int C = decltype(wide)::value;
        int64_t b = 0;
        for (; b + 4 <= batch; b += 4)
            mixed<4, C>(x + b * x_stride, x_stride, w + n, w_stride, count, y + b * stride + n, stride);
        for (; b < batch; ++b)
            mixed<1, C>(x + b * x_stride, x_stride, w + n, w_stride, count, y + b * stride + n, stride);
        n += C * kLanes;
    };
    while (n + 4 * kLanes <= cols) tokens(std::integral_constant<int, 4>{});
    while (n + kLanes <= cols) tokens(std::integral_constant<int, 1>{});
    for (int64_t b = 0; b < batch && n < cols; ++b)
        for (int64_t k = 0; k < count; ++k)
            for (int64_t i = n; i < cols; ++i) y[b * stride + i] += x[b * x_stride + k] * w[k * w_stride + i];
}

// y += a b, element by element.
static void multiply_add(const float* a, const float* b, int64_t size, float* y) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) y[i] += a[i] * b[i];
}
