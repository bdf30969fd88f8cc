// An encoded matrix as the engine uses it: a few activations times it, or one of its rows.
//
// A new format is a subclass of Leaf. Its product has two steps, since several matrices often share their activations (q, k and
// v; gate and up): `prepare` brings the activations into the form its kernel reads, then `run` works on ranges of rows
// on several threads. Trees of matrices (low rank, sums, rotations) are other subclasses of Matrix.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../parallel.h"
#include "buffer.h"

namespace nstf::engine {

// Activations as a kernel reads them; each kind of leaf uses the fields it needs.
struct Input {
    const float* x = nullptr;  // [batch, cols] as they came, set by `reserve` of the leaves that read them so
    int64_t batch = 0;
    Buffer<float> floats;      // rotated, padded or reordered
    Buffer<int8_t> codes;
    Buffer<int16_t> wide;
    Buffer<float> scales, sums;
    int64_t stride = 0, scales_stride = 0, sums_stride = 0;
};

// Rows of codes as bytes, for products whose activations lie word by word (convolution.h). Columns come 64 at a time, padded to
// whole chunks; even_odd: of each 64 the even ones first. A weight is scale * (byte - middle), or scale * byte - zero where
// there are zero points (`zeros`). wide, run: as the pieces of a set have them (packed_int8.h).
struct ByteRows {
    bool even_odd, wide, zeros, is_signed;
    int run;
    int32_t middle;
    int64_t group, groups, chunks;  // columns of a group; groups and chunks of a row
    int unit;                       // rows that are unpacked together start at multiples of this
};

class Matrix {
  public:
    Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols) {}
    virtual ~Matrix() = default;
    const int64_t rows, cols;

    // y[b, r] = sum_k x[b, k] W[r, k]; x: [batch, cols], y: [batch, stride].
    virtual void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) = 0;
    // Row `row`, decoded.
    virtual void decode(int64_t row, float* out) const = 0;
    // `count` rows from `first`, decoded: [count, cols].
    virtual void decode_rows(int64_t first, int64_t count, float* out) const {
        for (int64_t i = 0; i < count; ++i) decode(first + i, out + i * cols);
    }
    // What runs, for reports.
    virtual std::string kernel() const = 0;
};

class Leaf : public Matrix {
  public:
    using Matrix::Matrix;
    // Leaves of the same width and the same key share what `prepare` makes.
    virtual uintptr_t key() const = 0;
    // Room for `batch` rows of activations.
    virtual void reserve(const float* x, int64_t batch, Input& in) const = 0;
    // Rows first..end-1 of x, each on its own, so that several threads may share the work.
    virtual void prepare(const float* x, int64_t first, int64_t end, Input& in) const = 0;
    // Places that `rows` is called for; more than rows where they are padded.
    virtual int64_t places() const { return rows; }
    // Ranges of places start at multiples of this.
    virtual int64_t unit() const { return 1; }
    virtual void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const = 0;
    // Where the codes of places first..end-1 lie, for who fetches them ahead; nothing where they do not lie together.
    virtual Ahead codes(int64_t first, int64_t end) const { return static_cast<void>(first), static_cast<void>(end), Ahead{}; }

    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override;

    // How `unpack` gives rows; null for leaves that do not.
    virtual const ByteRows* byte_rows() const { return nullptr; }
    // Rows first to first + count - 1: codes [count][64 chunks], scales [count][groups] and, where there are zero points, zeros
    // alike. For at most kUnpacked rows.
    virtual void unpack(int64_t first, int count, uint8_t* codes, float* scales, float* zeros) const {
        static_cast<void>(first), static_cast<void>(count), static_cast<void>(codes);
        static_cast<void>(scales), static_cast<void>(zeros);
    }
};
constexpr int kUnpacked = 32;

using Shared = std::shared_ptr<Matrix>;

// Several matrices with the same activations, in one parallel region where all are leaves. y[i]: [batch, stride[i]].
// next: the matrices that are multiplied after these: threads that have nothing else to do fetch the beginnings of their shares.
void multiply_all(const std::vector<Matrix*>& matrices, const float* x, int64_t batch, const std::vector<float*>& y,
                  const std::vector<int64_t>& strides, int threads, const std::vector<Matrix*>& next = {});

}  // namespace nstf::engine
