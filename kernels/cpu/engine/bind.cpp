// The engine for Python. Matrices keep the arrays they point into alive through Python objects held beside them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "../parallel.h"
#include "argmax.h"
#include "convolution.h"
#include "held.h"
#include "image_steps.h"
#include "leaves.h"
#include "layer_plan.h"
#include "model.h"
#include "shuffle.h"
#include "stored.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nstf::engine {
namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using Stored = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

std::vector<float> copied(const Floats& a) { return {a.data(), a.data() + a.size()}; }

std::vector<float> optional(const nb::dict& d, const char* key) {
    if (!d.contains(key)) return {};
    return copied(nb::cast<Floats>(d[key]));
}

// Copies for matrices that were made, and what they read and write until they are.
class HeldCopies {
  public:
    // target: where task(i) writes, i in [0, tasks); source: what it reads.
    void add(int64_t tasks, std::function<void(int64_t)> task, std::shared_ptr<void> target, nb::object source) {
        targets_.push_back(std::move(target));
        sources_.push_back(std::move(source));
        copies_.add(tasks, std::move(task));
    }
    Shared panels_of(const PackedView& view, nb::object source) {
        targets_.emplace_back();  // first: nothing may fail once the copies know where the matrix lies
        sources_.push_back(std::move(source));
        Shared made = panels(view, copies_);
        targets_.back() = made;
        return made;
    }
    void run(int threads) {
        {
            nb::gil_scoped_release release;
            copies_.run(threads);
        }
        targets_.clear();
        sources_.clear();
    }

  private:
    Copies copies_;
    std::vector<std::shared_ptr<void>> targets_;
    std::vector<nb::object> sources_;
};

// copies: makes panels where there are some; null: none.
Held packed(nb::object linear, bool exact, HeldCopies* copies) {
    const auto* view = reinterpret_cast<const PackedView*>(nb::cast<uintptr_t>(linear.attr("view")()));
    if (!exact && copies != nullptr) {
        Shared repacked = copies->panels_of(*view, linear);
        if (repacked) return {repacked, {}};
    }
    Shared made = exact ? nullptr : packed_int8(*view);
    return {made ? made : packed_exact(*view), {linear}};
}

// Codes as they are, or a copy of them in large pages, which then lives as long as the matrix.
class Codes {
  public:
    // copies: bring the codes; null for no copy.
    Codes(const Bytes& stored, HeldCopies* copies) : stored_(stored) {
        if (copies == nullptr) return;
        const auto size = static_cast<int64_t>(stored.size());
        copy_ = std::make_shared<Copy>();
        uint8_t* const to = copy_->bytes.grow_raw(size);
        const uint8_t* const from = stored.data();
        const auto task = [=](int64_t i) { std::copy_n(from + i * kShare, std::min(kShare, size - i * kShare), to + i * kShare); };
        copies->add((size + kShare - 1) / kShare, task, copy_, nb::cast(stored));
    }
    const uint8_t* data() const { return copy_ ? copy_->bytes.data() : stored_.data(); }
    Held held(Shared made) && {
        if (!copy_) return {std::move(made), {nb::cast(stored_)}};
        copy_->matrix = std::move(made);
        Matrix* const matrix = copy_->matrix.get();
        return {Shared(std::move(copy_), matrix), {}};
    }

  private:
    static constexpr int64_t kShare = 1 << 18;
    struct Copy {
        Buffer<uint8_t, LargePages> bytes;
        Shared matrix;
    };
    const Bytes& stored_;
    std::shared_ptr<Copy> copy_;
};

// scale: uint8 or float16's bits [rows]; top: the value they are relative to; copies: as Codes takes them.
Held make_trellis(int64_t rows, int64_t cols, std::vector<int> quarter_bits, std::vector<int64_t> section_rows, Bytes codes,
                  std::optional<Bytes> numbers, int number_bits, Stored scale, Floats top, std::optional<Floats> quantiles,
                  bool exact, HeldCopies* copies) {
    if (top.size() != 1 || static_cast<int64_t>(scale.size()) != rows || (scale.itemsize() != 1 && scale.itemsize() != 2) ||
        (quantiles && quantiles->size() != 4096))
        throw std::invalid_argument("trellis: scales or quantiles of another size");
    Codes kept(codes, copies);
    StoredTrellis stored{rows, cols, std::move(quarter_bits), std::move(section_rows), kept.data(),
                         static_cast<int64_t>(codes.size()), numbers ? numbers->data() : nullptr,
                         numbers ? static_cast<int64_t>(numbers->size()) : 0, number_bits,
                         quantiles ? quantiles->data() : nullptr};
    std::vector<float> scales = scale.itemsize() == 1
                                    ? trellis_scales(static_cast<const uint8_t*>(scale.data()), rows, *top.data())
                                    : trellis_scales(static_cast<const uint16_t*>(scale.data()), rows, *top.data());
    return std::move(kept).held(trellis(rows, cols, sections(stored), std::move(scales), exact));
}

