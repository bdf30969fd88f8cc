// Shuffle codes times activations rounded to int8, for one instruction set: the shuffle_*.cpp include this file once per set,
// after the pieces of the set (int8_avx512.h, int8_avx2.h, int8_neon.h) and some of its own:
//
// split: 32 bytes to the 64 symbols of a chunk, even columns first; split_pair and fetch_here, where the set is
// NSTF_PAIRED: of two chunks; prefetches a line at that place of the program. mixed: exclusive or. Table: 16 bytes for look_up(table,
// symbols). sum: of bytes.
//
// A group of 32 rows is read once, chunk by chunk; the symbols of three steps are all that a row needs.
// Levels are at most 63, so that products of two of them with two activations each fit 16 bits. Activations are those of packed
// codes of four bits, even columns first (packed_int8.h).

#include "int8_several.h"

constexpr int SUMS = CHUNK_SUMS<true>, FINE = CHUNK_SCALES<true>;
constexpr int RUN = run_of(6);

struct Symbols {  // of a step
    static constexpr int COUNT = PARTS;
    Bytes at[PARTS];
    NSTF_INLINE Symbols(const uint8_t* p, int64_t) { split(p, at); }
};
#if NSTF_PAIRED
struct PairSymbols {  // of two chunks, `apart` bytes from each other: the even columns of both, and the odd ones (pair_bytes)
    static constexpr int COUNT = 2;
    Bytes at[2];
    NSTF_INLINE PairSymbols(const uint8_t* p, int64_t apart) { split_pair(p, p + apart, at); }
};
#endif

// The levels of the rows that end at a symbol `a`, b and c being the ones before it: emit(row of the group, vectors).
template <int Q, int SYMBOL, int COUNT, class F>
NSTF_INLINE void rows_of_symbol(const Bytes* a, const Bytes* b, const Bytes* c, const uint8_t* tables, F& emit) {
    constexpr int first = first_row(Q, SYMBOL), count = rows_at(Q, SYMBOL);
    constexpr int phases = Q % 16 == 0 ? 1 : Q % 8 == 0 ? 2 : Q % 4 == 0 ? 4 : Q % 2 == 0 ? 8 : 16;
    Bytes turned[COUNT], w[COUNT];
    if constexpr (count > 0) {
        const uint8_t* t = tables + first % phases * 32;
        const Table x = table_of(t), y = table_of(t + 16);
        for (int i = 0; i < COUNT; ++i) {
            turned[i] = mixed(a[i], c[i]);
            w[i] = sum(look_up(x, turned[i]), look_up(y, b[i]));
        }
        emit(first, w);
    }
    if constexpr (count > 1) {
        const uint8_t* t = tables + (first + 1) % phases * 32;
        const Table x = table_of(t), y = table_of(t + 16);
        for (int i = 0; i < COUNT; ++i) w[i] = sum(look_up(x, mixed(a[i], b[i])), look_up(y, turned[i]));
        emit(first + 1, w);
    }
}

template <int Q, int SYMBOL, class S, class F>
NSTF_INLINE void rows_from(const uint8_t* codes, const S& b, const S& c, const uint8_t* tables, F& emit) {
    if constexpr (SYMBOL < 2 * Q) {
        const S a(codes + SYMBOL * kChunk / 2, Q * kChunk);
        rows_of_symbol<Q, SYMBOL, S::COUNT>(a.at, b.at, c.at, tables, emit);
        rows_from<Q, SYMBOL + 1>(codes, a, b, tables, emit);
    }
}

// The levels of a group of 32 rows in one chunk, or in two, row by row.
template <int Q, class S = Symbols, class F>
NSTF_INLINE void all_rows(const uint8_t* codes, const uint8_t* before, int64_t apart, const uint8_t* tables, F emit) {
    rows_from<Q, 0>(codes, S(before + kChunk / 2, apart), S(before, apart), tables, emit);
}

template <int Q>
class ShuffleInt8 : public Shuffle {
  public:
    ShuffleInt8(StoredShuffle stored, bool exact)
        : Shuffle(std::move(stored)), exact_(exact), chunks_(stored_.chunks()), blocks_(2 * chunks_),
          padded_((blocks_ + 15) / 16 * 16) {}

