// How fast this machine reads memory: what a decoding token is measured against.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>

#include "../parallel.h"
#include "buffer.h"

namespace nb = nanobind;

namespace nstf::engine {
namespace {

// Bytes per second of the fastest of some passes over `size` bytes.
double read_bandwidth(int64_t size, int threads, int passes) {
    if (size < 4096 || threads < 1 || passes < 1) throw std::invalid_argument("read_bandwidth: sizes out of range");
    nb::gil_scoped_release release;
    Buffer<uint64_t> data(size / 8);
    constexpr int64_t kShare = 1 << 16;  // words of a task
    const int64_t words = size / 8, tasks = (words + kShare - 1) / kShare;
    Buffer<uint64_t> sums(tasks * 8);
    double best = 0;
    for (int pass = 0; pass < passes; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        auto task = [&](int64_t i) {
            const uint64_t* at = data.data() + i * kShare;
            const int64_t count = i + 1 == tasks ? words - i * kShare : kShare;
            uint64_t total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t k = 0; k < count; ++k) total += at[k];
            sums.data()[i * 8] = total;
        };
        parallel_for(threads, tasks, task);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(words * 8) / took.count());
    }
    return best;
}

}  // namespace
}  // namespace nstf::engine

void bind_bandwidth(nb::module_& m) {
    using namespace nb::literals;
    m.def("read_bandwidth", &nstf::engine::read_bandwidth, "size"_a, "threads"_a, "passes"_a = 5,
          "Bytes a second read from `size` bytes of memory by `threads` threads.");
}
