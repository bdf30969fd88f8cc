// Included like int8_avx2.h, inside a namespace and a set of instructions.

// 8 vectors of 8 numbers, transposed.
inline void transpose(__m256i* v) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; ++k) {
            v[i + 2 * k] = _mm256_unpacklo_epi64(t[i + k], t[i + 2 + k]);
            v[i + 2 * k + 1] = _mm256_unpackhi_epi64(t[i + k], t[i + 2 + k]);
        }
    for (int k = 0; k < 4; ++k) {
        t[k] = _mm256_permute2x128_si256(v[k], v[4 + k], 0x20);
        t[4 + k] = _mm256_permute2x128_si256(v[k], v[4 + k], 0x31);
    }
    std::copy_n(t, 8, v);
}
