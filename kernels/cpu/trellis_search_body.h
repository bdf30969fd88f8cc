// The search for one instruction set; trellis_search.cpp includes it inside a namespace for each, after the definitions of
// LANES, Cost, Value, stream(to, costs), doubled(d), square(d), unzip(a, b, even, odd), low_words(a, b) and
// high_words(a, b) (unpacked within 128 bits), piece<N>(from) and in_order<N>(v).

INLINE Cost load(const uint16_t* p) {
    Cost v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(uint16_t* p, Cost v) { std::memcpy(p, &v, sizeof v); }
INLINE Value load_values(const int16_t* p) {
    Value v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE Cost lower(Cost a, Cost b) { return a < b ? a : b; }
template <int D>
INLINE Cost distance(Value x, Value c) {
    Value d = Value(Cost(x) - Cost(c));
    for (int i = 0; i < D; i++) d = doubled(d);
    return square(d);
}
INLINE uint16_t least_lane(Cost v) {
    uint16_t least = v[0];
    for (int l = 1; l < LANES; l++) least = std::min(least, uint16_t(v[l]));
    return least;
}

// 2^L vectors of consecutive entries [lane][a] become one vector per a.
template <int L>
INLINE void split(const uint16_t* from, Cost* out) {
    constexpr int N = 1 << L;
    Cost in[N], next[N];
    if (L > 3) {  // a perfect unshuffle, a bit at a time
        for (int i = 0; i < N; i++) in[i] = load(from + i * LANES);
#pragma GCC unroll 6
        for (int bit = 0; bit < L; bit++) {
            for (int i = 0; i < N / 2; i++) unzip(in[2 * i], in[2 * i + 1], next[i], next[N / 2 + i]);
            for (int i = 0; i < N; i++) in[i] = next[i];
        }
        // Each round put its bit on top of the index, which after L rounds reads as a.
        for (int i = 0; i < N; i++) out[i] = in[i];
        return;
    }
    // Within 128 bits: each round moves the topmost bit of a word's place to the end of the vector's index, which loses its
    // topmost bit to the end of the place. After three rounds all of a is in the index, and the vectors' bits are on top.
    for (int i = 0; i < N; i++) in[i] = piece<N>(from, i);
#pragma GCC unroll 3
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N / 2; i++) {
            next[2 * i] = low_words(in[i], in[N / 2 + i]);
            next[2 * i + 1] = high_words(in[i], in[N / 2 + i]);
        }
        for (int i = 0; i < N; i++) in[i] = next[i];
    }
    for (int i = 0; i < N; i++) out[i] = in_order<N>(in[i]);
}

// A step that shifts K bits in: for T tiles the costs of all states from M, reduced over their L oldest bits. The codebook comes
// in the order in which it is read here, once for all tiles.
template <int K, int L, int D, int T>
INLINE void step(const int16_t* book, Track* tracks) {
    constexpr int MIDDLE = 1 << (kStateBits - K - L);  // values of the bits that neither step touches
    constexpr int N = 1 << L;
    const Cost most = Cost{} + kMost;
    Value x[T];
    Cost found[T];
    for (int i = 0; i < T; i++) x[i] = Value{} + tracks[i].target, found[i] = Cost{} + uint16_t(0xffff);
    for (int middle = 0; middle < MIDDLE; middle += LANES) {
        Cost m[T][N];
        for (int i = 0; i < T; i++) {
            split<L>(tracks[i].from + (middle << L), m[i]);
            for (int a = 0; a < N; a++) m[i][a] = lower(m[i][a] - (Cost{} + tracks[i].least), most);
        }
        for (int top = 0; top < (1 << K); top++) {
            Cost low[T];
            const Value first = load_values(book);
            for (int i = 0; i < T; i++) low[i] = distance<D>(x[i], first) + m[i][0];
#pragma GCC unroll 16
            for (int a = 1; a < N; a++) {
                const Value value = load_values(book + a * LANES);
                for (int i = 0; i < T; i++) low[i] = lower(distance<D>(x[i], value) + m[i][a], low[i]);
            }
            for (int i = 0; i < T; i++) {
                store(tracks[i].to + top * MIDDLE + middle, low[i]);
                if (tracks[i].row) {
                    stream(tracks[i].row, low[i]);
                    tracks[i].row += LANES;
                }
                found[i] = lower(found[i], low[i]);
            }
            book += N * LANES;
        }
    }
    for (int i = 0; i < T; i++) tracks[i].least = least_lane(found[i]);
}

template <int T>
INLINE void any_step(const Book& book, int t, Track* tracks) {
    const int16_t* stream = book.streams[t & 3].data();
    switch (book.doublings * 64 + book.steps.at(t) * 8 + book.steps.at(t + 1)) {
#define STEP(K, L, D) \
    case D * 64 + K * 8 + L: return step<K, L, D, T>(stream, tracks);
        STEP(1, 1, 0) STEP(1, 2, 0) STEP(2, 1, 0) STEP(2, 2, 0) STEP(2, 3, 0) STEP(3, 2, 0) STEP(3, 3, 0)
        STEP(3, 4, 0) STEP(4, 3, 0) STEP(4, 4, 0) STEP(4, 4, 1) STEP(4, 5, 1) STEP(5, 4, 1) STEP(5, 5, 1)
        STEP(5, 5, 2) STEP(5, 6, 2) STEP(6, 5, 2) STEP(6, 6, 2)
#undef STEP
    }
}

// Steps first..end-1 (of the circular tiles) from the M in row `first`. For the first `whole` steps nothing is taken off the
// costs, so that the dearest stay so.
template <int T>
INLINE void forward(const float* x, const Book& book, int first, int end, int whole, Scratch* s) {
    Track tracks[T] = {};
    for (int t = first; t < end; t++) {
        for (int i = 0; i < T; i++) {
            if (t < first + whole) tracks[i].least = 0;
            s[i].taken[t + kSeam] = tracks[i].least;
            tracks[i].target = rounded(x[i * kTile + (t & (kTile - 1))], kFarthest);
            tracks[i].from = s[i].from, tracks[i].to = s[i].to, tracks[i].row = s[i].row(t + 1);
        }
        any_step<T>(book, t, tracks);
        for (int i = 0; i < T; i++) std::swap(s[i].from, s[i].to);
    }
}

// The codes of T tiles one after another.
template <int T>
INLINE void run(const float* x, const Book& book, uint8_t* codes, Scratch* s) {
    // First pass: around the seam, from nowhere, to find the state in which the tile may start and end.
    for (int i = 0; i < T; i++) {
        s[i].stride = kStates >> book.steps.k[0], s[i].every = book.every;
        const int size = kStates >> book.steps.at(-kSeam);
        std::fill_n(s[i].from, size, uint16_t(0));
        std::fill_n(s[i].row(-kSeam), size, uint16_t(0));
    }
    forward<T>(x, book, -kSeam, kSeam, 0, s);
    int seam[T];
    for (int i = 0; i < T; i++) seam[i] = seam_state(x + i * kTile, book, s[i]);
    // Second pass: the whole tile, from that state to that state.
    const int k = book.steps.at(0);
    for (int i = 0; i < T; i++) {
        std::fill_n(s[i].from, kStates >> k, kMost);
        std::fill_n(s[i].row(0), kStates >> k, kMost);
        s[i].from[seam[i] >> k] = s[i].row(0)[book.place(-1, seam[i] >> k)] = 0;
    }
    forward<T>(x, book, 0, kTile, kStateBits / k + 1, s);
    for (int i = 0; i < T; i++) write(x + i * kTile, book, seam[i], codes + i * 8 * book.quarter_bits, s[i]);
}
