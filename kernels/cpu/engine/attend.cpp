#include "attend.h"

#include <algorithm>
#include <cmath>

#include "../parallel.h"

namespace nstf::engine {
namespace {

// Pages of a piece of a decoded token's context: few heads have to keep all cores busy. The pieces do not depend on the number
// of threads, and neither do the numbers.
constexpr int64_t kPiece = 8;
constexpr int64_t kTile = 32;  // tokens of a task

Rule rule_of(int64_t position, int64_t window, const HeadPlan* head, const GroupPlan& group, const std::vector<uint8_t>* blocks) {
    Rule r;
    r.end = position + 1;
    if (window > 0) r.window = position + 1 - window;
    if (group.recent > 0 && position + 1 >= group.min_length)
        r.kept_sink = group.sink, r.kept_recent = position + 1 - group.recent;
    if (head != nullptr && head->pattern == HeadPlan::kStreaming && position + 1 >= head->min_length)
        r.sink = head->sink, r.recent = position + 1 - head->window;
    if (blocks != nullptr && !blocks->empty()) r.blocks = blocks->data();
    return r;
}

}  // namespace

void Attention::arrange(const AttendShape& shape, const std::vector<AttendPart>& parts) {
    const int64_t group = shape.heads / shape.kv_heads, together = std::min(group, kQueries);
    tasks_.clear();
    splits_.clear();
    int64_t number = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
        const AttendPart& p = parts[i];
        const auto part = static_cast<int64_t>(i);
        for (int64_t h = 0; h < shape.heads; h += h % group + together < group ? together : group - h % group) {
            const int64_t heads = std::min(together, group - h % group);
            if (p.alone) {
                const int64_t pages = p.first / kPage + 1, pieces = (pages + kPiece - 1) / kPiece;
                if (pieces == 1) {
                    tasks_.push_back({part, h, heads, 0, 1, 0, pages, -1});
                    continue;
                }
                for (int64_t k = 0; k < heads; ++k) splits_.push_back({p.row, h + k, number + k, pieces, heads});
                for (int64_t k = 0; k < pieces; ++k, number += heads)
                    tasks_.push_back({part, h, heads, 0, 1, k * kPiece, std::min(pages, (k + 1) * kPiece), number});
                continue;
            }
            int64_t tile = kTile;
            while (tile > 1 && tile * heads > kQueries) tile /= 2;
            for (int64_t t = 0; t < p.count;) {
                const int64_t now = std::min(p.count - t, tile - (p.first + t) % tile);
                tasks_.push_back({part, h, heads, t, now, 0, (p.first + t) / kPage + 1, -1});
                t += now;
            }
        }
    }
    pieces_.grow(std::max<int64_t>(1, number * (shape.size + 2)));
    // The longest first; the pieces of one token are equal but for the last.
    if (parts.size() > 1 || !parts[0].alone) std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
        return a.tokens * a.heads * (a.last - a.first) > b.tokens * b.heads * (b.last - b.first);
    });
}

void Attention::work(const Task& task, const AttendShape& shape, size_t layer, const LayerPlan& plan, const AttendPart& part,
                     const float* q, float* out) {
    const int64_t size = shape.size, stride = shape.heads * size, kv = task.head / (shape.heads / shape.kv_heads);
    const int64_t count = task.tokens * task.heads, position = part.first + task.token;
    Going going[kQueries];
    Scratch own(count * size);
    const GroupPlan& group = part.cache->plan(layer, kv);
    int64_t sinks = 0, recent = task.last * kPage;
    for (int64_t i = 0; i < count; ++i) {
        Going& g = going[i];
        const int64_t token = task.token + i / task.heads, head = task.head + i % task.heads;
        g.q = q + (part.row + token) * stride + head * size;
        g.sums = task.split < 0 ? own.data() + i * size : pieces_.data() + (task.split + i) * (size + 2);
        std::fill(g.sums, g.sums + size, 0.0f);
        const auto h = static_cast<size_t>(head);
        const auto at = static_cast<size_t>(&part - parts_) * static_cast<size_t>(shape.heads) + h;
        g.rule = rule_of(part.first + token, shape.window, plan.heads.empty() ? nullptr : &plan.heads[h], group,
                         blocks_.empty() ? nullptr : &blocks_[at]);
        sinks = std::max({sinks, std::min(g.rule.sink, g.rule.end), g.rule.kept_sink});
        recent = std::min(recent, std::max({g.rule.recent, g.rule.kept_recent, g.rule.window}));
    }
    PageTask pages;
    pages.size = size, pages.keys = group.keys, pages.values = group.values, pages.scale = shape.scale;
    pages.queries = going, pages.count = count;
    pages.first = task.first, pages.last = task.last;
    pages.whole = group.at_once ? task.last : std::max<int64_t>(0, position / kPage - 1);
    pages.gap_from = (sinks + kPage - 1) / kPage, pages.gap_to = std::max<int64_t>(0, recent) / kPage;
    pages.key_pages = part.cache->keys(layer, kv), pages.value_pages = part.cache->values(layer, kv);
    page_ops().attend(pages);
    for (int64_t i = 0; i < count; ++i) {
        const Going& g = going[i];
        if (task.split >= 0) {
            g.sums[size] = g.top, g.sums[size + 1] = g.total;
            continue;
        }
        float* to = out + (g.q - q);
        const float share = 1.0f / g.total;
        for (int64_t d = 0; d < size; ++d) to[d] = g.sums[d] * share;
    }
}

void Attention::merge(const Split& split, const AttendShape& shape, float* out) const {
    const int64_t size = shape.size;
    const auto piece = [&](int64_t k) { return pieces_.data() + (split.first + k * split.step) * (size + 2); };
    float top = -3e38f, total = 0;
    for (int64_t k = 0; k < split.pieces; ++k) top = std::max(top, piece(k)[size]);
    float* to = out + (split.row * shape.heads + split.head) * size;
    std::fill(to, to + size, 0.0f);
    for (int64_t k = 0; k < split.pieces; ++k) {
        const float *own = piece(k), by = std::exp(own[size] - top);
        total += own[size + 1] * by;
        for (int64_t d = 0; d < size; ++d) to[d] += own[d] * by;
    }
    for (int64_t d = 0; d < size; ++d) to[d] /= total;
}

void Attention::run(const AttendShape& shape, size_t layer, const LayerPlan& plan, const std::vector<AttendPart>& parts,
                    const float* q, float* out, int threads) {
    parts_ = parts.data();
    arrange(shape, parts);
    blocks_.clear();
    predict(shape, layer, plan, parts, q, threads);
    int64_t work_of = 0;
    for (const Task& t : tasks_) work_of += t.tokens * t.heads * (t.last - t.first) * kPage * shape.size;
    auto one = [&](int64_t i) {
        const Task& task = tasks_[static_cast<size_t>(i)];
        work(task, shape, layer, plan, parts[static_cast<size_t>(task.part)], q, out);
    };
    parallel_for(work_of < (1 << 16) ? 1 : threads, static_cast<int64_t>(tasks_.size()), one);
    for (const Split& split : splits_) merge(split, shape, out);
}

}  // namespace nstf::engine
