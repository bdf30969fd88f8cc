// float16 to float, for one instruction set: files that are compiled once per set include this inside the set's namespace, so
// there is no include guard and no #include here.

static inline void halves_to_floats(const uint16_t* in, int64_t count, float* out) {
    int64_t i = 0;
#if NSTF_ISA >= 2
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < count; ++i) out[i] = half_to_float(in[i]);
}
