// Pages from float16 into few bits and back, for one instruction set (see paged.cpp, which includes this file).

// Offset in a page's codes of the byte for a row and a column; the row within it is `unit`.
static inline int64_t code_offset(int64_t row, int64_t column, int64_t columns, int bits, int64_t* unit) {
    const int64_t together = rows_together(bits);
    *unit = row % together / 4;
    return (row / together * (columns / 16) + column / 16) * 64 + column % 16 * 4 + row % 4;
}

// Positions by channels, [64][size], from a float16 page.
static void rows_of(const uint16_t* half, int64_t size, bool key, float* x) {
    if (!key) return halves_to_floats(half, kPage * size, x);
    float column[16];
    for (int64_t b = 0; b < kPage / 16; ++b)
        for (int64_t d = 0; d < size; ++d) {
            halves_to_floats(half + (b * size + d) * 16, 16, column);
            for (int64_t l = 0; l < 16; ++l) x[(16 * b + l) * size + d] = column[l];
        }
}

// Numbers are exact float16 divided by a unit where one did not fit, so no minimum overflows.
static void pack(const Format& format, int64_t size, bool key, const uint16_t* half, uint8_t* packed) {
    const int64_t pairs = pairs_of(format, size), groups = format.channel ? 1 : channel_groups(size), width = size / groups;
    const int64_t columns = packed_columns(size, key), levels = (1 << format.bits) - 1;
    Scratch room(2 * kPage * size + 4 * pairs);
    float *x = room.data(), *codes = x + kPage * size, *low = codes + kPage * size, *high = low + pairs, *bad = high + pairs;
    float* step = bad + pairs;
    rows_of(half, size, key, x);
    if (format.rotate) hadamard(x, kPage * size, static_cast<int>(size & -size));
    std::fill(low, low + pairs, 3e38f);
    std::fill(high, high + pairs, -3e38f);
    std::fill(bad, bad + pairs, 0.0f);  // becomes NaN where a number is none
    auto widen = [&](int64_t pair, float value) {
        low[pair] = value < low[pair] ? value : low[pair];
        high[pair] = value > high[pair] ? value : high[pair];
        bad[pair] += value * 0.0f;
    };
    for (int64_t p = 0; p < kPage; ++p)
        if (format.channel) {
            for (int64_t d = 0; d < size; ++d) widen(d, x[p * size + d]);
        } else {
            for (int64_t d = 0; d < size; ++d) widen(d / width * kPage + p, x[p * size + d]);
        }
    auto* stored = reinterpret_cast<uint16_t*>(packed);
    for (int64_t i = 0; i < pairs; ++i) {
        stored[i] = float_to_half(low[i] + bad[i]);
        low[i] = half_to_float(stored[i]);
        const float wide = (high[i] - low[i]) / static_cast<float>(levels);
        stored[pairs + i] = float_to_half(wide < 0 ? 0 : wide > 65504 ? 65504 : wide);
        step[i] = half_to_float(stored[pairs + i]);
    }
    const float most = static_cast<float>(levels);
    for (int64_t p = 0; p < kPage; ++p) {
        const float* in = x + p * size;
        float* out = codes + p * size;
        auto code = [&](float value, float least, float by) {
            const float c = std::nearbyint((value - least) / by);
            return !(by > 0) || !(c > 0) ? 0.0f : c > most ? most : c;
        };
        if (format.channel) {
#pragma omp simd
            for (int64_t d = 0; d < size; ++d) out[d] = code(in[d], low[d], step[d]);
        } else {
            for (int64_t g = 0; g < groups; ++g) {
                const float least = low[g * kPage + p], by = step[g * kPage + p];
#pragma omp simd
                for (int64_t d = g * width; d < (g + 1) * width; ++d) out[d] = code(in[d], least, by);
            }
        }
    }
    uint8_t* bytes = packed + 4 * pairs;
    std::memset(bytes, 0, static_cast<size_t>(packed_bytes(format, size, key) - 4 * pairs));
    for (int64_t p = 0; p < kPage; ++p)
        for (int64_t d = 0; d < size; ++d) {
            int64_t unit;
            uint8_t* to = bytes + (key ? code_offset(d, p, columns, format.bits, &unit) : code_offset(p, d, columns, format.bits, &unit));
            *to = static_cast<uint8_t>(*to | static_cast<int>(codes[p * size + d]) << (unit * format.bits));
        }
}

