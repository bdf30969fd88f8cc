// Activations in int8, and products of several rows of them, for one instruction set: included by packed_int8.h and shuffle_int8.h
// after the pieces of the set. 16 rows of codes lie side by side, [word of four columns][16 rows][4 codes], and every activation meets
// all of them.
//
// The inner loop is bound by the vector units, so what counts is instructions for 32 products. AVX2 without VNNI takes a multiplication
// and an addition for codes of up to 4 bits, and more for wider ones, whose sums outgrow 16 bits. Codes of 8 bits would take two
// multiplications, a vpsignb and an addition; with NSTF_WORDS they are kept as 16 bits, [pair of columns][16 rows][2], which takes
// two of each: on Zen, vpsignb runs on the units of multiplications.

constexpr int PARTS = 16 / LANES, ROW_BLOCKS = kPanel / LANES;

// Vectors of sums of a chunk: with the even columns in one half and the odd ones in the other, parts of the same columns' scale are
// added. CHUNK_SCALES: scales of a chunk of one row of activations, a lane each.
template <bool EVEN_ODD>
constexpr int CHUNK_SUMS = EVEN_ODD && PARTS > 1 ? PARTS / 2 : PARTS;
template <bool EVEN_ODD>
constexpr int CHUNK_SCALES = CHUNK_SUMS<EVEN_ODD> * LANES;

// FEW_WORDS: few rows meet codes of 16 bits, too.
template <bool EVEN_ODD, bool FEW_WORDS = false>
inline void reserve_input(int64_t cols, int64_t batch, Input& in) {
    const int64_t chunks = (cols + kChunk - 1) / kChunk, blocks = 2 * chunks;
    in.batch = batch;
    in.stride = chunks * kChunk;
    in.scales_stride = batch < kSeveral ? chunks * CHUNK_SCALES<EVEN_ODD> : blocks;
    in.sums_stride = (blocks + 15) / 16 * 16;
    in.codes.grow(batch * in.stride);
    in.scales.grow(batch * in.scales_stride);
    in.sums.grow(batch * in.sums_stride);
    if (NSTF_WORDS && (FEW_WORDS || batch >= kSeveral)) in.wide.grow(batch * in.stride);
}

template <bool EVEN_ODD, bool FEW_WORDS = false>
inline void prepare_input(const float* x, int64_t cols, int64_t first, int64_t end, Input& in) {
    const bool fine = in.batch < kSeveral;
    alignas(64) float last[kChunk] = {};  // a chunk that is not whole
    const int64_t rest = cols % kChunk, chunks = (cols + kChunk - 1) / kChunk;
    for (int64_t b = first; b < end; ++b) {
        float* sums = in.sums.data() + b * in.sums_stride;
        std::fill_n(sums, in.sums_stride, 0.0f);
        for (int64_t c = 0; c < chunks; ++c) {
            const float* from = x + b * cols + c * kChunk;
            if ((c + 1) * kChunk > cols) {
                std::copy_n(from, rest, last);
                from = last;
            }
            int8_t* codes = in.codes.data() + b * in.stride + c * kChunk;
            quantise<EVEN_ODD>(from, fine, codes, in.scales.data() + b * in.scales_stride + c * (fine ? CHUNK_SCALES<EVEN_ODD> : 2), sums + 2 * c);
#if NSTF_WORDS
            if (FEW_WORDS || !fine) store_words(codes, in.wide.data() + b * in.stride + c * kChunk);
#endif
        }
    }
}

// Sums of products of a block of 32 columns, `from` in each row of activations. k counts its words of four columns.
template <int T>
using Sums = Ints[T][BLOCKS];

// Where word k of a block is among those of its chunk, counted from the block's first one; and the first one of the second block.
template <bool EVEN_ODD>
constexpr int64_t word_at(int k) { return EVEN_ODD ? (k & 3) + (k >> 2) * 8 : k; }
template <bool EVEN_ODD>
constexpr int64_t SECOND = EVEN_ODD ? 4 : 8;

// T rows of activations. Of few, the compiler must not know how they are related: it would keep the distance of every word from the
// first row's in memory, and load one for each few instructions. Of many there are not as many registers.
template <int T, class Code>
struct Rows {
    const Code* at[T];
    NSTF_INLINE Rows(const Code* q, int64_t stride) {
        each<T>([&](auto t) __attribute__((always_inline)) {
            at[t] = q + t * stride;
            if (T <= 4) __asm__("" : "+r"(at[t]));
        });
    }
};

