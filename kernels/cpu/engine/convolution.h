// Convolutions from stored codes: an implicit product of the weight [out, channels * kernel] with the patches of the image, of which
// only a tile is laid out at a time, in the caches. Activations are rounded to int8 once, with a scale and a zero point for each
// image; the weight's codes become bytes 32 rows at a time and meet a tile of pixels.
//
// Where patches share no value of the image (a vision transformer's) each tile is rounded from the image itself.
//
// A tile's activations lie [word of four columns][64 pixels][4], so that a vector is some pixels' next four columns, and four codes
// of a row meet all of them at once. Sums are whole numbers until the end of a group of codes, which has a scale.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "leaves.h"

namespace nstf::engine {

constexpr int kPixels = 64;  // of a tile

struct ConvolutionShape {
    int64_t channels, kernel[2], stride[2], before[2], after[2], dilation[2], groups;  // [0]: rows, [1]: columns of the image
};

// What becomes of the products: gain * (W x) + bias + added, between two bounds.
struct ConvolutionEnd {
    const float *gain, *bias;  // [out], or null
    const float* added;        // laid out as the result, or null
    float least, most;         // of the result: 0 and infinity after a ReLU
};

// The same for one row of the weight, with the sum of its values.
struct ConvolutionRow {
    float by, gain, bias, least, most;
};

// Pixels of a tile that are neighbours in one row of the image. at: of the first one in the tile.
struct PixelRun {
    const int8_t* from;
    int64_t at, count;
};

// What an instruction set does. out: [rows][64]; blocks: of 32 columns, that a tile has.
struct ConvolutionKernels {
    // Sums of activations by group of codes, [group][64], each times `by`.
    void (*sums)(const ByteRows& form, int64_t blocks, const int8_t* x, int32_t by, int32_t* out);
    // Rows of bytes times a tile. sums: those of the groups, times minus the middle of the codes where there are no zero points.
    void (*tile)(const ByteRows& form, int64_t blocks, const uint8_t* codes, const float* scales, const float* zeros, int rows, const int8_t* x,
                 const int32_t* sums, int pixels, float* out);
    void (*range)(const float* x, int64_t count, float* least, float* most);
    void (*quantise)(const float* x, int64_t count, float inverse, float zero, int8_t* out);
    // The same for four channels, `plane` values from one to the next; out: [count][4].
    void (*quantise_quads)(const float* x, int64_t plane, int64_t count, float inverse, float zero, int8_t* out);
    // A tile from an image in quads (patches.h). places: of each word; what is written beyond a run is written again later, or is
    // room beyond the tile.
    void (*copy_tile)(const PixelRun* runs, int found, const int32_t* places, int64_t words, int8_t* out);
    // y = (x - shift * by) * scale * gain + bias + added between its bounds, for some rows and pixels of one image. x: [rows][64]; y and
    // added (or null): [rows][stride]. extremes: least and largest of y so far, and NaN where there is one or an infinity.
    void (*finish)(const float* x, float scale, float shift, const ConvolutionRow* rows, int count_rows, const float* added, int64_t stride,
                   int64_t count, float* y, float* extremes);
    // y = y + added between bounds.
    void (*add)(float* y, const float* added, int64_t count, float least, float most);
    // y[p][r] = x[r][p].
    void (*turn)(const float* x, int rows, int pixels, float* y, int64_t stride);
    // The largest of some rows (one at least) at each place, NaN where there is one.
    void (*largest)(const float* const* rows, int64_t row_count, int64_t count, float* y);
};
// Those of the instruction set in use, or null.
const ConvolutionKernels* convolution_kernels();
#if NSTF_X86
const ConvolutionKernels& convolution_avx512();
const ConvolutionKernels& convolution_avx2_vnni();
const ConvolutionKernels& convolution_avx2();
#elif defined(__aarch64__)
const ConvolutionKernels& convolution_neon();
#if NSTF_DOTPROD
const ConvolutionKernels& convolution_neon_dot();
#endif
#endif

// Of each image the three extremes that `finish` has: the least and largest value, zero among them, and NaN where there is one or an
// infinity. x: [images][lines][length]; threads share out the length.
void extremes(const float* x, int64_t images, int64_t lines, int64_t length, int threads, float* found);

// What a thread does next with some rows of one image's result, first..end - 1, all channels of which it has just written.
using RowsDone = std::function<void(int64_t first, int64_t end)>;

struct Image;

class Convolution {
  public:
    // weight: [out, channels / groups * kernel]. Throws std::invalid_argument for a weight without bytes (`byte_rows`), or of another
    // width.
    Convolution(Shared weight, const ConvolutionShape& shape);

