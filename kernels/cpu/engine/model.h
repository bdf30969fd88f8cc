// A decoder-only transformer of the Llama family: Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma 3. One call runs all layers.
#pragma once

#include <functional>
#include <vector>

#include "attend.h"
#include "matrix.h"

namespace nstf::engine {

struct Shape {
    int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_size = 0, ffn = 0, vocab = 0, context = 0;
    int64_t first_row = 0, rows = 0;  // of table and head, those that this process has: all but in a divided model
    float epsilon = 1e-6f, score_scale = 1.0f, embedding_scale = 1.0f, logit_cap = 0.0f;
    bool gelu = false;
};

struct Layer {
    Shared q, k, v, o, gate, up, down;
    std::vector<Matrix*> qkv, gate_up, only_o, only_down;  // those that are multiplied together
    // Norms of what goes into attention and into the feed-forward, of what comes out of each (Gemma), and of each head's query
    // and key (Qwen 3, Gemma); empty where the model has none.
    std::vector<float> attention_norm, ffn_norm, attention_out_norm, ffn_out_norm, q_norm, k_norm;
    std::vector<float> q_bias, k_bias, v_bias, o_bias;
    int64_t window = 0;  // positions seen, 0: all
    int rotation = 0;    // which of the model's tables of angles
    LayerPlan plan;      // without heads and groups: dense attention, everything kept in float16
};

// Tokens of one sequence that go through the layers together, at positions first..
struct Part {
    int64_t sequence, first, count;
    bool prompt;  // numbers of a prompt do not depend on where it is cut: a single token of it goes the way of several
    bool wanted;  // logits of the last token
};

// How processes that run a model together, each with some heads, columns of the feed-forward and rows of the tables, put their
// results together. Called by the thread that called the model.
struct Others {
    std::function<void(float*, int64_t)> sum;                 // of all processes' numbers, in their place
    std::function<void(const float*, int64_t, float*)> join;  // everybody's [count, rows] -> [count, vocab]
};

class Model {
  public:
    Model(const Shape& shape, Shared embedding, Shared head, std::vector<float> final_norm);
    void add_layer(Layer layer);
    // From here on results are those of all processes together, which make the same calls.
    void divide(Others others) { others_ = std::move(others); }
    // Angles per position, [head_size / 2].
    void add_rotation(std::vector<float> frequencies);

    // Runs tokens at positions first.. and fills the logits of the last one, [vocab], or of all, [count, vocab].
    void run(const int64_t* ids, int64_t count, int64_t first, float* logits, bool all, int threads);
    // Runs a token at position first and goes on with the likeliest one, `count` tokens or up to and with one of `stop`. Fills
    // `found` with them; returns how many. After one whose logits are NaN it ends, too; `nan` says so.
    int64_t go_on(int64_t token, int64_t first, int64_t count, const std::vector<int64_t>& stop, int64_t* found, bool& nan, int threads);
    // Runs parts of different sequences in one pass over the weights, 128 tokens together at most; ids side by side. Fills a
    // row of logits for each part that wants them. The rows of a product are at least `least`: where that is 4, every product
    // is done by the kernels for several rows, and numbers of a sequence do not depend on what runs beside it.
    void step(const int64_t* ids, const std::vector<Part>& parts, float* logits, int64_t least, int threads);
    // The most of the first `positions` of a sequence that another text may go on from: all, or 0 where pages were freed or
    // brought into few bits since.
    int64_t resumable(int64_t sequence, int64_t positions);
    // The first `positions` of one sequence's cache become those of another.
    void copy(int64_t from, int64_t to, int64_t positions);
    // Frees what a sequence holds.
    void release(int64_t sequence);
    void set_sequences(int64_t count);

    int64_t cache_bytes() const;  // of pages that hold something
    int64_t held_bytes() const;   // of memory taken for pages
    const Shape& shape() const { return shape_; }

  private:
    void make_room(int64_t sequence, int64_t first, int64_t count);
    void ready(const int64_t* ids, int64_t count) const;
    PageCache& cache(int64_t sequence);
    PageCache fresh_cache() const;
    // count: rows of the products, those of the parts and padding.
    void chunk(const int64_t* ids, const std::vector<Part>& parts, int64_t count, int threads);
    void attention(const Layer& layer, size_t index, const std::vector<Part>& parts, int64_t count, int threads);
    void feed_forward(const Layer& layer, size_t index, int64_t count, int threads);
    void sum(float* values, int64_t count) const {
        if (others_.sum) others_.sum(values, count);
    }
    void heads(const float* normed, int64_t count, float* logits, int threads);
    // What follows layer `index` in a token: the next one's matrices, or the head.
    const std::vector<Matrix*>& after(size_t index) const { return index + 1 < layers_.size() ? layers_[index + 1].qkv : only_head_; }

    Shape shape_;
    Others others_;
    Shared embedding_, head_;
    std::vector<float> final_norm_;
    std::vector<Layer> layers_;
    std::vector<Matrix*> only_head_;
    std::vector<std::vector<float>> frequencies_, cosines_, sines_;  // the tables: [positions][head_size / 2]
    int64_t turned_ = 0;  // positions the tables have angles for
    bool blocks_ = false;  // whether a head computes chosen blocks only, so that prompts are cut at whole blocks
    std::vector<PageCache> caches_;  // of each sequence
    Attention attention_;
    Buffer<float> padded_;
    Buffer<float> x_, normed_, q_, k_, v_, mixed_, out_, gate_, up_, logits_, part_;
};

}  // namespace nstf::engine
