// Exceptions out of grouped products, from a worker or from the caller, in any of their steps: each reaches the caller, and the
// products of the next call are right.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <thread>

#include "engine/grouped.h"

using namespace nstf::engine;

namespace {

enum class Step { kReserve, kPrepare, kRun, kNone };
Step bad = Step::kNone;
std::atomic<bool> by_worker{false};
std::thread::id caller;

// Row r of the weight is r + 1 in every column.
class Rows : public Leaf {
  public:
    explicit Rows(bool fails) : Leaf(64, 512), fails_(fails) {}
    uintptr_t key() const override { return 1; }
    void reserve(const float* x, int64_t, Input& in) const override {
        fail(Step::kReserve);
        in.x = x;
    }
    void prepare(const float*, int64_t, int64_t, Input&) const override { fail(Step::kPrepare); }
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        if (end == rows || first == 0) fail(Step::kRun);
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t r = first; r < end; ++r) {
                float sum = 0;
                for (int64_t k = 0; k < cols; ++k) sum += in.x[b * cols + k];
                y[b * stride + r] = sum * static_cast<float>(r + 1);
            }
    }
    void decode(int64_t row, float* out) const override {
        for (int64_t k = 0; k < cols; ++k) out[k] = static_cast<float>(row + 1);
    }
    std::string kernel() const override { return "rows"; }

  private:
    void fail(Step step) const {
        if (!fails_ || step != bad) return;
        if (std::this_thread::get_id() != caller) by_worker = true;
        else if (step == Step::kRun) {  // leave a worker the time to be the first in some rounds
            const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(500);
            while (!by_worker && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        }
        if (step == Step::kPrepare) throw std::bad_alloc();
        throw std::runtime_error("an expert");
    }
    bool fails_;
};

}  // namespace

int main() {
    caller = std::this_thread::get_id();
    constexpr int64_t kTokens = 60, kExperts = 4;
    Rows good(false), other(true);
    const std::vector<Matrix*> matrices{&good, &other, &other, nullptr};
    std::vector<int64_t> index, order(kTokens), offsets(kExperts + 1);
    for (int64_t t = 0; t < kTokens; ++t) index.push_back(t % 3);
    group(index.data(), kTokens, kExperts, order.data(), offsets.data());
    std::vector<float> x(kTokens * 512, 1.0f), y(kTokens * 64);
    int caught = 0;
    bool workers = false;
    for (int round = 0; round < 600; ++round) {
        bad = static_cast<Step>(round % 3);
        by_worker = false;
        try {
            multiply_grouped(matrices, offsets.data(), x.data(), order.data(), 1, y.data(), 4);
        } catch (const std::bad_alloc&) {
            caught += bad == Step::kPrepare;
        } catch (const std::runtime_error&) {
            caught += bad != Step::kPrepare;
        }
        workers = workers || by_worker;
        bad = Step::kNone;
        multiply_grouped(matrices, offsets.data(), x.data(), order.data(), 1, y.data(), 4);
        for (int64_t i = 0; i < kTokens; ++i)
            for (int64_t r = 0; r < 64; ++r)
                if (y[static_cast<size_t>(i * 64 + r)] != 512.0f * static_cast<float>(r + 1)) return 1;
    }
    std::printf("%d %d\n", caught, workers);
    return 0;
}
