#include "page_cache.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "../half.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

constexpr int64_t kSmallest = 64 << 10, kLargest = 4 << 20;  // bytes of a piece of memory
constexpr float kLargestHalf = 65504;

// The power of two to divide by so that float16 holds `x`, at least `unit`. Infinity stays what it is.
float fitting(float unit, const float* x, int64_t count) {
    float most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(x[i]));  // NaN is passed over, and stays NaN
    if (most <= kLargestHalf * unit || std::isinf(most)) return unit;
    int exponent;
    std::frexp(most / kLargestHalf, &exponent);
    return std::ldexp(1.0f, exponent);
}

}  // namespace

uint8_t* Arena::take(int64_t bytes) {
    bytes = up_to(bytes, 64);
    auto& spare = free_[bytes];
    if (spare.empty()) {
        if (pieces_.empty() || at_ + bytes > pieces_.back().size()) {
            const int64_t next = pieces_.empty() ? kSmallest : std::min(kLargest, 2 * pieces_.back().size());
            pieces_.emplace_back(std::max(next, bytes));
            held_ += pieces_.back().size();
            at_ = 0;
        }
        spare.push_back(pieces_.back().data() + at_);
        at_ += bytes;
    }
    uint8_t* page = spare.back();
    spare.pop_back();
    used_ += bytes;
    return page;
}

void Arena::give(void* page, int64_t bytes) {
    bytes = up_to(bytes, 64);
    free_[bytes].push_back(static_cast<uint8_t*>(page));
    used_ -= bytes;
}

void PageCache::add_layer(const std::vector<GroupPlan>& groups) {
    layers_.emplace_back(static_cast<size_t>(kv_heads_));
    for (size_t h = 0; h < groups.size(); ++h) layers_.back()[h].plan = groups[h];
}

template <class F>
void PageCache::sides(Group& g, F body) {
    body(g.keys, g.plan.keys, true);
    body(g.values, g.plan.values, false);
}

void PageCache::clear(PageSide& side, const Format& format, bool key, bool half, bool packed) {
    if (half && side.half != nullptr) arena_.give(side.half, half_bytes(size_)), side.half = nullptr;
    if (packed && side.packed != nullptr) arena_.give(side.packed, packed_bytes(format, size_, key)), side.packed = nullptr;
}

void PageCache::prepare(int64_t first, int64_t count) {
    if (first != 0 && resumable(first) == 0)
        throw std::invalid_argument("engine: the text before these tokens is no longer in the cache");
    if (first == 0) lowest_ = 0;
    seen_ = std::min(seen_, first);  // what comes after is replaced, should memory run out in between
    const int64_t begun = first / kPage, last = (first + count - 1) / kPage;
    for (auto& layer : layers_)
        for (Group& g : layer) {
            if (first == 0) g.whole_from = g.held_from = 0;
            sides(g, [&](std::vector<PageSide>& pages, const Format& format, bool key) {
                for (int64_t p = begun; p < static_cast<int64_t>(pages.size()); ++p) {
                    const bool fresh = p > begun || first % kPage == 0;
                    clear(pages[static_cast<size_t>(p)], format, key, fresh, fresh || !g.plan.at_once);
                }
                pages.resize(static_cast<size_t>(last + 1));
                for (int64_t p = begun; p <= last; ++p) {
                    PageSide& side = pages[static_cast<size_t>(p)];
                    if (g.plan.at_once) {
                        if (side.packed != nullptr) continue;
                        side.packed = arena_.take(packed_bytes(format, size_, key));
                        // Positions that are not stored yet are read, times nothing: they have to be numbers.
                        std::fill_n(side.packed, packed_bytes(format, size_, key), uint8_t{0});
                        continue;
                    }
                    if (side.half == nullptr) side.half = reinterpret_cast<uint16_t*>(arena_.take(half_bytes(size_)));
                }
                for (int64_t p = g.whole_from; format.bits < 16 && !g.plan.at_once && p <= last - 2; ++p) {
                    PageSide& side = pages[static_cast<size_t>(p)];
                    if (side.half != nullptr && side.packed == nullptr)
                        side.packed = arena_.take(packed_bytes(format, size_, key));
                }
            });
        }
    seen_ = first + count;
}

void PageCache::put(PageSide& side, int64_t position, const float* x, bool key) {
    const int64_t within = position % kPage, block = key ? 16 : 1;
    if (within == 0) side.unit = 1;
    const float unit = fitting(side.unit, x, size_);
    uint16_t* to = side.half + (key ? within / 16 * 16 * size_ + within % 16 : within * size_);
    if (unit == 1) return ops().to_halves(x, size_, block, to);
    // Models with keys of a million exist, and float16 ends at 65504: a page is divided by a power of two, exactly.
    if (unit > side.unit) {
        const float by = unit / side.unit;
        const int64_t stored = key ? up_to(within + 1, 16) : within;
        for (int64_t i = 0; i < stored * size_; ++i) side.half[i] = float_to_half(half_to_float(side.half[i]) / by);
        side.unit = unit;
    }
    for (int64_t i = 0; i < size_; ++i) to[i * block] = float_to_half(x[i] / unit);
}

