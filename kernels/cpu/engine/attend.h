// Attention of one layer over the caches of one or several sequences: which queries go through which pages together.
#pragma once

#include <vector>

#include "../parallel.h"
#include "page_cache.h"

namespace nstf::engine {

// Tokens of one sequence at positions first.., in rows row.. of the queries.
struct AttendPart {
    PageCache* cache;
    int64_t first, count, row;
    bool alone;  // a single token, decoded: its pages are split over the threads
};

struct AttendShape {
    int64_t heads, kv_heads, size, window;  // window: positions seen, 0: all
    float scale;
};

class Attention {
  public:
    // q, out: [row][heads * size]; keys and values of the parts have been stored. plan: empty for dense attention.
    void run(const AttendShape& shape, size_t layer, const LayerPlan& plan, const std::vector<AttendPart>& parts, const float* q,
             float* out, int threads);
    // The same of one token, which is alone. ready(head): brings the queries, keys and values of a key head into place; called
    // once for each, by the thread that reads them first.
    template <class F>
    void run_one(const AttendShape& shape, size_t layer, const LayerPlan& plan, const std::vector<AttendPart>& parts, const float* q,
                 float* out, F& ready, int threads) {
        parts_ = parts.data();
        arrange(shape, parts);
        // A key head's queries make one task where its context is not cut into pieces.
        const bool together = splits_.empty() && static_cast<int64_t>(tasks_.size()) == shape.kv_heads;
        blocks_.clear();
        auto one = [&](int64_t i) {
            const Task& task = tasks_[static_cast<size_t>(i)];
            if (together) ready(task.head / (shape.heads / shape.kv_heads));
            work(task, shape, layer, plan, parts[0], q, out);
        };
        for (int64_t h = 0; h < shape.kv_heads && !together; ++h) ready(h);
        parallel_for(threads, static_cast<int64_t>(tasks_.size()), one);
        for (const Split& split : splits_) merge(split, shape, out);
    }

  private:
    struct Task {  // of tokens token.. of a part and heads head.. that share a key head
        int64_t part, head, heads, token, tokens, first, last;
        int64_t split;  // number of the first of its queries among the split ones, -1: the task sees all their pages
    };
    struct Split {  // one query head of a token that is split, and where its pieces are
        int64_t row, head, first, pieces, step;
    };
    void arrange(const AttendShape& shape, const std::vector<AttendPart>& parts);
    void predict(const AttendShape& shape, size_t layer, const LayerPlan& plan, const std::vector<AttendPart>& parts,
                 const float* q, int threads);
    void work(const Task& task, const AttendShape& shape, size_t layer, const LayerPlan& plan, const AttendPart& part,
              const float* q, float* out);
    void merge(const Split& split, const AttendShape& shape, float* out) const;

    const AttendPart* parts_ = nullptr;
    std::vector<Task> tasks_;
    std::vector<Split> splits_;
    Buffer<float> pieces_;  // of split queries: [number][sums, largest score, total]
    std::vector<std::vector<uint8_t>> blocks_;  // [part * heads + head]: the blocks of keys that are computed, empty: all
};

}  // namespace nstf::engine
