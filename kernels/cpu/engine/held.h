// What the files of the binding share: matrices with the Python objects that they read.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "leaves.h"

namespace nstf::engine {

struct Held {  // a matrix, and what must live as long
    Shared matrix;
    std::vector<nanobind::object> keep;
};

// More threads than any machine has cores for; with them times some shares each, no count overflows.
inline int limited(int threads) { return std::clamp(threads, 1, 4096); }

}  // namespace nstf::engine

void bind_grouped(nanobind::module_& m);