    // x: [images][channels][height][width], or [images][height][width][channels] where channels are last; y, with `out` channels, and
    // what is added so too.
    // known: of each image three extremes, as `finish` has them, or null; found: room for those of the results, or null, where channels
    // come first; then: called for the rows of a single image as they are done, by several threads (null: nothing is).
    void run(const float* x, int64_t images, int64_t height, int64_t width, const ConvolutionEnd& end, float* y, bool last_in,
             bool last_out, int threads, const float* known = nullptr, float* found = nullptr, const RowsDone* then = nullptr) const;
    // Height and width of what comes out.
    int64_t size(int side, int64_t of) const;
    // Channels, height and width of what comes out; false where such images are too small, too large or have other channels.
    bool sizes(int64_t channels, int64_t height, int64_t width, int64_t* out) const;

  private:
    struct Plan;
    void scales(const Plan& p, int64_t images, const float* known) const;
    void lay_out(const Plan& p, const float* x, int64_t images) const;
    void lay_patches(const Plan& p, int64_t first, int64_t count, int8_t* out) const;
    void tiles(const Plan& p, int64_t images, const ConvolutionEnd& end, float* y) const;
    void bands(const Plan& p, const ConvolutionEnd& end, float* y, const RowsDone& then) const;
    void task(const Plan& p, int64_t first, int64_t end, int64_t group, int64_t row, int64_t row_end, const ConvolutionEnd& after,
              float* y) const;

    Shared weight_;
    const Leaf* leaf_;
    const ByteRows* form_;
    const ConvolutionKernels* kernels_;
    int64_t blocks_;  // of 32 columns, that have a column of the weight: rows are padded to 64
    ConvolutionShape shape_;
    // Where the columns of a row are in images of one size, as the last call left it.
    struct Columns {
        int64_t plane, row;
        std::vector<int32_t> places;
    };
    std::shared_ptr<const Columns> columns_of(const Image& image) const;
    std::vector<float> row_sums_;  // of the weight, as the bytes give it
    // Whether the image is laid out in quads; and a small weight's bytes, in their order: unpacked once, [rows][32 blocks], with
    // scales and zero points as `unpack` gives them.
    bool quads_ = false;
    // Whether patches share no value: a tile is then rounded from the image itself, without a copy of it.
    bool apart_ = false;
    std::vector<uint8_t> held_;
    // Whether of each 32 columns of the weight the even ones come first. Weights of patches that are held lie in their own order.
    bool even_odd() const { return form_->even_odd && !(apart_ && !held_.empty()); }
    std::vector<float> held_scales_, held_zeros_;
    // How `tiles` shares out so many pixels among some threads, as the last call did.
    struct Shares {
        int64_t pixels = 0, each = kPixels, rows = 1;  // pixels of a task; tasks that share the rows of a group
        int threads = 0;
        bool apart = false;
    };
    Shares shares_of(int64_t pixels, int threads, bool apart) const;
    mutable std::mutex mutex_;     // of `columns_` and `shares_`
    mutable std::shared_ptr<const Columns> columns_;
    mutable Shares shares_;
};

}  // namespace nstf::engine
