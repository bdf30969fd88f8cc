// Products of a mixture of experts: every row of activations has the matrix of its expert, and rows are sorted by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"

namespace nstf::engine {

// What is a sum of matrices, which may be multiplied each on its own.
class Terms {
  public:
    virtual ~Terms() = default;
    virtual void terms(std::vector<Matrix*>& out) = 0;
};
// The matrices whose sum a matrix is: itself alone unless it is a sum.
void terms_of(Matrix* matrix, std::vector<Matrix*>& out);

// Sorts the choices of a router. index: [count] experts, where `experts` itself stands for none. order: the places in `index`, by
// expert and within one as they came, those of none last; offsets: [experts + 1], where the places of each expert begin.
// Throws std::invalid_argument for an expert that is not there.
void group(const int64_t* index, int64_t count, int64_t experts, int64_t* order, int64_t* offsets);

// y[i] = x[i] W_e^T for the rows i from offsets[e] to offsets[e + 1] of every expert e. y: [offsets[experts]][rows].
// order, choices: row i of the activations is x[order[i] / choices], or x[i] where `order` is null. Null matrices have no rows.
// All experts are one parallel loop over pieces (expert, range of rows of its weight); weights are read as they are stored.
void multiply_grouped(const std::vector<Matrix*>& matrices, const int64_t* offsets, const float* x, const int64_t* order, int64_t choices,
                      float* y, int threads);

// y[t] = sum over the choices of token t of its weight times its row of `parts`, in the order of the choices. parts: [taken][cols],
// as `order` sorted them; weights: [tokens][choices]; choices of none add nothing. y: [tokens][cols].
void combine(const float* parts, const int64_t* order, int64_t taken, const float* weights, int64_t tokens, int64_t choices, int64_t cols,
             float* y, int threads);

}  // namespace nstf::engine
