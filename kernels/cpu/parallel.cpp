// Our own pool and not OpenMP: a second OpenMP runtime beside torch's would fight it for the cores.
//
// A matrix-vector product takes tens of microseconds, so starting threads for each is too slow, and so is waiting for
// a sleeping one: a worker joins a job only while the job is open, and the caller, having run out of tasks, closes the job
// and waits only for those who joined. On a busy machine a worker that never got a core costs nothing.
#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#if defined(_WIN32)
#include <process.h>
int nstf::process_id() { return _getpid(); }
#else
#include <unistd.h>
int nstf::process_id() { return static_cast<int>(getpid()); }
#endif

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace nstf {
namespace {

constexpr uint32_t kClosed = 1u << 31;
// How long a worker looks for the next job before it sleeps: layers of a model follow each other closely, and between two
// tokens Python chooses one, hands it out and may be asked for the next in 50 to 150 us. Waking up takes as long again.
constexpr auto kSpin = std::chrono::microseconds(250);

class Pool {
  public:
    void run(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
        grow(threads - 1);
        body_ = body;
        context_ = context;
        tasks_ = tasks;
        limit_.store(static_cast<uint32_t>(threads - 1), std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        finished_.store(0, std::memory_order_relaxed);
        state_.store(0, std::memory_order_release);
        generation_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work();
        const uint32_t joined = state_.fetch_or(kClosed, std::memory_order_acq_rel);
        while (finished_.load(std::memory_order_acquire) != joined) relax();
        if (failure_) {  // nobody else looks at it now
            const std::exception_ptr failure = std::exchange(failure_, nullptr);
            std::rethrow_exception(failure);
        }
    }

    std::mutex owner;  // held by the one caller whose job the pool runs
    const int process = process_id();

  private:
    void grow(int workers) {
        try {
            for (; workers_ < workers; ++workers_) std::thread([this] { loop(); }).detach();
        } catch (const std::exception&) {  // a limit on threads or memory: those that are there do the work, one at least
        }
    }

    void work() {
        for (;;) {
            const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks_) return;
            try {
                body_(context_, task);
            } catch (...) {  // leaving a worker would end the process: the caller throws it, once all have left the job
                next_.store(tasks_, std::memory_order_relaxed);
                std::lock_guard<std::mutex> lock(mutex_);
                if (!failure_) failure_ = std::current_exception();
            }
        }
    }

    bool join() {
        uint32_t state = state_.load(std::memory_order_acquire);
        while (!(state & kClosed) && state < limit_.load(std::memory_order_relaxed))
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    void loop() {
        uint64_t seen = 0;
        for (;;) {
            const auto until = std::chrono::steady_clock::now() + kSpin;
            while (generation_.load(std::memory_order_acquire) == seen) {
                for (int i = 0; i < 32 && generation_.load(std::memory_order_relaxed) == seen; ++i) relax();
                if (std::chrono::steady_clock::now() < until) continue;
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen = generation_.load(std::memory_order_acquire);
            if (join()) {
                work();
                finished_.fetch_add(1, std::memory_order_release);
            }
        }
    }

    void (*body_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int64_t tasks_ = 0;
    // Atomic: a worker that comes late reads it while the next job is set up; whether it joined is settled by `state_` alone.
    std::atomic<uint32_t> limit_{0};
    int workers_ = 0;
    std::atomic<int64_t> next_{0};
    std::atomic<uint32_t> finished_{0};
    std::atomic<uint32_t> state_{kClosed};  // workers that joined; kClosed when no more may
    // In a cache line of its own: workers read it all the time, the rest is written for every job.
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::mutex mutex_;  // of `failure_`, and of workers that sleep
    std::exception_ptr failure_;
    std::condition_variable wake_;
};

// Never destroyed: its threads may outlive main(). After a fork the child has none of them and needs a new one. Without a lock,
// which another thread may hold at that moment, and then for ever.
Pool& pool() {
    static std::atomic<Pool*> current{nullptr};
    Pool* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->process != process_id()) {
        auto* made = new Pool;
        if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
        delete made;  // another thread was first
    }
    return *found;
}

}  // namespace

void parallel_for(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
    threads = static_cast<int>(std::min<int64_t>(threads, tasks));
    if (threads > 1) {
        Pool& shared = pool();
        std::unique_lock<std::mutex> lock(shared.owner, std::try_to_lock);
        if (lock.owns_lock()) return shared.run(threads, tasks, body, context);
    }
    for (int64_t task = 0; task < tasks; ++task) body(context, task);
}

}  // namespace nstf
