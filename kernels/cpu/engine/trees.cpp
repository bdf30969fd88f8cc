// Matrices made of matrices, and the dense one.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "../half.h"
#include "../parallel.h"
#include "grouped.h"
#include "leaves.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

class Dense : public Leaf {
  public:
    Dense(int64_t rows, int64_t cols, const void* values, Number type)
        : Leaf(rows, cols), values_(values), type_(type) {}
    uintptr_t key() const override { return 1; }
    void reserve(const float* x, int64_t, Input& in) const override { in.x = x; }
    void prepare(const float*, int64_t, int64_t, Input&) const override {}
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        if (type_ == Number::kFloat) {
            const float* w = static_cast<const float*>(values_) + first * cols;
            return ops().products(in.x, batch, cols, w, end - first, cols, y + first, stride);
        }
        // Some rows at a time, so that they are still in the first cache when they are used.
        const int64_t panel = std::max<int64_t>(4, kPanel / cols / 4 * 4);
        Scratch room(std::min(panel, end - first) * cols);
        for (int64_t r = first; r < end; r += panel) {
            const int64_t count = std::min(panel, end - r);
            decode_rows(r, count, room.data());
            ops().products(in.x, batch, cols, room.data(), count, cols, y + r, stride);
        }
    }
    Ahead codes(int64_t first, int64_t end) const override {
        const int64_t row_bytes = cols * (type_ == Number::kFloat ? 4 : 2);
        return {static_cast<const uint8_t*>(values_) + first * row_bytes, (end - first) * row_bytes};
    }
    void decode(int64_t row, float* out) const override { decode_rows(row, 1, out); }
    void decode_rows(int64_t first, int64_t count, float* out) const override {
        const int64_t size = count * cols;
        if (type_ == Number::kFloat) {
            std::copy_n(static_cast<const float*>(values_) + first * cols, size, out);
            return;
        }
        const uint16_t* in = static_cast<const uint16_t*>(values_) + first * cols;
        if (type_ == Number::kHalf) ops().from_halves(in, size, out);
        else ops().from_bfloats(in, size, out);
    }
    std::string kernel() const override { return "dense"; }

  private:
    static constexpr int64_t kPanel = 1 << 12;
    const void* values_;
    Number type_;
};

class LowRank : public Matrix {
  public:
    LowRank(Shared a, Shared b) : Matrix(a->rows, b->cols), a_(std::move(a)), b_(std::move(b)) {}
    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        Scratch middle(batch * b_->rows);
        b_->multiply(x, batch, middle.data(), b_->rows, threads);
        a_->multiply(middle.data(), batch, y, stride, threads);
    }
    void decode(int64_t row, float* out) const override {
        std::vector<float> a(static_cast<size_t>(a_->cols)), b(static_cast<size_t>(cols));
        a_->decode(row, a.data());
        std::fill_n(out, cols, 0.0f);
        for (int64_t i = 0; i < a_->cols; ++i) {
            b_->decode(i, b.data());
            for (int64_t k = 0; k < cols; ++k) out[k] += a[static_cast<size_t>(i)] * b[static_cast<size_t>(k)];
        }
    }
    std::string kernel() const override { return "low_rank(" + a_->kernel() + ", " + b_->kernel() + ")"; }

  private:
    Shared a_, b_;
};

class Sum : public Matrix, public Terms {
  public:
    Sum(Shared x, Shared y) : Matrix(x->rows, x->cols), x_(std::move(x)), y_(std::move(y)) {}
    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        Scratch other(batch * rows);
        x_->multiply(x, batch, y, stride, threads);
        y_->multiply(x, batch, other.data(), rows, threads);
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t r = 0; r < rows; ++r) y[b * stride + r] += other.data()[b * rows + r];
    }
    void decode(int64_t row, float* out) const override {
        std::vector<float> other(static_cast<size_t>(cols));
        x_->decode(row, out);
        y_->decode(row, other.data());
        for (int64_t k = 0; k < cols; ++k) out[k] += other[static_cast<size_t>(k)];
    }
    std::string kernel() const override { return x_->kernel() + " + " + y_->kernel(); }
    void terms(std::vector<Matrix*>& out) override {
        terms_of(x_.get(), out);
        terms_of(y_.get(), out);
    }

  private:
    Shared x_, y_;
};

void rotate(const float* x, const float* signs, int64_t size, int block, float* out) {
    for (int64_t k = 0; k < size; ++k) out[k] = x[k] * signs[k];
    hadamard(out, size, block);
}

void unrotate(float* x, const float* signs, int64_t size, int block) {
    hadamard(x, size, block);
    for (int64_t k = 0; k < size; ++k) x[k] *= signs[k];
}

