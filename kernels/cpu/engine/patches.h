// How images of bytes lie in memory, and how a tile of pixels with its patches is taken from them (convolution.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "convolution.h"

#if NSTF_X86
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nstf::engine {

// A padded image: [channel][row][phase][column]. The columns of a phase are those that one tap of a kernel with that stride meets, so
// that a tap's pixels are neighbours.
struct Image {
    static constexpr int64_t kBeyond = 64;  // bytes that are read or written beyond the end

    int64_t height = 0, phases = 1, phase = 0, row = 0, plane = 0, bytes = 0;  // height: with padding; the others in bytes
    int64_t before[2] = {0, 0}, kernel = 1, stride = 1, dilation = 1;         // padding; of the image's rows

    Image() = default;
    Image(const ConvolutionShape& s, int64_t rows, int64_t columns) {
        before[0] = s.before[0], before[1] = s.before[1];
        kernel = s.kernel[0], stride = s.stride[0], dilation = s.dilation[0];
        height = rows + s.before[0] + s.after[0];
        phases = s.stride[1];
        phase = (columns + s.before[1] + s.after[1] + phases - 1) / phases;
        row = phase * phases;
        plane = height * row;
        bytes = plane * s.channels;
    }

    // Whether a row is in any patch.
    bool used(int64_t y) const {
        for (int64_t k = 0; k < kernel && k * dilation <= y; ++k)
            if ((y - k * dilation) % stride == 0) return true;
        return false;
    }

    // A row of codes [columns] into its phases.
    void spread(const int8_t* codes, int64_t columns, int8_t zero, int8_t* to) const {
        std::memset(to, zero, static_cast<size_t>(row));
        if (phases == 1) {
            std::memcpy(to + before[1], codes, static_cast<size_t>(columns));
            return;
        }
        for (int64_t p = 0; p < phases; ++p) {
            // The first column of the phase that is no padding.
            const int64_t first = (std::max<int64_t>(before[1] - p, 0) + phases - 1) / phases;
            int8_t* line = to + p * phase + first;
            for (int64_t x = first * phases + p - before[1]; x < columns; x += phases) *line++ = codes[x];
        }
    }

    // A row of codes [columns][channels], or none, into all channels. to: of the first one.
    void spread_channels(const int8_t* codes, int64_t columns, int64_t channels, int8_t zero, int8_t* to) const {
        if (codes == nullptr || row != columns)
            for (int64_t c = 0; c < channels; ++c) std::memset(to + c * plane, zero, static_cast<size_t>(row));
        if (codes == nullptr) return;
        constexpr int64_t kBlock = 16;
        for (int64_t first = 0; first < columns; first += kBlock)
            for (int64_t c = 0; c < channels; ++c) {
                int8_t* line = to + c * plane;
                const int64_t end = std::min(columns, first + kBlock);
                int64_t p = (first + before[1]) % phases, at = (first + before[1]) / phases;
                for (int64_t x = first; x < end; ++x) {
                    line[p * phase + at] = codes[x * channels + c];
                    if (++p == phases) p = 0, ++at;
                }
            }
    }

    // Where column k of the weight lies among its bytes; even_odd: of each 32 the even ones first.
    static int64_t place(int64_t k, bool even_odd) {
        const int64_t at = k % 32;
        return k - at + (even_odd ? at / 2 + at % 2 * 16 : at);
    }

    // Where each column of a patch is, from the patch's place on: in the order of the weight's bytes, -1 beyond the last.
    std::vector<int32_t> columns(const ConvolutionShape& s, int64_t chunks, bool even_odd) const {
        const int64_t taps = s.kernel[0] * s.kernel[1], count = s.channels / s.groups * taps;
        std::vector<int32_t> found(static_cast<size_t>(chunks * 64), -1);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t c = k / taps, ky = k % taps / s.kernel[1] * s.dilation[0], kx = k % s.kernel[1] * s.dilation[1];
            found[static_cast<size_t>(place(k, even_odd))] = static_cast<int32_t>(c * plane + ky * row + kx % phases * phase + kx / phases);
        }
        return found;
    }

    // `count` pixels from `first`, counted through the images, as a tile: [word][64][4].
    void patches(const int8_t* planes, const int32_t* columns, int64_t words, int64_t first, int64_t count, int64_t out_height,
                 int64_t out_width, int8_t* out) const {
        struct Segment {
            const int8_t* from;
            int64_t at, count;
        };
        Segment segments[kPixels];
        int found = 0;
        for (int64_t at = 0; at < count;) {
            const int64_t pixel = first + at, x = pixel % out_width, y = pixel / out_width % out_height;
            const int64_t n = std::min(out_width - x, count - at);
            segments[found++] = {planes + pixel / (out_width * out_height) * bytes + y * stride * row + x, at, n};
            at += n;
        }
        static const int8_t zeros[kPixels + 16] = {};
        for (int64_t w = 0; w < words; ++w, columns += 4, out += 4 * kPixels) {
            // The last word may have fewer columns than four.
            const bool whole = columns[0] >= 0 && columns[1] >= 0 && columns[2] >= 0 && columns[3] >= 0;
            for (int i = 0; i < found; ++i) {
                const Segment& s = segments[i];
                const int8_t* from[4];
                for (int k = 0; k < 4; ++k) from[k] = whole || columns[k] >= 0 ? s.from + columns[k] : zeros;
                for (int64_t p = 0; p < s.count; p += 16)
                    interleave(from[0] + p, from[1] + p, from[2] + p, from[3] + p, out + 4 * (s.at + p));
            }
        }
    }

  private:
    // 16 bytes of each in turn.
    static void interleave(const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d, int8_t* out) {
#if NSTF_X86
        const auto load = [](const int8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
        const auto store = [&](int i, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + i, v); };
        const __m128i va = load(a), vb = load(b), vc = load(c), vd = load(d);
        const __m128i ab = _mm_unpacklo_epi8(va, vb), cd = _mm_unpacklo_epi8(vc, vd);
        const __m128i ab2 = _mm_unpackhi_epi8(va, vb), cd2 = _mm_unpackhi_epi8(vc, vd);
        store(0, _mm_unpacklo_epi16(ab, cd)), store(1, _mm_unpackhi_epi16(ab, cd));
        store(2, _mm_unpacklo_epi16(ab2, cd2)), store(3, _mm_unpackhi_epi16(ab2, cd2));
#elif defined(__aarch64__)
        vst4q_s8(out, (int8x16x4_t{vld1q_s8(a), vld1q_s8(b), vld1q_s8(c), vld1q_s8(d)}));
#else
        for (int i = 0; i < 16; ++i) out[4 * i] = a[i], out[4 * i + 1] = b[i], out[4 * i + 2] = c[i], out[4 * i + 3] = d[i];
#endif
    }
};

}  // namespace nstf::engine
