#include "convolution.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "blocks.h"
#include "patches.h"

namespace nstf::engine {
namespace {

// Bytes of a tile's activations, which the second cache holds beside the weight's rows; and of the images that are rounded at a time.
constexpr int64_t kTileBytes = 1 << 18, kImageBytes = 1 << 22;
// Of a result, that a thread leaves to what follows at a time.
constexpr int64_t kBandBytes = 1 << 20;
// An image of fewer values is rounded by one thread: handing out parts of it takes as long.
constexpr int64_t kSmallImage = 1 << 14;
// In times of a tile's products with the rows of a group: unpacking their codes; laying a tile out, times the rows.
constexpr double kUnpackTime = 0.12, kLayTime = 10, kCopyTime = 3;
// Pixels of a task are a multiple of these: a vector's.
constexpr int64_t kFewPixels = 16;
// A weight of no more bytes, one each, is unpacked once: those of few channels meet many pixels.
constexpr int64_t kHeldBytes = 192 << 10;

// Rows of bytes in which 32 neighbouring columns lie together, in the order of `Image::columns`: of the even and the odd ones of a
// chunk, the middle quarters change places.
void unpack(const Leaf& leaf, const ByteRows& form, int64_t first, int count, uint8_t* codes, float* scales, float* zeros) {
    leaf.unpack(first, count, codes, scales, zeros);
    if (!form.even_odd) return;
    for (uint8_t *chunk = codes, *end = codes + count * form.chunks * 64; chunk < end; chunk += 64)
        std::swap_ranges(chunk + 16, chunk + 32, chunk + 32);
}

}  // namespace

const ConvolutionKernels* convolution_kernels() {
    switch (isa()) {
#if NSTF_X86
        case Isa::kAvx512Vbmi:
        case Isa::kAvx512Vnni: return &convolution_avx512();
        case Isa::kAvx2Vnni: return &convolution_avx2_vnni();
        case Isa::kAvx512:
        case Isa::kAvx2: return &convolution_avx2();
#elif defined(__aarch64__)
#if NSTF_DOTPROD
        case Isa::kNeonDot: return &convolution_neon_dot();
#endif
        case Isa::kNeon: return &convolution_neon();
#endif
        default: return nullptr;
    }
}

void extremes(const float* x, int64_t images, int64_t lines, int64_t length, int threads, float* found) {
    const ConvolutionKernels* kernels = convolution_kernels();
    const int64_t parts = images >= threads || lines * length < kSmallImage ? 1 : std::min<int64_t>(threads, length);
    thread_local Buffer<float> room;
    float* ends = room.grow(3 * images * parts);
    auto task = [&](int64_t t) {
        const int64_t part = t % parts, from = length * part / parts, end = length * (part + 1) / parts;
        float *own = ends + 3 * t, low, high;
        std::fill_n(own, 3, 0.0f);
        for (int64_t line = 0; line < lines; ++line) {
            // A single part is all lines in a row.
            const int64_t count = parts == 1 ? lines * length : end - from;
            kernels->range(x + (t / parts * lines + line) * length + from, count, &low, &high);
            own[0] = std::min(own[0], low), own[1] = std::max(own[1], high), own[2] += low - low;
            if (parts == 1) break;
        }
    };
    parallel_blocks(threads, images * parts, task);
    std::fill_n(found, 3 * images, 0.0f);
    for (int64_t t = 0; t < images * parts; ++t) {
        float *to = found + t / parts * 3, *own = ends + 3 * t;
        to[0] = std::min(to[0], own[0]), to[1] = std::max(to[1], own[1]), to[2] += own[2];
    }
}

// One call: how its images lie, and what all of its tasks read.
struct Convolution::Plan {
    Image image;
    int64_t height, width, out_height, out_width;  // of the images as they came
    bool last_in, last_out;         // whether channels are last
    int threads;
    int8_t* planes;             // rounded images
    float *scale, *zero;        // by image: step; the code that stands for zero
    int parts;                  // that an image's rounding is shared out in
    bool by_pixels;             // whether these are parts of the image, and not of its channels
    float* found;               // by image of the results: three extremes, or null
    std::mutex* merging;        // of `found`
    const int32_t* columns;     // of a group's first channel: where each column of a row is, or each word in quads, or -1
    const float* apart = nullptr;  // the images themselves, where patches are taken from them
    int64_t pixels() const { return out_height * out_width; }
};

Convolution::Convolution(Shared weight, const ConvolutionShape& shape)
    : weight_(std::move(weight)), leaf_(dynamic_cast<const Leaf*>(weight_.get())), form_(leaf_ ? leaf_->byte_rows() : nullptr),
      kernels_(convolution_kernels()), blocks_((weight_->cols + 31) / 32), shape_(shape) {
    // No products of sizes overflow where the image itself has less than 2^31 bytes.
    constexpr int64_t most = 1 << 24;
    const auto positive = [](const int64_t* two) { return two[0] > 0 && two[1] > 0 && two[0] <= most && two[1] <= most; };
    if (shape.channels < 1 || shape.groups < 1 || !positive(shape.kernel) || !positive(shape.stride) || !positive(shape.dilation) ||
        std::min({shape.before[0], shape.before[1], shape.after[0], shape.after[1]}) < 0 ||
        std::max({shape.before[0], shape.before[1], shape.after[0], shape.after[1]}) > most)
        throw std::invalid_argument("convolution: a size is out of range");
    if (shape.channels % shape.groups || weight_->rows % shape.groups ||
        weight_->cols != shape.channels / shape.groups * shape.kernel[0] * shape.kernel[1])
        throw std::invalid_argument("convolution: the weight has another shape");
    // Sums of products of a group stay below 2^31.
    if (form_ == nullptr || kernels_ == nullptr || form_->group > 65536 ||
        (shape.groups > 1 && weight_->rows / shape.groups % form_->unit))
        throw std::invalid_argument("convolution: no kernel for this weight");
    const int64_t taps = shape.kernel[0] * shape.kernel[1], groups = form_->groups;
    const bool hold = weight_->rows * form_->chunks * 64 <= kHeldBytes, fours = shape.channels / shape.groups % 4 == 0;
    // The weight's order is that of an image in quads, or is made so; the columns of a group of codes stay together.
    quads_ = fours && ((taps == 1 && !form_->even_odd) || (hold && (taps == 1 || groups == 1)));
    apart_ = !quads_ && taps > 1 && shape.groups == 1 && shape.kernel[0] == shape.stride[0] && shape.kernel[1] == shape.stride[1] &&
             shape.dilation[0] * shape.dilation[1] == 1 && shape.kernel[1] % (form_->even_odd && !hold ? 16 : 4) == 0 &&
             shape.before[0] + shape.before[1] + shape.after[0] + shape.after[1] == 0;
    if (hold) {
        held_.resize(static_cast<size_t>(weight_->rows * form_->chunks * 64));
        held_scales_.resize(static_cast<size_t>(weight_->rows * groups));
        held_zeros_ = held_scales_;
    }
    std::vector<uint8_t> codes(static_cast<size_t>(kUnpacked * form_->chunks * 64));
    std::vector<float> scales(static_cast<size_t>(kUnpacked * groups)), zeros(scales);
    for (int64_t row = 0; row < weight_->rows; row += kUnpacked) {
        const int count = static_cast<int>(std::min<int64_t>(kUnpacked, weight_->rows - row));
        unpack(*leaf_, *form_, row, count, codes.data(), scales.data(), zeros.data());
        if (hold) {
            std::copy_n(scales.data(), count * groups, held_scales_.data() + row * groups);
            std::copy_n(zeros.data(), count * groups, held_zeros_.data() + row * groups);
        }
        for (int64_t r = 0; r < count; ++r) {
            const uint8_t* from = codes.data() + r * form_->chunks * 64;
            uint8_t* to = hold ? held_.data() + (row + r) * form_->chunks * 64 : nullptr;
            if (hold && !quads_ && !apart_) std::copy_n(from, form_->chunks * 64, to);
            double total = 0;
            for (int64_t k = 0; k < weight_->cols; ++k) {
                const size_t at = static_cast<size_t>(r * groups + std::min(groups - 1, k / form_->group));
                const uint8_t code = from[Image::place(k, form_->even_odd)];
                if (hold && (quads_ || apart_)) to[quads_ ? Image::place_in_quads(k, taps) : k] = code;
                const int value = form_->is_signed ? static_cast<int8_t>(code) : code;
                total += form_->zeros ? scales[at] * static_cast<float>(value) - zeros[at]
                                      : scales[at] * static_cast<float>(value - form_->middle);
            }
            row_sums_.push_back(static_cast<float>(total));
        }
    }
}

int64_t Convolution::size(int side, int64_t of) const {
    const int64_t reach = shape_.dilation[side] * (shape_.kernel[side] - 1) + 1;
    const int64_t room = of + shape_.before[side] + shape_.after[side] - reach;
    return room < 0 ? 0 : room / shape_.stride[side] + 1;
}

bool Convolution::sizes(int64_t channels, int64_t height, int64_t width, int64_t* out) const {
    if (channels != shape_.channels || height < 1 || width < 1 || height > (1 << 24) || width > (1 << 24)) return false;
    out[0] = weight_->rows, out[1] = size(0, height), out[2] = size(1, width);
    const int64_t around = (height + shape_.before[0] + shape_.after[0]) * (width + shape_.before[1] + shape_.after[1]);
    return out[1] > 0 && out[2] > 0 && channels * around < (int64_t{1} << 30);
}

void Convolution::run(const float* x, int64_t images, int64_t height, int64_t width, const ConvolutionEnd& end, float* y,
                      bool last_in, bool last_out, int threads, const float* known, float* found, const RowsDone* then) const {
    Plan p;
    std::mutex merging;
    p.merging = &merging;
    p.height = height, p.width = width, p.last_in = last_in, p.last_out = last_out, p.threads = threads;
    p.out_height = size(0, height), p.out_width = size(1, width);
    ConvolutionShape shape = shape_;
    if (shape.kernel[0] * shape.kernel[1] * shape.stride[0] * shape.stride[1] == 1 &&
        shape.before[0] + shape.before[1] + shape.after[0] + shape.after[1] == 0) {
        // A product with each pixel: rows of the image need not be told apart.
        p.width = p.out_width = height * width, p.height = p.out_height = 1;
    }
    if (images * p.pixels() == 0) return;
    p.image = Image(shape, p.height, p.width, quads_);
    if (p.image.bytes > std::numeric_limits<int32_t>::max()) throw std::invalid_argument("convolution: an image is too large");
    const std::shared_ptr<const Columns> columns = columns_of(p.image);
    p.columns = columns->places.data();
    const int64_t chunk = std::clamp<int64_t>(kImageBytes / p.image.bytes, 1, images);
    const bool whole = chunk >= threads || shape.channels * p.height * p.width < kSmallImage;
    p.parts = whole ? 1 : static_cast<int>(std::min<int64_t>(threads, shape.channels / p.image.each));
    thread_local Buffer<int8_t> planes;
    thread_local Buffer<float> numbers;
    const bool apart = apart_ && !last_in;
    p.planes = apart ? nullptr : planes.grow(chunk * p.image.bytes + Image::kBeyond);
    float* ends = numbers.grow(5 * chunk);
    p.scale = ends + 3 * chunk, p.zero = p.scale + chunk;
    const int64_t in = shape.channels * p.height * p.width, out = weight_->rows * p.pixels();
    for (int64_t i = 0; i < images; i += chunk) {
        const int64_t count = std::min(chunk, images - i);
        const int64_t lines = last_in ? 1 : shape.channels;
        if (known == nullptr) extremes(x + i * in, count, lines, in / lines, threads, ends);
        scales(p, count, known == nullptr ? ends : known + 3 * i);
        p.found = found == nullptr ? nullptr : found + 3 * i;
        if (p.found != nullptr) std::fill_n(p.found, 3 * count, 0.0f);
        if (apart) {
            p.apart = x + i * in;
        } else {
            p.by_pixels = p.parts > 1 && shares_of(count * p.pixels(), threads, false).rows == 1;
            lay_out(p, x + i * in, count);
        }
        ConvolutionEnd own = end;
        if (end.added != nullptr) own.added += i * out;
        if (then != nullptr && images == 1 && p.out_height > 1) bands(p, own, y, *then);
        else tiles(p, count, own, y + i * out);
    }
}

std::shared_ptr<const Convolution::Columns> Convolution::columns_of(const Image& image) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (columns_ == nullptr || columns_->plane != image.plane || columns_->row != image.row)
        columns_ = std::make_shared<Columns>(Columns{image.plane, image.row, image.columns(shape_, blocks_, even_odd())});
    return columns_;
}

