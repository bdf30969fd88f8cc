// A parallel loop in which each thread begins with tasks that are neighbours: what one layer's thread wrote is then what the next
// layer's reads, in the same processor's caches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../parallel.h"

namespace nstf::engine {

// Calls f(task) for every task in [0, tasks). Thread t takes those of the t-th of `threads` equal blocks in order, and then what is
// left of the others'.
template <class F>
void parallel_blocks(int threads, int64_t tasks, F& f) {
    constexpr int64_t most = kMostShares;
    const int64_t blocks = std::min<int64_t>({threads, tasks, most});
    if (blocks <= 1) {
        for (int64_t task = 0; task < tasks; ++task) f(task);
        return;
    }
    struct alignas(64) Next {
        std::atomic<int64_t> task;
    };
    struct Job {
        F& f;
        int64_t tasks, blocks;
        Next next[most];
        int64_t end(int64_t block) const { return tasks * (block + 1) / blocks; }
    } job{f, tasks, blocks, {}};
    for (int64_t b = 0; b < blocks; ++b) job.next[b].task.store(tasks * b / blocks, std::memory_order_relaxed);
    const auto body = [](void* context, int64_t first) {
        Job& own = *static_cast<Job*>(context);
        for (int64_t i = 0; i < own.blocks; ++i) {
            const int64_t block = (first + i) % own.blocks, end = own.end(block);
            for (;;) {
                const int64_t task = own.next[block].task.fetch_add(1, std::memory_order_relaxed);
                if (task >= end) break;
                own.f(task);
            }
        }
    };
    parallel_shares(threads, blocks, body, nullptr, &job);
}

}  // namespace nstf::engine
