#include "matrix.h"

#include <algorithm>

#include "../parallel.h"

namespace nstf::engine {

void Leaf::multiply(const float* x, int64_t batch, float* y, int64_t stride, int threads) {
    multiply_all({this}, x, batch, {y}, {stride}, threads);
}

namespace {

// Shares of the rows of a leaf per thread. Of one row of activations one, since a share's first bytes come from memory unless
// they were fetched ahead; of several more, since cores are rarely equally fast.
constexpr int64_t kSharesOfMany = 3;

// Fewer rows of activations than this are prepared by the caller alone.
constexpr int64_t kAlone = 8;

// What a thread fetches of its next share while it waits: what fits into the second cache of a core beside what is in use.
constexpr int64_t kFetched = 256 << 10;

struct Part {
    const Leaf* leaf;
    const Input* in;
    float* y;
    int64_t stride, first, end;
};

// Places of a share of a leaf. Small matrices are not worth splitting: a share is at least some 8,000 weights of one row of activations.
int64_t share_of(const Leaf& leaf, int64_t batch, int64_t shares) {
    const int64_t units = (leaf.places() + leaf.unit() - 1) / leaf.unit();
    const int64_t least = std::max<int64_t>(1, 8192 / (leaf.cols * leaf.unit() * batch));
    return std::max(least, (units + shares - 1) / shares) * leaf.unit();
}

}  // namespace

void multiply_all(const std::vector<Matrix*>& matrices, const float* x, int64_t batch, const std::vector<float*>& y,
                  const std::vector<int64_t>& strides, int threads, const std::vector<Matrix*>& next) {
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
    // Of one row: a share of every leaf for each thread.
    auto flush_shares = [&] {
        struct Job {
            const Part* parts;
            size_t count;
            const std::vector<Matrix*>* next;
            int64_t threads;
        } job{parts.data(), parts.size(), &next, threads};
        const auto body = [](void* context, int64_t t) {
            const Job& j = *static_cast<const Job*>(context);
            for (size_t i = 0; i < j.count; ++i) {
                const Part& p = j.parts[i];
                const int64_t share = share_of(*p.leaf, 1, j.threads), first = t * share, end = std::min(p.leaf->places(), first + share);
                if (first < end) p.leaf->run(*p.in, 1, first, end, p.y, p.stride);
            }
        };
        const auto ahead = [](void* context, int64_t t, Ahead* out) {
            const Job& j = *static_cast<const Job*>(context);
            int64_t left = kFetched;
            for (size_t i = 0, at = 0; i < j.next->size() && at < kAheads; ++i) {
                const auto* leaf = dynamic_cast<const Leaf*>((*j.next)[i]);
                if (leaf == nullptr) return;
                const int64_t share = share_of(*leaf, 1, j.threads), first = t * share, end = std::min(leaf->places(), first + share);
                if (first >= end) continue;
                out[at] = leaf->codes(first, end);
                out[at].bytes = std::min(out[at].bytes, left);
                left -= out[at++].bytes;
            }
        };
        parallel_shares(threads, threads, body, ahead, &job);
        keys.clear();
        parts.clear();
    };
    for (size_t i = 0; i < leaves.size(); ++i) {
        const Leaf& leaf = *leaves[i];
        auto found = std::find(keys.begin(), keys.end(), leaf.key());
        if (found == keys.end() && keys.size() == kMost) {
            batch == 1 ? flush_shares() : flush();
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
        if (batch == 1) {
            parts.push_back({&leaf, &inputs[slot], y[i], strides[i], 0, leaf.places()});
            continue;
        }
        const int64_t share = share_of(leaf, batch, threads * kSharesOfMany);
        for (int64_t first = 0; first < leaf.places(); first += share)
            parts.push_back({&leaf, &inputs[slot], y[i], strides[i], first, std::min(leaf.places(), first + share)});
    }
    batch == 1 ? flush_shares() : flush();
}

}  // namespace nstf::engine
