// Matrices stored as CP, Tucker or tensor train: activations go through the factors one after the other.
//
// A matrix W is read as a tensor whose first axes make the rows and whose last ones make the columns, so every one of these
// decompositions is W = L R: R brings activations to the bond between the two sides, L the bond's values to the rows. Each
// side is a list of small steps, every one a product with a factor along one axis. Rows of activations go through all steps
// in groups whose intermediate values stay in the second cache.
//
// Where one row of activations costs less with W itself, decoded and read from memory, by counted work (see `Work`), W is decoded
// once. Decoding some rows of W at a time for many rows of activations was tried: 128 of them do not pay for it.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "../parallel.h"
#include "factor.h"
#include "leaves.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

// Values of one intermediate result of a group of rows of activations: two of them share the second cache.
constexpr int64_t kTogether = 1 << 17;

int64_t product(const std::vector<int64_t>& sizes, size_t first, size_t end) {
    return std::accumulate(sizes.begin() + static_cast<int64_t>(first), sizes.begin() + static_cast<int64_t>(end), int64_t{1},
                           [](int64_t a, int64_t b) { return a * b; });
}

// One step for a row of activations. kProduct: [times, cols] -> [times, rows]. kTransposed: the other way round.
// kRotate: [times, last] -> [last, times], the last axis to the front. kFold: [times, rows, cols] -> [times, cols], summed
// over the rows with the factor's weights. kSpread: [times, cols] -> [times, rows, cols], its transpose.
struct Step {
    enum Kind { kProduct, kTransposed, kRotate, kFold, kSpread } kind;
    int64_t times;
    Factor* factor = nullptr;
    int64_t last = 1;

    int64_t in() const {
        if (kind == kRotate) return sized(times, last);
        return sized(times, kind == kTransposed ? factor->rows : kind == kFold ? factor->rows * factor->cols : factor->cols);
    }
    int64_t out() const {
        if (kind == kRotate) return sized(times, last);
        return sized(times, kind == kProduct ? factor->rows : kind == kSpread ? factor->rows * factor->cols : factor->cols);
    }
    Step transposed() const {
        switch (kind) {
            case kProduct: return {kTransposed, times, factor};
            case kTransposed: return {kProduct, times, factor};
            case kRotate: return {kRotate, last, nullptr, times};
            case kFold: return {kSpread, times, factor};
            default: return {kFold, times, factor};
        }
    }
    void run(const float* x, int64_t batch, float* y, int threads, bool exact) const {
        switch (kind) {
            case kProduct: return factor->multiply(x, batch * times, y, threads, exact);
            case kTransposed: return factor->multiply_transposed(x, batch * times, y, threads);
            case kRotate: return rotate(x, batch, y, threads);
            default: return weigh(x, batch * times, y, threads);
        }
    }

  private:
    static constexpr int64_t kAlone = 1 << 15;  // values that are not worth a second thread

    // A tree of a few bytes can have more intermediate values than 64 bits count. No memory holds 2^44 of them, and so many
    // for each of a group of rows are counted without overflow.
    static int64_t sized(int64_t count, int64_t each) {
        if (static_cast<double>(count) * static_cast<double>(each) > 0x1p44) throw std::bad_alloc();
        return count * each;
    }

    void rotate(const float* x, int64_t batch, float* y, int threads) const {
        auto task = [&](int64_t b) {
            const float* from = x + b * in();
            float* to = y + b * in();
            for (int64_t j = 0; j < last; ++j)
                for (int64_t i = 0; i < times; ++i) to[j * times + i] = from[i * last + j];
        };
        parallel_for(batch * in() < kAlone ? 1 : threads, batch, task);
    }
    void weigh(const float* x, int64_t count, float* y, int threads) const {
        const int64_t size = factor->cols, tall = factor->rows, part = std::max<int64_t>(1, kAlone / (tall * size));
        Scratch weights(tall * size);
        factor->decode(0, tall, weights.data());
        const int64_t wide = kind == kFold ? tall * size : size, narrow = kind == kFold ? size : tall * size;
        auto task = [&](int64_t p) {
            for (int64_t i = p * part; i < std::min(count, (p + 1) * part); ++i) {
                const float* from = x + i * wide;
                float* to = y + i * narrow;
                std::fill_n(to, narrow, 0.0f);
                for (int64_t j = 0; j < tall; ++j) {
                    const float* w = weights.data() + j * size;
                    if (kind == kFold) ops().multiply_add(from + j * size, w, size, to);
                    else ops().multiply_add(from, w, size, to + j * size);
                }
            }
        };
        parallel_for(threads, (count + part - 1) / part, task);
    }
};

