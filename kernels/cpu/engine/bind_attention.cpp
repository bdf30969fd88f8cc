// Attention over paged caches for Python: plans of layers, and one layer alone, which tests compare with a reference.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "attend.h"
#include "layer_plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nstf::engine {
namespace {

using Head = std::tuple<std::string, int64_t, int64_t, float, int64_t, int64_t>;
using Stated = std::tuple<int, bool, bool>;
using Group = std::tuple<int64_t, int64_t, int64_t, Stated, Stated, bool>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

Format format(const Stated& s) { return {std::get<0>(s), std::get<1>(s), std::get<2>(s)}; }

class LayerAttention {
  public:
    LayerAttention(int64_t heads, int64_t kv_heads, int64_t size, int64_t window, float scale, const nb::dict& plan)
        : shape_{heads, kv_heads, size, window, scale}, plan_(layer_plan(plan)), cache_(kv_heads, size) {
        if (kv_heads < 1 || heads % kv_heads || size < 2 || size > 512 || size % 2 ||
            (!plan_.heads.empty() && static_cast<int64_t>(plan_.heads.size()) != heads) ||
            (!plan_.groups.empty() && static_cast<int64_t>(plan_.groups.size()) != kv_heads))
            throw std::invalid_argument("attention: sizes that do not fit each other");
        cache_.add_layer(plan_.groups);
    }

    // q, out: [tokens][heads][size]; k, v: [tokens][kv heads][size]; at positions first...
    void run(Floats q, Floats k, Floats v, int64_t first, uintptr_t out, bool decode, int threads) {
        const int64_t wide = shape_.kv_heads * shape_.size, count = static_cast<int64_t>(k.size()) / wide;
        if (count < 1 || count > 128 || static_cast<int64_t>(v.size()) != count * wide ||
            static_cast<int64_t>(q.size()) != count * shape_.heads * shape_.size || (decode && count != 1))
            throw std::invalid_argument("attention: arrays of another size");
        cache_.prepare(first, count);
        auto store = [&](int64_t h) {
            for (int64_t t = 0; t < count; ++t)
                cache_.store(0, h, first + t, k.data() + t * wide + h * shape_.size, v.data() + t * wide + h * shape_.size);
            cache_.pack(0, h);
        };
        const std::vector<AttendPart> parts{{&cache_, first, count, 0, decode}};
        auto* to = reinterpret_cast<float*>(out);
        if (decode) {  // as a model does
            attention_.run_one(shape_, 0, plan_, parts, q.data(), to, store, std::max(1, threads));
        } else {
            for (int64_t h = 0; h < shape_.kv_heads; ++h) store(h);
            attention_.run(shape_, 0, plan_, parts, q.data(), to, std::max(1, threads));
        }
        cache_.finish();
    }
    void copy(const LayerAttention& from, int64_t positions) {
        if (&from == this) throw std::invalid_argument("attention: nothing to copy");
        cache_.copy(from.cache_, positions);
    }
    int64_t resumable(int64_t positions) const { return cache_.resumable(positions); }
    int64_t bytes() const { return cache_.bytes(); }
    int64_t held_bytes() const { return cache_.held_bytes(); }

  private:
    AttendShape shape_;
    LayerPlan plan_;
    PageCache cache_;
    Attention attention_;
};

}  // namespace

LayerPlan layer_plan(const nb::dict& d) {
    LayerPlan plan;
    for (const Head& h : nb::cast<std::vector<Head>>(d["heads"])) {
        HeadPlan one;
        const auto& pattern = std::get<0>(h);
        if (pattern != "full" && pattern != "streaming" && pattern != "block_sparse")
            throw std::invalid_argument("attention: no pattern " + pattern);
        one.pattern = pattern == "full" ? HeadPlan::kFull : pattern == "streaming" ? HeadPlan::kStreaming : HeadPlan::kSparse;
        std::tie(std::ignore, one.sink, one.window, one.threshold, one.stride, one.min_length) = h;
        plan.heads.push_back(one);
    }
    for (const Group& g : nb::cast<std::vector<Group>>(d["groups"])) {
        GroupPlan one;
        std::tie(one.sink, one.recent, one.min_length, std::ignore, std::ignore, one.at_once) = g;
        one.keys = format(std::get<3>(g)), one.values = format(std::get<4>(g));
        for (const Format& f : {one.keys, one.values})
            if (one.at_once && (f.bits != 8 || f.channel))
                throw std::invalid_argument("attention: positions are stored at once in 8 bits of their own only");
        plan.groups.push_back(one);
    }
    return plan;
}

void bind_attention(nb::module_& m) {
    nb::class_<LayerAttention>(m, "LayerAttention")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, float, const nb::dict&>(), "heads"_a, "kv_heads"_a, "size"_a,
             "window"_a, "scale"_a, "plan"_a)
        .def("run", &LayerAttention::run, "q"_a, "k"_a, "v"_a, "first"_a, "out"_a, "decode"_a, "threads"_a)
        .def("copy", &LayerAttention::copy, "source"_a, "positions"_a)
        .def("resumable", &LayerAttention::resumable, "positions"_a)
        .def_prop_ro("cache_bytes", &LayerAttention::bytes)
        .def_prop_ro("held_bytes", &LayerAttention::held_bytes);
}

}  // namespace nstf::engine
