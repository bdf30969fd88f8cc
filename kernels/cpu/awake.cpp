// Keeps a core from halting while its thread waits for another process. A virtual processor that halted takes its host 50 to 100 us
// to wake, and one with deep sleep states some 100 us, where a message takes a few.
#include <nanobind/nanobind.h>

#include <atomic>
#include <thread>

#include "parallel.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace nb = nanobind;

namespace nstf {
namespace {

// A thread that only runs where nothing else would, and then looks busy.
class Awake {
  public:
    Awake() : thread_([this] { spin(); }) {}
    ~Awake() { stop(); }
    void stop() {
        stopped_.store(true, std::memory_order_relaxed);
        if (!thread_.joinable()) return;
        if (process_ == process_id()) return thread_.join();
        thread_.detach();  // a child of fork has no such thread
    }

  private:
    void spin() {
#if defined(__linux__)
        sched_param none{};
        if (pthread_setschedparam(pthread_self(), SCHED_IDLE, &none) != 0) return;
        // Not by pauses: a host takes a processor away that makes many.
        for (volatile uint32_t i = 0; !stopped_.load(std::memory_order_relaxed);) i = i + 1;
#endif
    }

    std::atomic<bool> stopped_{false};
    int process_ = process_id();
    std::thread thread_;
};

}  // namespace
}  // namespace nstf

void bind_awake(nb::module_& m) {
    nb::class_<nstf::Awake>(m, "Awake")
        .def(nb::init<>())
        .def("stop", &nstf::Awake::stop, nb::call_guard<nb::gil_scoped_release>());
}
