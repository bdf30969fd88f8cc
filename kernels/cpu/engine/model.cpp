#include "model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "../parallel.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

// Tokens of a prompt that go through the layers together: enough to make unpacking cheap, few enough for the caches.
constexpr int64_t kTogether = 128;
constexpr int64_t kAttendTokens = 8;  // tokens that share a pass over the keys

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

void add_bias(float* x, const std::vector<float>& bias, int64_t count) {
    if (bias.empty()) return;
    for (int64_t t = 0; t < count; ++t) ops().add(x + t * static_cast<int64_t>(bias.size()), bias.data(), static_cast<int64_t>(bias.size()));
}

void fits(const Shared& m, int64_t rows, int64_t cols) {
    require(m != nullptr && m->rows == rows && m->cols == cols, "engine: a matrix has another shape than the model's");
}

}  // namespace

Model::Model(const Shape& shape, Shared embedding, Shared head, std::vector<float> final_norm, CacheType cache)
    : shape_(shape), embedding_(std::move(embedding)), head_(std::move(head)), final_norm_(std::move(final_norm)),
      cache_(cache, shape.kv_heads, shape.head_size) {
    const Shape& s = shape_;
    // Below 2^31 no product of two of them overflows.
    for (int64_t size : {s.hidden, s.heads, s.kv_heads, s.head_size, s.ffn, s.vocab, s.context})
        require(size > 0 && size < int64_t{1} << 31, "engine: sizes out of range");
    require(s.hidden > 0 && s.heads > 0 && s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.head_size > 0 &&
                s.head_size % 2 == 0 && s.head_size <= 512 && s.ffn > 0 && s.context > 0,
            "engine: sizes out of range");
    fits(embedding_, s.vocab, s.hidden);
    fits(head_, s.vocab, s.hidden);
    require(static_cast<int64_t>(final_norm_.size()) == s.hidden, "engine: the last norm has another size");
}

void Model::add_layer(Layer layer) {
    const Shape& s = shape_;
    fits(layer.q, s.heads * s.head_size, s.hidden);
    fits(layer.k, s.kv_heads * s.head_size, s.hidden);
    fits(layer.v, s.kv_heads * s.head_size, s.hidden);
    fits(layer.o, s.hidden, s.heads * s.head_size);
    fits(layer.gate, s.ffn, s.hidden);
    fits(layer.up, s.ffn, s.hidden);
    fits(layer.down, s.hidden, s.ffn);
    auto sized = [](const std::vector<float>& v, int64_t size) {
        require(v.empty() || static_cast<int64_t>(v.size()) == size, "engine: a norm or a bias has another size");
    };
    require(!layer.attention_norm.empty() && !layer.ffn_norm.empty(), "engine: a layer has no norms");
    for (const auto* v : {&layer.attention_norm, &layer.ffn_norm, &layer.attention_out_norm, &layer.ffn_out_norm, &layer.o_bias})
        sized(*v, s.hidden);
    sized(layer.q_norm, s.head_size);
    sized(layer.k_norm, s.head_size);
    sized(layer.q_bias, s.heads * s.head_size);
    sized(layer.k_bias, s.kv_heads * s.head_size);
    sized(layer.v_bias, s.kv_heads * s.head_size);
    layers_.push_back(std::move(layer));
    cache_.add_layer();
}

void Model::add_rotation(std::vector<float> frequencies) {
    require(static_cast<int64_t>(frequencies.size()) == shape_.head_size / 2, "engine: the angles have another shape");
    frequencies_.push_back(std::move(frequencies));
    cosines_.emplace_back();
    sines_.emplace_back();
}

void Model::make_room(int64_t positions) {
    cache_.make_room(positions, shape_.context);
    const int64_t half = shape_.head_size / 2, fresh = cache_.positions();
    for (size_t r = 0; r < frequencies_.size() && turned_ < fresh; ++r) {
        cosines_[r].resize(static_cast<size_t>(fresh * half));
        sines_[r].resize(static_cast<size_t>(fresh * half));
        for (int64_t t = turned_; t < fresh; ++t)
            for (int64_t i = 0; i < half; ++i) {
                const float angle = static_cast<float>(t) * frequencies_[r][static_cast<size_t>(i)];
                cosines_[r][static_cast<size_t>(t * half + i)] = std::cos(angle);
                sines_[r][static_cast<size_t>(t * half + i)] = std::sin(angle);
            }
    }
    turned_ = fresh;
}

void Model::run(const int64_t* ids, int64_t count, int64_t first, float* logits, bool all, int threads) {
    const Shape& s = shape_;
    require(static_cast<int64_t>(layers_.size()) == s.layers, "engine: layers are missing");
    require(count > 0 && first >= 0 && first + count <= s.context, "engine: more tokens than the context holds");
    for (int64_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < s.vocab, "engine: no such token");
    for (const Layer& layer : layers_)
        require(layer.rotation >= 0 && layer.rotation < static_cast<int>(cosines_.size()), "engine: no such rotation");
    make_room(first + count);
    for (int64_t done = 0; done < count;) {
        const int64_t now = std::min(kTogether, count - done);
        chunk(ids + done, now, first + done, threads);
        done += now;
        if (!all && done < count) continue;
        const int64_t from = all ? 0 : now - 1;
        float* normed = normed_.grow(now * s.hidden);
        for (int64_t t = from; t < now; ++t)
            ops().rms_norm(x_.data() + t * s.hidden, final_norm_.data(), s.hidden, s.epsilon, normed + t * s.hidden);
        float* to = all ? logits + (done - now) * s.vocab : logits;
        head_->multiply(normed + from * s.hidden, now - from, to, s.vocab, threads);
        if (s.logit_cap > 0)
            for (int64_t i = 0; i < (now - from) * s.vocab; ++i) to[i] = s.logit_cap * std::tanh(to[i] / s.logit_cap);
    }
}

