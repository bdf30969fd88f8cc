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

// A padded image: [channel][row][phase][column], or in quads [four channels][row][phase][column][4]. The columns of a phase are
// those that one tap of a kernel with that stride meets, so that a tap's pixels are neighbours. In quads a word of a tile is four
// channels of one tap, and its pixels are a copy of the image; else four columns of the weight, as they come, are mixed for every word.
struct Image {
    static constexpr int64_t kBeyond = 64;  // bytes that are read or written beyond the end

    int64_t each = 1;  // channels that lie side by side
    int64_t height = 0, phases = 1, phase = 0, row = 0, plane = 0, bytes = 0;  // height: with padding; the others in bytes
    int64_t before[2] = {0, 0}, kernel = 1, stride = 1, dilation = 1;         // padding; of the image's rows

    Image() = default;
    Image(const ConvolutionShape& s, int64_t rows, int64_t columns, bool quads) : each(quads ? 4 : 1) {
        before[0] = s.before[0], before[1] = s.before[1];
        kernel = s.kernel[0], stride = s.stride[0], dilation = s.dilation[0];
        height = rows + s.before[0] + s.after[0];
        phases = s.stride[1];
        phase = (columns + s.before[1] + s.after[1] + phases - 1) / phases * each;
        row = phase * phases;
        plane = height * row;
        bytes = plane * (s.channels / each);
    }

    // Whether a row is in any patch.
    bool used(int64_t y) const {
        for (int64_t k = 0; k < kernel && k * dilation <= y; ++k)
            if ((y - k * dilation) % stride == 0) return true;
        return false;
    }

    // A row of codes [columns] into its phases. Some bytes beyond the codes are read.
    void spread(const int8_t* codes, int64_t columns, int8_t zero, int8_t* to) const {
        std::memset(to, zero, static_cast<size_t>(row));
        if (phases == 1) {
            std::memcpy(to + before[1], codes, static_cast<size_t>(columns));
            return;
        }
#if NSTF_X86
        if (phases == 2) {
            // The first column that comes is of the odd phase where there is an odd number of columns before it.
            const int64_t odd = before[1] % 2;
            int8_t *even_line = to + odd * phase + first_of(odd), *odd_line = to + (1 - odd) * phase + first_of(1 - odd);
            int64_t x = 0;
            for (; x + 32 <= columns; x += 32, even_line += 16, odd_line += 16) {
                const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + x));
                const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + x + 16));
                const __m128i low = _mm_set1_epi16(0xff);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(even_line), _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(odd_line), _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
            }
            for (; x < columns; ++x) *(x % 2 == 0 ? even_line : odd_line)++ = codes[x];
            return;
        }
