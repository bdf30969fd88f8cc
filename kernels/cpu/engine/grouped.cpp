#include "grouped.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

namespace nstf::engine {
namespace {

// Pieces per thread: cores are rarely equally fast, and experts have unlike numbers of rows.
constexpr int64_t kPieces = 4;
// Products of two numbers that are worth a piece of their own, and a second thread.
constexpr int64_t kLeast = 8192, kAlone = 1 << 15;
// Rows of activations that are prepared at a time, and those of the experts that are multiplied together: what is made of
// them stays in the caches, and what is held does not grow with the prompt.
constexpr int64_t kPrepared = 8, kTogether = 1024;

struct Product {  // one term of one expert
    const Leaf* leaf;
    const float* x;
    Input* in;
    float* y;
    int64_t batch;
};
struct Piece {
    size_t product;
    int64_t first, end;
};

// Rows of experts whose terms are leaves, at most `kTogether`.
class Wave {
  public:
    Wave(int64_t cols, int64_t rows, int threads) : cols_(cols), rows_(rows), threads_(threads) {}

    void add(const Leaf* leaf, const float* x, int64_t batch, float* y) {
        // Terms of one expert that read the same activations alike share what is prepared.
        for (size_t i = products_.size(); i-- > 0 && products_[i].x == x;)
            if (products_[i].leaf->key() == leaf->key()) {
                products_.push_back({leaf, x, products_[i].in, y, batch});
                return;
            }
        if (used_ == inputs().size()) inputs().push_back(std::make_unique<Input>());
        Input* in = inputs()[used_++].get();
        in->x = nullptr;
        leaf->reserve(x, batch, *in);
        for (int64_t b = 0; b < batch; b += kPrepared) chunks_.push_back({products_.size(), b, std::min(batch, b + kPrepared)});
        products_.push_back({leaf, x, in, y, batch});
    }

    void run() {
        if (products_.empty()) return;
        int64_t work = 0;
        for (const Product& p : products_) work += p.batch * p.leaf->places();
        const int workers = work * cols_ < kAlone ? 1 : threads_;
        auto prepare = [&](int64_t i) {
            const Piece& c = chunks_[static_cast<size_t>(i)];
            const Product& p = products_[c.product];
            p.leaf->prepare(p.x, c.first, c.end, *p.in);
        };
        parallel_for(static_cast<int64_t>(chunks_.size()) < 2 * workers ? 1 : workers, static_cast<int64_t>(chunks_.size()), prepare);
        // Places times activations of a piece.
        const int64_t size = std::max(kLeast / std::max<int64_t>(1, cols_), (work + workers * kPieces - 1) / (workers * kPieces));
        for (size_t i = 0; i < products_.size(); ++i) {
            const Leaf& leaf = *products_[i].leaf;
            const int64_t places = leaf.places();
            // Equal pieces, so that the last one is not a small rest.
            const int64_t count = std::max<int64_t>(1, std::min(places / leaf.unit(), places * products_[i].batch / size));
            const int64_t share = (places + count * leaf.unit() - 1) / (count * leaf.unit()) * leaf.unit();
            for (int64_t at = 0; at < places; at += share) pieces_.push_back({i, at, std::min(places, at + share)});
        }
        auto multiply = [&](int64_t i) {
            const Piece& piece = pieces_[static_cast<size_t>(i)];
            const Product& p = products_[piece.product];
            p.leaf->run(*p.in, p.batch, piece.first, piece.end, p.y, rows_);
        };
        parallel_for(workers, static_cast<int64_t>(pieces_.size()), multiply);
    }