// tables: uint8 [phases, 2, 16]; step: what a level is worth at scale 1; scale and top as of a trellis.
Held make_shuffle(int64_t rows, int64_t cols, int quarter_bits, Bytes codes, Bytes tables, float step, Stored scale, Floats top,
                  bool exact, HeldCopies* copies) {
    if (top.size() != 1 || static_cast<int64_t>(scale.size()) != rows || (scale.itemsize() != 1 && scale.itemsize() != 2))
        throw std::invalid_argument("shuffle: scales of another size");
    std::vector<float> scales = scale.itemsize() == 1
                                    ? trellis_scales(static_cast<const uint8_t*>(scale.data()), rows, *top.data())
                                    : trellis_scales(static_cast<const uint16_t*>(scale.data()), rows, *top.data());
    for (float& s : scales) s *= step;
    Codes kept(codes, copies);
    StoredShuffle stored{rows, cols, quarter_bits, kept.data(), {tables.data(), tables.data() + tables.size()}, std::move(scales)};
    return std::move(kept).held(shuffle(std::move(stored), static_cast<int64_t>(codes.size()), exact));
}

Held make_dense(int64_t rows, int64_t cols, Stored values, const std::string& type) {
    const Number number = type == "float32" ? Number::kFloat : type == "float16" ? Number::kHalf : Number::kBfloat;
    if (static_cast<int64_t>(values.size()) != rows * cols || values.itemsize() != (number == Number::kFloat ? 4u : 2u))
        throw std::invalid_argument("dense: another size");
    return {dense(rows, cols, values.data(), number), {nb::cast(values)}};
}

Held pair(const Held& a, const Held& b, Shared (*make)(Shared, Shared)) {
    Held held{make(a.matrix, b.matrix), a.keep};
    held.keep.insert(held.keep.end(), b.keep.begin(), b.keep.end());
    return held;
}

Held make_chain(const std::string& kind, int64_t rows, int64_t cols, const std::vector<int64_t>& view,
                const std::vector<int64_t>& ranks, nb::list parts, const std::string& way) {
    const Decomposition which = kind == "cp"       ? Decomposition::kCp
                                : kind == "tucker" ? Decomposition::kTucker
                                                   : Decomposition::kTrain;
    std::vector<Shared> matrices;
    Held held;
    for (nb::handle part : parts) {
        matrices.push_back(nullptr);
        if (part.is_none()) continue;
        const Held& own = nb::cast<const Held&>(part);
        matrices.back() = own.matrix;
        held.keep.insert(held.keep.end(), own.keep.begin(), own.keep.end());
    }
    const Way how = way == "steps" ? Way::kSteps : way == "decoded" ? Way::kDecoded : Way::kBest;
    held.matrix = chain(which, rows, cols, view, ranks, matrices, how);
    return held;
}

void multiply(const Held& m, uintptr_t x, int64_t batch, uintptr_t y, int threads) {
    if (batch < 0) throw std::invalid_argument("a product with fewer than no rows of activations");
    if (batch == 0) return;
    nb::gil_scoped_release release;
    m.matrix->multiply(reinterpret_cast<const float*>(x), batch, reinterpret_cast<float*>(y), m.matrix->rows, limited(threads));
}

// A convolution, and what its weight keeps.
class HeldConvolution {
  public:
    using Two = std::tuple<int64_t, int64_t>;
    HeldConvolution(const Held& weight, int64_t channels, Two kernel, Two stride, Two before, Two after, Two dilation, int64_t groups)
        : convolution_(weight.matrix, shape(channels, kernel, stride, before, after, dilation, groups)), keep_(weight.keep) {}

