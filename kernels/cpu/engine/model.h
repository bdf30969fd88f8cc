// A decoder-only transformer of the Llama family: Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma 3. One call runs all layers.
#pragma once

#include <vector>

#include "cache.h"
#include "matrix.h"

namespace nstf::engine {

struct Shape {
    int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_size = 0, ffn = 0, vocab = 0, context = 0;
    float epsilon = 1e-6f, score_scale = 1.0f, embedding_scale = 1.0f, logit_cap = 0.0f;
    bool gelu = false;
};

struct Layer {
    Shared q, k, v, o, gate, up, down;
    // Norms of what goes into attention and into the feed-forward, of what comes out of each (Gemma), and of each head's query
    // and key (Qwen 3, Gemma); empty where the model has none.
    std::vector<float> attention_norm, ffn_norm, attention_out_norm, ffn_out_norm, q_norm, k_norm;
    std::vector<float> q_bias, k_bias, v_bias, o_bias;
    int64_t window = 0;  // positions seen, 0: all
    int rotation = 0;    // which of the model's tables of angles
};

class Model {
  public:
    Model(const Shape& shape, Shared embedding, Shared head, std::vector<float> final_norm, CacheType cache);
    void add_layer(Layer layer);
    // Angles per position, [head_size / 2].
    void add_rotation(std::vector<float> frequencies);

    // Runs tokens at positions first.. and fills the logits of the last one, [vocab], or of all, [count, vocab].
    void run(const int64_t* ids, int64_t count, int64_t first, float* logits, bool all, int threads);

    int64_t cache_bytes() const { return cache_.bytes(); }
    const Shape& shape() const { return shape_; }

  private:
    void make_room(int64_t positions);
    void chunk(const int64_t* ids, int64_t count, int64_t first, int threads);
    void attention(const Layer& layer, size_t index, int64_t count, int64_t first, int threads);
    void feed_forward(const Layer& layer, int64_t count, int threads);

    Shape shape_;
    Shared embedding_, head_;
    std::vector<float> final_norm_;
    std::vector<Layer> layers_;
    std::vector<std::vector<float>> frequencies_, cosines_, sines_;  // the tables: [positions][head_size / 2]
    int64_t turned_ = 0;  // positions the tables have angles for
    Cache cache_;
    Buffer<float> x_, normed_, q_, k_, v_, mixed_, out_, gate_, up_;
};

}  // namespace nstf::engine