    uintptr_t key() const override { return exact_ ? Shuffle::key() : KEY; }
    std::string kernel() const override {
        return std::string(exact_ ? "shuffle float32, " : "shuffle int8 x int8, ") + name(SELF);
    }

    // As PackedInt8 has them: leaves of one key share their activations.
    void reserve(const float* x, int64_t batch, Input& in) const override {
        if (exact_) return Shuffle::reserve(x, batch, in);
        reserve_input<true>(cols, batch, in);
    }
    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        if (exact_) return;
        prepare_input<true>(x, cols, first, end, in);
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        if (exact_) return Shuffle::run(in, batch, first, end, y, stride);
        for (int64_t r = first; r < end; r += kGroupRows) {
            const int count = static_cast<int>(std::min<int64_t>(kGroupRows, end - r));
            if (batch >= kSeveral) {
                panel(in, batch, r, count, y, stride);
            } else {
                for (int64_t b = 0; b < batch; ++b) one(in, b, r, count, y + b * stride);
            }
        }
    }

    const ByteRows* byte_rows() const override { return exact_ ? nullptr : &bytes_; }
    // Twice a level less twice its centre, which is half a whole number.
    void unpack(int64_t first, int count, uint8_t* codes, float* scales, float*) const override {
        const auto before = stored_.before(first / kGroupRows);
        for (int64_t c = 0; c < chunks_; ++c) {
            alignas(64) uint8_t levels[kGroupRows][kChunk];
            group(stored_.group(first / kGroupRows) + c * Q * kChunk, before.bytes + c * before.stride, levels);
            for (int i = 0; i < count; ++i)
                for (int p = 0; p < PARTS; ++p) {
                    const Bytes level = load_bytes(levels[i] + p * 4 * LANES);
                    store_bytes(codes + (i * chunks_ + c) * kChunk + p * 4 * LANES, sum(level, level));
                }
        }
        for (int i = 0; i < count; ++i) scales[i] = 0.5f * stored_.scales[static_cast<size_t>(first + i)];
    }

    void decode_rows(int64_t first, int64_t count, float* out) const override {
        for (int64_t row = first; row < first + count;) {
            const int64_t g = row / kGroupRows, end = std::min(first + count, (g + 1) * kGroupRows);
            const auto before = stored_.before(g);
            for (int64_t c = 0; c < chunks_; ++c) {
                alignas(64) uint8_t levels[kGroupRows][kChunk];
                group(stored_.group(g) + c * Q * kChunk, before.bytes + c * before.stride, levels);
                for (int64_t r = row; r < end; ++r) {
                    const float scale = stored_.scales[static_cast<size_t>(r)];
                    const uint8_t* from = levels[r % kGroupRows];
                    float *to = out + (r - first) * cols + c * kChunk, ordered[kChunk];
                    for (int i = 0; i < kChunk / 2; ++i) {
                        ordered[2 * i] = (static_cast<float>(from[i]) - kCentre) * scale;
                        ordered[2 * i + 1] = (static_cast<float>(from[kChunk / 2 + i]) - kCentre) * scale;
                    }
                    std::copy_n(ordered, std::min<int64_t>(kChunk, cols - c * kChunk), to);
                }
            }
            row = end;
        }
    }

  private:
    // The levels of a group in one chunk.
    void group(const uint8_t* codes, const uint8_t* before, uint8_t (*levels)[kChunk]) const {
        all_rows<Q>(codes, before, 0, stored_.tables.data(), [&](int row, const Bytes* w) {
            for (int p = 0; p < PARTS; ++p) store_bytes(levels[row] + p * 4 * LANES, w[p]);
        });
    }

    // A group of rows times one row of activations.
    void one(const Input& in, int64_t b, int64_t r, int count, float* y) const {
        const uint8_t *codes = stored_.group(r / kGroupRows), *tables = stored_.tables.data();
        const auto before = stored_.before(r / kGroupRows);
        const int8_t* q = in.codes.data() + b * in.stride;
        const float *fine = in.scales.data() + b * in.scales_stride, *sums = in.sums.data() + b * in.sums_stride;
        const int64_t chunks = chunks_;
        Floats total[kGroupRows];
        // One by one: of a loop the compiler makes `rep stos`, which takes longer than it.
        each<kGroupRows>([&](auto i) __attribute__((always_inline)) { total[i] = zero_floats(); });
        int64_t c = 0;
#if NSTF_PAIRED
        // Sums of 32 rows outnumber the registers: two chunks at a time write each of them half as often.
        for (; c + 2 <= chunks; c += 2) {
            Bytes x[2];
            pair_bytes<true>(q + c * kChunk, x);
            const Floats by = pair_scales<true>(fine + c * FINE);
            const uint8_t* from = codes + c * Q * kChunk;
            const auto add = [&](int row, const Bytes* w) __attribute__((always_inline)) {
                // A line or so for each row: all at once would wait for one another, which is where the compiler puts the
                // built-in ones. With codes from memory that takes twice as long.
                for (int i = row * 2 * Q / kGroupRows; i < (row + 1) * 2 * Q / kGroupRows; ++i) fetch_here(from + kFar + i * kChunk);
                total[row] = fma(to_floats(widened(more<false>(first<false>(w[0], x[0]), w[1], x[1]))), by, total[row]);
            };
            all_rows<Q, PairSymbols>(from, before.bytes + c * before.stride, before.stride, tables, add);
        }
#endif
        for (; c < chunks; ++c) {
            Bytes x[PARTS];
            for (int p = 0; p < PARTS; ++p) x[p] = load_bytes(q + c * kChunk + p * 4 * LANES);
            Floats by[SUMS];
            for (int k = 0; k < SUMS; ++k) by[k] = load(fine + c * FINE + k * LANES);
            const uint8_t* from = codes + c * Q * kChunk;
            for (int i = 0; i < Q; ++i) __builtin_prefetch(from + kNear + i * kChunk, 0, 3);
            all_rows<Q>(from, before.bytes + c * before.stride, 0, tables, [&](int row, const Bytes* w) {
                for (int k = 0; k < SUMS; ++k) total[row] = fma(to_floats(products(w, x, k)), by[k], total[row]);
            });
        }
        float lost = 0;
        for (int64_t j = 0; j < blocks_; ++j) lost += sums[j];
        alignas(64) float found[kGroupRows];
        for (int i = 0; i < kGroupRows; i += 4) store_four_sums(found + i, total + i);
        for (int i = 0; i < count; ++i)
            y[r + i] = (found[i] - kCentre * lost) * stored_.scales[static_cast<size_t>(r + i)];
    }

    // Vector k of the sums of products of a chunk.
    static NSTF_INLINE Ints products(const Bytes* w, const Bytes* x, int k) {
        if constexpr (SUMS == PARTS) return widened(first<false>(w[k], x[k]));
        else return widened(more<false>(first<false>(w[k], x[k]), w[k + SUMS], x[k + SUMS]));
    }

    // A group of rows for all activations: levels of 16 rows side by side, which each activation meets at once.
    void panel(const Input& in, int64_t batch, int64_t r, int count, float* y, int64_t stride) const {
        thread_local Buffer<uint8_t> room;
        const int64_t half = chunks_ * 1024;
        uint8_t* panel = room.grow(2 * half);  // [16 rows each][word of four levels][16 rows]
        const uint8_t* codes = stored_.group(r / kGroupRows);
        const auto before = stored_.before(r / kGroupRows);
        for (int64_t c = 0; c < chunks_; ++c) {
            alignas(64) uint8_t levels[kGroupRows][kChunk];
            group(codes + c * Q * kChunk, before.bytes + c * before.stride, levels);
            for (int h = 0; h < kGroupRows / LANES; ++h)
                for (int p = 0; p < PARTS; ++p) {
                    Bytes v[LANES];
                    for (int i = 0; i < LANES; ++i) v[i] = load_bytes(levels[h * LANES + i] + p * 4 * LANES);
                    transpose(v);
                    uint8_t* to = panel + h / ROW_BLOCKS * half + c * 1024 + h % ROW_BLOCKS * 4 * LANES;
                    for (int i = 0; i < LANES; ++i) store_bytes(to + (p * LANES + i) * 64, v[i]);
                }
        }
        for (int i = 0; i < count; i += LANES * BLOCKS) {
            const uint8_t* rows = panel + i / kPanel * half + i % kPanel * 4;
            int64_t b = 0;
            for (; b + TOKENS <= batch; b += TOKENS) tokens<TOKENS>(in, b, rows, r + i, count - i, y + b * stride, stride);
            if (TOKENS > 4)
                for (; b + 4 <= batch; b += 4) tokens<4>(in, b, rows, r + i, count - i, y + b * stride, stride);
            for (; b < batch; ++b) tokens<1>(in, b, rows, r + i, count - i, y + b * stride, stride);
        }
    }

    template <int T>
    void tokens(const Input& in, int64_t b, const uint8_t* rows, int64_t r, int count, float* y, int64_t stride) const {
        const float* by = in.scales.data() + b * in.scales_stride;
        const int64_t by_stride = in.scales_stride;
        const Rows<T, int8_t> activations(in.codes.data() + b * in.stride, in.stride);
        Floats total[T][BLOCKS];
        each<T>([&](auto t) __attribute__((always_inline)) {
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) { total[t][h] = zero_floats(); });
        });
        for (int64_t c = 0; c < chunks_; ++c)
            each<2>([&](auto half) __attribute__((always_inline)) {
                const int64_t word = c * 16 + half * SECOND<true>;  // the block's first one
                Sums<T> sum;
                block_of_bytes<T, RUN, false, true>(rows + word * 64, activations, word * 4, sum);
                each<T>([&](auto t) __attribute__((always_inline)) {
                    const Floats scale = set(by[t * by_stride + 2 * c + half]);
                    each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                        total[t][h] = fma(to_floats(sum[t][h]), scale, total[t][h]);
                    });
                });
            });
        for (int t = 0; t < T; ++t) {
            const float* sums = in.sums.data() + (b + t) * in.sums_stride;
            float lost = 0;
            for (int64_t j = 0; j < blocks_; ++j) lost += sums[j];
            alignas(64) float found[LANES * BLOCKS];
            for (int h = 0; h < BLOCKS; ++h) store(found + h * LANES, total[t][h]);
            for (int i = 0; i < std::min(count, LANES * BLOCKS); ++i)
                y[t * stride + r + i] = (found[i] - kCentre * lost) * stored_.scales[static_cast<size_t>(r + i)];
        }
    }

    bool exact_;
    int64_t chunks_, blocks_, padded_;
    // Levels twice are below 127: 16 bits hold two products' sum, as of codes of seven bits.
    ByteRows bytes_ = {true, false, false, false, run_of(7), 63, cols, 1, chunks_, kGroupRows};
};

inline Shared make(StoredShuffle s, bool exact) {
    switch (s.quarter_bits) {
        case 8: return std::make_shared<ShuffleInt8<8>>(std::move(s), exact);
        case 9: return std::make_shared<ShuffleInt8<9>>(std::move(s), exact);
        case 10: return std::make_shared<ShuffleInt8<10>>(std::move(s), exact);
        case 11: return std::make_shared<ShuffleInt8<11>>(std::move(s), exact);
        case 12: return std::make_shared<ShuffleInt8<12>>(std::move(s), exact);
        case 13: return std::make_shared<ShuffleInt8<13>>(std::move(s), exact);
        case 14: return std::make_shared<ShuffleInt8<14>>(std::move(s), exact);
        case 15: return std::make_shared<ShuffleInt8<15>>(std::move(s), exact);
        case 16: return std::make_shared<ShuffleInt8<16>>(std::move(s), exact);
        case 17: return std::make_shared<ShuffleInt8<17>>(std::move(s), exact);
        case 18: return std::make_shared<ShuffleInt8<18>>(std::move(s), exact);
        case 19: return std::make_shared<ShuffleInt8<19>>(std::move(s), exact);
        default: return std::make_shared<ShuffleInt8<20>>(std::move(s), exact);
    }
}
