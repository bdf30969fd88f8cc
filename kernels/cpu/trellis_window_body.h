// The steps for one instruction set; trellis_window.cpp includes it inside a namespace for each, after the definitions of LANES,
// Cost, Value, doubled(d), square(d), plus(a, b) (saturated) low_words(a, b), high_words(a, b)
// (unpacked within 128 bits), pieces<WIDTH>(from) and store_piece(to, v, i).

INLINE Cost load(const uint16_t* p) {
    Cost v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(uint16_t* p, Cost v) { std::memcpy(p, &v, sizeof v); }
INLINE Cost lower(Cost a, Cost b) { return a < b ? a : b; }

// 8 rows of 8 for each piece.
template <int ACROSS, int STRIDE>
INLINE void put_pieces(const Cost* v, uint16_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < LANES / 8; j++) store_piece(out + (j % ACROSS * 8 + i) * STRIDE + j / ACROSS * 8, v[i], j);
    }
}

// M less what is taken off, [h][c] -> [c][h]; h counts from the middle of the window. The first block is there again at the end.
template <int K, int L>
INLINE void transpose(const uint16_t* from, uint16_t least, int middle, uint16_t* to) {
    constexpr int WIDTH = 1 << L, PERIOD = 1 << (kStateBits - K - L), STRIDE = PERIOD + kBlock;
    // 8 x 8 pieces, one in each 128 bits: beside each other, and where the rows are too short under each other.
    constexpr int ACROSS = WIDTH < LANES ? WIDTH / 8 : LANES / 8, DOWN = LANES / 8 / ACROSS;
    const int first = middle * kBlock & (PERIOD - 1);
    const Cost off = Cost{} + least;
    for (int h = 0; h < PERIOD; h += 8 * DOWN) {
        const uint16_t* rows = from + ((h + first) & (PERIOD - 1)) * WIDTH;
        for (int c = 0; c < WIDTH; c += 8 * ACROSS) {
            Cost v[8], w[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) v[i] = pieces<WIDTH>(rows + i * WIDTH + c) - off;
#pragma GCC unroll 3
            for (int round = 0; round < 3; round++) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) w[2 * i] = low_words(v[i], v[i + 4]), w[2 * i + 1] = high_words(v[i], v[i + 4]);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) v[i] = w[i];
            }
            uint16_t* out = to + c * STRIDE + h;
            put_pieces<ACROSS, STRIDE>(v, out);
            if (h < kBlock) put_pieces<ACROSS, STRIDE>(v, out + PERIOD);
            if (PERIOD < kBlock) put_pieces<ACROSS, STRIDE>(v, out + 2 * PERIOD);
        }
    }
}
// Of all h up to `span` from the middle; those that are not there are farthest.
template <int D>
INLINE void fill_distances(const WindowStep& step, int16_t target, int middle, int span, uint16_t* to) {
    const Value x = Value{} + target;
    for (int set = 0; set < step.sets(); set++)
        for (int block = -span; block <= span; block += kBlock) {
            const int h = middle * kBlock + block;
            const bool there = h >= 0 && h < step.results;
            const int16_t* values = step.values.data() + set * step.results + (there ? h : 0);
            uint16_t* out = to + set * kDistances + block;
            for (int i = 0; i < kBlock; i += LANES) {
                Value d;
                std::memcpy(&d, values + i, sizeof d);
                d = Value(Cost(x) - Cost(d));
                const Cost size = Cost(d < Value{} ? -d : d), most = Cost{} + uint16_t(32767 >> D);
                for (int j = 0; j < D; j++) d = doubled(d);
                // Where squares have reached their end, farther is dearer still.
                store(out + i, there ? square(d) + (size > most ? size - most : Cost{}) : Cost{} + uint16_t(0xffff));
            }
        }
}

// The new M, from N sources each; returns the least.
template <int N>
INLINE uint16_t reduce(const WindowStep& step, int middle, const uint16_t* distance, const uint16_t* m, uint16_t* to) {
    const int blocks = step.results / kBlock;
    const Source* source = step.sources.data();
    Cost found = Cost{} + uint16_t(0xffff);
    for (int b = 0; b < blocks; b++, source += kMostSources) {
        uint16_t* out = to + ((middle + b) & (blocks - 1)) * kBlock;
        for (int i = 0; i < kBlock; i += LANES) {
            Cost low = plus(load(distance + source[0].distance + i), load(m + source[0].m + i));
#pragma GCC unroll 16
            for (int n = 1; n < N; n++)
                low = lower(plus(load(distance + source[n].distance + i), load(m + source[n].m + i)), low);
            store(out + i, low);
            found = lower(found, low);
        }
    }
    uint16_t least = found[0];
    for (int l = 1; l < LANES; l++) least = std::min(least, uint16_t(found[l]));
    return least;
}

INLINE uint16_t any_step(const Windows& windows, int t, int16_t target, uint16_t least, Scratch& s) {
    const WindowStep& step = windows.step(t);
    const Window window = windows.window(t, target);
    const uint16_t* from = s.row(t);
    uint16_t *to = s.row(t + 1), *m = s.m.get(), *distance = s.distance();
    switch (step.k * 8 + step.l) {
#define TRANSPOSE(K, L) \
    case K * 8 + L: transpose<K, L>(from, least, window.middle, m); break;
        TRANSPOSE(3, 3) TRANSPOSE(3, 4) TRANSPOSE(4, 3) TRANSPOSE(4, 4) TRANSPOSE(4, 5) TRANSPOSE(5, 4) TRANSPOSE(5, 5)
        TRANSPOSE(5, 6) TRANSPOSE(6, 5) TRANSPOSE(6, 6)
#undef TRANSPOSE
    }
    const int span = step.span[window.sources];
    if (windows.doublings() == 1)
        fill_distances<1>(step, target, window.middle, span, distance);
    else
        fill_distances<2>(step, target, window.middle, span, distance);
    switch (window.sources) {
#define REDUCE(N) \
    case N: return reduce<N>(step, window.middle, distance, m, to);
        REDUCE(1) REDUCE(2) REDUCE(3) REDUCE(4) REDUCE(5) REDUCE(6) REDUCE(7) REDUCE(8) REDUCE(9) REDUCE(10) REDUCE(11)
#undef REDUCE
    }
    return reduce<12>(step, window.middle, distance, m, to);
}
