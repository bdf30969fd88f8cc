// float16 and the scale formats, read one at a time; the vector code has faster ways.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace nstf {

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    float magnitude;
    if (exponent == 0) {
        magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    } else {
        const uint32_t bits = exponent == 31 ? 0x7f800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
        std::memcpy(&magnitude, &bits, 4);
    }
    return sign ? -magnitude : magnitude;
}

// Rounds to the nearest float16, ties to even; too large becomes infinite.
inline uint16_t float_to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // a subnormal half: units of 2^-24
        float units;
        std::memcpy(&units, &magnitude, 4);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(units * 16777216.0f)));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

inline float bfloat_to_float(uint16_t b) {
    const uint32_t bits = static_cast<uint32_t>(b) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float power_of_two(uint8_t code) {
    if (code == 255) return std::numeric_limits<float>::quiet_NaN();
    const uint32_t bits = code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23;  // 2^-127 is subnormal
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace nstf
