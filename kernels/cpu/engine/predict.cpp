// The blocks of keys that matter to a block of queries, predicted (XAttention, Xu et al. 2025): products along antidiagonals of
// groups of `stride` queries and keys are summed, and a softmax over the groups of keys estimates their mass.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "../parallel.h"
#include "attend.h"

namespace nstf::engine {
namespace {

constexpr int64_t kBlockOf = 128;

// The fewest blocks whose mass reaches the threshold, always the first and the last; ties go to the lower block.
std::vector<uint8_t> chosen(std::vector<float>& mass, float threshold) {
    const float all = std::accumulate(mass.begin(), mass.end(), 0.0f);
    for (float& m : mass) m /= all;
    std::vector<size_t> order(mass.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return mass[a] > mass[b]; });
    std::vector<uint8_t> keep(mass.size(), 0);
    float before = 0;
    for (size_t i : order) {
        if (!(before < threshold)) break;  // NaN keeps all
        keep[i] = 1;
        before += mass[i];
    }
    if (!(all > 0)) std::fill(keep.begin(), keep.end(), uint8_t{1});
    keep.front() = keep.back() = 1;
    return keep;
}

}  // namespace

void Attention::predict(const AttendShape& shape, size_t layer, const LayerPlan& plan, const std::vector<AttendPart>& parts,
                        const float* q, int threads) {
    struct Wanted {
        size_t part, head;
    };
    std::vector<Wanted> wanted;
    for (size_t i = 0; i < parts.size(); ++i)
        for (size_t h = 0; h < plan.heads.size(); ++h) {
            const AttendPart& p = parts[i];
            if (plan.heads[h].pattern == HeadPlan::kSparse && p.count == kBlockOf && p.first % kBlockOf == 0 &&
                p.first + 1 >= plan.heads[h].min_length)
                wanted.push_back({i, h});
        }
    if (wanted.empty()) return;
    blocks_.assign(parts.size() * static_cast<size_t>(shape.heads), {});
    auto one = [&](int64_t number) {
        const Wanted& w = wanted[static_cast<size_t>(number)];
        const AttendPart& p = parts[w.part];
        const HeadPlan& head = plan.heads[w.head];
        const int64_t size = shape.size, kv = static_cast<int64_t>(w.head) / (shape.heads / shape.kv_heads);
        const int64_t stride = head.stride, rows = kBlockOf / stride, groups = (p.first + kBlockOf) / stride;
        const GroupPlan& group = p.cache->plan(layer, kv);
        // Of each group of queries, for each channel, what each of 16 keys next to each other is multiplied with.
        Scratch room(2 * rows * size * 16 + kPage * size + rows * groups + size);
        float *plain = room.data(), *turned = plain + rows * size * 16, *page = turned + rows * size * 16;
        float *scores = page + kPage * size, *query = scores + rows * groups;
        const bool turn = group.keys.rotate && group.keys.bits < 16;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t t = 0; t < stride; ++t) {
                const float* in = q + ((p.row + r * stride + t) * shape.heads + static_cast<int64_t>(w.head)) * size;
                const auto place = [&](const float* from, float* to) {
                    for (int64_t d = 0; d < size; ++d)
                        for (int64_t l = stride - 1 - t; l < 16; l += stride) to[(r * size + d) * 16 + l] = from[d];
                };
                place(in, plain);
                if (!turn) continue;
                std::copy_n(in, size, query);
                page_ops().turn(query, size);
                place(query, turned);
            }
        const int64_t whole = p.first / kPage - 1, pages = (p.first + kBlockOf) / kPage;  // as its first query reads them
        const PageSide* keys = p.cache->keys(layer, kv);
        for (int64_t i = 0; i < pages; ++i) {
            const bool half = i >= whole || group.keys.bits == 16;
            page_ops().unpack_keys(group.keys, size, keys[i], half, page);
            page_ops().diagonals(!half && turn ? turned : plain, page, size, rows, stride, scores + i * (kPage / stride), groups);
        }
        const float by = shape.scale / static_cast<float>(stride);
        std::vector<float> mass(static_cast<size_t>((p.first + kBlockOf) / kBlockOf), 0.0f);
        for (int64_t r = 0; r < rows; ++r) {
            float* s = scores + r * groups;
            float top = -3e38f, total = 0;
            for (int64_t k = 0; k < groups; ++k) s[k] *= by, top = std::max(top, s[k]);
            for (int64_t k = 0; k < groups; ++k) s[k] = std::exp(s[k] - top), total += s[k];
            for (int64_t k = 0; k < groups; ++k) mass[static_cast<size_t>(k * stride / kBlockOf)] += s[k] / total;
        }
        blocks_[w.part * static_cast<size_t>(shape.heads) + w.head] = chosen(mass, head.threshold);
    };
    parallel_for(threads, static_cast<int64_t>(wanted.size()), one);
}

}  // namespace nstf::engine
