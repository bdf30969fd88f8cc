// The exponential function, for one instruction set (see ops.h and paged.cpp, which include this file).

// Where it is cut off. A loop takes them from here, by a way that hides their values: from known ones GCC 12 makes branches to what
// the function is there, and no vectors.
struct ExpEnds {
    float low = -87.0f, high = 88.0f;
    ExpEnds() { __asm__("" : "+m"(low), "+m"(high)); }
};

// Twelve multiplications: as exact as a float needs for an activation, and a loop of it becomes vectors.
static inline float fast_exp(float x, float low = -87.0f, float high = 88.0f) {
    x = x < low ? low : x;
    x = x > high ? high : x;
    // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
    const float shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
    const float part = x * 1.44269504f - whole;
    float p = 1.5403530e-4f;
    p = p * part + 1.3333558e-3f;
    p = p * part + 9.6181291e-3f;
    p = p * part + 5.5504109e-2f;
    p = p * part + 2.4022651e-1f;
    p = p * part + 6.9314718e-1f;
    p = p * part + 1.0f;
    // Unsigned: what is shifted out, all of it for a NaN, is no overflow.
    const uint32_t bits = (__builtin_bit_cast(uint32_t, shifted) + (127u - 0x4b400000u)) << 23;
    const float power = __builtin_bit_cast(float, bits);
    return p * power;
}
