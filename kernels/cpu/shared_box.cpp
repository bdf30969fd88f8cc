// A few kilobytes from each of a host's processes to each other one, through memory that they share.
//
// The file that they map begins with a line for each process: how many messages it has posted, and how many processes sleep until
// it posts another. After the lines come the last two messages of each process. A process that has posted message n waits for
// everybody's message n before it posts n + 1. So once it may post n + 2, all have read n, whose place it takes.
//
// Waking up takes a virtual processor 50 us and more, and a layer's products take about as long on all processes. So a process
// that waits polls the memory for some time before it sleeps (a futex).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace nstf {
namespace {

#if defined(__linux__)

using Clock = std::chrono::steady_clock;

// Polls between two readings of the clock.
constexpr int kPolls = 64;
// The longest sleep before signals, and whether the other process still runs, are checked.
constexpr long kSleepNanoseconds = 50'000'000;

struct alignas(128) Line {
    std::atomic<uint32_t> posted;
    std::atomic<uint32_t> sleeping;
    std::atomic<int32_t> process;
    std::atomic<uint64_t> names;  // the PID namespace that `process` is a number of; 0: unknown
};
static_assert(sizeof(Line) == 128 && std::atomic<uint32_t>::is_always_lock_free);

// This process's PID namespace; 0 where /proc does not tell.
uint64_t process_names() {
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? static_cast<uint64_t>(found.st_ino) : 0;
}

// Whether a process of this namespace has ended: it is not there, or nobody has asked for its exit code yet.
bool has_ended(int32_t process) {
    const std::string name = "/proc/" + std::to_string(process) + "/stat";
    const int file = open(name.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno == ENOENT;
    char text[512];
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return size == 0;
    text[size] = 0;
    const char* after = strrchr(text, ')');  // the command may contain anything
    return after && after[1] && (after[2] == 'Z' || after[2] == 'X');
}

class SharedBox {
  public:
    // file: of size_bytes(ranks, capacity), the same for all; the caller may close it. capacity: bytes of a message's piece.
    // spin_us: how long to poll before a sleep; limit_s: the longest wait. Throws invalid_argument, and runtime_error where the
    // file is too short or cannot be mapped.
    SharedBox(int file, int rank, int ranks, int64_t capacity, double spin_us, double limit_s)
        : rank_(rank), ranks_(ranks), capacity_(capacity), spin_(spin_us), limit_(limit_s) {
        if (rank < 0 || rank >= ranks || capacity < 4) throw std::invalid_argument("no such rank, or no room");
        bytes_ = size_bytes(ranks, capacity);
        struct stat found;
        if (fstat(file, &found) != 0 || found.st_size < bytes_) throw std::runtime_error("the shared file is too short");
        void* at = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) throw std::runtime_error("the shared file cannot be mapped");
        start_ = static_cast<uint8_t*>(at);
        line(rank).names = process_names();
        line(rank).process = static_cast<int32_t>(getpid());
    }
    SharedBox(const SharedBox&) = delete;
    ~SharedBox() { munmap(start_, static_cast<size_t>(bytes_)); }

    static int64_t size_bytes(int ranks, int64_t capacity) {
        return static_cast<int64_t>(ranks) * (sizeof(Line) + 2 * padded(capacity));
    }

    // Writes the messages of all ranks, `size` bytes each, one after the other to `out`; this rank's are at `from`. Throws
    // runtime_error where another rank has ended or is silent for longer than the limit.
    void exchange(uintptr_t from, int64_t size, uintptr_t out) {
        uint8_t* to = reinterpret_cast<uint8_t*>(out);
        for (int64_t at = 0; at < size; at += capacity_) {
            const int64_t some = std::min(capacity_, size - at);
            swap(from + at, some);
            for (int rank = 0; rank < ranks_; ++rank) memcpy(to + rank * size + at, message(rank), static_cast<size_t>(some));
        }
    }

    // Replaces `count` float32 at `from` by their sum over the ranks, added up in the order of the ranks. Throws as `exchange`.
    void sum(uintptr_t from, int64_t count) {
        const int64_t most = capacity_ / 4;
        for (int64_t at = 0; at < count; at += most) {
            float* out = reinterpret_cast<float*>(from) + at;
            const int64_t some = std::min(most, count - at);
            swap(reinterpret_cast<uintptr_t>(out), 4 * some);
            memcpy(out, message(0), static_cast<size_t>(some) * 4);
            for (int rank = 1; rank < ranks_; ++rank) {
                const float* other = reinterpret_cast<const float*>(message(rank));
                for (int64_t i = 0; i < some; ++i) out[i] += other[i];
            }
        }
    }

  private:
    static int64_t padded(int64_t capacity) { return (capacity + 127) / 128 * 128; }
    Line& line(int rank) const { return reinterpret_cast<Line*>(start_)[rank]; }
    uint8_t* message(int rank) const {
        return start_ + ranks_ * static_cast<int64_t>(sizeof(Line)) + (2 * rank + (number_ & 1)) * padded(capacity_);
    }

    void swap(uintptr_t from, int64_t size) {
        number_ += 1;
        memcpy(message(rank_), reinterpret_cast<const void*>(from), static_cast<size_t>(size));
        Line& own = line(rank_);
        // This store and load, and those in `wait`, are sequentially consistent: either this process sees that another one sleeps,
        // or that one sees the message before it sleeps.
        own.posted.store(number_);
        if (own.sleeping.load()) syscall(SYS_futex, &own.posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        for (int rank = 0; rank < ranks_; ++rank) {
            if (rank != rank_) wait(rank);
        }
    }

    // By the difference, since numbers wrap around after 2^32 messages; those of two ranks differ by one at most.
    bool is_there(int rank) const {
        return static_cast<int32_t>(line(rank).posted.load(std::memory_order_acquire) - number_) >= 0;
    }

    void wait(int rank) {
        const Clock::time_point start = Clock::now();
        auto passed = [start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
        do {
            // Without pause instructions: a hypervisor takes the processor from a guest that executes many of them.
            for (int i = 0; i < kPolls; ++i) {
                if (is_there(rank)) return;
            }
        } while (1e6 * passed() < spin_);
        Line& other = line(rank);
        while (!is_there(rank)) {
            const uint32_t seen = other.posted.load();
            other.sleeping.fetch_add(1);
            if (static_cast<int32_t>(seen - number_) < 0) {
                timespec longest{0, kSleepNanoseconds};
                syscall(SYS_futex, &other.posted, FUTEX_WAIT, seen, &longest, nullptr, 0);
            }
            other.sleeping.fetch_sub(1);
            if (is_there(rank)) return;
            {
                nb::gil_scoped_acquire held;
                if (PyErr_CheckSignals() != 0) throw nb::python_error();
            }
            const uint64_t names = line(rank_).names.load();
            const bool gone = names != 0 && names == other.names.load() && has_ended(other.process.load());
            if (is_there(rank)) return;  // posted just before it ended
            if (gone) throw std::runtime_error("rank " + std::to_string(rank) + " has ended");
            if (passed() > limit_) throw std::runtime_error("rank " + std::to_string(rank) + " has sent nothing for too long");
        }
    }

    const int rank_, ranks_;
    const int64_t capacity_;
    const double spin_, limit_;
    int64_t bytes_ = 0;
    uint8_t* start_ = nullptr;
    uint32_t number_ = 0;
};

#endif

}  // namespace
}  // namespace nstf

void bind_shared_box(nb::module_& m) {
#if defined(__linux__)
    using Box = nstf::SharedBox;
    nb::class_<Box>(m, "SharedBox")
        .def(nb::init<int, int, int, int64_t, double, double>(), "file"_a, "rank"_a, "ranks"_a, "capacity"_a, "spin_us"_a,
             "limit_s"_a)
        .def_static("size_bytes", &Box::size_bytes, "ranks"_a, "capacity"_a)
        .def("exchange", &Box::exchange, "source"_a, "size"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("sum", &Box::sum, "source"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>());
#else
    (void)m;
#endif
}
