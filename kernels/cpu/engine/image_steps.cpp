#include "image_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "blocks.h"
#include "buffer.h"

namespace nstf::engine {
namespace {

// Bytes of all values of the images that one thread works on together, where that is more than one: what a second cache holds.
constexpr int64_t kBatchBytes = 2 << 20;

int64_t count_of(const ImageSteps::Size& s) { return s[0] * s[1] * s[2]; }

// Windows of one plane: first over the rows, then over the columns of the rows that this leaves.
struct Pool {
    // Rows of the result at a time: what was just written is not read at once.
    static constexpr int64_t kTogether = 8;

    const ConvolutionKernels* kernels;
    int64_t height, width, out_height, out_width;
    const int64_t *kernel, *stride, *before;

    // Rows y0..y1 - 1 of a result. lines: room for as many addresses as a window has rows or columns; room: `floats()`.
    void rows(const float* x, int64_t y0, int64_t y1, const float** lines, float* room, float* out) const {
        constexpr float kLeast = -std::numeric_limits<float>::infinity();
        for (int64_t y = y0; y < y1; ++y) {
            const int64_t first = std::max<int64_t>(y * stride[0] - before[0], 0);
            const int64_t end = std::min(y * stride[0] - before[0] + kernel[0], height);
            float* line = room + (y - y0) * padded();
            std::fill_n(line, before[1], kLeast);
            std::fill_n(line + before[1] + width, before[1], kLeast);
            for (int64_t r = first; r < end; ++r) lines[r - first] = x + r * width;
            kernels->largest(lines, end - first, width, line + before[1]);
        }
        float* found = room + kTogether * padded();
        for (int64_t y = y0; y < y1; ++y) {  // of all windows
            for (int64_t k = 0; k < kernel[1]; ++k) lines[k] = room + (y - y0) * padded() + k;
            kernels->largest(lines, kernel[1], (out_width - 1) * stride[1] + 1, found + (y - y0) * padded());
        }
        for (int64_t y = y0; y < y1; ++y) {  // of which every so many are kept
            const float* of = found + (y - y0) * padded();
            float* to = out + y * out_width;
            if (stride[1] == 2)
                for (int64_t o = 0; o < out_width; ++o) to[o] = of[2 * o];
            else
                for (int64_t o = 0; o < out_width; ++o) to[o] = of[o * stride[1]];
        }
    }
    int64_t padded() const { return width + 2 * before[1]; }
    int64_t floats() const { return 2 * kTogether * padded(); }
};

// Rows first..end - 1 of one image's results.
void pool_rows(const Pool& p, const float* x, int64_t channels, int64_t first, int64_t end, float* y) {
    thread_local Buffer<float> room;
    float* own = room.grow(p.floats());
    std::vector<const float*> lines(static_cast<size_t>(std::max(p.kernel[0], p.kernel[1])));
    for (int64_t c = 0; c < channels; ++c)
        for (int64_t r = first; r < end; r += Pool::kTogether)
            p.rows(x + c * p.height * p.width, r, std::min(end, r + Pool::kTogether), lines.data(), own,
                   y + c * p.out_height * p.out_width);
}

void pool(const Pool& p, const float* x, int64_t images, int64_t channels, float* y, int threads) {
    // Shared out by rows, as a convolution's pixels are.
    const int64_t parts = images >= threads ? 1 : std::min<int64_t>(p.out_height, 2 * threads);
    auto task = [&](int64_t t) {
        const int64_t image = t / parts, part = t % parts;
        pool_rows(p, x + image * channels * p.height * p.width, channels, p.out_height * part / parts, p.out_height * (part + 1) / parts,
                  y + image * channels * p.out_height * p.out_width);
    };
    parallel_blocks(threads, images * parts, task);
}

// The pooling of one image by the threads that make it: of rows that came from one call to `done`, and then the rest.
class PoolBehind {
  public:
    PoolBehind(const Pool& pool, const float* x, int64_t channels, float* y)
        : pool_(pool), x_(x), channels_(channels), y_(y), made_(static_cast<size_t>(pool.out_height), 0) {}
    void done(int64_t first, int64_t end) {
        int64_t from = first + pool_.before[0] + pool_.stride[0] - 1;
        from = first == 0 ? 0 : std::min(from / pool_.stride[0], pool_.out_height);
        int64_t to = from;  // windows that end within these rows, or at the image's end
        while (to < pool_.out_height && (end == pool_.height || to * pool_.stride[0] - pool_.before[0] + pool_.kernel[0] <= end)) ++to;
        if (from < to) pool_rows(pool_, x_, channels_, from, to, y_);
        std::fill(made_.begin() + from, made_.begin() + to, 1);
    }
    void rest() {
        for (int64_t r = 0; r < pool_.out_height; ++r)
            if (made_[static_cast<size_t>(r)] == 0) pool_rows(pool_, x_, channels_, r, r + 1, y_);
    }

