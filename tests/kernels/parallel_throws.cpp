// Exceptions out of a parallel loop reach the caller, whoever ran the task, and the pool works afterwards.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <thread>

#include "parallel.h"

int main() {
    int caught = 0, by_workers = 0;
    const auto caller = std::this_thread::get_id();
    for (int round = 0; round < 2000; ++round) {
        const int64_t tasks = 1 + round % 97, bad = round % tasks;
        std::atomic<int> thrown_by_worker{0};
        auto body = [&](int64_t task) {
            if (task != bad) {
                if (round % 3 == 0) std::this_thread::yield();
                return;
            }
            if (std::this_thread::get_id() != caller) thrown_by_worker = 1;
            if (round % 2) throw std::bad_alloc();
            throw std::runtime_error("a task");
        };
        try {
            nstf::parallel_for(4, tasks, body);
        } catch (const std::bad_alloc&) {
            caught += round % 2 == 1;
        } catch (const std::runtime_error&) {
            caught += round % 2 == 0;
        }
        by_workers += thrown_by_worker;
        std::atomic<int64_t> sum{0};
        auto good = [&](int64_t task) { sum += task; };
        nstf::parallel_for(4, 100, good);
        if (sum != 4950) return 1;
        // Long enough for workers to be asleep in some rounds, and awake in others.
        if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    // A task that only a worker can get: the caller is kept in the first one until a worker has thrown.
    for (int round = 0; round < 20; ++round) {
        std::atomic<bool> thrown{false};
        auto body = [&](int64_t) {
            if (std::this_thread::get_id() != caller) {
                thrown = true;
                throw std::runtime_error("a worker");
            }
            const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
            while (!thrown && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        };
        try {
            nstf::parallel_for(2, 2, body);
        } catch (const std::runtime_error&) {
            ++by_workers;
        }
    }
    std::printf("%d %d\n", caught, by_workers >= 20);
    return caught == 2000 && by_workers >= 20 ? 0 : 1;
}