void Convolution::scales(const Plan& p, int64_t images, const float* known) const {
    for (int64_t i = 0; i < images; ++i) {
        const float low = known[3 * i], high = known[3 * i + 1], odd = known[3 * i + 2];
        // 252 and not 254 steps, so that neither end is rounded beyond a byte. NaN and infinities make the image's results NaN.
        p.scale[i] = std::isnan(odd) ? std::numeric_limits<float>::quiet_NaN() : high / 252 - low / 252;
        p.zero[i] = p.scale[i] > 1e-30f ? std::nearbyint(-126 - low / p.scale[i]) : 0.0f;
    }
}

void Convolution::lay_out(const Plan& p, const float* x, int64_t images) const {
    const Image& image = p.image;
    auto task = [&](int64_t t) {
        thread_local Buffer<int8_t> room;
        const int64_t i = t / p.parts, part = t % p.parts;
        const float scale = p.scale[i], inverse = scale > 1e-30f ? 1 / scale : 0.0f, zero = p.zero[i];
        const float* from = x + i * shape_.channels * p.height * p.width;
        int8_t* to = p.planes + i * image.bytes;
        if (p.last_in) {  // shared out by rows
            int8_t* codes = room.grow(p.width * shape_.channels + Image::kBeyond);
            for (int64_t y = image.height * part / p.parts; y < image.height * (part + 1) / p.parts; ++y) {
                if (!image.used(y)) continue;
                const int64_t row = y - image.before[0];
                const bool there = row >= 0 && row < p.height;
                if (there) kernels_->quantise(from + row * p.width * shape_.channels, p.width * shape_.channels, inverse, zero, codes);
                image.spread_channels(there ? codes : nullptr, p.width, shape_.channels, static_cast<int8_t>(zero), to + y * image.row);
            }
            return;
        }
        // Shared out as the tiles are: by rows, or by columns of a single one; else by channels.
        const int64_t each = image.each, lines = shape_.channels / each, plane = p.height * p.width;
        const int64_t c0 = p.by_pixels ? 0 : lines * part / p.parts;
        const int64_t c1 = p.by_pixels ? lines : lines * (part + 1) / p.parts;
        const auto quantise = [&](const float* values, int64_t count, int8_t* out) {
            if (each == 4) kernels_->quantise_quads(values, plane, count, inverse, zero, out);
            else kernels_->quantise(values, count, inverse, zero, out);
        };
        const bool whole = image.phases == 1 && image.row == p.width * each;  // as the image itself
        if (p.by_pixels && whole && image.height == 1) {
            const int64_t first = p.width * part / p.parts, count = p.width * (part + 1) / p.parts - first;
            for (int64_t c = 0; c < c1; ++c)
                quantise(from + c * each * p.width + first, count, to + c * image.plane + first * each);
            return;
        }
        const int64_t y0 = p.by_pixels ? image.height * part / p.parts : 0;
        const int64_t y1 = p.by_pixels ? image.height * (part + 1) / p.parts : image.height;
        const int64_t r0 = std::clamp<int64_t>(y0 - image.before[0], 0, p.height);
        const int64_t r1 = std::clamp<int64_t>(y1 - image.before[0], 0, p.height);
        int8_t* codes = room.grow((r1 - r0) * p.width * each + Image::kBeyond);
        for (int64_t c = c0; c < c1; ++c) {
            quantise(from + c * each * plane + r0 * p.width, (r1 - r0) * p.width,
                     whole ? to + c * image.plane + (image.before[0] + r0) * image.row : codes);
            for (int64_t y = y0; y < y1; ++y) {
                if (!image.used(y)) continue;
                int8_t* line = to + c * image.plane + y * image.row;
                const int64_t row = y - image.before[0];
                if (row < 0 || row >= p.height) std::memset(line, static_cast<int8_t>(zero), static_cast<size_t>(image.row));
                else if (each == 4 && !whole)
                    image.spread_quads(codes + (row - r0) * p.width * 4, p.width, static_cast<int8_t>(zero), line);
                else if (!whole) image.spread(codes + (row - r0) * p.width, p.width, static_cast<int8_t>(zero), line);
            }
        }
    };
    parallel_blocks(p.threads, images * p.parts, task);
}