  private:
    const Pool& pool_;
    const float* x_;
    int64_t channels_;
    float* y_;
    std::vector<char> made_;  // rows that are done
};

// Whether every value is in some window.
bool covers(const Pool& p) {
    for (int i = 0; i < 2; ++i) {
        const int64_t size = i == 0 ? p.height : p.width, out = i == 0 ? p.out_height : p.out_width;
        if (p.stride[i] > p.kernel[i] || (out - 1) * p.stride[i] - p.before[i] + p.kernel[i] < size) return false;
    }
    return true;
}

// The mean of each plane of so many numbers.
void means(const float* x, int64_t planes, int64_t count, float* y, int threads) {
    constexpr int64_t kAtOnce = 1 << 16;  // numbers of a task
    const int64_t some = std::max<int64_t>(1, kAtOnce / count);
    auto task = [&](int64_t t) {
        for (int64_t plane = t * some; plane < std::min(planes, (t + 1) * some); ++plane) {
            constexpr int64_t kSums = 16;
            float sums[kSums] = {};
            const float* from = x + plane * count;
            int64_t i = 0;
            for (; i + kSums <= count; i += kSums)
                for (int64_t k = 0; k < kSums; ++k) sums[k] += from[i + k];
            for (; i < count; ++i) sums[i % kSums] += from[i];
            double total = 0;
            for (float sum : sums) total += sum;
            y[plane] = static_cast<float>(total / static_cast<double>(count));
        }
    };
    parallel_blocks(threads, (planes + some - 1) / some, task);
}

// w [outputs][inputs] times x [images][inputs], with a bias or without.
void linear(const float* x, int64_t images, const float* w, const float* bias, int64_t inputs, int64_t outputs, float* y, int threads) {
    constexpr int64_t kAtOnce = 1 << 15;  // products of a task
    const int64_t some = std::max<int64_t>(1, kAtOnce / inputs);
    auto task = [&](int64_t t) {
        for (int64_t o = t * some; o < std::min(outputs, (t + 1) * some); ++o)
            for (int64_t i = 0; i < images; ++i) {
                const float *a = w + o * inputs, *b = x + i * inputs;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t k = 0; k < inputs; ++k) sum += a[k] * b[k];
                y[i * outputs + o] = bias == nullptr ? sum : sum + bias[o];
            }
    };
    parallel_blocks(threads, (outputs + some - 1) / some, task);
}

// [images][rows][columns] to [images][columns][rows].
void turn(const ConvolutionKernels* kernels, const float* x, int64_t images, int64_t rows, int64_t columns, float* y, int threads) {
    const int64_t tiles = (columns + kPixels - 1) / kPixels;
    auto task = [&](int64_t t) {
        thread_local Buffer<float> room;
        const int64_t image = t / tiles, first = t % tiles * kPixels, count = std::min<int64_t>(kPixels, columns - first);
        float* lines = room.grow(kUnpacked * kPixels);
        for (int64_t r = 0; r < rows; r += kUnpacked) {
            const int64_t some = std::min<int64_t>(kUnpacked, rows - r);
            for (int64_t i = 0; i < some; ++i)
                std::copy_n(x + (image * rows + r + i) * columns + first, count, lines + i * kPixels);
            kernels->turn(lines, static_cast<int>(some), static_cast<int>(count), y + (image * columns + first) * rows + r, rows);
        }
    };
    parallel_blocks(threads, images * tiles, task);
}

// Gain and bias of the products.
void scaled(const Normalisation& n, int64_t rows, float* gain, float* bias) {
    for (int64_t r = 0; r < rows; ++r) gain[r] = 1 / std::sqrt(n.variance[r] + n.eps);
    if (n.gain != nullptr)
        for (int64_t r = 0; r < rows; ++r) gain[r] *= n.gain[r];
    for (int64_t r = 0; r < rows; ++r) {
        const float mean = n.own == nullptr ? n.mean[r] : n.mean[r] - n.own[r];
        bias[r] = (n.bias == nullptr ? 0.0f : n.bias[r]) - mean * gain[r];
    }
}

}  // namespace

