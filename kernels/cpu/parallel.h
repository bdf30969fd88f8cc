// A parallel loop over a small persistent pool of threads.
#pragma once

#include <cstdint>

namespace nstf {

int process_id();

// Calls body(context, task) for every task in [0, tasks), on at most `threads` threads, this one included.
// The calls may come in any order; the function returns when all are done. Safe to call from several threads at
// once (the second caller then works alone) and after a fork. What a call throws is thrown here, the first of several, when
// no other call is under way; tasks that were not begun by then are left out.
void parallel_for(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context);

// Memory that a thread fetches into its own caches while it waits for work.
struct Ahead {
    const void* from = nullptr;
    int64_t bytes = 0;
};
constexpr int kAheads = 3;

// The same with a task for each thread: thread t of the pool begins with task t (this one with task 0), so that what it fetched
// ahead is what it reads, and takes over those that no thread has begun. `ahead` fills what thread t should fetch until its next
// job of this kind, [kAheads]; it may be null. At most kMostShares tasks; more are handed out in turn.
constexpr int64_t kMostShares = 64;
void parallel_shares(int threads, int64_t tasks, void (*body)(void*, int64_t), void (*ahead)(void*, int64_t, Ahead*), void* context);

template <class F>
void parallel_for(int threads, int64_t tasks, F& f) {
    parallel_for(threads, tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &f);
}

}  // namespace nstf