    // Addresses of float32 arrays; gain, bias and added may be 0.
    void run(uintptr_t x, int64_t images, int64_t height, int64_t width, uintptr_t gain, uintptr_t bias, uintptr_t added, float least,
             float most, uintptr_t y, bool last, int threads) const {
        if (images < 0 || height < 1 || width < 1) throw std::invalid_argument("convolution: no image");
        nb::gil_scoped_release release;
        const auto floats = [](uintptr_t p) { return reinterpret_cast<const float*>(p); };
        convolution_.run(floats(x), images, height, width, {floats(gain), floats(bias), floats(added), least, most},
                         reinterpret_cast<float*>(y), last, last, limited(threads));
    }

    const Convolution& convolution() const { return convolution_; }

  private:
    static ConvolutionShape shape(int64_t channels, Two kernel, Two stride, Two before, Two after, Two dilation, int64_t groups) {
        ConvolutionShape s{};
        s.channels = channels, s.groups = groups;
        std::tie(s.kernel[0], s.kernel[1]) = kernel;
        std::tie(s.stride[0], s.stride[1]) = stride;
        std::tie(s.before[0], s.before[1]) = before;
        std::tie(s.after[0], s.after[1]) = after;
        std::tie(s.dilation[0], s.dilation[1]) = dilation;
        return s;
    }
    Convolution convolution_;
    std::vector<nb::object> keep_;
};

// Steps over images, and the convolutions that they are of.
class HeldSteps {
  public:
    using Two = HeldConvolution::Two;
    void add(nb::object convolution, int from, int to, int added, float least, float most) {
        steps_.add(nb::cast<const HeldConvolution&>(convolution).convolution(), from, to, added, least, most);
        keep_.push_back(std::move(convolution));
    }
    void add_pool(int from, int to, Two kernel, Two stride, Two before) {
        const auto two = [](const Two& t) { return std::array<int64_t, 2>{std::get<0>(t), std::get<1>(t)}; };
        steps_.add_pool(from, to, two(kernel).data(), two(stride).data(), two(before).data());
    }
    void add_mean(int from, int to) { steps_.add_mean(from, to); }
    void add_linear(int from, int to, int64_t inputs, int64_t outputs) { steps_.add_linear(from, to, inputs, outputs); }
    nb::object sizes(int64_t channels, int64_t height, int64_t width) const {
        ImageSteps::Size out;
        if (!steps_.sizes({channels, height, width}, &out)) return nb::none();
        return nb::make_tuple(out[0], out[1], out[2]);
    }
    // numbers: for each convolution the addresses of mean, variance, gain, bias and its own bias, or 0; for each matrix those of its
    // values and its bias in the places of a gain and an own bias; eps: one for each.
    void run(uintptr_t x, int64_t images, std::tuple<int64_t, int64_t, int64_t> in, const std::vector<uintptr_t>& numbers,
             const std::vector<float>& eps, uintptr_t y, bool last, int threads) const {
        if (images < 0 || numbers.size() != 5 * eps.size()) throw std::invalid_argument("image steps: wrong numbers");
        const auto floats = [](uintptr_t p) { return reinterpret_cast<const float*>(p); };
        std::vector<Normalisation> norms;
        for (size_t i = 0; i < eps.size(); ++i) {
            const uintptr_t* n = numbers.data() + 5 * i;
            norms.push_back({floats(n[0]), floats(n[1]), floats(n[2]), floats(n[3]), floats(n[4]), eps[i]});
        }
        nb::gil_scoped_release release;
        steps_.run(floats(x), images, {std::get<0>(in), std::get<1>(in), std::get<2>(in)}, norms, reinterpret_cast<float*>(y), last,
                   limited(threads));
    }

  private:
    ImageSteps steps_;
    std::vector<nb::object> keep_;
};

// An engine that was at work when its process was forked. NstfError in Python, whichever of its functions was called.
struct Forked : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Engine {
  public:
    Engine(const nb::dict& d, const Held& embedding, const Held& head, Floats final_norm)
        : model_(shape(d), embedding.matrix, head.matrix, copied(final_norm)),
          keep_(embedding.keep) {
        keep_.insert(keep_.end(), head.keep.begin(), head.keep.end());
    }