void ImageSteps::push(const Step& step) {
    const int before = values_;
    if (step.from < 0 || step.from >= before || step.to < 1 || step.to > before || step.added < -1 || step.added >= before ||
        step.to == step.from || step.to == step.added)
        throw std::invalid_argument("image steps: no such value");
    values_ = std::max(values_, step.to + 1);
    steps_.push_back(step);
}

void ImageSteps::add(const Convolution& convolution, int from, int to, int added, float least, float most) {
    push({&convolution, from, to, added, least, most, {0, 0}, {0, 0}, {0, 0}});
}

void ImageSteps::add_pool(int from, int to, const int64_t kernel[2], const int64_t stride[2], const int64_t before[2]) {
    constexpr int64_t most = 1 << 24;
    for (int i = 0; i < 2; ++i)
        if (kernel[i] < 1 || stride[i] < 1 || before[i] < 0 || kernel[i] > most || stride[i] > most || 2 * before[i] > kernel[i])
            throw std::invalid_argument("image steps: a size is out of range");
    push({nullptr, from, to, -1, 0, 0, {kernel[0], kernel[1]}, {stride[0], stride[1]}, {before[0], before[1]}});
}

void ImageSteps::add_mean(int from, int to) { push({nullptr, from, to, -1, 0, 0, {0, 0}, {0, 0}, {0, 0}}); }

void ImageSteps::add_linear(int from, int to, int64_t inputs, int64_t outputs) {
    if (inputs < 1 || outputs < 1 || inputs > (1 << 24) || outputs > (1 << 24))
        throw std::invalid_argument("image steps: a size is out of range");
    push({nullptr, from, to, -1, 0, 0, {0, 0}, {0, 0}, {0, 0}, inputs, outputs});
}

bool ImageSteps::size_of(const Step& step, const Size& in, Size* out) {
    if (step.convolution != nullptr) return step.convolution->sizes(in[0], in[1], in[2], out->data());
    if (step.outputs > 0) {
        *out = {step.outputs, 1, 1};
        return in[0] == step.inputs && in[1] == 1 && in[2] == 1;
    }
    *out = in;
    if (step.kernel[0] == 0) {
        *out = {in[0], 1, 1};
        return in[1] > 0 && in[2] > 0;
    }
    for (int i = 0; i < 2; ++i) {
        const int64_t room = in[static_cast<size_t>(i + 1)] + 2 * step.before[i] - step.kernel[i];
        if (room < 0) return false;
        (*out)[static_cast<size_t>(i + 1)] = room / step.stride[i] + 1;
    }
    return true;
}