  private:
    // Kept from call to call, as those of `multiply_all`.
    static std::vector<std::unique_ptr<Input>>& inputs() {
        thread_local std::vector<std::unique_ptr<Input>> kept;
        return kept;
    }
    int64_t cols_, rows_;
    int threads_;
    size_t used_ = 0;
    std::vector<Product> products_;
    std::vector<Piece> chunks_, pieces_;
};

}  // namespace

void terms_of(Matrix* matrix, std::vector<Matrix*>& out) {
    if (auto* sum = dynamic_cast<Terms*>(matrix)) sum->terms(out);
    else out.push_back(matrix);
}

void group(const int64_t* index, int64_t count, int64_t experts, int64_t* order, int64_t* offsets) {
    std::vector<int64_t> next(static_cast<size_t>(experts) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (index[i] < 0 || index[i] > experts) throw std::invalid_argument("an expert that is not there");
        ++next[static_cast<size_t>(index[i])];
    }
    int64_t total = 0;
    for (int64_t e = 0; e <= experts; ++e) {
        offsets[e] = total;
        total += std::exchange(next[static_cast<size_t>(e)], total);
    }
    for (int64_t i = 0; i < count; ++i) order[next[static_cast<size_t>(index[i])]++] = i;
}

void multiply_grouped(const std::vector<Matrix*>& matrices, const int64_t* offsets, const float* x, const int64_t* order, int64_t choices,
                      float* y, int threads) {
    const int64_t experts = static_cast<int64_t>(matrices.size());
    std::vector<Matrix*> terms;
    for (int64_t e = 0, from = 0; e < experts;) {
        // A wave: the rows [from, until) of the experts from e to end, several whole ones or an equal piece of a large one.
        const int64_t rest = offsets[e + 1] - from, pieces = std::max<int64_t>(1, (rest + kTogether - 1) / kTogether);
        int64_t end = e + 1, until = from + (rest + pieces - 1) / pieces;
        while (pieces == 1 && end < experts && offsets[end + 1] - from <= kTogether) until = offsets[++end];
        const int64_t count = until - from;
        if (count == 0) {
            e = end;
            continue;
        }
        // (where an expert's rows begin in the wave, how many they are)
        auto part = [&](int64_t i) {
            const int64_t first = std::max(from, offsets[i]);
            return std::pair(first - from, std::min(until, offsets[i + 1]) - first);
        };
        const Matrix* any = nullptr;
        for (int64_t i = e; i < end; ++i)
            if (part(i).second > 0) any = matrices[static_cast<size_t>(i)];
        const int64_t cols = any->cols, rows = any->rows;
        const float* inputs = x + from * cols;
        Scratch gathered(order == nullptr ? 0 : count * cols);
        if (order != nullptr) {
            for (int64_t i = 0; i < count; ++i) std::copy_n(x + order[from + i] / choices * cols, cols, gathered.data() + i * cols);
            inputs = gathered.data();
        }
        // The first term is written where the sum belongs, the others beside it, as many times over as the largest sum has terms.
        size_t most = 1;
        for (int64_t i = e; i < end; ++i) {
            if (part(i).second == 0) continue;
            terms.clear();
            terms_of(matrices[static_cast<size_t>(i)], terms);
            most = std::max(most, terms.size());
        }
        Scratch beside(static_cast<int64_t>(most - 1) * count * rows);
        Wave wave(cols, rows, threads);
        for (int64_t i = e; i < end; ++i) {
            const auto [at, batch] = part(i);
            if (batch == 0) continue;
            terms.clear();
            terms_of(matrices[static_cast<size_t>(i)], terms);
            for (size_t t = 0; t < terms.size(); ++t) {
                float* to = t == 0 ? y + (from + at) * rows : beside.data() + (static_cast<int64_t>(t - 1) * count + at) * rows;
                const auto* leaf = dynamic_cast<const Leaf*>(terms[t]);
                // What is no leaf (a low rank's two products) has parallel loops of its own.
                if (leaf == nullptr) terms[t]->multiply(inputs + at * cols, batch, to, rows, threads);
                else wave.add(leaf, inputs + at * cols, batch, to);
            }
        }
        wave.run();
        for (int64_t i = e; i < end && most > 1; ++i) {
            const auto [at, batch] = part(i);
            if (batch == 0) continue;
            terms.clear();
            terms_of(matrices[static_cast<size_t>(i)], terms);
            for (size_t t = 1; t < terms.size(); ++t) {
                const float* other = beside.data() + (static_cast<int64_t>(t - 1) * count + at) * rows;
                float* to = y + (from + at) * rows;
                for (int64_t k = 0; k < batch * rows; ++k) to[k] += other[k];
            }
        }
        if (until == offsets[end]) e = end;
        from = until;
    }
}

void combine(const float* parts, const int64_t* order, int64_t taken, const float* weights, int64_t tokens, int64_t choices, int64_t cols,
             float* y, int threads) {
    std::vector<int64_t> places(static_cast<size_t>(tokens * choices), -1);
    for (int64_t i = 0; i < taken; ++i) places[static_cast<size_t>(order[i])] = i;
    auto task = [&](int64_t t) {
        float* to = y + t * cols;
        std::fill_n(to, cols, 0.0f);
        for (int64_t c = t * choices; c < (t + 1) * choices; ++c) {
            const int64_t place = places[static_cast<size_t>(c)];
            if (place < 0) continue;
            const float weight = weights[c];
            const float* from = parts + place * cols;
            for (int64_t k = 0; k < cols; ++k) to[k] += weight * from[k];
        }
    };
    parallel_for(tokens * choices * cols < kAlone ? 1 : threads, tokens, task);
}

}  // namespace nstf::engine
