// Stored matrices read in another way: transposed, or in rows of another length.
#include <algorithm>

#include "factor.h"
#include "leaves.h"

namespace nstf::engine {
namespace {

class Transposed : public Matrix {
  public:
    explicit Transposed(Shared x) : Matrix(x->cols, x->rows), x_(x, x->rows, x->cols) {}
    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        if (stride == rows) return x_.multiply_transposed(x, batch, y, threads);
        Scratch out(batch * rows);
        x_.multiply_transposed(x, batch, out.data(), threads);
        for (int64_t b = 0; b < batch; ++b) std::copy_n(out.data() + b * rows, rows, y + b * stride);
    }
    void decode(int64_t row, float* out) const override {
        Scratch line(x_.cols);
        for (int64_t k = 0; k < cols; ++k) {
            x_.decode(k, 1, line.data());
            out[k] = line.data()[row];
        }
    }
    std::string kernel() const override { return "transposed " + x_.kernel(); }

  private:
    Factor x_;
};

class Reshaped : public Matrix {
  public:
    Reshaped(Shared x, int64_t rows, int64_t cols) : Matrix(rows, cols), x_(std::move(x), rows, cols) {}
    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        if (stride == rows) return x_.multiply(x, batch, y, threads, false);
        Scratch out(batch * rows);
        x_.multiply(x, batch, out.data(), threads, false);
        for (int64_t b = 0; b < batch; ++b) std::copy_n(out.data() + b * rows, rows, y + b * stride);
    }
    void decode(int64_t row, float* out) const override { x_.decode(row, 1, out); }
    void decode_rows(int64_t first, int64_t count, float* out) const override { x_.decode(first, count, out); }
    std::string kernel() const override { return "reshaped, " + x_.kernel(); }

  private:
    Factor x_;
};

}  // namespace

Shared transposed(Shared x) { return std::make_shared<Transposed>(std::move(x)); }

Shared reshaped(Shared x, int64_t rows, int64_t cols) { return std::make_shared<Reshaped>(std::move(x), rows, cols); }

}  // namespace nstf::engine
