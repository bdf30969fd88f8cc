// How fast this machine reads memory: what a decoding token is measured against.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>

#include "../parallel.h"
#include "buffer.h"

namespace nb = nanobind;

namespace nstf::engine {
namespace {

// Adds up `words` numbers with `threads` threads, which read them as fast as they come.
uint64_t read_words(const uint64_t* data, int64_t words, int threads) {
    constexpr int64_t kShare = 1 << 16;  // words of a task
    const int64_t tasks = (words + kShare - 1) / kShare;
    std::atomic<uint64_t> all{0};
    auto task = [&](int64_t i) {
        const uint64_t* at = data + i * kShare;
        const int64_t count = i + 1 == tasks ? words - i * kShare : kShare;
        uint64_t total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t k = 0; k < count; ++k) total += at[k];
        all.fetch_add(total, std::memory_order_relaxed);
    };
    parallel_for(threads, tasks, task);
    return all.load();
}

// Bytes per second of the fastest of some passes over `size` bytes.
double read_bandwidth(int64_t size, int threads, int passes) {
    if (size < 4096 || threads < 1 || passes < 1) throw std::invalid_argument("read_bandwidth: sizes out of range");
    nb::gil_scoped_release release;
    Buffer<uint64_t, LargePages> data(size / 8);
    double best = 0;
    for (int pass = 0; pass < passes; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        read_words(data.data(), size / 8, threads);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(size) / took.count());
    }
    return best;
}

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;

// The sum of the words of an array, for measurements that read what a kernel reads.
uint64_t read_bytes(const Bytes& bytes, int threads) {
    if (threads < 1 || reinterpret_cast<uintptr_t>(bytes.data()) % 8) throw std::invalid_argument("read_bytes: not aligned");
    nb::gil_scoped_release release;
    return read_words(reinterpret_cast<const uint64_t*>(bytes.data()), static_cast<int64_t>(bytes.size()) / 8, threads);
}

}  // namespace
}  // namespace nstf::engine

void bind_bandwidth(nb::module_& m) {
    using namespace nb::literals;
    m.def("read_bandwidth", &nstf::engine::read_bandwidth, "size"_a, "threads"_a, "passes"_a = 5,
          "Bytes a second read from `size` bytes of memory by `threads` threads.");
    m.def("read_bytes", &nstf::engine::read_bytes, "bytes"_a, "threads"_a,
          "Reads an array with `threads` threads and adds up its 64-bit words.");
}
