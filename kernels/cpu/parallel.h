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

template <class F>
void parallel_for(int threads, int64_t tasks, F& f) {
    parallel_for(threads, tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &f);
}

}  // namespace nstf
