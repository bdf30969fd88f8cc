#include "cache.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "../half.h"
#include "leaves.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

constexpr int64_t kBlock = 16;  // positions of a block of keys

// The same heads with room for more positions, of `width` numbers each.
template <class T>
Buffer<T> grown(const Buffer<T>& old, int64_t heads, int64_t before, int64_t after, int64_t width) {
    Buffer<T> fresh(heads * after * width);
    for (int64_t h = 0; h < heads && before > 0; ++h)
        std::copy_n(old.data() + h * before * width, before * width, fresh.data() + h * after * width);
    return fresh;
}

constexpr float kLargestHalf = 65504;

float largest(const float* x, int64_t count) {
    float found = 0;
    for (int64_t i = 0; i < count; ++i) found = std::max(found, std::fabs(x[i]));  // NaN is passed over, and stays NaN
    return found;
}

// The power of two to divide by so that float16 holds `x`, at least `unit`. Infinity stays what it is.
float fitting(float unit, const float* x, int64_t count) {
    const float most = largest(x, count);
    if (most <= kLargestHalf * unit || std::isinf(most)) return unit;
    int exponent;
    std::frexp(most / kLargestHalf, &exponent);
    return std::ldexp(1.0f, exponent);
}

void divide(uint16_t* halves, int64_t count, float by) {
    for (int64_t i = 0; i < count; ++i) halves[i] = float_to_half(half_to_float(halves[i]) / by);
}

}  // namespace

Cache::Cache(CacheType type, int64_t kv_heads, int64_t head_size)
    : type_(type), kv_heads_(kv_heads), head_size_(head_size), block_(static_cast<int>(head_size & -head_size)) {}

void Cache::add_layer() {
    layers_.emplace_back();
    layers_.back().key_unit.assign(kv_heads_, 1.0f);
    layers_.back().value_unit.assign(kv_heads_, 1.0f);
}

void Cache::make_room(int64_t positions, int64_t context) {
    if (positions <= positions_) return;
    const auto whole = [](int64_t p) { return (p + kBlock - 1) / kBlock * kBlock; };
    const int64_t fresh = std::min(whole(context), std::max<int64_t>({256, 2 * positions_, whole(positions)}));
    // All memory first: a failure leaves everything as it was.
    std::vector<Layer> made(layers_.size());
    for (size_t i = 0; i < layers_.size(); ++i) {
        const Layer& old = layers_[i];
        if (type_ == CacheType::kHalf) {
            made[i].keys = grown(old.keys, kv_heads_, positions_, fresh, head_size_);
            made[i].values = grown(old.values, kv_heads_, positions_, fresh, head_size_);
            made[i].key_unit = old.key_unit, made[i].value_unit = old.value_unit;
        } else {
            made[i].key_codes = grown(old.key_codes, kv_heads_, positions_, fresh, head_size_);
            made[i].value_codes = grown(old.value_codes, kv_heads_, positions_, fresh, head_size_);
            made[i].key_scales = grown(old.key_scales, kv_heads_, positions_, fresh, 1);
            made[i].value_scales = grown(old.value_scales, kv_heads_, positions_, fresh, 1);
        }
    }
    layers_ = std::move(made);
    positions_ = fresh;
}

void Cache::copy(const Cache& from, int64_t positions, int64_t context) {
    if (positions > from.positions_) throw std::invalid_argument("engine: fewer positions than are to be copied");
    make_room(positions, context);
    // Whole blocks, since their positions are mixed.
    const int64_t whole = (positions + kBlock - 1) / kBlock * kBlock;
    const auto one = [&](auto& to, const auto& own, int64_t width) {
        for (int64_t h = 0; h < kv_heads_; ++h)
            std::copy_n(own.data() + h * from.positions_ * width, whole * width, to.data() + h * positions_ * width);
    };
    for (size_t i = 0; i < layers_.size(); ++i) {
        Layer& to = layers_[i];
        const Layer& own = from.layers_[i];
        if (type_ == CacheType::kHalf) {
            one(to.keys, own.keys, head_size_);
            one(to.values, own.values, head_size_);
            // What they were divided by. Those of the target's earlier text must not stay either.
            to.key_unit = own.key_unit;
            to.value_unit = own.value_unit;
        } else {
            one(to.key_codes, own.key_codes, head_size_);
            one(to.value_codes, own.value_codes, head_size_);
            one(to.key_scales, own.key_scales, 1);
            one(to.value_scales, own.value_scales, 1);
        }
    }
}

int64_t Cache::bytes() const {
    const int64_t per_head = type_ == CacheType::kHalf ? 2 * head_size_ : head_size_ + static_cast<int64_t>(sizeof(float));
    return static_cast<int64_t>(layers_.size()) * 2 * kv_heads_ * positions_ * per_head;
}

