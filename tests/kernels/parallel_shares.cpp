// Shares of threads: each is done once, whoever does it, also where workers come late or throw; what a worker fetches ahead is asked for
// while the job's context is there; and jobs of both kinds follow each other.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "parallel.h"

int main(int argc, char**) {
    const int rounds = argc > 1 ? 300 : 4000;
    static char memory[1 << 14];
    long wrong = 0, caught = 0, asked = 0;
    for (int round = 0; round < rounds; ++round) {
        struct Job {
            std::vector<int> done;
            std::vector<std::atomic<int>> asked;
            int64_t bad;
        };
        const int64_t tasks = 1 + round % 70;
        Job job{std::vector<int>(static_cast<size_t>(tasks)), std::vector<std::atomic<int>>(80), round % 5 ? -1 : round % tasks};
        const auto body = [](void* context, int64_t task) {
            Job& j = *static_cast<Job*>(context);
            if (task == j.bad) throw std::runtime_error("a share");
            ++j.done[static_cast<size_t>(task)];
        };
        const auto ahead = [](void* context, int64_t thread, nstf::Ahead* out) {
            ++static_cast<Job*>(context)->asked[static_cast<size_t>(thread)];
            out[0] = {memory, static_cast<int64_t>(sizeof memory)};
        };
        try {
            nstf::parallel_shares(2 + round % 4, tasks, body, ahead, &job);
            for (int d : job.done) wrong += d != 1;
            wrong += job.bad >= 0;
        } catch (const std::runtime_error&) {
            ++caught;
            for (int d : job.done) wrong += d > 1;
        }
        wrong += job.asked[0] != 0;
        for (const auto& a : job.asked) wrong += a > 1, asked += a;
        std::atomic<int64_t> sum{0};
        auto good = [&](int64_t task) { sum += task; };
        nstf::parallel_for(3, 20, good);
        wrong += sum != 190;
        // Long enough for workers to be asleep in some rounds, and awake in others.
        if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(400));
    }
    std::printf("%ld %ld %d\n", wrong, caught, asked > 0);
    return wrong != 0;
}