// Pixels first..first + count - 1 of patches that share no value, counted through the images, as a tile.
void Convolution::lay_patches(const Plan& p, int64_t first, int64_t count, int8_t* out) const {
    thread_local Buffer<int8_t> room;
    const int64_t high = shape_.kernel[0], wide = shape_.kernel[1], words = wide / 4;
    int8_t* codes = room.grow(std::min<int64_t>(kPixels, p.out_width) * wide);
    for (int64_t at = 0; at < count;) {  // row of patches by row
        const int64_t pixel = first + at, image = pixel / p.pixels(), x = pixel % p.out_width, y = pixel / p.out_width % p.out_height;
        const int64_t n = std::min(p.out_width - x, count - at);
        const float scale = p.scale[image], inverse = scale > 1e-30f ? 1 / scale : 0.0f, zero = p.zero[image];
        const float* from = p.apart + (image * shape_.channels * p.height + y * high) * p.width + x * wide;
        for (int64_t row = 0; row < shape_.channels * high; ++row) {
            kernels_->quantise(from + (row / high * p.height + row % high) * p.width, n * wide, inverse, zero, codes);
            Image::rows_apart(codes, n, words, row, even_odd(), out + 4 * at);
        }
        at += n;
    }
    const int64_t whole = weight_->cols / 4 * 4 * kPixels;
    std::memset(out + whole, 0, static_cast<size_t>(blocks_ * 32 * kPixels - whole));
}