    void add_layer(const nb::dict& d) {
        Layer layer;
        auto matrix = [&](const char* key) {
            const Held& held = nb::cast<const Held&>(d[key]);
            keep_.insert(keep_.end(), held.keep.begin(), held.keep.end());
            return held.matrix;
        };
        layer.q = matrix("q"), layer.k = matrix("k"), layer.v = matrix("v"), layer.o = matrix("o");
        layer.gate = matrix("gate"), layer.up = matrix("up"), layer.down = matrix("down");
        layer.attention_norm = optional(d, "attention_norm"), layer.ffn_norm = optional(d, "ffn_norm");
        layer.attention_out_norm = optional(d, "attention_out_norm"), layer.ffn_out_norm = optional(d, "ffn_out_norm");
        layer.q_norm = optional(d, "q_norm"), layer.k_norm = optional(d, "k_norm");
        layer.q_bias = optional(d, "q_bias"), layer.k_bias = optional(d, "k_bias");
        layer.v_bias = optional(d, "v_bias"), layer.o_bias = optional(d, "o_bias");
        layer.window = nb::cast<int64_t>(d["window"]);
        layer.rotation = nb::cast<int>(d["rotation"]);
        if (d.contains("heads")) layer.plan = layer_plan(d);
        model_.add_layer(std::move(layer));
    }
    // sum(address, numbers), join(address of [count, rows], count, address of [count, vocab]): Python functions, called with its
    // lock. What they raise ends the call.
    void divide(nb::object sum, nb::object join) {
        model_.divide({[sum](float* values, int64_t count) {
                           nb::gil_scoped_acquire locked;
                           sum(reinterpret_cast<uintptr_t>(values), count);
                       },
                       [join](const float* part, int64_t count, float* logits) {
                           nb::gil_scoped_acquire locked;
                           join(reinterpret_cast<uintptr_t>(part), count, reinterpret_cast<uintptr_t>(logits));
                       }});
    }
    void add_rotation(Floats frequencies) { model_.add_rotation(copied(frequencies)); }

    // Addresses: ids int64 [count], logits float32 [vocab] or [count, vocab].
    void run(uintptr_t ids, int64_t count, int64_t first, uintptr_t logits, bool all, int threads) {
        locked([&] {
            model_.run(reinterpret_cast<const int64_t*>(ids), count, first, reinterpret_cast<float*>(logits), all, limited(threads));
        });
    }
    // found: int64 [count]. Returns how many tokens, and whether the last one's logits were NaN.
    std::pair<int64_t, bool> go_on(int64_t token, int64_t first, int64_t count, const std::vector<int64_t>& stop, uintptr_t found, int threads) {
        std::pair<int64_t, bool> done{0, false};
        locked([&] {
            done.first = model_.go_on(token, first, count, stop, reinterpret_cast<int64_t*>(found), done.second, limited(threads));
        });
        return done;
    }
    // parts: (sequence, first position, tokens, whether of a prompt, whether logits are wanted).
    void step(uintptr_t ids, const std::vector<std::tuple<int64_t, int64_t, int64_t, bool, bool>>& parts, uintptr_t logits,
              int64_t least, int threads) {
        std::vector<Part> all;
        for (const auto& [sequence, first, count, prompt, wanted] : parts) all.push_back({sequence, first, count, prompt, wanted});
        locked([&] {
            model_.step(reinterpret_cast<const int64_t*>(ids), all, reinterpret_cast<float*>(logits), least, limited(threads));
        });
    }
    void set_sequences(int64_t count) { locked([&] { model_.set_sequences(count); }); }
    void copy(int64_t from, int64_t to, int64_t positions) { locked([&] { model_.copy(from, to, positions); }); }
    int64_t resumable(int64_t sequence, int64_t positions) {
        int64_t found = 0;
        locked([&] { found = model_.resumable(sequence, positions); });
        return found;
    }
    void release(int64_t sequence) { locked([&] { model_.release(sequence); }); }
    // As the last call left them: whoever asks does not wait for the one that is under way.
    int64_t cache_bytes() const { return cache_bytes_; }
    int64_t held_bytes() const { return held_bytes_; }