#endif
        const int64_t whole = before[1] == 0 ? columns / phases : 0;  // without padding: pixels of so many columns
        turn_bytes(codes, phases, whole, phases, phase, to);
        for (int64_t p = 0; p < phases; ++p) {
            const int64_t first = std::max(first_of(p), whole);
            int8_t* line = to + p * phase + first;
            for (int64_t x = first * phases + p - before[1]; x < columns; x += phases) *line++ = codes[x];
        }
    }

    // The same for a row of four channels [columns][4].
    void spread_quads(const int8_t* codes, int64_t columns, int8_t zero, int8_t* to) const {
        std::memset(to, zero, static_cast<size_t>(row));
        if (phases == 1) {
            std::memcpy(to + 4 * before[1], codes, static_cast<size_t>(4 * columns));
            return;
        }
        for (int64_t p = 0; p < phases; ++p) {
            const int64_t first = first_of(p), x = first * phases + p - before[1];
            int8_t* line = to + p * phase + 4 * first;
            if (phases == 2) copy_words(codes + 4 * x, 8, (columns - x + 1) / 2, line);
            else copy_words(codes + 4 * x, 4 * phases, (columns - x + phases - 1) / phases, line);
        }
    }

    // A row of codes [columns][channels], or none, into all channels. to: of the first one. Some bytes beyond the codes are read.
    void spread_channels(const int8_t* codes, int64_t columns, int64_t channels, int8_t zero, int8_t* to) const {
        if (codes == nullptr) {
            for (int64_t c = 0; c < channels / each; ++c) std::memset(to + c * plane, zero, static_cast<size_t>(row));
            return;
        }
        for (int64_t p = 0; p < phases; ++p) {
            const int64_t first = first_of(p), x = first * phases + p - before[1];
            const int64_t count = x < columns ? (columns - x + phases - 1) / phases : 0;
            int8_t* lines = to + p * phase;
            for (int64_t c = 0; c < channels / each; ++c) {
                int8_t* line = lines + c * plane;
                for (int64_t i = 0; i < first * each; ++i) line[i] = zero;
                for (int64_t i = (first + count) * each; i < phase; ++i) line[i] = zero;
                if (each == 4) copy_words(codes + x * channels + 4 * c, phases * channels, count, line + 4 * first);
            }
            if (each == 1) turn_bytes(codes + x * channels, phases * channels, count, channels, plane, lines + first);
        }
    }

    // Where column k of the weight lies among its bytes; even_odd: of each 32 the even ones first.
    static int64_t place(int64_t k, bool even_odd) {
        const int64_t at = k % 32;
        return k - at + (even_odd ? at / 2 + at % 2 * 16 : at);
    }

    // The same among bytes in the order of an image in quads: [four channels][tap][4].
    static int64_t place_in_quads(int64_t k, int64_t taps) {
        const int64_t c = k / taps;
        return (c / 4 * taps + k % taps) * 4 + c % 4;
    }

    // Where each column of a patch is, or each word of it in quads, from the patch's place on: in the order of the weight's bytes, -1
    // beyond the last.
    std::vector<int32_t> columns(const ConvolutionShape& s, int64_t blocks, bool even_odd) const {
        const int64_t taps = s.kernel[0] * s.kernel[1], count = s.channels / s.groups * taps / each;
        std::vector<int32_t> found(static_cast<size_t>(blocks * 32 / each), -1);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t c = k / taps, ky = k % taps / s.kernel[1] * s.dilation[0], kx = k % s.kernel[1] * s.dilation[1];
            found[static_cast<size_t>(each == 4 ? k : place(k, even_odd))] =
                static_cast<int32_t>(c * plane + ky * row + kx % phases * phase + kx / phases * each);
        }
        return found;
    }

    // `count` pixels from `first`, counted through the images, as pieces of rows: [kPixels] at most.
    int pieces(const int8_t* planes, int64_t first, int64_t count, int64_t out_height, int64_t out_width, PixelRun* runs) const {
        int found = 0;
        for (int64_t at = 0; at < count;) {
            const int64_t pixel = first + at, x = pixel % out_width, y = pixel / out_width % out_height;
            const int64_t n = std::min(out_width - x, count - at);
            runs[found++] = {planes + pixel / (out_width * out_height) * bytes + y * stride * row + x * each, at, n};
            at += n;
        }
        return found;
    }

    // Those pixels as a tile, [word][64][4], from an image that is not in quads.
    static void patches(const PixelRun* runs, int found, const int32_t* columns, int64_t words, int8_t* out) {
        static const int8_t zeros[kPixels + 16] = {};
        for (int64_t w = 0; w < words; ++w, columns += 4, out += 4 * kPixels) {
            // The last word may have fewer columns than four.
            const bool whole = columns[0] >= 0 && columns[1] >= 0 && columns[2] >= 0 && columns[3] >= 0;
            for (int i = 0; i < found; ++i) {
                const PixelRun& s = runs[i];
                const int8_t* from[4];
                for (int k = 0; k < 4; ++k) from[k] = whole || columns[k] >= 0 ? s.from + columns[k] : zeros;
                for (int64_t p = 0; p < s.count; p += 16)
                    interleave(from[0] + p, from[1] + p, from[2] + p, from[3] + p, out + 4 * (s.at + p));
            }
        }
    }

    // One row of a channel in neighbouring patches that share no value, `pixels` times `words` words of four codes, as that many words
    // of a tile. even_odd: of each 32 columns the even ones come first; `words` is then a multiple of four. row: of the patches, counted
    // through the channels.
    static void rows_apart(const int8_t* codes, int64_t pixels, int64_t words, int64_t row, bool even_odd, int8_t* out) {
        constexpr int64_t kWord = 4 * kPixels;
        int64_t w = 0;
        for (; w + 4 <= words; w += 4) {
            // Of 16 columns, and the words that they are.
            const int64_t first = row * words + w, half = first / 4 % 2;
            int8_t* to = out + (even_odd ? first / 8 * 8 + 2 * half : first) * kWord;
            const int64_t skip = even_odd ? 4 * kWord : 2 * kWord;  // to the second two
            int64_t p = 0;
            for (; pixels >= 4 && p < pixels; p += 4) {
                const int64_t at = std::min(p, pixels - 4);  // the last ones overlap
                four_words(codes + 4 * (at * words + w), 4 * words, even_odd, to + 4 * at, to + skip + 4 * at);
            }
            for (; p < pixels; ++p)
                for (int k = 0; k < 16; ++k) {
                    const int at = even_odd ? k % 2 * 8 + k / 2 : k;
                    to[at / 8 * skip + at / 4 % 2 * kWord + 4 * p + at % 4] = codes[4 * (p * words + w) + k];
                }
        }
        for (; w < words; ++w) copy_words(codes + 4 * w, 4 * words, pixels, out + (row * words + w) * kWord);
    }

  private:
    // 16 bytes of four pixels, as four words of a tile: two at `a` and two at `b`.
    static void four_words(const int8_t* from, int64_t stride, bool even_odd, int8_t* a, int8_t* b) {
        constexpr int64_t kWord = 4 * kPixels;
#if NSTF_X86
        __m128i v[4];
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
            if (even_odd) v[i] = _mm_packus_epi16(_mm_and_si128(v[i], _mm_set1_epi16(0xff)), _mm_srli_epi16(v[i], 8));
        }
        const auto store = [](int8_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); };
        const __m128i t0 = _mm_unpacklo_epi32(v[0], v[1]), t1 = _mm_unpacklo_epi32(v[2], v[3]);
        const __m128i t2 = _mm_unpackhi_epi32(v[0], v[1]), t3 = _mm_unpackhi_epi32(v[2], v[3]);
        store(a, _mm_unpacklo_epi64(t0, t1)), store(a + kWord, _mm_unpackhi_epi64(t0, t1));
        store(b, _mm_unpacklo_epi64(t2, t3)), store(b + kWord, _mm_unpackhi_epi64(t2, t3));