// The split with which the last thread is done first. Tiles together share the work of unpacking codes, tasks that share rows each lay
// out the same tiles.
Convolution::Shares Convolution::shares_of(int64_t pixels, int threads, bool apart) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shares_.pixels == pixels && shares_.threads == threads && shares_.apart == apart) return shares_;
    const int64_t tiles = (pixels + kPixels - 1) / kPixels, own = weight_->rows / shape_.groups;
    const int64_t panels = (own + kUnpacked - 1) / kUnpacked, most = std::clamp<int64_t>(kTileBytes / (blocks_ * 32 * kPixels), 1, 16);
    const double unpack = held_.empty() ? kUnpackTime : 0, lay = quads_ || apart ? kCopyTime : kLayTime;
    Shares best;
    best.pixels = pixels, best.threads = threads, best.apart = apart;
    best.each = most * kPixels;
    if (threads == 1) return shares_ = best;
    std::vector<int64_t> sizes;  // of a task
    for (int64_t together = std::min(most, tiles); together >= 1; --together) sizes.push_back(together * kPixels);
    for (int64_t parts = threads; parts <= 2 * threads; parts += threads) {  // or as many for each thread
        const int64_t each = ((pixels + parts - 1) / parts + kFewPixels - 1) / kFewPixels * kFewPixels;
        if (each % kPixels != 0 && each <= most * kPixels) sizes.push_back(each);
    }
    double least = std::numeric_limits<double>::infinity();
    for (int64_t rows = 1; rows <= std::min<int64_t>(panels, 4 * threads); ++rows)
        for (const int64_t each : sizes) {
            const int64_t whole = pixels / each, over = pixels - whole * each;
            const double share = static_cast<double>((panels + rows - 1) / rows) / static_cast<double>(panels);
            const auto time = [&](int64_t some) {
                const double of = static_cast<double>(some) / kPixels;
                return of * share + std::ceil(of) * lay / static_cast<double>(own) + unpack * share;
            };
            // Whole tasks in turn, and what is left over at the end to who is free.
            const int64_t tasks = whole * rows * shape_.groups, turns = tasks / threads, beside = tasks % threads;
            const double one = time(each), rest = over > 0 ? time(over) : 0;
            const int64_t rests = over > 0 ? rows * shape_.groups : 0, free = beside > 0 ? threads - beside : threads;
            const double late = rest * static_cast<double>((rests + free - 1) / free);
            const double total = static_cast<double>(turns) * one + (beside > 0 ? std::max(one, late) : late);
            if (total < least * 0.99) least = total, best.each = each, best.rows = rows;
        }
    return shares_ = best;
}

