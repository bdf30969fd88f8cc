#include "sampler.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace nstf::engine {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

void punish(float* logits, int64_t vocab, float penalty, const int64_t* seen, int64_t count) {
    std::vector<int64_t> once(seen, seen + count);
    std::sort(once.begin(), once.end());
    once.erase(std::unique(once.begin(), once.end()), once.end());
    for (int64_t token : once) {
        if (token < 0 || token >= vocab) throw std::invalid_argument("sampling: no such token");
        logits[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
    }
}

// The k largest stay, with those that equal the last of them.
void keep_top(float* scores, int64_t vocab, int64_t k) {
    if (k <= 0 || k >= vocab) return;
    // A heap of the best so far: most scores are below its least and cost one comparison.
    std::vector<float> best(scores, scores + k);
    const auto later = std::greater<float>();
    std::make_heap(best.begin(), best.end(), later);
    for (int64_t i = k; i < vocab; ++i) {
        if (!(scores[i] > best.front())) continue;
        std::pop_heap(best.begin(), best.end(), later);
        best.back() = scores[i];
        std::push_heap(best.begin(), best.end(), later);
    }
    const float least = best.front();
    for (int64_t i = 0; i < vocab; ++i)
        if (scores[i] < least) scores[i] = kNone;
}

// The likeliest tokens stay until they have p together.
void keep_share(float* scores, int64_t vocab, float p) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < vocab; ++i)
        if (scores[i] > kNone) order.push_back(i);
    if (order.empty()) return;
    const float top = scores[*std::max_element(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] < scores[b]; })];
    double total = 0;
    for (int64_t i : order) total += std::exp(scores[i] - top);
    // Sorted bit by bit: the share is reached after a few tokens as a rule.
    const auto before = [&](int64_t a, int64_t b) { return scores[a] > scores[b]; };
    const auto size = static_cast<int64_t>(order.size());
    double sum = 0;
    int64_t kept = 0;
    for (int64_t sorted = 0, step = 64; kept == sorted && sorted < size; step *= 4) {
        const int64_t end = std::min(size, sorted + step);
        std::partial_sort(order.begin() + sorted, order.begin() + end, order.end(), before);
        for (sorted = end; kept < sorted && (kept == 0 || sum < static_cast<double>(p) * total); ++kept)
            sum += std::exp(scores[order[static_cast<size_t>(kept)]] - top);
    }
    for (int64_t i = kept; i < size; ++i) scores[order[static_cast<size_t>(i)]] = kNone;
}

}  // namespace

void filter(float* logits, int64_t vocab, const Sampling& s, const int64_t* seen, int64_t count, const uint32_t* allowed) {
    if (vocab <= 0) throw std::invalid_argument("sampling from nothing");
    if (s.penalty != 1.0f) punish(logits, vocab, s.penalty, seen, count);
    if (allowed != nullptr)
        for (int64_t i = 0; i < vocab; ++i)
            if (!(allowed[i / 32] >> (i % 32) & 1u)) logits[i] = kNone;
    if (s.temperature != 1.0f)
        for (int64_t i = 0; i < vocab; ++i) logits[i] /= s.temperature;
    keep_top(logits, vocab, s.top_k);
    if (s.top_p < 1.0f) keep_share(logits, vocab, s.top_p);
    if (s.min_p > 0.0f) {
        const float least = *std::max_element(logits, logits + vocab) + std::log(s.min_p);
        for (int64_t i = 0; i < vocab; ++i)
            if (logits[i] < least) logits[i] = kNone;
    }
}

int64_t draw(const float* scores, int64_t vocab, double share) {
    const float top = *std::max_element(scores, scores + vocab);
    if (!(top > kNone)) return -1;
    std::vector<std::pair<int64_t, double>> found;
    double total = 0;
    for (int64_t i = 0; i < vocab; ++i)
        if (scores[i] > kNone) found.emplace_back(i, total += std::exp(static_cast<double>(scores[i] - top)));
    for (const auto& [token, sum] : found)
        if (share * total < sum) return token;
    return found.back().first;
}

std::vector<std::pair<int64_t, float>> likeliest(const float* logits, int64_t vocab, int64_t count, int64_t token) {
    if (token < 0 || token >= vocab) throw std::invalid_argument("sampling: no such token");
    const float top = *std::max_element(logits, logits + vocab);
    double total = 0;
    for (int64_t i = 0; i < vocab; ++i) total += std::exp(static_cast<double>(logits[i] - top));
    const auto log_total = static_cast<float>(std::log(total));
    std::vector<int64_t> order(static_cast<size_t>(vocab));
    for (int64_t i = 0; i < vocab; ++i) order[static_cast<size_t>(i)] = i;
    count = std::clamp<int64_t>(count, 0, vocab);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [&](int64_t a, int64_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
    order.resize(static_cast<size_t>(count));
    order.push_back(token);
    std::vector<std::pair<int64_t, float>> result;
    for (int64_t i : order) result.emplace_back(i, logits[i] - top - log_total);
    return result;
}

}  // namespace nstf::engine

// Addresses: logits float32 [vocab], seen int64 [count], allowed uint32 [(vocab + 31) / 32] or 0.
void bind_sampler(nanobind::module_& m) {
    namespace nb = nanobind;
    using namespace nb::literals;
    using namespace nstf::engine;
    m.def("filter_scores", [](uintptr_t logits, int64_t vocab, float temperature, int64_t top_k, float top_p, float min_p,
                              float penalty, uintptr_t seen, int64_t count, uintptr_t allowed) {
        filter(reinterpret_cast<float*>(logits), vocab, {temperature, top_k, top_p, min_p, penalty},
               reinterpret_cast<const int64_t*>(seen), count, reinterpret_cast<const uint32_t*>(allowed));
    }, nb::call_guard<nb::gil_scoped_release>(), "logits"_a, "vocab"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
       "penalty"_a, "seen"_a, "count"_a, "allowed"_a);
    m.def("draw_token", [](uintptr_t scores, int64_t vocab, double share) {
        return draw(reinterpret_cast<const float*>(scores), vocab, share);
    }, nb::call_guard<nb::gil_scoped_release>(), "scores"_a, "vocab"_a, "share"_a);
    m.def("best_token", [](uintptr_t scores, int64_t vocab) {
        const auto* first = reinterpret_cast<const float*>(scores);
        return std::max_element(first, first + vocab) - first;
    }, nb::call_guard<nb::gil_scoped_release>(), "scores"_a, "vocab"_a);
    m.def("likeliest_tokens", [](uintptr_t logits, int64_t vocab, int64_t count, int64_t token) {
        return likeliest(reinterpret_cast<const float*>(logits), vocab, count, token);
    }, nb::call_guard<nb::gil_scoped_release>(), "logits"_a, "vocab"_a, "count"_a, "token"_a);
}