#else
        for (int i = 0; i < 4; ++i, from += stride, a += 4, b += 4) {
            int8_t v[16];
            for (int k = 0; k < 16; ++k) v[even_odd ? k % 2 * 8 + k / 2 : k] = from[k];
            std::memcpy(a, v, 4), std::memcpy(a + kWord, v + 4, 4), std::memcpy(b, v + 8, 4), std::memcpy(b + kWord, v + 12, 4);
        }
#endif
    }

    // The first place of a phase that is no padding.
    int64_t first_of(int64_t p) const { return (std::max<int64_t>(before[1] - p, 0) + phases - 1) / phases; }

    // Words of four bytes, `stride` bytes from one to the next.
    static void copy_words(const int8_t* from, int64_t stride, int64_t count, int8_t* to) {
        for (int64_t i = 0; i < count; ++i) std::memcpy(to + 4 * i, from + i * stride, 4);
    }

    // `count` pixels, `stride` bytes from one to the next, with their channels: to the channels' lines, `lines` bytes from one to the
    // next.
    static void turn_bytes(const int8_t* codes, int64_t stride, int64_t count, int64_t channels, int64_t lines, int8_t* to) {
#if NSTF_X86
        constexpr int64_t kSide = 16;
        if (count >= kSide) {
            for (int64_t c = 0; c < channels; c += kSide)
                for (int64_t x = 0; x < count; x += kSide) {
                    const int64_t at = std::min(x, count - kSide);  // the last ones overlap
                    turn_block(codes + at * stride + c, stride, std::min(kSide, channels - c), lines, to + c * lines + at);
                }
            return;
        }
#endif
        for (int64_t x = 0; x < count; ++x)
            for (int64_t c = 0; c < channels; ++c) to[c * lines + x] = codes[x * stride + c];
    }

#if NSTF_X86
    // 16 pixels of 16 channels, of which `count` are written.
    static void turn_block(const int8_t* from, int64_t stride, int64_t count, int64_t lines, int8_t* to) {
        __m128i a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
        // Four times: the first half of the vectors in turn with the second.
        const auto mix = [](const __m128i* in, __m128i* out) {
            for (int i = 0; i < 8; ++i) {
                out[2 * i] = _mm_unpacklo_epi8(in[i], in[i + 8]);
                out[2 * i + 1] = _mm_unpackhi_epi8(in[i], in[i + 8]);
            }
        };
        mix(a, b), mix(b, a), mix(a, b), mix(b, a);
        for (int64_t i = 0; i < count; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * lines), a[i]);
    }
#endif

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
