// Keys and values of the positions seen, of all layers.
#pragma once

#include <vector>

#include "buffer.h"

namespace nstf::engine {

// What a key or a value is kept as. kInt8: symmetric, one float32 scale per position and head; keys after a Hadamard rotation
// of the head, which spreads the few channels that are much larger than the others (Ashkboos et al. 2024, QuaRot) and leaves
// products with equally rotated queries as they were.
enum class CacheType { kHalf, kInt8 };

class Cache {
  public:
    Cache(CacheType type, int64_t kv_heads, int64_t head_size);
    void add_layer();
    // Room for at least `positions`, at most `context`; doubles when it is full, so that a short text does not pay for the
    // longest one. What is there stays.
    void make_room(int64_t positions, int64_t context);
    // The first `positions` of another sequence's, which it must have seen.
    void copy(const Cache& from, int64_t positions, int64_t context);
    int64_t positions() const { return positions_; }
    int64_t bytes() const;

    // A query or a key as the cache compares them, in place.
    void turn(float* head) const;
    void store(size_t layer, int64_t head, int64_t position, const float* key, const float* value);
    // Attention of `heads` query heads that share `head`, see `attend_cells` in attention.h.
    void attend(size_t layer, int64_t head, const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t first,
                int64_t window, float scale, float* out, int64_t out_stride) const;
    // Of one query head at one position; false when `attend` is the only way.
    bool attends_alone() const;
    void attend_one(size_t layer, int64_t head, const float* q, int64_t position, int64_t window, float scale,
                    float* out) const;

  private:
    struct Layer {  // [kv head][positions]...
        Buffer<uint16_t> keys, values;
        Buffer<int8_t> key_codes, value_codes;
        Buffer<float> key_scales, value_scales;
        // kHalf: what the numbers of each head were divided by, a power of two; 1 as long as float16 holds them.
        std::vector<float> key_unit, value_unit;
    };
    void store_divided(Layer& to, int64_t head, int64_t position, const float* key, const float* value, float key_unit,
                       float value_unit);
    CacheType type_;
    int64_t kv_heads_, head_size_, block_, positions_ = 0;
    std::vector<Layer> layers_;
};

}  // namespace nstf::engine