void Cache::turn(float* head) const {
    if (type_ == CacheType::kInt8) hadamard(head, head_size_, static_cast<int>(block_));
}

void Cache::store(size_t layer, int64_t head, int64_t position, const float* key, const float* value) {
    Layer& to = layers_[layer];
    const int64_t at = head * positions_ + position, block = at / kBlock * kBlock * head_size_, within = at % kBlock;
    if (type_ == CacheType::kHalf) {
        if (position == 0) to.key_unit[head] = to.value_unit[head] = 1;  // another text
        const float key_unit = fitting(to.key_unit[head], key, head_size_);
        const float value_unit = fitting(to.value_unit[head], value, head_size_);
        if (key_unit != 1 || value_unit != 1) return store_divided(to, head, position, key, value, key_unit, value_unit);
        ops().to_halves(key, head_size_, kBlock, to.keys.data() + block + within);
        ops().to_halves(value, head_size_, 1, to.values.data() + at * head_size_);
        return;
    }
    to.key_scales.data()[at] = ops().to_int8(key, head_size_, 1, 2 * kBlock, to.key_codes.data() + block + 2 * within);
    to.value_scales.data()[at] =
        ops().to_int8(value, head_size_, 2, 4, to.value_codes.data() + at / 2 * 2 * head_size_ + at % 2);
}

// Models with keys of a million exist, and float16 ends at 65504: what a head holds is divided by a power of two, exactly.
void Cache::store_divided(Layer& to, int64_t head, int64_t position, const float* key, const float* value, float key_unit,
                          float value_unit) {
    const int64_t at = head * positions_, blocks = position / kBlock;
    uint16_t *keys = to.keys.data() + at * head_size_, *values = to.values.data() + at * head_size_;
    if (key_unit > to.key_unit[head]) divide(keys, (blocks + 1) * kBlock * head_size_, key_unit / to.key_unit[head]);
    if (value_unit > to.value_unit[head]) divide(values, position * head_size_, value_unit / to.value_unit[head]);
    to.key_unit[head] = key_unit, to.value_unit[head] = value_unit;
    keys += blocks * kBlock * head_size_ + position % kBlock, values += position * head_size_;
    for (int64_t i = 0; i < head_size_; ++i) {
        keys[i * kBlock] = float_to_half(key[i] / key_unit);
        values[i] = float_to_half(value[i] / value_unit);
    }
}

void Cache::attend(size_t layer, int64_t head, const float* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t first,
                   int64_t window, float scale, float* out, int64_t out_stride) const {
    const Layer& from = layers_[layer];
    const int64_t at = head * positions_;
    Scratch scores(tokens * heads * (first + tokens + 2 * kBlock)), room(kBlock * head_size_);
    if (type_ == CacheType::kHalf) {
        const float unit = from.value_unit[head];
        scale *= from.key_unit[head];
        ops().attend(q, q_stride, tokens, heads, head_size_, first, window, scale, from.keys.data() + at * head_size_,
                     from.values.data() + at * head_size_, out, out_stride, scores.data(), room.data());
        for (int64_t t = 0; unit != 1 && t < tokens; ++t)
            for (int64_t i = 0; i < heads * head_size_; ++i) out[t * out_stride + i] *= unit;
        return;
    }
    const Int8Head cells{from.key_codes.data() + at * head_size_, from.key_scales.data() + at,
                         from.value_codes.data() + at * head_size_, from.value_scales.data() + at};
    ops().attend_int8(q, q_stride, tokens, heads, head_size_, first, window, scale, cells, out, out_stride, scores.data(),
                      room.data());
}

bool Cache::attends_alone() const { return type_ == CacheType::kInt8 || ops().attend_one != nullptr; }

void Cache::attend_one(size_t layer, int64_t head, const float* q, int64_t position, int64_t window, float scale,
                       float* out) const {
    const Layer& from = layers_[layer];
    const int64_t at = head * positions_;
    Scratch scores(position + 2 * kBlock);
    if (type_ == CacheType::kHalf) {
        const float unit = from.value_unit[head];
        scale *= from.key_unit[head];
        ops().attend_one(q, head_size_, position, window, scale, from.keys.data() + at * head_size_,
                         from.values.data() + at * head_size_, out, scores.data());
        for (int64_t i = 0; unit != 1 && i < head_size_; ++i) out[i] *= unit;
        return;
    }
    const Int8Head cells{from.key_codes.data() + at * head_size_, from.key_scales.data() + at,
                         from.value_codes.data() + at * head_size_, from.value_scales.data() + at};
    ops().attend_one_int8(q, head_size_, position, window, scale, cells, out, scores.data());
}

}  // namespace nstf::engine
