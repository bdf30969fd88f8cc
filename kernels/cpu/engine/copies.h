// Copies of codes into memory that matrices already have, made all at once when the matrices are: their owner does something
// else meanwhile (reads a tokenizer), and threads are not called together for every matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "../parallel.h"

namespace nstf::engine {

class Copies {
  public:
    // task(i) for every i in [0, tasks), not now. What it reads and writes has to be there until `run` returns.
    void add(int64_t tasks, std::function<void(int64_t)> task) {
        jobs_.push_back({tasks_, std::move(task)});
        tasks_ += tasks;
    }
    // All that was added, once. Throws what a task throws.
    void run(int threads) {
        const std::vector<Job> jobs = std::exchange(jobs_, {});
        auto task = [&](int64_t i) {
            const auto after = std::upper_bound(jobs.begin(), jobs.end(), i, [](int64_t at, const Job& job) { return at < job.first; });
            (after - 1)->task(i - (after - 1)->first);
        };
        parallel_for(threads, std::exchange(tasks_, 0), task);
    }

  private:
    struct Job {
        int64_t first;
        std::function<void(int64_t)> task;
    };
    std::vector<Job> jobs_;
    int64_t tasks_ = 0;
};

}  // namespace nstf::engine