void Convolution::tiles(const Plan& p, int64_t images, const ConvolutionEnd& after, float* y) const {
    const int64_t pixels = images * p.pixels(), groups = shape_.groups;
    const int64_t own = weight_->rows / groups, panels = (own + kUnpacked - 1) / kUnpacked;
    const Shares split = shares_of(pixels, p.threads, p.apart != nullptr);
    const int64_t each = split.each, shares = split.rows, across = (pixels + each - 1) / each;
    auto one = [&](int64_t t) {
        const int64_t group = t / shares % groups, share = t % shares, first = t / (shares * groups) * each;
        const int64_t from = panels * share / shares * kUnpacked, end = std::min(own, panels * (share + 1) / shares * kUnpacked);
        task(p, first, std::min(pixels, first + each), group, group * own + from, group * own + end, after, y);
    };
    parallel_blocks(p.threads, across * groups * shares, one);
}

// Rows of one image with what follows them while they are in the caches.
void Convolution::bands(const Plan& p, const ConvolutionEnd& after, float* y, const RowsDone& then) const {
    const int64_t row_bytes = 4 * weight_->rows * p.out_width, groups = shape_.groups, own = weight_->rows / groups;
    const int64_t turns = (p.out_height * row_bytes / kBandBytes + p.threads) / p.threads;
    const int64_t parts = std::clamp<int64_t>(turns * p.threads, 1, p.out_height);
    const int64_t together = std::clamp<int64_t>(kTileBytes / (blocks_ * 32 * kPixels), 1, 16) * kPixels;
    auto one = [&](int64_t t) {
        const int64_t first = p.out_height * t / parts, end = p.out_height * (t + 1) / parts;
        for (int64_t pixel = first * p.out_width; pixel < end * p.out_width; pixel += together)
            for (int64_t g = 0; g < groups; ++g)
                task(p, pixel, std::min(end * p.out_width, pixel + together), g, g * own, (g + 1) * own, after, y);
        then(first, end);
    };
    parallel_blocks(p.threads, parts, one);
}