// In 8 bits, with a minimum and a scale of the position's own.
static void pack_one(const Format& format, int64_t size, bool key, const float* x, int64_t position, uint8_t* packed) {
    const int64_t pairs = pairs_of(format, size), groups = channel_groups(size), width = size / groups;
    const int64_t columns = packed_columns(size, key);
    auto* stored = reinterpret_cast<uint16_t*>(packed);
    uint8_t* bytes = packed + 4 * pairs;
    for (int64_t g = 0; g < groups; ++g) {
        const float* in = x + g * width;
        float low = in[0], high = in[0], bad = 0;  // becomes NaN where a number is none
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : bad)
        for (int64_t d = 0; d < width; ++d) {
            low = in[d] < low ? in[d] : low;
            high = in[d] > high ? in[d] : high;
            bad += in[d] * 0.0f;
        }
        uint16_t &minimum = stored[g * kPage + position], &scale = stored[pairs + g * kPage + position];
        minimum = float_to_half(low + bad);
        low = half_to_float(minimum);
        const float wide = (high - low) / 255;
        scale = float_to_half(wide > 0 ? wide : 0);
        const float step = half_to_float(scale), by = step > 0 ? 1 / step : 0;
        int64_t unit;
        for (int64_t d = 0; d < width; ++d) {
            const float code = std::nearbyint((in[d] - low) * by);
            const int64_t row = g * width + d;
            bytes[key ? code_offset(row, position, columns, 8, &unit) : code_offset(position, row, columns, 8, &unit)] =
                static_cast<uint8_t>(!(code > 0) ? 0 : code > 255 ? 255 : code);
        }
    }
}

// Keys as [4 blocks of 16 positions][size][16], still rotated where they are stored rotated.
static void unpack_keys(const Format& format, int64_t size, const PageSide& page, bool half, float* out) {
    if (half) {
        halves_to_floats(page.half, kPage * size, out);
    } else {
        const int64_t pairs = pairs_of(format, size), groups = format.channel ? 1 : channel_groups(size), width = size / groups;
        const auto* stored = reinterpret_cast<const uint16_t*>(page.packed);
        const uint8_t* bytes = page.packed + 4 * pairs;
        Scratch room(2 * pairs);
        float *low = room.data(), *step = low + pairs;
        halves_to_floats(stored, pairs, low);
        halves_to_floats(stored + pairs, pairs, step);
        const int64_t together = rows_together(format.bits);
        const uint32_t most = (1u << format.bits) - 1;
        uint32_t words[16];  // of 16 positions: four channels each, once for every unit
        for (int64_t first = 0; first < size; first += together)
            for (int64_t b = 0; b < kPage / 16; ++b) {
                std::memcpy(words, bytes + (first / together * (kPage / 16) + b) * 64, sizeof words);
                for (int64_t d = first; d < std::min(size, first + together); ++d) {
                    const auto shift = static_cast<int>(d % 4 * 8 + (d - first) / 4 * format.bits);
                    float* to = out + (b * size + d) * 16;
                    const int64_t pair = format.channel ? d : d / width * kPage + 16 * b;
                    const float *least = low + pair, *by = step + pair;
                    if (format.channel) {
#pragma omp simd
                        for (int p = 0; p < 16; ++p) to[p] = *least + *by * static_cast<float>(static_cast<int32_t>(words[p] >> shift & most));
                    } else {
#pragma omp simd
                        for (int p = 0; p < 16; ++p) to[p] = least[p] + by[p] * static_cast<float>(static_cast<int32_t>(words[p] >> shift & most));
                    }
                }
            }
    }
    if (page.unit != 1)
        for (int64_t i = 0; i < kPage * size; ++i) out[i] *= page.unit;
}
