// Our own pool and not OpenMP: a second OpenMP runtime beside torch's would fight it for the cores.
//
// A matrix-vector product takes tens of microseconds, so starting threads for each is too slow, and so is waiting for
// a sleeping one: a worker joins a job only while the job is open, and the caller, having run out of tasks, closes the job
// and waits only for those who joined. On a busy machine a worker that never got a core costs nothing.
#include "parallel.h"

#include <algorithm>
#include <array>
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

// What is fetched before a worker looks for a job again: short enough that it does not come late.
constexpr int64_t kFetched = 512;

class Pool {
  public:
    // shares: task t belongs to thread t.
    void run(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context, bool shares = false,
             void (*ahead)(void*, int64_t, Ahead*) = nullptr) {
        grow(threads - 1);
        body_ = body;
        context_ = context;
        ahead_ = ahead;
        tasks_ = tasks;
        shares_ = shares;
        if (shares)
            for (int64_t i = 0; i < tasks; ++i) taken_[i].store(false, std::memory_order_relaxed);
        limit_.store(static_cast<uint32_t>(threads - 1), std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        finished_.store(0, std::memory_order_relaxed);
        state_.store(0, std::memory_order_release);
        generation_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(0);
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
            for (; workers_ < workers; ++workers_) std::thread([this, me = workers_ + 1] { loop(me); }).detach();
        } catch (const std::exception&) {  // a limit on threads or memory: those that are there do the work, one at least
        }
    }

    void work(int64_t me) {
        if (shares_) {
            for (int64_t i = 0; i < tasks_; ++i) {
                const int64_t task = me + i < tasks_ ? me + i : me + i - tasks_;
                if (!taken_[task].load(std::memory_order_relaxed) && !taken_[task].exchange(true, std::memory_order_relaxed))
                    one(task);
            }
            return;
        }
        for (;;) {
            const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks_) return;
            one(task);
        }
    }

    void one(int64_t task) {
        try {
            body_(context_, task);
        } catch (...) {  // leaving a worker would end the process: the caller throws it, once all have left the job
            next_.store(tasks_, std::memory_order_relaxed);
            if (shares_)
                for (int64_t i = 0; i < tasks_; ++i) taken_[i].store(true, std::memory_order_relaxed);
            std::lock_guard<std::mutex> lock(mutex_);
            if (!failure_) failure_ = std::current_exception();
        }
    }

    // Whether worker `me` belongs to the job. Its own share is one of the job's tasks: of few threads the first workers.
    bool join(int64_t me) {
        uint32_t state = state_.load(std::memory_order_acquire);
        while (!(state & kClosed) && me <= limit_.load(std::memory_order_relaxed))
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    void loop(int64_t me) {
        uint64_t seen = 0;
        Ahead ahead[kAheads];
        int at = kAheads;  // which of them is fetched
        for (;;) {
            const auto until = std::chrono::steady_clock::now() + kSpin;
            while (generation_.load(std::memory_order_acquire) == seen) {
                if (at < kAheads) {
                    if (!fetch(ahead[at])) ++at;
                    continue;
                }
                for (int i = 0; i < 32 && generation_.load(std::memory_order_relaxed) == seen; ++i) relax();
                if (std::chrono::steady_clock::now() < until) continue;
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen = generation_.load(std::memory_order_acquire);
            if (join(me)) {
                work(me);
                if (shares_ && ahead_ != nullptr) {
                    std::fill_n(ahead, kAheads, Ahead{});
                    ahead_(context_, me, ahead);
                    at = 0;
                }
                finished_.fetch_add(1, std::memory_order_release);
            }
        }
    }

    // The next piece; false at the end.
    static bool fetch(Ahead& ahead) {
        if (ahead.bytes <= 0) return false;
        const auto* from = static_cast<const char*>(ahead.from);
        for (int64_t i = 0; i < kFetched; i += 64) __builtin_prefetch(from + i, 0, 2);
        ahead.from = from + kFetched;
        ahead.bytes -= kFetched;
        return true;
    }

    void (*body_)(void*, int64_t) = nullptr;
    void (*ahead_)(void*, int64_t, Ahead*) = nullptr;
    void* context_ = nullptr;
    int64_t tasks_ = 0;
    bool shares_ = false;
    std::array<std::atomic<bool>, kMostShares> taken_{};
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

namespace {

void run(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context, bool shares, void (*ahead)(void*, int64_t, Ahead*)) {
    threads = static_cast<int>(std::min<int64_t>(threads, tasks));
    if (threads > 1) {
        Pool& shared = pool();
        std::unique_lock<std::mutex> lock(shared.owner, std::try_to_lock);
        if (lock.owns_lock()) return shared.run(threads, tasks, body, context, shares, ahead);
    }
    for (int64_t task = 0; task < tasks; ++task) body(context, task);
}

}  // namespace

void parallel_for(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
    run(threads, tasks, body, context, false, nullptr);
}

void parallel_shares(int threads, int64_t tasks, void (*body)(void*, int64_t), void (*ahead)(void*, int64_t, Ahead*), void* context) {
    run(threads, tasks, body, context, tasks <= kMostShares, ahead);
}

}  // namespace nstf