// A leaf in a rotated basis is a leaf with another preparation.
class RotatedLeaf : public Leaf {
  public:
    RotatedLeaf(Shared x, std::vector<float> signs, int block, uintptr_t id)
        : Leaf(x->rows, x->cols), x_(std::move(x)), leaf_(static_cast<const Leaf*>(x_.get())), signs_(std::move(signs)),
          block_(block), id_(id) {}
    // The keys of the leaves themselves are below 16.
    uintptr_t key() const override { return id_ * 16 + leaf_->key(); }
    void reserve(const float* x, int64_t batch, Input& in) const override {
        leaf_->reserve(x, batch, in);
        // A kernel that reads activations as they are finds them turned.
        if (in.x != nullptr) in.x = in.floats.grow(batch * cols);
    }
    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        if (in.x != nullptr) {
            for (int64_t b = first; b < end; ++b)
                rotate(x + b * cols, signs_.data(), cols, block_, in.floats.data() + b * cols);
            return;
        }
        thread_local Buffer<float> room;
        // Rows keep their numbers: the leaf finds row b at b * cols.
        float* turned = room.grow((end - first) * cols) - first * cols;
        for (int64_t b = first; b < end; ++b) rotate(x + b * cols, signs_.data(), cols, block_, turned + b * cols);
        leaf_->prepare(turned, first, end, in);
    }
    int64_t places() const override { return leaf_->places(); }
    int64_t unit() const override { return leaf_->unit(); }
    Ahead codes(int64_t first, int64_t end) const override { return leaf_->codes(first, end); }
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        leaf_->run(in, batch, first, end, y, stride);
    }
    void decode(int64_t row, float* out) const override {
        leaf_->decode(row, out);
        unrotate(out, signs_.data(), cols, block_);
    }
    std::string kernel() const override { return leaf_->kernel(); }

  private:
    Shared x_;
    const Leaf* leaf_;
    std::vector<float> signs_;
    int block_;
    uintptr_t id_;
};

class Rotated : public Matrix {
  public:
    Rotated(Shared x, std::vector<float> signs, int block)
        : Matrix(x->rows, x->cols), x_(std::move(x)), signs_(std::move(signs)), block_(block) {}
    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        Scratch turned(batch * cols);
        for (int64_t b = 0; b < batch; ++b) rotate(x + b * cols, signs_.data(), cols, block_, turned.data() + b * cols);
        x_->multiply(turned.data(), batch, y, stride, threads);
    }
    void decode(int64_t row, float* out) const override {
        x_->decode(row, out);
        unrotate(out, signs_.data(), cols, block_);
    }
    std::string kernel() const override { return x_->kernel(); }

  private:
    Shared x_;
    std::vector<float> signs_;
    int block_;
};

class RotatedRows : public Matrix {
  public:
    RotatedRows(Shared x, std::vector<float> signs, int block)
        : Matrix(x->rows, x->cols), x_(std::move(x)), signs_(std::move(signs)), block_(block) {}
    void multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) override {
        x_->multiply(x, batch, y, stride, threads);
        for (int64_t b = 0; b < batch; ++b) unrotate(y + b * stride, signs_.data(), rows, block_);
    }
    void decode(int64_t row, float* out) const override {
        // A row of H X is a signed sum of a block's rows.
        std::vector<float> unit(static_cast<size_t>(block_)), one(static_cast<size_t>(cols));
        unit[static_cast<size_t>(row % block_)] = 1;
        hadamard(unit.data(), block_, block_);
        std::fill_n(out, cols, 0.0f);
        for (int i = 0; i < block_; ++i) {
            x_->decode(row / block_ * block_ + i, one.data());
            const float by = unit[static_cast<size_t>(i)] * signs_[static_cast<size_t>(row)];
            for (int64_t k = 0; k < cols; ++k) out[k] += by * one[static_cast<size_t>(k)];
        }
    }
    std::string kernel() const override { return x_->kernel(); }

  private:
    Shared x_;
    std::vector<float> signs_;
    int block_;
};

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

}  // namespace

void hadamard(float* x, int64_t size, int block) { ops().hadamard(x, size, block); }

Shared dense(int64_t rows, int64_t cols, const void* values, Number type) {
    return std::make_shared<Dense>(rows, cols, values, type);
}

Shared low_rank(Shared a, Shared b) {
    require(a->cols == b->rows, "low rank: the factors do not fit");
    return std::make_shared<LowRank>(std::move(a), std::move(b));
}

Shared sum(Shared x, Shared y) {
    require(x->rows == y->rows && x->cols == y->cols, "sum: the matrices have other shapes");
    return std::make_shared<Sum>(std::move(x), std::move(y));
}

Shared rotated(Shared x, std::vector<float> signs, int block, uintptr_t id) {
    require(block > 0 && x->cols % block == 0 && static_cast<int64_t>(signs.size()) == x->cols, "rotated: bad blocks");
    const auto* leaf = dynamic_cast<const Leaf*>(x.get());
    if (leaf == nullptr || leaf->key() >= 16) return std::make_shared<Rotated>(std::move(x), std::move(signs), block);
    return std::make_shared<RotatedLeaf>(std::move(x), std::move(signs), block, id);
}

Shared rotated_rows(Shared x, std::vector<float> signs, int block) {
    require(block > 0 && x->rows % block == 0 && static_cast<int64_t>(signs.size()) == x->rows, "rotated: bad blocks");
    return std::make_shared<RotatedRows>(std::move(x), std::move(signs), block);
}

}  // namespace nstf::engine
