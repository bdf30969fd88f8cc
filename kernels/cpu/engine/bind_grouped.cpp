// Grouped products of experts for Python. What Python may do to the object meanwhile cannot matter: a call copies its pointers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "grouped.h"
#include "held.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nstf::engine {
namespace {

// The matrices [rows, cols] of experts, each made when it is first hit.
class Grouped {
  public:
    Grouped(int64_t experts, int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {
        if (experts < 1 || rows < 1 || cols < 1) throw std::invalid_argument("grouped: no experts, or matrices without elements");
        held_.resize(static_cast<size_t>(experts));
    }
    void set(int64_t expert, const Held& matrix) {
        if (expert < 0 || expert >= count() || matrix.matrix->rows != rows_ || matrix.matrix->cols != cols_)
            throw std::invalid_argument("grouped: another expert or shape");
        Held& own = held_[static_cast<size_t>(expert)];
        if (own.matrix == nullptr) own = matrix;  // another thread may be multiplying with the one that is there
    }
    // Experts that have rows and no matrix yet. offsets: int64 [experts + 1].
    std::vector<int64_t> missing(uintptr_t offsets) const {
        const auto* at = reinterpret_cast<const int64_t*>(offsets);
        std::vector<int64_t> found;
        for (int64_t e = 0; e < count(); ++e)
            if (at[e + 1] > at[e] && held_[static_cast<size_t>(e)].matrix == nullptr) found.push_back(e);
        return found;
    }
    // Addresses: offsets int64 [experts + 1], x float32, order int64 or 0, y float32 [offsets[experts], rows].
    void multiply(uintptr_t offsets, uintptr_t x, uintptr_t order, int64_t choices, uintptr_t y, int threads) const {
        if (choices < 1) throw std::invalid_argument("grouped: no choices");
        if (!missing(offsets).empty()) throw std::invalid_argument("grouped: an expert that is hit has no matrix");
        std::vector<Shared> kept;
        std::vector<Matrix*> matrices;
        for (const Held& h : held_) {
            kept.push_back(h.matrix);
            matrices.push_back(h.matrix.get());
        }
        nb::gil_scoped_release release;
        multiply_grouped(matrices, reinterpret_cast<const int64_t*>(offsets), reinterpret_cast<const float*>(x),
                         reinterpret_cast<const int64_t*>(order), choices, reinterpret_cast<float*>(y), limited(threads));
    }

  private:
    int64_t count() const { return static_cast<int64_t>(held_.size()); }
    int64_t rows_, cols_;
    std::vector<Held> held_;
};

}  // namespace
}  // namespace nstf::engine

void bind_grouped(nb::module_& m) {
    using namespace nstf::engine;
    nb::class_<Grouped>(m, "GroupedMatrices")
        .def(nb::init<int64_t, int64_t, int64_t>(), "experts"_a, "rows"_a, "cols"_a)
        .def("set", &Grouped::set, "expert"_a, "matrix"_a)
        .def("missing_at", &Grouped::missing, "offsets"_a)
        .def("multiply_at", &Grouped::multiply, "offsets"_a, "x"_a, "order"_a, "choices"_a, "y"_a, "threads"_a);
    m.def("group_at", [](uintptr_t index, int64_t count, int64_t experts, uintptr_t order, uintptr_t offsets) {
        if (count < 0 || experts < 1) throw std::invalid_argument("grouped: no experts");
        nstf::engine::group(reinterpret_cast<const int64_t*>(index), count, experts, reinterpret_cast<int64_t*>(order),
                            reinterpret_cast<int64_t*>(offsets));
    }, "index"_a, "count"_a, "experts"_a, "order"_a, "offsets"_a, "Sorts choices of experts, int64 [count], by expert.");
    m.def("combine_at", [](uintptr_t parts, uintptr_t order, int64_t taken, uintptr_t weights, int64_t tokens, int64_t choices,
                           int64_t cols, uintptr_t y, int threads) {
        if (taken < 0 || tokens < 0 || choices < 1 || taken > tokens * choices) throw std::invalid_argument("grouped: other sizes");
        nb::gil_scoped_release release;
        combine(reinterpret_cast<const float*>(parts), reinterpret_cast<const int64_t*>(order), taken,
                reinterpret_cast<const float*>(weights), tokens, choices, cols, reinterpret_cast<float*>(y), limited(threads));
    }, "parts"_a, "order"_a, "taken"_a, "weights"_a, "tokens"_a, "choices"_a, "cols"_a, "y"_a, "threads"_a,
       "The weighted sum of each token's experts.");
}