// What one row of activations costs, in float32 multiplications with an addition: a byte from memory takes as long as one of
// them on each of two cores of the machine this was measured on, one through an int8 kernel for several rows as
// long as a quarter, and a step as some thousands for handing it over.
struct Work {
    static constexpr double kByte = 1, kNarrow = 0.25, kStep = 10000;
    static double of(const std::vector<Step>& steps) {
        double total = 0;
        for (const Step& s : steps) {
            total += kStep;
            if (s.kind == Step::kRotate) {
                total += static_cast<double>(s.in());
                continue;
            }
            const double values = static_cast<double>(s.factor->rows * s.factor->cols);
            const bool narrow = s.kind == Step::kProduct && s.factor->narrow() && s.times >= 4;
            // Its bytes, at least one a value for what unpacking costs, then the products.
            total += values * kByte + static_cast<double>(s.times) * values * (narrow ? kNarrow : 1);
        }
        return total;
    }
};

class Chain : public Matrix {
  public:
    Chain(Decomposition kind, int64_t rows, int64_t cols, std::vector<int64_t> view, size_t split, std::vector<int64_t> ranks,
          const std::vector<Shared>& parts)
        : Matrix(rows, cols), kind_(kind), view_(std::move(view)), ranks_(std::move(ranks)), split_(split) {
        switch (kind_) {
            case Decomposition::kCp: make_cp(parts); break;
            case Decomposition::kTucker: make_tucker(parts); break;
            case Decomposition::kTrain: make_train(parts); break;
        }
        for (auto step = right_.rbegin(); step != right_.rend(); ++step) unfold_.push_back(step->transposed());
        steps_ = right_;
        steps_.insert(steps_.end(), left_.begin(), left_.end());
        for (const auto* side : {&steps_, &unfold_})
            for (const Step& step : *side) widest_ = std::max({widest_, step.in(), step.out()});
    }

    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        const int64_t most = std::clamp<int64_t>(kTogether / widest_, 1, batch);
        Scratch first(most * widest_), second(most * widest_);
        for (int64_t b = 0; b < batch; b += most) {
            const int64_t count = std::min(most, batch - b);
            const float* found = pass(steps_, x + b * cols, count, threads, false, first.data(), second.data());
            for (int64_t i = 0; i < count; ++i) std::copy_n(found + i * rows, rows, y + (b + i) * stride);
        }
    }

    void decode(int64_t row, float* out) const override { decode_rows(row, 1, out); }
    void decode_rows(int64_t first, int64_t count, float* out) const override {
        const int64_t most = std::clamp<int64_t>(kTogether / widest_, 1, count);
        Scratch bond(most * bond_), core(core_ == nullptr ? 1 : core_->rows * bond_);
        if (core_ != nullptr) core_->decode(0, core_->rows, core.data());
        for (int64_t r = 0; r < count; r += most) {
            const int64_t now = std::min(most, count - r);
            for (int64_t i = 0; i < now; ++i) left_row(first + r + i, core.data(), bond.data() + i * bond_);
            Scratch a(now * widest_), b(now * widest_);
            std::copy_n(pass(unfold_, bond.data(), now, 1, true, a.data(), b.data()), now * cols, out + r * cols);
        }
    }

    std::string kernel() const override {
        const char* names[] = {"cp", "tucker", "tensor_train"};
        bool narrow = false, wide = false;
        for (const Step& s : steps_) {
            if (s.factor == nullptr) continue;
            const bool int8 = s.kind == Step::kProduct && s.factor->narrow();
            narrow |= int8, wide |= !int8;
        }
        const std::string all = narrow ? wide ? "int8, float32" : "int8" : "float32";
        return std::string(names[static_cast<int>(kind_)]) + "(" + all + ")";
    }

    // Whether W itself, decoded and read from memory, costs less than the steps.
    bool better_decoded() const {
        const double values = static_cast<double>(rows * cols);
        return values * (1 + 4 * Work::kByte) < Work::of(steps_);
    }

  private:
    Factor* factor(Shared stored, int64_t r, int64_t c) {
        factors_.push_back(std::make_unique<Factor>(std::move(stored), r, c));
        return factors_.back().get();
    }
    void rotate(std::vector<Step>& steps, int64_t times, int64_t last) {
        if (times > 1 && last > 1) steps.push_back({Step::kRotate, times, nullptr, last});
    }

    // W = sum_r a_r (x) b_r (x) ...; the bond has a place for every term.
    void make_cp(const std::vector<Shared>& parts) {
        const size_t n = view_.size();
        bond_ = ranks_[0];
        for (size_t i = 0; i < n; ++i) axes_.push_back(factor(parts[i], view_[i], bond_));
        right_.push_back({Step::kTransposed, product(view_, split_, n - 1), axes_[n - 1]});
        for (size_t i = n - 1; i-- > split_;) right_.push_back({Step::kFold, product(view_, split_, i), axes_[i]});
        for (size_t i = 0; i + 1 < split_; ++i) left_.push_back({Step::kSpread, product(view_, 0, i), axes_[i]});
        left_.push_back({Step::kProduct, product(view_, 0, split_ - 1), axes_[split_ - 1]});
    }

    // parts: the core, then a factor or null for every axis. Each axis is brought to its rank and moved to the front, from
    // the last to the first, after which they are in order again.
    void make_tucker(const std::vector<Shared>& parts) {
        const size_t n = view_.size();
        bond_ = product(ranks_, split_, n);
        core_ = factor(parts[0], product(ranks_, 0, split_), bond_);
        for (size_t i = 0; i < n; ++i)
            axes_.push_back(parts[i + 1] == nullptr ? nullptr : factor(parts[i + 1], view_[i], ranks_[i]));
        for (size_t i = n; i-- > split_;) {
            const int64_t others = product(view_, split_, i) * product(ranks_, i + 1, n);
            if (axes_[i] != nullptr) right_.push_back({Step::kTransposed, others, axes_[i]});
            rotate(right_, others, ranks_[i]);
        }
        left_.push_back({Step::kProduct, 1, core_});
        for (size_t i = split_; i-- > 0;) {
            const int64_t others = product(ranks_, 0, i) * product(view_, i + 1, split_);
            if (axes_[i] != nullptr) left_.push_back({Step::kProduct, others, axes_[i]});
            rotate(left_, others, view_[i]);
        }
    }

    void make_train(const std::vector<Shared>& parts) {
        const size_t n = view_.size();
        auto bond = [&](size_t i) { return i == 0 || i == n ? 1 : ranks_[i - 1]; };
        bond_ = bond(split_);
        for (size_t i = 0; i < n; ++i) {
            const bool left = i < split_;
            axes_.push_back(left ? factor(parts[i], bond(i) * view_[i], bond(i + 1))
                                 : factor(parts[i], bond(i), view_[i] * bond(i + 1)));
        }
        for (size_t i = n; i-- > split_;) right_.push_back({Step::kProduct, product(view_, split_, i), axes_[i]});
        for (size_t i = split_; i-- > 0;) {
            const int64_t done = product(view_, i + 1, split_);
            left_.push_back({Step::kProduct, done, axes_[i]});
            rotate(left_, done * bond(i), view_[i]);
        }
    }

    // A row of L, [bond]. core: Tucker's, decoded.
    void left_row(int64_t row, const float* core, float* out) const {
        std::vector<int64_t> at(split_);
        for (size_t i = split_; i-- > 0; row /= view_[i]) at[i] = row % view_[i];
        switch (kind_) {
            case Decomposition::kCp: return row_of_cp(at, out);
            case Decomposition::kTucker: return row_of_tucker(at, core, out);
            case Decomposition::kTrain: return row_of_train(at, out);
        }
    }
    void row_of_cp(const std::vector<int64_t>& at, float* out) const {
        Scratch one(bond_);
        axes_[0]->decode(at[0], 1, out);
        for (size_t i = 1; i < split_; ++i) {
            axes_[i]->decode(at[i], 1, one.data());
            for (int64_t r = 0; r < bond_; ++r) out[r] *= one.data()[r];
        }
    }
    // From the first axis on, each summed away: what is left is [ranks of the others, bond].
    void row_of_tucker(const std::vector<int64_t>& at, const float* core, float* out) const {
        int64_t rest = core_->rows * bond_;
        Scratch a(rest), b(rest);
        float *next = a.data(), *spare = b.data();
        for (size_t i = 0; i < split_; ++i) {
            rest /= ranks_[i];
            if (axes_[i] == nullptr) {
                std::copy_n(core + at[i] * rest, rest, next);
            } else {
                Scratch weights(ranks_[i]);
                axes_[i]->decode(at[i], 1, weights.data());
                std::fill_n(next, rest, 0.0f);
                ops().mixtures(weights.data(), 1, ranks_[i], core, rest, ranks_[i], rest, next, rest);
            }
            core = next;
            std::swap(next, spare);
        }
        std::copy_n(core, bond_, out);
    }
    void row_of_train(const std::vector<int64_t>& at, float* out) const {
        std::vector<float> now{1}, next, line;
        for (size_t i = 0; i < split_; ++i) {
            const int64_t size = axes_[i]->cols;
            next.assign(static_cast<size_t>(size), 0.0f);
            line.resize(static_cast<size_t>(size));
            for (size_t j = 0; j < now.size(); ++j) {
                axes_[i]->decode(static_cast<int64_t>(j) * view_[i] + at[i], 1, line.data());
                for (size_t k = 0; k < next.size(); ++k) next[k] += now[j] * line[k];
            }
            now.swap(next);
        }
        std::copy(now.begin(), now.end(), out);
    }

    // All steps, from x to one of two rooms.
    static const float* pass(const std::vector<Step>& steps, const float* x, int64_t batch, int threads, bool exact, float* a,
                             float* b) {
        for (const Step& step : steps) {
            step.run(x, batch, a, threads, exact);
            x = a;
            std::swap(a, b);
        }
        return x;
    }

    Decomposition kind_;
    std::vector<int64_t> view_, ranks_;
    size_t split_;  // axes of the view that make the rows
    std::vector<std::unique_ptr<Factor>> factors_;
    std::vector<Factor*> axes_;  // by axis; null where Tucker has none
    Factor* core_ = nullptr;
    int64_t bond_ = 1, widest_ = 1;
    std::vector<Step> right_, left_, steps_, unfold_;  // R, L, both, the transpose of R
};