void Model::chunk(const int64_t* ids, int64_t count, int64_t first, int threads) {
    const Shape& s = shape_;
    float* x = x_.grow(kTogether * s.hidden);
    for (int64_t t = 0; t < count; ++t) {
        embedding_->decode(ids[t], x + t * s.hidden);
        for (int64_t i = 0; i < s.hidden; ++i) x[t * s.hidden + i] *= s.embedding_scale;
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
        attention(layers_[i], i, count, first, threads);
        feed_forward(layers_[i], count, threads);
    }
}

void Model::attention(const Layer& layer, size_t index, int64_t count, int64_t first, int threads) {
    const Shape& s = shape_;
    const Ops& op = ops();
    const int64_t q_size = s.heads * s.head_size, kv_size = s.kv_heads * s.head_size;
    float *x = x_.data(), *normed = normed_.grow(kTogether * s.hidden);
    float *q = q_.grow(kTogether * q_size), *k = k_.grow(kTogether * kv_size), *v = v_.grow(kTogether * kv_size);
    float *mixed = mixed_.grow(kTogether * q_size), *out = out_.grow(kTogether * s.hidden);
    for (int64_t t = 0; t < count; ++t)
        op.rms_norm(x + t * s.hidden, layer.attention_norm.data(), s.hidden, s.epsilon, normed + t * s.hidden);
    multiply_all({layer.q.get(), layer.k.get(), layer.v.get()}, normed, count, {q, k, v}, {q_size, kv_size, kv_size}, threads);
    add_bias(q, layer.q_bias, count);
    add_bias(k, layer.k_bias, count);
    add_bias(v, layer.v_bias, count);

    const int64_t half = s.head_size / 2;
    const auto rotation = static_cast<size_t>(layer.rotation);
    for (int64_t t = 0; t < count; ++t) {
        const int64_t at = first + t;
        const float *cosine = cosines_[rotation].data() + at * half, *sine = sines_[rotation].data() + at * half;
        auto turn = [&](float* head, const std::vector<float>& norm) {
            if (!norm.empty()) op.rms_norm(head, norm.data(), s.head_size, s.epsilon, head);
            op.rope(head, cosine, sine, s.head_size);
            cache_.turn(head);
        };
        for (int64_t h = 0; h < s.heads; ++h) turn(q + t * q_size + h * s.head_size, layer.q_norm);
        for (int64_t h = 0; h < s.kv_heads; ++h) {
            float* key = k + t * kv_size + h * s.head_size;
            turn(key, layer.k_norm);
            cache_.store(index, h, at, key, v + t * kv_size + h * s.head_size);
        }
    }

    const int64_t group = s.heads / s.kv_heads, blocks = (count + kAttendTokens - 1) / kAttendTokens;
    auto task = [&](int64_t i) {
        // The longest passes first.
        const int64_t h = i % s.kv_heads, t = (blocks - 1 - i / s.kv_heads) * kAttendTokens;
        const int64_t tokens = std::min(kAttendTokens, count - t), at = t * q_size + h * group * s.head_size;
        cache_.attend(index, h, q + at, q_size, tokens, group, first + t, layer.window, s.score_scale, mixed + at, q_size);
    };
    auto one = [&](int64_t h) {
        const int64_t at = h * s.head_size;
        cache_.attend_one(index, h / group, q + at, first, layer.window, s.score_scale, mixed + at);
    };
    const int64_t work = count * (first + count) * q_size;
    const int workers = work < (1 << 16) ? 1 : threads;
    if (count == 1 && cache_.attends_alone()) parallel_for(workers, s.heads, one);
    else parallel_for(workers, s.kv_heads * blocks, task);

    layer.o->multiply(mixed, count, out, s.hidden, threads);
    add_bias(out, layer.o_bias, count);
    for (int64_t t = 0; t < count; ++t) {
        float* row = out + t * s.hidden;
        if (!layer.attention_out_norm.empty()) op.rms_norm(row, layer.attention_out_norm.data(), s.hidden, s.epsilon, row);
        op.add(x + t * s.hidden, row, s.hidden);
    }
}

void Model::feed_forward(const Layer& layer, int64_t count, int threads) {
    const Shape& s = shape_;
    const Ops& op = ops();
    float *x = x_.data(), *normed = normed_.data(), *out = out_.data();
    float *gate = gate_.grow(kTogether * s.ffn), *up = up_.grow(kTogether * s.ffn);
    for (int64_t t = 0; t < count; ++t)
        op.rms_norm(x + t * s.hidden, layer.ffn_norm.data(), s.hidden, s.epsilon, normed + t * s.hidden);
    multiply_all({layer.gate.get(), layer.up.get()}, normed, count, {gate, up}, {s.ffn, s.ffn}, threads);
    auto task = [&](int64_t t) { op.gated(gate + t * s.ffn, up + t * s.ffn, s.ffn, s.gelu); };
    parallel_for(count > 1 ? threads : 1, count, task);
    layer.down->multiply(gate, count, out, s.hidden, threads);
    for (int64_t t = 0; t < count; ++t) {
        float* row = out + t * s.hidden;
        if (!layer.ffn_out_norm.empty()) op.rms_norm(row, layer.ffn_out_norm.data(), s.hidden, s.epsilon, row);
        op.add(x + t * s.hidden, row, s.hidden);
    }
}

}  // namespace nstf::engine
