// Loops from several threads at once, as engines in several threads of a server make them: what tasks write without atomics is
// there for their caller, and only for it.
#include <cstdio>
#include <thread>
#include <vector>

#include "parallel.h"

int main(int argc, char**) {
    const int rounds = argc > 1 ? 200 : 3000;
    std::vector<long> wrong(3, 0);
    auto steps = [&](int caller) {
        std::vector<int64_t> values(64);
        for (int round = 0; round < rounds; ++round) {
            const int64_t tasks = 1 + (round * 7 + caller) % 64;
            auto body = [&](int64_t task) { values[task] = task * round + caller; };
            nstf::parallel_for(2 + caller % 2, tasks, body);
            for (int64_t task = 0; task < tasks; ++task) wrong[caller] += values[task] != task * round + caller;
        }
    };
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) callers.emplace_back(steps, caller);
    for (auto& caller : callers) caller.join();
    std::printf("%ld\n", wrong[0] + wrong[1] + wrong[2]);
    return wrong[0] + wrong[1] + wrong[2] != 0;
}