void PageCache::put_code(PageSide& side, const Format& format, int64_t position, const float* x, bool key) {
    const int64_t within = position % kPage, pairs = pairs_of(format, size_);
    if (within == 0) side.unit = 1;
    Scratch row(size_);
    std::copy_n(x, size_, row.data());
    if (format.rotate) page_ops().turn(row.data(), size_);
    const float unit = fitting(side.unit, row.data(), size_);
    if (unit > side.unit) {
        auto* stored = reinterpret_cast<uint16_t*>(side.packed);
        for (int64_t i = 0; i < 2 * pairs; ++i)
            stored[i] = float_to_half(half_to_float(stored[i]) / (unit / side.unit));
        side.unit = unit;
    }
    if (unit != 1)
        for (int64_t i = 0; i < size_; ++i) row.data()[i] /= unit;
    page_ops().pack_one(format, size_, key, row.data(), within, side.packed);
}

void PageCache::store(size_t layer, int64_t head, int64_t position, const float* key, const float* value) {
    Group& g = layers_[layer][static_cast<size_t>(head)];
    const auto page = static_cast<size_t>(position / kPage);
    if (g.plan.at_once) {
        put_code(g.keys[page], g.plan.keys, position, key, true);
        return put_code(g.values[page], g.plan.values, position, value, false);
    }
    put(g.keys[page], position, key, true);
    put(g.values[page], position, value, false);
}

void PageCache::pack(size_t layer, int64_t head) {
    Group& g = layers_[layer][static_cast<size_t>(head)];
    if (g.plan.at_once) return;
    const int64_t last = (seen_ - 1) / kPage;
    sides(g, [&](std::vector<PageSide>& pages, const Format& format, bool key) {
        for (int64_t p = g.whole_from; format.bits < 16 && p <= last - 2; ++p) {
            PageSide& side = pages[static_cast<size_t>(p)];
            if (side.half != nullptr) page_ops().pack(format, size_, key, side.half, side.packed);
        }
    });
}

void PageCache::finish() {
    const int64_t last = (seen_ - 1) / kPage, base = seen_ / kPage * kPage;
    for (auto& layer : layers_)
        for (Group& g : layer) {
            const bool few = !g.plan.at_once && (g.plan.keys.bits < 16 || g.plan.values.bits < 16);
            for (; few && g.whole_from <= last - 2; ++g.whole_from) {
                const auto p = static_cast<size_t>(g.whole_from);
                sides(g, [&](std::vector<PageSide>& pages, const Format& format, bool key) {
                    if (format.bits < 16) clear(pages[p], format, key, true, false);
                });
                lowest_ = std::max(lowest_, (g.whole_from + 2) * kPage);
            }
            // Of pages, and as any text from the beginning of the last page on would see them.
            if (g.plan.recent == 0 || base + 1 < g.plan.min_length) continue;
            for (; (g.held_from + 1) * kPage - 1 <= base - g.plan.recent; ++g.held_from) {
                if (g.held_from * kPage < g.plan.sink) continue;
                const auto p = static_cast<size_t>(g.held_from);
                sides(g, [&](std::vector<PageSide>& pages, const Format& format, bool key) {
                    clear(pages[p], format, key, true, true);
                });
                lowest_ = std::max(lowest_, base);
            }
        }
}

void PageCache::copy(const PageCache& from, int64_t positions) {
    if (positions > from.seen_) throw std::invalid_argument("engine: fewer positions than are to be copied");
    if (positions != 0 && from.resumable(positions) == 0)
        throw std::invalid_argument("engine: these positions of the other sequence are no longer held");
    const int64_t pages = (positions + kPage - 1) / kPage;
    seen_ = lowest_ = 0;  // nothing, should memory run out
    for (size_t i = 0; i < layers_.size(); ++i)
        for (size_t h = 0; h < layers_[i].size(); ++h) {
            Group& g = layers_[i][h];
            const Group& own = from.layers_[i][h];
            const auto one = [&](std::vector<PageSide>& to, const std::vector<PageSide>& in, const Format& format, bool key) {
                for (PageSide& side : to) clear(side, format, key, true, true);
                to.assign(static_cast<size_t>(pages), PageSide{});
                for (size_t p = 0; p < to.size(); ++p) {
                    to[p].unit = in[p].unit;
                    if (in[p].half != nullptr) {
                        to[p].half = reinterpret_cast<uint16_t*>(arena_.take(half_bytes(size_)));
                        std::copy_n(in[p].half, half_bytes(size_) / 2, to[p].half);
                    }
                    if (in[p].packed != nullptr) {
                        to[p].packed = arena_.take(packed_bytes(format, size_, key));
                        std::copy_n(in[p].packed, packed_bytes(format, size_, key), to[p].packed);
                    }
                }
            };
            one(g.keys, own.keys, g.plan.keys, true);
            one(g.values, own.values, g.plan.values, false);
            g.whole_from = std::min(own.whole_from, pages);
            g.held_from = std::min(own.held_from, pages);
        }
    seen_ = positions;
    lowest_ = std::min(from.lowest_, positions);
}

}  // namespace nstf::engine