// RUN: sums of how many products are added before they are widened. With few, each row of activations has its sums widened at
// once: less is kept in registers.
// word(k, h): vector h of its word k.
template <int T, int RUN, bool WIDE, bool EVEN_ODD, class Word>
NSTF_INLINE void block_of(const Word& word, const Rows<T, int8_t>& rows, int64_t from, Sums<T>& sum) {
    each<8 / RUN>([&](auto turn) __attribute__((always_inline)) {
        constexpr int FIRST = decltype(turn)::value * RUN;
        const auto add = [&](Ints& to, Narrow part) __attribute__((always_inline)) {
            to = FIRST == 0 ? widened(part) : add_ints(to, widened(part));
        };
        if constexpr (RUN <= 2) {
            Bytes w[RUN][BLOCKS];
            each<RUN>([&](auto k) __attribute__((always_inline)) {
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    w[k][h] = word(std::integral_constant<int, FIRST + decltype(k)::value>{}, h);
                });
            });
            each<T>([&](auto t) __attribute__((always_inline)) {
                Narrow part[BLOCKS];
                each<RUN>([&](auto k) __attribute__((always_inline)) {
                    const Bytes x = four_bytes(rows.at[t] + from + word_at<EVEN_ODD>(FIRST + k) * 4);
                    each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                        part[h] = k == 0 ? first<WIDE>(w[k][h], x) : more<WIDE>(part[h], w[k][h], x);
                    });
                });
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) { add(sum[t][h], part[h]); });
            });
        } else {
            Narrow part[T][BLOCKS];
            each<RUN>([&](auto k) __attribute__((always_inline)) {
                Bytes w[BLOCKS];
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    w[h] = word(std::integral_constant<int, FIRST + decltype(k)::value>{}, h);
                });
                each<T>([&](auto t) __attribute__((always_inline)) {
                    const Bytes x = four_bytes(rows.at[t] + from + word_at<EVEN_ODD>(FIRST + k) * 4);
                    each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                        part[t][h] = k == 0 ? first<WIDE>(w[h], x) : more<WIDE>(part[t][h], w[h], x);
                    });
                });
            });
            each<T>([&](auto t) __attribute__((always_inline)) {
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) { add(sum[t][h], part[t][h]); });
            });
        }
    });
}

template <int T, int RUN, bool WIDE, bool EVEN_ODD>
NSTF_INLINE void block_of_bytes(const uint8_t* codes, const Rows<T, int8_t>& rows, int64_t from, Sums<T>& sum) {
    const auto word = [&](auto k, auto h) __attribute__((always_inline)) {
        return load_bytes(codes + word_at<EVEN_ODD>(k) * 64 + h * 4 * LANES);
    };
    block_of<T, RUN, WIDE, EVEN_ODD>(word, rows, from, sum);
}

#if NSTF_WORDS
// The same of codes and activations of 16 bits. pair(i, h): vector h of the block's pair i of columns.
template <int T, bool EVEN_ODD, class Pair>
NSTF_INLINE void block_of_pairs(const Pair& pair, const Rows<T, int16_t>& rows, int64_t from, Sums<T>& sum) {
    each<16>([&](auto i) __attribute__((always_inline)) {
        constexpr int64_t at = 2 * word_at<EVEN_ODD>(decltype(i)::value / 2) + decltype(i)::value % 2;
        Bytes w[BLOCKS];
        each<BLOCKS>([&](auto h) __attribute__((always_inline)) { w[h] = pair(i, h); });
        each<T>([&](auto t) __attribute__((always_inline)) {
            const Bytes x = two_words(rows.at[t] + from + 2 * at);
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                const Ints product = pairs(w[h], x);
                sum[t][h] = i == 0 ? product : add_ints(sum[t][h], product);
            });
        });
    });
}
template <int T, bool EVEN_ODD>
NSTF_INLINE void block_of_words(const int16_t* codes, const Rows<T, int16_t>& rows, int64_t from, Sums<T>& sum) {
    const auto pair = [&](auto i, auto h) __attribute__((always_inline)) {
        return load_bytes(codes + (2 * word_at<EVEN_ODD>(i / 2) + i % 2) * 2 * kPanel + h * 2 * LANES);
    };
    block_of_pairs<T, EVEN_ODD>(pair, rows, from, sum);
}
#endif