  private:
    // One caller at a time: activations and caches are the engine's own. Without Python's lock, so that other threads go on.
    template <class F>
    void locked(F body) {
        nb::gil_scoped_release release;
        const std::unique_lock<std::mutex> lock = owned();
        struct Counted {
            Engine& e;
            ~Counted() { e.cache_bytes_ = e.model_.cache_bytes(), e.held_bytes_ = e.model_.held_bytes(); }
        } counted{*this};
        body();
    }
    // After a fork in the middle of another thread's call nobody would ever let go of the lock, and what it guards is half done.
    std::unique_lock<std::mutex> owned() {
        const int here = process_id();
        for (int tries = 0; process_ != here; ++tries) {
            std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
            if (lock.owns_lock()) {
                process_ = here;
                return lock;
            }
            if (tries == 100) throw Forked("the engine was at work when this process was forked; open it anew");
            std::this_thread::sleep_for(std::chrono::milliseconds(5));  // for another thread of this process that is here first
        }
        return std::unique_lock<std::mutex>(mutex_);
    }
    static Shape shape(const nb::dict& d) {
        Shape s;
        auto number = [&](const char* key) { return nb::cast<int64_t>(d[key]); };
        auto real = [&](const char* key) { return nb::cast<float>(d[key]); };
        s.hidden = number("hidden"), s.layers = number("layers"), s.heads = number("heads"), s.kv_heads = number("kv_heads");
        s.head_size = number("head_size"), s.ffn = number("ffn"), s.vocab = number("vocab"), s.context = number("context");
        s.first_row = d.contains("first_row") ? number("first_row") : 0, s.rows = d.contains("rows") ? number("rows") : s.vocab;
        s.epsilon = real("epsilon"), s.score_scale = real("score_scale"), s.embedding_scale = real("embedding_scale");
        s.logit_cap = real("logit_cap"), s.gelu = nb::cast<bool>(d["gelu"]);
        return s;
    }

    Model model_;
    std::vector<nb::object> keep_;
    std::mutex mutex_;
    std::atomic<int> process_{process_id()};  // whose threads the lock knows
    std::atomic<int64_t> cache_bytes_{0}, held_bytes_{0};
};

}  // namespace
}  // namespace nstf::engine

