// A factor of a decomposed matrix: an encoded matrix read in another shape, and what products need of it.
#pragma once

#include "matrix.h"

namespace nstf::engine {

// The same values in the same order as `stored`, as [rows, cols]. Where the shapes agree, products run through the stored
// matrix's own kernel; otherwise some rows at a time are decoded into the caches and multiplied in float32.
class Factor {
  public:
    // Throws std::invalid_argument where the numbers of values differ.
    Factor(Shared stored, int64_t rows, int64_t cols);
    const int64_t rows, cols;

    // y[b] = F x[b]; x: [batch, cols], y: [batch, rows]. exact: float32 whatever the stored matrix's kernel does.
    void multiply(const float* x, int64_t batch, float* y, int threads, bool exact);
    // y[b] = F^T x[b]; x: [batch, rows], y: [batch, cols].
    void multiply_transposed(const float* x, int64_t batch, float* y, int threads) const;
    // Rows first..first+count-1 in float32.
    void decode(int64_t first, int64_t count, float* out) const;

    std::string kernel() const { return stored_->kernel(); }
    // Whether `multiply` runs in int8.
    bool narrow() const;

  private:
    bool as_stored() const { return stored_->rows == rows; }
    Shared stored_;
};

}  // namespace nstf::engine