// Rows row..row_end - 1 of a group for pixels first..end - 1, counted through the images.
void Convolution::task(const Plan& p, int64_t first, int64_t end, int64_t group, int64_t row, int64_t row_end,
                       const ConvolutionEnd& after, float* y) const {
    struct Room {
        Buffer<int8_t> x;
        Buffer<uint8_t> codes;
        Buffer<int32_t> sums;
        Buffer<float> floats;
    };
    thread_local Room room;
    const int64_t groups = form_->groups, size = blocks_ * 32 * kPixels;
    const int64_t tiles = (end - first + kPixels - 1) / kPixels, out_rows = weight_->rows;
    const bool adds = after.added != nullptr, later = adds && p.last_out;
    constexpr float kAny = std::numeric_limits<float>::infinity();
    const int64_t here = (end - 1) / p.pixels() - first / p.pixels() + 1;  // images
    int8_t* x = room.x.grow(tiles * size + Image::kBeyond);
    const int64_t stride = form_->chunks * 64;
    const uint8_t* codes = held_.empty() ? room.codes.grow(kUnpacked * stride) : nullptr;
    int32_t* sums = room.sums.grow(tiles * groups * kPixels);
    float* numbers = room.floats.grow(2 * kUnpacked * groups + 2 * kUnpacked * kPixels + 3 * here);
    float *found = numbers + 2 * kUnpacked * groups, *done = found + kUnpacked * kPixels, *ends = done + kUnpacked * kPixels;
    const float *scales = numbers, *zeros = numbers + kUnpacked * groups;
    std::fill_n(ends, 3 * here, 0.0f);

    const int8_t* planes = p.planes + group * (shape_.channels / shape_.groups / p.image.each) * p.image.plane;
    PixelRun runs[kPixels];
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t from = first + t * kPixels, count = std::min<int64_t>(kPixels, end - from);
        if (p.apart != nullptr) {
            lay_patches(p, from, count, x + t * size);
        } else {
            const int pieces = p.image.pieces(planes, from, count, p.out_height, p.out_width, runs);
            if (quads_) kernels_->copy_tile(runs, pieces, p.columns, blocks_ * 8, x + t * size);
            else Image::patches(runs, pieces, p.columns, blocks_ * 8, x + t * size);
        }
        kernels_->sums(*form_, blocks_, x + t * size, form_->zeros ? 1 : -form_->middle, sums + t * groups * kPixels);
    }
    for (int64_t r = row; r < row_end; r += kUnpacked) {
        const int rows = static_cast<int>(std::min<int64_t>(kUnpacked, row_end - r));
        if (held_.empty()) {
            unpack(*leaf_, *form_, r, rows, room.codes.data(), numbers, numbers + kUnpacked * groups);
        } else {
            codes = held_.data() + r * stride;
            scales = held_scales_.data() + r * groups, zeros = held_zeros_.data() + r * groups;
        }
        ConvolutionRow one[kUnpacked];
        for (int i = 0; i < rows; ++i)
            one[i] = {row_sums_[static_cast<size_t>(r + i)], after.gain == nullptr ? 1.0f : after.gain[r + i],
                      after.bias == nullptr ? 0.0f : after.bias[r + i], later ? -kAny : after.least, later ? kAny : after.most};
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t from = first + t * kPixels, count = std::min<int64_t>(kPixels, end - from);
            kernels_->tile(*form_, blocks_, codes, scales, zeros, rows, x + t * size, sums + t * groups * kPixels,
                           static_cast<int>(count), found);
            for (int64_t at = 0; at < count;) {  // image by image
                const int64_t image = (from + at) / p.pixels(), pixel = (from + at) % p.pixels();
                const int64_t n = std::min(count - at, p.pixels() - pixel), to = (image * out_rows + r) * p.pixels() + pixel;
                float* own = ends + 3 * (image - first / p.pixels());
                if (p.last_out)
                    kernels_->finish(found + at, p.scale[image], p.zero[image], one, rows, nullptr, kPixels, n, done + at, own);
                else
                    kernels_->finish(found + at, p.scale[image], p.zero[image], one, rows, adds ? after.added + to : nullptr, p.pixels(), n,
                                     y + to, own);
                at += n;
            }
            if (!p.last_out) continue;
            kernels_->turn(done, rows, static_cast<int>(count), y + from * out_rows + r, out_rows);
            for (int64_t i = from; adds && i < from + count; ++i)
                kernels_->add(y + i * out_rows + r, after.added + i * out_rows + r, rows, after.least, after.most);
        }
    }
    if (p.found == nullptr) return;
    std::lock_guard<std::mutex> lock(*p.merging);
    for (int64_t i = 0; i < here; ++i) {
        float* own = p.found + 3 * (first / p.pixels() + i);
        own[0] = std::min(own[0], ends[3 * i]), own[1] = std::max(own[1], ends[3 * i + 1]), own[2] += ends[3 * i + 2];
    }
}

}  // namespace nstf::engine