void bind_engine(nb::module_& m) {
    using namespace nstf::engine;
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Forked& error) {
            PyErr_SetString(nb::module_::import_("nstf.errors").attr("NstfError").ptr(), error.what());
        }
    });
    nb::class_<Held>(m, "EngineMatrix")
        .def_prop_ro("kernel", [](const Held& h) { return h.matrix->kernel(); })
        .def_prop_ro("shape", [](const Held& h) { return nb::make_tuple(h.matrix->rows, h.matrix->cols); })
        .def("multiply_at", &multiply, "x"_a, "batch"_a, "y"_a, "threads"_a)
        .def("decode_at", [](const Held& h, int64_t row, uintptr_t out) {
            if (row < 0 || row >= h.matrix->rows) throw std::invalid_argument("no such row");
            h.matrix->decode(row, reinterpret_cast<float*>(out));
        });
    nb::class_<HeldConvolution>(m, "Convolution")
        .def(nb::init<const Held&, int64_t, HeldConvolution::Two, HeldConvolution::Two, HeldConvolution::Two, HeldConvolution::Two,
                      HeldConvolution::Two, int64_t>(),
             "weight"_a, "channels"_a, "kernel"_a, "stride"_a, "before"_a, "after"_a, "dilation"_a, "groups"_a)
        .def("run_at", &HeldConvolution::run, "x"_a, "images"_a, "height"_a, "width"_a, "gain"_a, "bias"_a, "added"_a,
             "least"_a, "most"_a, "y"_a, "last"_a, "threads"_a);
    nb::class_<HeldSteps>(m, "ImageSteps")
        .def(nb::init<>())
        .def("add", &HeldSteps::add, "convolution"_a, "source"_a, "to"_a, "added"_a, "least"_a, "most"_a)
        .def("add_pool", &HeldSteps::add_pool, "source"_a, "to"_a, "kernel"_a, "stride"_a, "before"_a)
        .def("add_mean", &HeldSteps::add_mean, "source"_a, "to"_a)
        .def("add_linear", &HeldSteps::add_linear, "source"_a, "to"_a, "inputs"_a, "outputs"_a)
        .def("sizes", &HeldSteps::sizes, "channels"_a, "height"_a, "width"_a)
        .def("run_at", &HeldSteps::run, "x"_a, "images"_a, "size"_a, "numbers"_a, "eps"_a, "y"_a, "last"_a, "threads"_a);
    nb::class_<HeldCopies>(m, "EngineCopies").def(nb::init<>()).def("run", &HeldCopies::run, "threads"_a);
    m.def("engine_packed", &packed, "linear"_a, "exact"_a, "copies"_a.none() = nb::none());
    m.def("engine_trellis", &make_trellis, "rows"_a, "cols"_a, "quarter_bits"_a, "section_rows"_a, "codes"_a,
          "numbers"_a.none(), "number_bits"_a, "scale"_a, "top"_a, "quantiles"_a.none(), "exact"_a, "copies"_a.none() = nb::none());
    m.def("engine_shuffle", &make_shuffle, "rows"_a, "cols"_a, "quarter_bits"_a, "codes"_a, "tables"_a, "step"_a, "scale"_a,
          "top"_a, "exact"_a, "copies"_a.none() = nb::none());
    m.def("engine_dense", &make_dense, "rows"_a, "cols"_a, "values"_a, "type"_a);
    m.def("engine_low_rank", [](const Held& a, const Held& b) { return pair(a, b, low_rank); });
    m.def("engine_sum", [](const Held& a, const Held& b) { return pair(a, b, sum); });
    m.def("engine_rotated", [](const Held& x, uint32_t seed, int block) {
        // Matrices with the same blocks and signs share the rotation of their activations.
        const uintptr_t id = static_cast<uintptr_t>(seed) << 8 | static_cast<uintptr_t>(block);
        return Held{rotated(x.matrix, rotation_signs(x.matrix->cols, seed, 0), block, id), x.keep};
    });
    m.def("engine_rotated_rows", [](const Held& x, uint32_t seed, int block) {
        return Held{rotated_rows(x.matrix, rotation_signs(x.matrix->rows, seed, 1), block), x.keep};
    });
    m.def("argmax", [](Floats values) {
        if (values.size() == 0) throw std::invalid_argument("argmax of nothing");
        return nstf::argmax(values.data(), static_cast<int64_t>(values.size()));
    }, "Index of the first largest value, or of the first NaN.");
    m.def("argmax_at", [](uintptr_t values, int64_t count) {
        if (count < 1) throw std::invalid_argument("argmax of nothing");
        return nstf::argmax(reinterpret_cast<const float*>(values), count);
    }, "values"_a, "count"_a, "The same of `count` floats at an address: arrays take longer to hand over than to search.");
    m.def("engine_transposed", [](const Held& x) { return Held{transposed(x.matrix), x.keep}; });
    m.def("engine_reshaped", [](const Held& x, int64_t rows, int64_t cols) {
        return Held{reshaped(x.matrix, rows, cols), x.keep};
    });
    m.def("engine_chain", [](const std::string& kind, int64_t rows, int64_t cols, const std::vector<int64_t>& view,
                             const std::vector<int64_t>& ranks, nb::list parts, const std::string& way) -> nb::object {
        Held held = make_chain(kind, rows, cols, view, ranks, parts, way);
        return held.matrix == nullptr ? nb::none() : nb::cast(std::move(held));
    });
    m.def("engine_int8", &int8_available, "Whether there are kernels with int8 activations for the instruction set in use.");
    m.def("isas", [] {
        std::vector<std::string> names;
        for (nstf::Isa i : nstf::isas()) names.emplace_back(nstf::name(i));
        return names;
    }, "The instruction sets of this processor that kernels are written for, best first.");
    m.def("isa", [] { return std::string(nstf::name(nstf::isa())); }, "The one kernels are chosen for.");
    m.def("use_isa", &nstf::use_isa, "isa"_a, "Chooses kernels for another one from here on; \"\": the best.");
    bind_attention(m);
    bind_grouped(m);
    nb::class_<Engine>(m, "Engine")
        .def(nb::init<const nb::dict&, const Held&, const Held&, Floats>(), "shape"_a, "embedding"_a, "head"_a,
             "final_norm"_a)
        .def("add_layer", &Engine::add_layer)
        .def("add_rotation", &Engine::add_rotation)
        .def("divide", &Engine::divide, "sum"_a, "join"_a, "For one process of several: how results are put together.")
        .def("run", &Engine::run, "ids"_a, "count"_a, "first"_a, "logits"_a, "all"_a, "threads"_a)
        .def("go_on", &Engine::go_on, "token"_a, "first"_a, "count"_a, "stop"_a, "found"_a, "threads"_a,
             "Runs a token and goes on with the likeliest ones: (tokens found, whether the last one's logits are NaN).")
        .def("step", &Engine::step, "ids"_a, "parts"_a, "logits"_a, "least"_a, "threads"_a)
        .def("set_sequences", &Engine::set_sequences, "count"_a)
        .def("copy", &Engine::copy, "source"_a, "target"_a, "positions"_a)
        .def("resumable", &Engine::resumable, "sequence"_a, "positions"_a)
        .def("release", &Engine::release, "sequence"_a)
        .def_prop_ro("cache_bytes", &Engine::cache_bytes)
        .def_prop_ro("held_bytes", &Engine::held_bytes);
}
