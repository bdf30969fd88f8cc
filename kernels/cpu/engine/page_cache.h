// Keys and values of the positions seen, of all layers, in pages of 64 positions (pages.h).
#pragma once

#include <map>
#include <vector>

#include "buffer.h"
#include "pages.h"

namespace nstf::engine {

// How a head's queries see keys: `streaming` those below `sink` and the `window` last ones, `sparse` the blocks of 128 that a
// prediction finds to hold `threshold` of the mass. From `min_length` tokens on.
struct HeadPlan {
    enum Pattern { kFull, kStreaming, kSparse } pattern = kFull;
    int64_t sink = 0, window = 0, min_length = 0, stride = 16;
    float threshold = 1;
};
// What is kept of a key head: all positions where `recent` is 0, else `sink` first and `recent` last ones from `min_length`
// tokens on. at_once: every position is brought into 8 bits when it is stored, and read so by all queries; what is held of it
// depends on no other, so that any number of first positions can be shared.
struct GroupPlan {
    int64_t sink = 0, recent = 0, min_length = 0;
    Format keys, values;
    bool at_once = false;
};
struct LayerPlan {
    std::vector<HeadPlan> heads;
    std::vector<GroupPlan> groups;
};

// Memory for pages: cut from large pieces, and given out again when a page of the same size was freed.
class Arena {
  public:
    uint8_t* take(int64_t bytes);
    void give(void* page, int64_t bytes);
    int64_t used() const { return used_; }
    // With what is free again: pieces are kept until the cache is released.
    int64_t held() const { return held_; }

  private:
    std::vector<Buffer<uint8_t, LargePages>> pieces_;
    int64_t at_ = 0, used_ = 0, held_ = 0;
    std::map<int64_t, std::vector<uint8_t*>> free_;
};

// The cache of one sequence. A query in page P reads pages P - 1 and P in float16 and those before as the group's format says,
// so what it reads does not depend on how a text is cut into calls.
class PageCache {
  public:
    PageCache(int64_t kv_heads, int64_t head_size) : kv_heads_(kv_heads), size_(head_size) {}
    // groups: empty for float16 and all positions.
    void add_layer(const std::vector<GroupPlan>& groups);

    // Memory for positions first..first + count - 1 and what they need in few bits. Position 0 begins another text. Throws
    // std::invalid_argument where earlier positions are no longer held as they were.
    void prepare(int64_t first, int64_t count);
    void store(size_t layer, int64_t head, int64_t position, const float* key, const float* value);
    // Brings pages that queries up to the last prepared position read in few bits into them.
    void pack(size_t layer, int64_t head);
    // Frees what no later query reads.
    void finish();

    // The most of the first `positions` that another text may share: `positions`, or 0 where they are no longer held.
    int64_t resumable(int64_t positions) const { return positions <= seen_ && positions >= lowest_ ? positions : 0; }
    void copy(const PageCache& from, int64_t positions);
    int64_t bytes() const { return arena_.used(); }
    int64_t held_bytes() const { return arena_.held(); }

    const GroupPlan& plan(size_t layer, int64_t head) const { return group(layer, head).plan; }
    const PageSide* keys(size_t layer, int64_t head) const { return group(layer, head).keys.data(); }
    const PageSide* values(size_t layer, int64_t head) const { return group(layer, head).values.data(); }

  private:
    struct Group {
        GroupPlan plan;
        std::vector<PageSide> keys, values;
        int64_t whole_from = 0;  // pages before are in few bits only
        int64_t held_from = 0;   // pages before that are no sinks were freed
    };
    const Group& group(size_t layer, int64_t head) const { return layers_[layer][static_cast<size_t>(head)]; }
    template <class F>
    void sides(Group& g, F body);
    void clear(PageSide& side, const Format& format, bool key, bool half, bool packed);
    void put(PageSide& side, int64_t position, const float* x, bool key);
    void put_code(PageSide& side, const Format& format, int64_t position, const float* x, bool key);

    int64_t kv_heads_, size_, seen_ = 0, lowest_ = 0;
    std::vector<std::vector<Group>> layers_;
    Arena arena_;
};

}  // namespace nstf::engine
