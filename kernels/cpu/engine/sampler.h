// The choice of the next token from its logits: what transformers' processors of the same names do, in their order.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace nstf::engine {

struct Sampling {
    float temperature = 1.0f;   // above 0
    int64_t top_k = 0;          // 0: all
    float top_p = 1.0f, min_p = 0.0f;
    float penalty = 1.0f;       // of tokens that occurred: positive logits are divided by it, negative ones multiplied
};

// In place: logits [vocab] become scores, minus infinity where a token is not to be drawn. seen: tokens that occurred, each at
// most once counted. allowed: a bit for each token, or null.
void filter(float* logits, int64_t vocab, const Sampling& s, const int64_t* seen, int64_t count, const uint32_t* allowed);

// The token at `share` (0 to 1) of the scores' probabilities, in order of tokens; -1 where none has a finite score.
int64_t draw(const float* scores, int64_t vocab, double share);

// The `count` likeliest tokens, best first, and then `token`, with the logarithms of their probabilities.
std::vector<std::pair<int64_t, float>> likeliest(const float* logits, int64_t vocab, int64_t count, int64_t token);

}  // namespace nstf::engine