// The axes of `view` that make the rows, 0 if none do.
size_t split_of(const std::vector<int64_t>& view, int64_t rows) {
    for (size_t s = 1; s < view.size(); ++s)
        if (product(view, 0, s) == rows) return s;
    return 0;
}

}  // namespace

Shared chain(Decomposition kind, int64_t rows, int64_t cols, const std::vector<int64_t>& view,
             const std::vector<int64_t>& ranks, const std::vector<Shared>& parts, Way way) {
    const size_t n = view.size(), split = split_of(view, rows);
    const size_t expected = kind == Decomposition::kCp ? 1 : kind == Decomposition::kTucker ? n : n - 1;
    if (n < 2 || product(view, 0, n) != rows * cols || ranks.size() != expected ||
        parts.size() != (kind == Decomposition::kTucker ? n + 1 : n))
        throw std::invalid_argument("a decomposition's sizes do not fit the matrix");
    if (split == 0) return nullptr;
    auto made = std::make_shared<Chain>(kind, rows, cols, view, split, ranks, parts);
    if (way == Way::kSteps || (way == Way::kBest && !made->better_decoded())) return made;
    auto values = std::make_shared<Buffer<float>>(rows * cols);
    made->decode_rows(0, rows, values->data());
    // The buffer lives as long as the matrix that reads it.
    Shared held = dense(rows, cols, values->data(), Number::kFloat);
    return Shared(held.get(), [held, values](Matrix*) {});
}

}  // namespace nstf::engine