bool ImageSteps::all_sizes(Size in, std::vector<Size>* found) const {
    std::vector<Size> now(static_cast<size_t>(values_), Size{0, 0, 0});
    now[0] = in;
    for (const Step& step : steps_) {
        Size out;
        if (!size_of(step, now[static_cast<size_t>(step.from)], &out) || count_of(out) == 0) return false;
        if (step.added >= 0 && now[static_cast<size_t>(step.added)] != out) return false;
        now[static_cast<size_t>(step.to)] = out;
        found->push_back(out);
    }
    return !steps_.empty() && convolution_kernels() != nullptr;
}

bool ImageSteps::sizes(Size in, Size* out) const {
    std::vector<Size> found;
    if (!all_sizes(in, &found)) return false;
    *out = found.back();
    return true;
}

void ImageSteps::run(const float* x, int64_t images, Size in, const std::vector<Normalisation>& norms, float* y, bool last,
                     int threads) const {
    Call call{in, {}, std::vector<int64_t>(static_cast<size_t>(values_), 0), {}, {}, last};
    if (!all_sizes(in, &call.sizes)) throw std::invalid_argument("image steps: images of another size");
    int64_t numbers = 0;
    size_t convolutions = 0;
    for (size_t i = 0; i < steps_.size(); ++i) {
        int64_t& one = call.room[static_cast<size_t>(steps_[i].to)];
        one = std::max(one, count_of(call.sizes[i]));
        if (steps_[i].convolution != nullptr) numbers += 2 * call.sizes[i][0];
        if (steps_[i].convolution != nullptr || steps_[i].outputs > 0) ++convolutions;
    }
    if (convolutions != norms.size()) throw std::invalid_argument("image steps: another number of convolutions");
    thread_local Buffer<float> scales;
    float* scale = scales.grow(numbers);
    size_t next = 0;
    for (size_t i = 0; i < steps_.size(); ++i) {
        if (steps_[i].convolution == nullptr && steps_[i].outputs == 0) continue;
        const Normalisation& norm = norms[next++];
        if (steps_[i].convolution == nullptr) {
            if (norm.gain == nullptr) throw std::invalid_argument("image steps: a matrix without values");
            call.gains.push_back(norm.gain), call.biases.push_back(norm.own);
            continue;
        }
        const int64_t rows = call.sizes[i][0];
        if (norm.mean != nullptr) scaled(norm, rows, scale, scale + rows);
        call.gains.push_back(norm.mean == nullptr ? nullptr : scale);
        call.biases.push_back(norm.mean == nullptr ? norm.own : scale + rows);
        scale += 2 * rows;
    }
    const int64_t each = threads > 1 ? images / threads : 0, size_in = count_of(in), size_out = count_of(call.sizes.back());
    if (each > 0) {
        auto share = [&](int64_t t) { some(call, x + t * each * size_in, each, y + t * each * size_out, 1); };
        parallel_blocks(threads, threads, share);
    }
    const int64_t done = each * threads;
    if (done < images) some(call, x + done * size_in, images - done, y + done * size_out, threads);
}

