#include "matrix.h"

#include <algorithm>

#include "../parallel.h"

namespace nstf::engine {

void Leaf::multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) {
    multiply_all({this}, x, batch, {y}, {stride}, threads);
}

namespace {

// Shares of the rows of a leaf per thread. Of one row of activations: one, since a share's first bytes come from memory
// unannounced. Of several: more, since cores are rarely equally fast.
constexpr int64_t kShares = 1, kSharesOfMany = 3;

// Fewer rows of activations than this are prepared by the caller alone.
constexpr int64_t kAlone = 8;

struct Part {
    const Leaf* leaf;
    const Input* in;
    float* y;
    int64_t stride, first, end;
};

}  // namespace

void multiply_all(const std::vector<Matrix*>& matrices, const float* x, int64_t batch, const std::vector<float*>& y,
                  const std::vector<int64_t>& strides, int threads) {
    // Kept from call to call: a token makes dozens of them, between which the other threads wait.
    thread_local std::vector<const Leaf*> leaves;
    leaves.clear();
    for (Matrix* m : matrices) leaves.push_back(dynamic_cast<const Leaf*>(m));
    if (std::find(leaves.begin(), leaves.end(), nullptr) != leaves.end()) {
        for (size_t i = 0; i < matrices.size(); ++i) matrices[i]->multiply(x, batch, y[i], strides[i], threads);
        return;
    }
    constexpr size_t kMost = 4;  // inputs at once
    thread_local Input inputs[kMost];
    thread_local std::vector<uintptr_t> keys;
    thread_local std::vector<Part> parts;
    keys.clear();
    parts.clear();
    auto flush = [&] {
        const Part* all = parts.data();  // this thread's, for whichever runs the task
        auto task = [&](int64_t i) {
            const Part& p = all[i];
            p.leaf->run(*p.in, batch, p.first, p.end, p.y, p.stride);
        };
        parallel_for(threads, static_cast<int64_t>(parts.size()), task);
        keys.clear();
        parts.clear();
    };
    for (size_t i = 0; i < leaves.size(); ++i) {
        const Leaf& leaf = *leaves[i];
        auto found = std::find(keys.begin(), keys.end(), leaf.key());
        if (found == keys.end() && keys.size() == kMost) {
            flush();
            found = keys.end();
        }
        const size_t slot = static_cast<size_t>(found - keys.begin());
        if (found == keys.end()) {
            Input& in = inputs[slot];
            in.x = nullptr;
            leaf.reserve(x, batch, in);
            if (batch < kAlone) {
                leaf.prepare(x, 0, batch, in);
            } else {
                auto task = [&](int64_t i) { leaf.prepare(x, i * kAlone, std::min(batch, (i + 1) * kAlone), in); };
                parallel_for(threads, (batch + kAlone - 1) / kAlone, task);
            }
            keys.push_back(leaf.key());
        }
        const int64_t units = (leaf.places() + leaf.unit() - 1) / leaf.unit();
        // Small matrices are not worth splitting: a share is at least some 8,000 weights of one row of activations.
        const int64_t least = std::max<int64_t>(1, 8192 / (leaf.cols * leaf.unit() * batch));
        const int64_t shares = threads * (batch == 1 ? kShares : kSharesOfMany);
        const int64_t share = std::max(least, (units + shares - 1) / shares);
        for (int64_t u = 0; u < units; u += share)
            parts.push_back({&leaf, &inputs[slot], y[i], strides[i], u * leaf.unit(),
                             std::min(leaf.places(), (u + share) * leaf.unit())});
    }
    flush();
}

}  // namespace nstf::engine
