#include "model.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>

#include "../parallel.h"
#include "argmax.h"
#include "ops_table.h"

namespace nstf::engine {
namespace {

// Tokens of a prompt that go through the layers together: enough to make unpacking cheap, few enough for the caches.
constexpr int64_t kTogether = 128;

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

Model::Model(const Shape& shape, Shared embedding, Shared head, std::vector<float> final_norm)
    : shape_(shape), embedding_(std::move(embedding)), head_(std::move(head)), final_norm_(std::move(final_norm)) {
    const Shape& s = shape_;
    // Below 2^31 no product of two of them overflows.
    for (int64_t size : {s.hidden, s.heads, s.kv_heads, s.head_size, s.ffn, s.vocab, s.context, s.rows})
        require(size > 0 && size < int64_t{1} << 31, "engine: sizes out of range");
    require(s.hidden > 0 && s.heads > 0 && s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.head_size > 0 &&
                s.head_size % 2 == 0 && s.head_size <= 512 && s.ffn > 0 && s.context > 0,
            "engine: sizes out of range");
    require(s.first_row >= 0 && s.first_row + s.rows <= s.vocab, "engine: rows outside of the table");
    fits(embedding_, s.rows, s.hidden);
    fits(head_, s.rows, s.hidden);
    require(static_cast<int64_t>(final_norm_.size()) == s.hidden, "engine: the last norm has another size");
    only_head_ = {head_.get()};
    set_sequences(1);
}

void Model::set_sequences(int64_t count) {
    require(count > 0 && count <= 4096, "engine: as many sequences are not possible");
    std::vector<PageCache> fresh;
    for (int64_t i = 0; i < count; ++i) {
        if (i < static_cast<int64_t>(caches_.size())) {
            fresh.push_back(std::move(caches_[static_cast<size_t>(i)]));
            continue;
        }
        fresh.push_back(fresh_cache());
    }
    caches_ = std::move(fresh);
}

PageCache Model::fresh_cache() const {
    PageCache fresh(shape_.kv_heads, shape_.head_size);
    for (const Layer& layer : layers_) fresh.add_layer(layer.plan.groups);
    return fresh;
}

PageCache& Model::cache(int64_t sequence) {
    require(sequence >= 0 && sequence < static_cast<int64_t>(caches_.size()), "engine: no such sequence");
    return caches_[static_cast<size_t>(sequence)];
}

void Model::copy(int64_t from, int64_t to, int64_t positions) {
    require(from != to && positions >= 0, "engine: nothing to copy");
    cache(to).copy(cache(from), positions);
}

int64_t Model::resumable(int64_t sequence, int64_t positions) { return cache(sequence).resumable(positions); }

void Model::release(int64_t sequence) {
    cache(sequence) = fresh_cache();
}

int64_t Model::cache_bytes() const {
    int64_t total = 0;
    for (const PageCache& c : caches_) total += c.bytes();
    return total;
}

int64_t Model::held_bytes() const {
    int64_t total = 0;
    for (const PageCache& c : caches_) total += c.held_bytes();
    return total;
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
    auto check = [&](const LayerPlan& plan) {
        require((plan.heads.empty() || static_cast<int64_t>(plan.heads.size()) == s.heads) &&
                    (plan.groups.empty() || static_cast<int64_t>(plan.groups.size()) == s.kv_heads),
                "engine: the attention plan has another number of heads");
        for (const HeadPlan& h : plan.heads)
            require(h.sink >= 0 && h.window >= 0 && (h.stride == 8 || h.stride == 16), "engine: no such attention pattern");
        for (const GroupPlan& g : plan.groups)
            for (const Format* f : {&g.keys, &g.values})
                require(g.sink >= 0 && g.recent >= 0 && (f->bits == 16 || f->bits == 8 || f->bits == 4 || f->bits == 2),
                        "engine: no such format of keys and values");
    };
    sized(layer.q_norm, s.head_size);
    sized(layer.k_norm, s.head_size);
    sized(layer.q_bias, s.heads * s.head_size);
    sized(layer.k_bias, s.kv_heads * s.head_size);
    sized(layer.v_bias, s.kv_heads * s.head_size);
    check(layer.plan);
    for (const HeadPlan& head : layer.plan.heads) blocks_ |= head.pattern == HeadPlan::kSparse;
    layer.qkv = {layer.q.get(), layer.k.get(), layer.v.get()}, layer.gate_up = {layer.gate.get(), layer.up.get()};
    layer.only_o = {layer.o.get()}, layer.only_down = {layer.down.get()};
    layers_.push_back(std::move(layer));
    for (PageCache& c : caches_) c.add_layer(layers_.back().plan.groups);
}

void Model::add_rotation(std::vector<float> frequencies) {
    require(static_cast<int64_t>(frequencies.size()) == shape_.head_size / 2, "engine: the angles have another shape");
    frequencies_.push_back(std::move(frequencies));
    cosines_.emplace_back();
    sines_.emplace_back();
}

void Model::make_room(int64_t sequence, int64_t first, int64_t count) {
    cache(sequence).prepare(first, count);
    if (first + count <= turned_) return;
    const int64_t half = shape_.head_size / 2;
    const int64_t fresh = std::min(shape_.context, std::max<int64_t>({256, 2 * turned_, first + count}));
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

void Model::ready(const int64_t* ids, int64_t count) const {
    const Shape& s = shape_;
    require(static_cast<int64_t>(layers_.size()) == s.layers, "engine: layers are missing");
    for (int64_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < s.vocab, "engine: no such token");
    for (const Layer& layer : layers_)
        require(layer.rotation >= 0 && layer.rotation < static_cast<int>(cosines_.size()), "engine: no such rotation");
}

void Model::heads(const float* normed, int64_t count, float* logits, int threads) {
    const Shape& s = shape_;
    float* part = others_.join ? part_.grow(count * s.rows) : logits;
    multiply_all(only_head_, normed, count, {part}, {s.rows}, threads, layers_.front().qkv);
    if (others_.join) others_.join(part, count, logits);
    if (s.logit_cap > 0)
        for (int64_t i = 0; i < count * s.vocab; ++i) logits[i] = s.logit_cap * std::tanh(logits[i] / s.logit_cap);
}

void Model::run(const int64_t* ids, int64_t count, int64_t first, float* logits, bool all, int threads) {
    const Shape& s = shape_;
    require(count > 0 && first >= 0 && first + count <= s.context, "engine: more tokens than the context holds");
    ready(ids, count);
    for (int64_t done = 0; done < count;) {
        const int64_t now = std::min(kTogether - (blocks_ ? (first + done) % kTogether : 0), count - done);
        make_room(0, first + done, now);
        chunk(ids + done, {Part{0, first + done, now, false, true}}, now, threads);
        done += now;
        if (!all && done < count) continue;
        const int64_t from = all ? 0 : now - 1;
        float* normed = normed_.grow(now * s.hidden);
        for (int64_t t = from; t < now; ++t)
            ops().rms_norm(x_.data() + t * s.hidden, final_norm_.data(), s.hidden, s.epsilon, normed + t * s.hidden);
        heads(normed + from * s.hidden, now - from, all ? logits + (done - now) * s.vocab : logits, threads);
    }
}

int64_t Model::go_on(int64_t token, int64_t first, int64_t count, const std::vector<int64_t>& stop, int64_t* found, bool& nan, int threads) {
    nan = false;
    for (int64_t i = 0; i < count; ++i) {
        float* logits = logits_.grow(shape_.vocab);
        try {
            run(&token, 1, first + i, logits, false, threads);
        } catch (const std::bad_alloc&) {  // what was found is not lost: the next call says it
            if (i == 0) throw;
            return i;
        }
        found[i] = token = argmax(logits, shape_.vocab);
        nan = std::isnan(logits[token]);
        if (nan || std::find(stop.begin(), stop.end(), token) != stop.end()) return i + 1;
    }
    return count;
}

void Model::step(const int64_t* ids, const std::vector<Part>& parts, float* logits, int64_t least, int threads) {
    const Shape& s = shape_;
    int64_t count = 0, wanted = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
        const Part& p = parts[i];
        require(p.count > 0 && p.first >= 0 && p.count <= kTogether && p.first <= s.context - p.count,
                "engine: more tokens than the context holds");
        for (size_t k = 0; k < i; ++k) require(parts[k].sequence != p.sequence, "engine: a sequence in two parts");
        count += p.count;
        wanted += p.wanted;
    }
    require(count > 0 && count <= kTogether && least <= kTogether, "engine: more tokens than go together");
    ready(ids, count);
    for (const Part& p : parts) make_room(p.sequence, p.first, p.count);
    const int64_t rows = std::max(count, least);
    chunk(ids, parts, rows, threads);
    if (wanted == 0) return;
    float* normed = normed_.grow(std::max(wanted, least) * s.hidden);
    const float* x = x_.data();
    int64_t to = 0;
    for (const Part& p : parts) {
        x += p.count * s.hidden;
        if (p.wanted) ops().rms_norm(x - s.hidden, final_norm_.data(), s.hidden, s.epsilon, normed + to++ * s.hidden);
    }
    if (wanted >= least) return heads(normed, wanted, logits, threads);
    float* room = padded_.grow(least * s.vocab);
    heads(normed, least, room, threads);
    std::copy_n(room, wanted * s.vocab, logits);
}

void Model::chunk(const int64_t* ids, const std::vector<Part>& parts, int64_t count, int threads) {
    const Shape& s = shape_;
    float* x = x_.grow(kTogether * s.hidden);
    int64_t t = 0;
    for (const Part& p : parts)
        for (int64_t end = t + p.count; t < end; ++t) {
            float* row = x + t * s.hidden;
            if (ids[t] < s.first_row || ids[t] >= s.first_row + s.rows) {  // of another process
                std::fill_n(row, s.hidden, 0.0f);
                continue;
            }
            embedding_->decode(ids[t] - s.first_row, row);
            for (int64_t i = 0; i < s.hidden; ++i) row[i] *= s.embedding_scale;
        }
    sum(x, t * s.hidden);
    std::fill(x + t * s.hidden, x + count * s.hidden, 0.0f);
    for (size_t i = 0; i < layers_.size(); ++i) {
        attention(layers_[i], i, parts, count, threads);
        feed_forward(layers_[i], i, count, threads);
    }
    for (const Part& p : parts) cache(p.sequence).finish();
}

void Model::attention(const Layer& layer, size_t index, const std::vector<Part>& parts, int64_t count, int threads) {
    const Shape& s = shape_;
    const Ops& op = ops();
    const int64_t q_size = s.heads * s.head_size, kv_size = s.kv_heads * s.head_size;
    float *x = x_.data(), *normed = normed_.grow(kTogether * s.hidden);
    float *q = q_.grow(kTogether * q_size), *k = k_.grow(kTogether * kv_size), *v = v_.grow(kTogether * kv_size);
    float *mixed = mixed_.grow(kTogether * q_size), *out = out_.grow(kTogether * s.hidden);
    for (int64_t t = 0; t < count; ++t)
        op.rms_norm(x + t * s.hidden, layer.attention_norm.data(), s.hidden, s.epsilon, normed + t * s.hidden);
    multiply_all(layer.qkv, normed, count, {q, k, v}, {q_size, kv_size, kv_size}, threads, layer.only_o);
    add_bias(q, layer.q_bias, count);
    add_bias(k, layer.k_bias, count);
    add_bias(v, layer.v_bias, count);

    const int64_t half = s.head_size / 2;
    const auto rotation = static_cast<size_t>(layer.rotation);
    std::vector<AttendPart> whole;
    std::vector<int64_t> part_of;  // of each row
    for (const Part& p : parts) {
        whole.push_back({&cache(p.sequence), p.first, p.count, static_cast<int64_t>(part_of.size()), p.count == 1 && !p.prompt});
        part_of.insert(part_of.end(), static_cast<size_t>(p.count), static_cast<int64_t>(whole.size()) - 1);
    }
    auto one = [&](int64_t t, float* head, const std::vector<float>& norm) {
        const AttendPart& p = whole[static_cast<size_t>(part_of[static_cast<size_t>(t)])];
        const int64_t at = p.first + t - p.row;
        if (!norm.empty()) op.rms_norm(head, norm.data(), s.head_size, s.epsilon, head);
        op.rope(head, cosines_[rotation].data() + at * half, sines_[rotation].data() + at * half, s.head_size);
    };
    auto turn = [&](int64_t t) {
        for (int64_t h = 0; h < s.heads; ++h) one(t, q + t * q_size + h * s.head_size, layer.q_norm);
        for (int64_t h = 0; h < s.kv_heads; ++h) one(t, k + t * kv_size + h * s.head_size, layer.k_norm);
    };
    auto store = [&](int64_t i) {  // of one part and head
        const AttendPart& p = whole[static_cast<size_t>(i / s.kv_heads)];
        const int64_t h = i % s.kv_heads;
        for (int64_t t = p.row; t < p.row + p.count; ++t) {
            const int64_t from = t * kv_size + h * s.head_size;
            p.cache->store(index, h, p.first + t - p.row, k + from, v + from);
        }
        p.cache->pack(index, h);
    };
    const AttendShape shape{s.heads, s.kv_heads, s.head_size, layer.window, s.score_scale};
    if (whole.size() == 1 && whole[0].alone) {
        // A token's work is spread by key heads: what belongs to one is turned, stored and read by one thread.
        auto ready = [&](int64_t h) {
            const int64_t group = s.heads / s.kv_heads;
            for (int64_t g = h * group; g < (h + 1) * group; ++g) one(0, q + g * s.head_size, layer.q_norm);
            one(0, k + h * s.head_size, layer.k_norm);
            store(h);
        };
        attention_.run_one(shape, index, layer.plan, whole, q, mixed, ready, threads);
    } else {
        const auto rows = static_cast<int64_t>(part_of.size());
        parallel_for(rows < 8 ? 1 : threads, rows, turn);
        parallel_for(rows < 8 ? 1 : threads, static_cast<int64_t>(whole.size()) * s.kv_heads, store);
        attention_.run(shape, index, layer.plan, whole, q, mixed, threads);
    }

    multiply_all(layer.only_o, mixed, count, {out}, {s.hidden}, threads, layer.gate_up);
    sum(out, count * s.hidden);
    add_bias(out, layer.o_bias, count);
    for (int64_t t = 0; t < count; ++t) {
        float* row = out + t * s.hidden;
        if (!layer.attention_out_norm.empty()) op.rms_norm(row, layer.attention_out_norm.data(), s.hidden, s.epsilon, row);
        op.add(x + t * s.hidden, row, s.hidden);
    }
}

void Model::feed_forward(const Layer& layer, size_t index, int64_t count, int threads) {
    const Shape& s = shape_;
    const Ops& op = ops();
    float *x = x_.data(), *normed = normed_.data(), *out = out_.data();
    float *gate = gate_.grow(kTogether * s.ffn), *up = up_.grow(kTogether * s.ffn);
    for (int64_t t = 0; t < count; ++t)
        op.rms_norm(x + t * s.hidden, layer.ffn_norm.data(), s.hidden, s.epsilon, normed + t * s.hidden);
    multiply_all(layer.gate_up, normed, count, {gate, up}, {s.ffn, s.ffn}, threads, layer.only_down);
    auto task = [&](int64_t t) { op.gated(gate + t * s.ffn, up + t * s.ffn, s.ffn, s.gelu); };
    parallel_for(count > 1 ? threads : 1, count, task);
    multiply_all(layer.only_down, gate, count, {out}, {s.hidden}, threads, after(index));
    sum(out, count * s.hidden);
    for (int64_t t = 0; t < count; ++t) {
        float* row = out + t * s.hidden;
        if (!layer.ffn_out_norm.empty()) op.rms_norm(row, layer.ffn_out_norm.data(), s.hidden, s.epsilon, row);
        op.add(x + t * s.hidden, row, s.hidden);
    }
}

}  // namespace nstf::engine