void ImageSteps::some(const Call& call, const float* x, int64_t images, float* y, int threads) const {
    const std::vector<int64_t>& room = call.room;
    const Size in = call.in;
    const bool last = call.last;
    int64_t whole = 0;
    for (int64_t one : room) whole += one;
    const int64_t together = std::clamp<int64_t>(kBatchBytes / (4 * std::max<int64_t>(1, whole)), 1, images);
    thread_local std::vector<Buffer<float>> kept;
    if (kept.size() < room.size()) kept.resize(room.size());
    const ConvolutionKernels* kernels = convolution_kernels();
    for (int64_t first = 0; first < images; first += together) {
        const int64_t count = std::min(together, images - first);
        std::vector<const float*> values(room.size(), nullptr);
        std::vector<Size> shapes(room.size(), in);
        const float* given = x + first * count_of(in);
        float* result = y + first * count_of(call.sizes.back());
        // Inside, channels come first. Convolutions read them last as well; for others the image is turned.
        bool turned = false;
        for (const Step& step : steps_) turned = turned || (last && (step.added == 0 || (step.from == 0 && step.convolution == nullptr)));
        if (turned) {
            float* own = kept[0].grow_raw(count * count_of(in));
            turn(kernels, given, count, in[1] * in[2], in[0], own, threads);
            given = own;
        }
        values[0] = given;
        size_t next = 0;
        // What convolutions found of the values that they made: the next ones need not look.
        std::vector<float> ends(room.size() * static_cast<size_t>(3 * count));
        std::vector<bool> seen(room.size(), false);
        const auto of = [&](size_t value) { return ends.data() + value * static_cast<size_t>(3 * count); };
        bool pooled = false;  // by the convolution before
        for (size_t i = 0; i < steps_.size(); ++i) {
            const Step& step = steps_[i];
            const size_t from = static_cast<size_t>(step.from), to = static_cast<size_t>(step.to);
            const Size &before = shapes[from], &made = call.sizes[i];
            const auto pool_of = [&](const Step& of, const Size& in_size, const Size& out_size) {
                return Pool{kernels, in_size[1], in_size[2], out_size[1], out_size[2], of.kernel, of.stride, of.before};
            };
            const bool done = i + 1 == steps_.size() && !last;
            bool kept_range = false;
            float* out = done ? result : kept[to].grow_raw(count * room[to]);
            if (step.convolution != nullptr) {
                const bool channels_last = last && !turned && from == 0;
                if (!seen[from]) {
                    const int64_t lines = channels_last ? 1 : before[0];
                    extremes(values[from], count, lines, count_of(before) / lines, threads, of(from));
                    seen[from] = true;
                }
                const float* added = step.added < 0 ? nullptr : values[static_cast<size_t>(step.added)];
                const ConvolutionEnd end{call.gains[next], call.biases[next], added, step.least, step.most};
                const Step* after = i + 1 < steps_.size() ? &steps_[i + 1] : nullptr;
                pooled = count == 1 && after != nullptr && after->convolution == nullptr && after->kernel[0] > 0 && after->from == step.to;
                if (pooled) {
                    const Pool own = pool_of(*after, made, call.sizes[i + 1]);
                    const size_t result_of = static_cast<size_t>(after->to);
                    float* small = i + 2 == steps_.size() && !last ? result : kept[result_of].grow_raw(room[result_of]);
                    PoolBehind behind(own, out, made[0], small);
                    const RowsDone then = [&](int64_t a, int64_t b) { behind.done(a, b); };
                    step.convolution->run(values[from], count, before[1], before[2], end, out, channels_last, false, threads, of(from),
                                          of(to), &then);
                    behind.rest();
                } else {
                    step.convolution->run(values[from], count, before[1], before[2], end, out, channels_last, false, threads, of(from),
                                          of(to));
                }
                ++next;
            } else if (step.outputs > 0) {
                linear(values[from], count, call.gains[next], call.biases[next], step.inputs, step.outputs, out, threads);
                ++next;
            } else if (step.kernel[0] == 0) {
                means(values[from], count * before[0], before[1] * before[2], out, threads);
            } else {
                const Pool own = pool_of(step, before, made);
                if (!pooled) pool(own, values[from], count, before[0], out, threads);
                pooled = false;
                // Of values of one sign the largest that any window has is the largest of all.
                bool same = seen[from] && covers(own);
                for (int64_t k = 0; same && k < count; ++k) same = of(from)[3 * k] == 0;
                if (same) std::copy_n(of(from), 3 * count, of(to));
                kept_range = same;
            }
            values[to] = out, shapes[to] = made, seen[to] = step.convolution != nullptr || kept_range;
            if (i + 1 == steps_.size() && last) turn(kernels, out, count, made[0], made[1] * made[2], result, threads);
        }
    }
}

}  // namespace nstf::engine
