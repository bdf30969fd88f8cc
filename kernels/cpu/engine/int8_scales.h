// The scales of rows of packed codes, for one instruction set; included by packed_int8.h.

inline int64_t scale_size(Scale kind) { return kind == Scale::kFloat ? 4 : kind == Scale::kHalf ? 2 : 1; }

// Where the scales of rows r to r + R - 1 are read.
template <int R>
inline void readable_scales(const PackedMatrix& w, int64_t r, uint8_t* room, const uint8_t** in) {
    const int64_t bytes = w.groups * scale_size(w.scale_kind);
    const uint8_t *all = static_cast<const uint8_t*>(w.scale), *end = all + w.rows * bytes;
    for (int i = 0; i < R; ++i) in[i] = readable(all + (r + i) * bytes, bytes, end, room + i * (bytes + kBeyond));
}

// The scales of rows r to r + R - 1 by group into out[R][stride], LANES at a time; what is beyond the last one is zero. in: where
// they are read. Where there are sums of activations by group, their products with the scales are `lost`, since both are at hand.
template <int R>
NSTF_INLINE void row_scales(const PackedMatrix& w, int64_t r, const uint8_t* const* in, float* out, int64_t stride, const float* sums,
                            Floats* lost) {
    const int64_t n = w.groups;
    const auto convert = [&](auto scale) __attribute__((always_inline)) {
        Floats total[R];
        each<R>([&](auto i) __attribute__((always_inline)) { total[i] = zero_floats(); });
        const auto some = [&](int64_t g, auto whole) __attribute__((always_inline)) {
            const Floats sum = sums == nullptr ? zero_floats() : load(sums + g);
            each<R>([&](auto i) __attribute__((always_inline)) {
                Floats s = scale(i, g);
                if (!whole) s = first_lanes(s, static_cast<int>(n - g));
                store(out + i * stride + g, s);
                total[i] = fma(s, sum, total[i]);
            });
        };
        int64_t g = 0;
        for (; g + LANES <= n; g += LANES) some(g, std::true_type{});
        if (g < n) some(g, std::false_type{});
        each<R>([&](auto i) __attribute__((always_inline)) { lost[i] = total[i]; });
    };
    switch (w.scale_kind) {
        case Scale::kSteps: {
            Floats step[R];
            each<R>([&](auto i) __attribute__((always_inline)) { step[i] = set(float_of_half(w.super_[r + i]) * (1.0f / 256)); });
            convert([&](auto i, int64_t g) __attribute__((always_inline)) { return fma(floats_of_bytes(in[i] + g), step[i], step[i]); });
            break;
        }
        case Scale::kHalf:
            convert([&](auto i, int64_t g) __attribute__((always_inline)) { return floats_of_halves(in[i] + 2 * g); });
            break;
        case Scale::kFloat:
            convert([&](auto i, int64_t g) __attribute__((always_inline)) { return load(reinterpret_cast<const float*>(in[i] + 4 * g)); });
            break;
        case Scale::kPower:  // the codes of a subnormal power and of NaN are left to the exact kernel
            convert([&](auto i, int64_t g) __attribute__((always_inline)) { return powers_of_bytes(in[i] + g); });
    }
}

// The same of one row, of any.
__attribute__((noinline)) inline void one_row_scales(const PackedMatrix& w, int64_t r, float* out, int64_t stride, uint8_t* room,
                                                     Floats* lost) {
    const uint8_t* in;
    readable_scales<1>(w, r, room, &in);
    row_scales<1>(w, r, &in, out, stride, nullptr, lost);
}
