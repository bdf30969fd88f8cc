#include "factor.h"

#include <algorithm>
#include <stdexcept>

#include "../parallel.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

// Values decoded at a time: of what one thread works on, and of what all share. Within the first and the second cache.
constexpr int64_t kPanel = 1 << 13, kSlab = 1 << 16;
// Less work than this (products of two numbers) is not worth a second thread.
constexpr int64_t kAlone = 1 << 15;

}  // namespace

Factor::Factor(Shared stored, int64_t rows, int64_t cols) : rows(rows), cols(cols), stored_(std::move(stored)) {
    if (stored_ == nullptr || rows < 1 || cols < 1 || stored_->rows * stored_->cols != rows * cols)
        throw std::invalid_argument("a factor has another size than its place in the decomposition");
}

bool Factor::narrow() const { return as_stored() && stored_->kernel().find("int8 x") != std::string::npos; }

void Factor::decode(int64_t first, int64_t count, float* out) const {
    const int64_t width = stored_->cols, end = (first + count) * cols;
    for (int64_t at = first * cols; at < end;) {
        const int64_t row = at / width, from = at % width, size = std::min(width - from, end - at);
        if (size == width) {
            const int64_t whole = (end - at) / width;
            stored_->decode_rows(row, whole, out);
            at += whole * width, out += whole * width;
            continue;
        }
        Scratch room(width);
        stored_->decode(row, room.data());
        std::copy_n(room.data() + from, size, out);
        at += size, out += size;
    }
}

void Factor::multiply(const float* x, int64_t batch, float* y, int threads, bool exact) {
    if (as_stored() && !exact) return stored_->multiply(x, batch, y, rows, threads);
    // Fours of rows are multiplied together.
    const int64_t share = (rows + 4 * threads - 1) / (4 * threads) * 4;
    const int64_t panel = std::min(share, std::max<int64_t>(4, kPanel / cols / 4 * 4));
    auto task = [&](int64_t i) {
        const int64_t first = i * panel, count = std::min(panel, rows - first);
        Scratch room(count * cols);
        decode(first, count, room.data());
        ops().products(x, batch, cols, room.data(), count, cols, y + first, rows);
    };
    parallel_for(batch * rows * cols < kAlone ? 1 : threads, (rows + panel - 1) / panel, task);
}

void Factor::multiply_transposed(const float* x, int64_t batch, float* y, int threads) const {
    std::fill_n(y, batch * cols, 0.0f);
    // Slabs of rows are decoded by all threads, then each thread adds them up for its own columns or activations.
    const int64_t slab = std::clamp<int64_t>(kSlab / cols, 1, rows), part = std::max<int64_t>(1, kPanel / cols);
    const int workers = batch * rows * cols < kAlone ? 1 : threads;
    constexpr int64_t kTokens = 16, kWide = 64;
    const int64_t down = (batch + kTokens - 1) / kTokens, wide = down >= workers ? cols : kWide;
    Scratch room(slab * cols);
    for (int64_t first = 0; first < rows; first += slab) {
        const int64_t count = std::min(slab, rows - first);
        auto unpack = [&](int64_t i) {
            decode(first + i * part, std::min(part, count - i * part), room.data() + i * part * cols);
        };
        parallel_for(workers, (count + part - 1) / part, unpack);
        auto add = [&](int64_t i) {
            const int64_t b = i % down * kTokens, n = i / down * wide;
            ops().mixtures(x + b * rows + first, std::min(kTokens, batch - b), rows, room.data() + n, cols, count,
                           std::min(wide, cols - n), y + b * cols + n, cols);
        };
        parallel_for(workers, down * ((cols + wide - 1) / wide), add);
    }
}

}  // namespace nstf::engine
