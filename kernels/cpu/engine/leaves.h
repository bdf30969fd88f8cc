// The kinds of matrices; each has its file. They point into arrays that the owner of the matrix keeps alive.
#pragma once

#include "../isa.h"
#include "../packed_matrix.h"
#include "copies.h"
#include "matrix.h"

namespace nstf::engine {

// Whether there are int8 kernels for the instruction set in use.
bool int8_available();

// Packed codes, computed in float32 as `decode` defines them.
Shared packed_exact(const PackedView& view);
// Packed codes times activations rounded to int8 per 8 (one row) or 32 columns (several). Null when there is no kernel for it.
Shared packed_int8(const PackedView& view);
// The same from panels, a copy that needs the view no longer once `copies` have run. Null where there are none.
Shared panels(const PackedView& view, Copies& copies);

struct TrellisSection {
    const uint8_t* codes;  // [row tiles, column tiles, 8 quarter_bits]
    int quarter_bits;
    const float* codebook;  // [65536]
    std::vector<int32_t> rows;
};
// scales: one per row.
Shared trellis(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales, bool exact);

enum class Number { kFloat, kHalf, kBfloat };
Shared dense(int64_t rows, int64_t cols, const void* values, Number type);

// W = A B.
Shared low_rank(Shared a, Shared b);
// W = X + Y.
Shared sum(Shared x, Shared y);
// W = X H S: blocks of an orthonormal Hadamard matrix after random signs, applied to the activations. `id` tells rotations
// apart: equal ones share their work.
Shared rotated(Shared x, std::vector<float> signs, int block, uintptr_t id);
// The same on the side of the rows: W = S H X.
Shared rotated_rows(Shared x, std::vector<float> signs, int block);

// The transpose of a stored matrix.
Shared transposed(Shared x);
// A stored matrix with as many values, in the same order, read as [rows, cols].
Shared reshaped(Shared x, int64_t rows, int64_t cols);

// CP, Tucker decomposition or tensor train of a matrix read as a tensor of shape `view`. parts: the factors; the core and a
// factor or null for every axis; the cores. ranks: one, one per axis, one per inner bond. A prefix of the view's axes must
// make the rows, else null. Throws std::invalid_argument for parts that do not fit.
enum class Decomposition { kCp, kTucker, kTrain };
// How it is multiplied: as costs least, factor by factor, or decoded once.
enum class Way { kBest, kSteps, kDecoded };
Shared chain(Decomposition kind, int64_t rows, int64_t cols, const std::vector<int64_t>& view,
             const std::vector<int64_t>& ranks, const std::vector<Shared>& parts, Way way);

// In place: blocks of x times the orthonormal Hadamard matrix.
void hadamard(float* x, int64_t size, int block);

}  // namespace nstf::engine
