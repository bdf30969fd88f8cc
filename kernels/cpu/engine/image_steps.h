// Convolutions and poolings that follow each other, in one call: what lies between them stays here, and no other pool of threads is
// asked for anything in between.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "convolution.h"

namespace nstf::engine {

// What a convolution's products are normalised by, read at every call: (W x + own - mean) / sqrt(variance + eps) * gain + bias.
// Any may be null; without a mean there is no normalisation.
struct Normalisation {
    const float *mean, *variance, *gain, *bias, *own;
    float eps;
};

class ImageSteps {
  public:
    using Size = std::array<int64_t, 3>;  // channels, height, width

    // Values are numbered; 0 is the image that comes in, and the last step's `to` is what goes out. A number is used again once
    // its value was read for the last time. The convolution must live as long as this. added: a value, or -1.
    void add(const Convolution& convolution, int from, int to, int added, float least, float most);
    // The largest value of each window. before: rows and columns of padding, on both sides.
    void add_pool(int from, int to, const int64_t kernel[2], const int64_t stride[2], const int64_t before[2]);

    // The mean of each channel.
    void add_mean(int from, int to);
    // A matrix [outputs, inputs] in float32 times channels of one pixel each.
    void add_linear(int from, int to, int64_t inputs, int64_t outputs);

    // The result's size for images of this one; false where they do not fit.
    bool sizes(Size in, Size* out) const;
    // x: images as for `Convolution`; y alike. norms: one for each convolution, in order; for each matrix its values as `gain` and its
    // bias as `own`. Of several images each thread takes as many
    // through all steps, without waiting for the others; those that are left over are shared out step by step.
    void run(const float* x, int64_t images, Size in, const std::vector<Normalisation>& norms, float* y, bool last, int threads) const;

  private:
    struct Step {
        const Convolution* convolution;  // or null: a pooling, of whole channels (the mean) where the kernel has no size
        int from, to, added;
        float least, most;
        int64_t kernel[2], stride[2], before[2];
        int64_t inputs = 0, outputs = 0;  // of a matrix
    };
    // What all images of a call have in common. room: of each value, for one image; gains, biases: of each convolution or matrix, or null.
    struct Call {
        Size in;
        std::vector<Size> sizes;  // of what each step makes
        std::vector<int64_t> room;
        std::vector<const float*> gains, biases;
        bool last;
    };
    void some(const Call& call, const float* x, int64_t images, float* y, int threads) const;
    bool all_sizes(Size in, std::vector<Size>* found) const;
    static bool size_of(const Step& step, const Size& in, Size* out);
    void push(const Step& step);

    std::vector<Step> steps_;
    int values_ = 1;
};

}  // namespace nstf::engine
