// Packed codes times activations rounded to int8, for one instruction set: the packed_int8_*.cpp include this file once per set,
// inside a namespace, after the pieces of the set (int8_avx512.h, int8_avx2.h, int8_neon.h), so there is no include guard.
//
// 64 codes at a time become bytes, and one instruction or two multiply each four of them with four activations and add them up.
// One row of activations: a row of codes is read as it is stored; a scale of activations covers 8 columns, and where the set can
// (NSTF_PAIRED) two chunks are read at once. Several
// rows: 16 rows of codes are unpacked side by side once, and each activation meets all 16; its scale covers 32 columns.
// Codes are unsigned, so their zero points are taken off at the end, times the sums of the activations of a block of 32.
// (Where eight-bit codes must be signed, 128 was taken off them, and is taken off their zero points.)
//
// The pieces of a set. Bytes, Ints, Floats: vectors of one size, LANES of Ints and Floats. A chunk is PARTS vectors of bytes.
// TOKENS rows of activations meet BLOCKS times LANES rows of codes at once; one row of them SHORT_ROWS or LONG_ROWS rows of codes.
// Nibbles, Levels, EightBits, OddBits: how a chunk of codes becomes bytes, and in which order: EVEN_ODD, the 32 even columns and
// then the odd ones. WIDE codes take eight bits. first, more, widened: sums of products, of which run() may be added before they
// are widened to Ints.

#include "int8_scales.h"
#include "int8_several.h"

template <class Codes>
class PackedInt8 : public Leaf {
  public:
    explicit PackedInt8(const PackedView& view)
        : Leaf(view.w.rows, view.w.cols), view_(view), w_(view_.w), codes_(w_), zero_codes_(w_.bits),
          chunks_((cols + kChunk - 1) / kChunk), blocks_(2 * chunks_), padded_((blocks_ + 15) / 16 * 16),
          chunk_bytes_(Codes::bytes(w_.bits)) {
        centre_ = static_cast<float>((Codes::TABLE ? 128 : 1 << (w_.bits - 1)) - MOVED);
        factor_ = Codes::TABLE ? largest(w_) / 127 : 1.0f;
        for (int64_t j = 0; j < blocks_; ++j)
            group_of_.push_back(static_cast<int32_t>(std::min(w_.groups - 1, j * kBlock / w_.group)));
        for (int64_t j = 0; PAIRS && j < padded_; ++j) {
            const auto of = [&](int64_t i) { return group_of_[static_cast<size_t>(std::min(i, blocks_ - 1))]; };
            in_sixteen_.push_back(of(j) - of(j / 16 * 16));
        }
        later_ = (kFar / (kPanel * w_.row_bytes) + 1) * kPanel;
        in_place_ = rows_in_place();
        bytes_ = {Codes::EVEN_ODD, Codes::WIDE, w_.zeros != nullptr, Codes::WIDE && SIGNED, codes_.run(),
                  static_cast<int32_t>(centre_), w_.group, w_.groups, chunks_, 1};
    }

    const ByteRows* byte_rows() const override { return &bytes_; }
    void unpack(int64_t first, int count, uint8_t* codes, float* scales, float* zeros) const override {
        Room& room = Room::mine(*this);
        for (int i = 0; i < count; ++i) {
            Floats unused;
            one_row_scales(w_, first + i, room.scales.data(), padded_, room.small.data(), &unused);
            const uint8_t* from = row(first + i, 0, room);
            for (int64_t c = 0; c < chunks_; ++c) {
                Bytes parts[PARTS];
                codes_(from + c * chunk_bytes_, parts);
                for (int p = 0; p < PARTS; ++p) store_bytes(codes + (i * chunks_ + c) * kChunk + p * 4 * LANES, parts[p]);
            }
            for (int64_t g = 0; g < w_.groups; ++g) {
                scales[i * w_.groups + g] = factor_ * room.scales.data()[g];
                if (w_.zeros != nullptr) zeros[i * w_.groups + g] = factor_ * room.zeros.data()[g];
            }
        }
    }

    uintptr_t key() const override { return KEY + (Codes::EVEN_ODD ? 0 : 1); }
    int64_t unit() const override { return kPanel; }
    void decode(int64_t row, float* out) const override { view_.decode(w_, row, 1, out, 1); }
    void decode_rows(int64_t first, int64_t count, float* out) const override { view_.decode(w_, first, count, out, 1); }
    std::string kernel() const override { return std::string("packed int8 x int8, ") + name(SELF); }

    void reserve(const float*, int64_t batch, Input& in) const override { reserve_input<Codes::EVEN_ODD>(cols, batch, in); }
    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        prepare_input<Codes::EVEN_ODD>(x, cols, first, end, in);
    }

    Ahead codes(int64_t first, int64_t end) const override {
        return {w_.codes + first * w_.row_bytes, (end - first) * w_.row_bytes};
    }
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        Room& room = Room::mine(*this);
        if (batch >= kSeveral) {
            const int32_t* middles = batch_middles(in, batch, room);
            for (int64_t r = first; r < end; r += kPanel)
                panel(in, middles, batch, r, static_cast<int>(std::min<int64_t>(kPanel, end - r)), room, y, stride);
            return;
        }
        // The first bytes, after which every row fetches what comes later.
        const uint8_t* start = w_.codes + first * w_.row_bytes;
        for (int64_t i = 0; i < w_.row_bytes + kNear; i += 64) __builtin_prefetch(start + i, 0, 2);
        if (w_.group == kBlock) all_rows<true>(in, in.sums.data(), batch, first, end, room, y, stride);
        else all_rows<false>(in, group_sums(in, batch, room), batch, first, end, room, y, stride);
    }

  private:
    // What is taken off codes of eight bits so that they are signed bytes.
    static constexpr int MOVED = Codes::WIDE && SIGNED ? 128 : 0;
    // Whether several rows of activations meet codes of 16 bits, and what such a code takes.
    static constexpr bool WORDS = NSTF_WORDS && Codes::WIDE;
    static constexpr int CODE_BYTES = WORDS ? 2 : 1;
    // Whether one row of activations meets two chunks of codes at once.
#if NSTF_PAIRED
    static constexpr bool PAIRS = Codes::PAIR;
#else
    static constexpr bool PAIRS = false;
#endif
    static constexpr int SUMS = CHUNK_SUMS<Codes::EVEN_ODD>, FINE = CHUNK_SCALES<Codes::EVEN_ODD>;

    // What a thread works in: scales and zero points of up to 16 rows by group, sums of activations, and copies of the last rows.
    struct Room {
        Buffer<float> scales, zeros, sums, by_block;
        Buffer<uint8_t> copies, panel, small;
        Buffer<int32_t> middles;
        static Room& mine(const PackedInt8& m) {
            thread_local Room room;
            room.scales.grow(kPanel * m.padded_ + LANES);
            if (PAIRS) room.by_block.grow(kPanel * m.padded_);
            room.zeros.grow(kPanel * m.padded_);
            room.sums.grow(kSeveral * m.padded_);
            room.copies.grow(kPanel * (m.w_.row_bytes + kBeyond + m.chunk_bytes_));
            room.small.grow(4 * (std::max(4 * m.w_.groups, m.w_.zero_bytes) + kChunk + kBeyond));
            return room;
        }
    };

    // Zero points of a row times its scales, where the matrix has some; returns the row's codes.
    const uint8_t* row(int64_t r, int slot, Room& room) const {
        float *scales = room.scales.data() + slot * padded_, *zeros = room.zeros.data() + slot * padded_;
        if (w_.zeros != nullptr) zero_points(r, scales, zeros, room.small.data());
        return row_codes(r, slot, room);
    }

    const uint8_t* row_codes(int64_t r, int slot, Room& room) const {
        const uint8_t* codes = w_.codes + r * w_.row_bytes;
        if (codes + chunks_ * chunk_bytes_ + kBeyond <= w_.codes_end) return codes;
        uint8_t* copy = room.copies.data() + slot * (w_.row_bytes + kBeyond + chunk_bytes_);
        std::copy_n(codes, w_.row_bytes, copy);
        return copy;
    }

    // How many rows, from the first, have kBeyond bytes after their codes and their scales.
    int64_t rows_in_place() const {
        const int64_t room = w_.codes_end - w_.codes - chunks_ * chunk_bytes_ - kBeyond;
        const int64_t scale_bytes = w_.groups * scale_size(w_.scale_kind);
        const int64_t scales = w_.rows - (kBeyond + scale_bytes - 1) / scale_bytes;
        return room < 0 ? 0 : std::max<int64_t>(0, std::min(room / w_.row_bytes + 1, scales));
    }

    // Where the codes and the scales of R rows are read: where they lie, but for a matrix's last rows.
    template <int R>
    NSTF_INLINE void places_of(int64_t r, int at, Room& room, const uint8_t** codes, const uint8_t** scales) const {
        if (__builtin_expect(r + R > in_place_, 0)) return copied<R>(r, at, room, codes, scales);
        const int64_t bytes = w_.groups * scale_size(w_.scale_kind);
        const uint8_t *first = w_.codes + r * w_.row_bytes, *scale = static_cast<const uint8_t*>(w_.scale) + r * bytes;
        each<R>([&](auto i) __attribute__((always_inline)) {
            codes[i] = first + i * w_.row_bytes;
            scales[i] = scale + i * bytes;
        });
    }
    template <int R>
    __attribute__((noinline)) void copied(int64_t r, int at, Room& room, const uint8_t** codes, const uint8_t** scales) const {
        readable_scales<R>(w_, r, room.small.data(), scales);
        for (int i = 0; i < R; ++i) codes[i] = row_codes(r + i, at + i, room);
    }

    // Zero points of a row times its scales, by group.
    void zero_points(int64_t r, const float* scales, float* zeros, uint8_t* room) const {
        const uint8_t* all = w_.zeros;
        const uint8_t* in = readable(all + r * w_.zero_bytes, w_.zero_bytes, all + w_.rows * w_.zero_bytes, room);
        alignas(64) uint8_t points[kChunk];
        const Floats moved = set(MOVED);
        for (int64_t g = 0; g < w_.groups; g += kChunk) {
            Bytes parts[PARTS];
            zero_codes_(in + g / 8 * w_.bits, parts);
            for (int p = 0; p < PARTS; ++p) store_bytes(points + p * 4 * LANES, parts[p]);
            for (int64_t i = 0; i < std::min<int64_t>(kChunk, w_.groups - g); i += LANES)
                store(zeros + g + i, mul(sub(floats_of_bytes(points + i), moved), load(scales + g + i)));
        }
    }

    // Sums of activations by group, of all rows of them.
    const float* group_sums(const Input& in, int64_t batch, Room& room) const {
        float* out = room.sums.data();
        std::fill_n(out, batch * padded_, 0.0f);
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t j = 0; j < blocks_; ++j)
                out[b * padded_ + group_of_[static_cast<size_t>(j)]] += in.sums.data()[b * padded_ + j];
        return out;
    }

    // Rows at a time share the loads of activations: what is best was measured on a Zen 4, and differs between the sets. AVX2 takes two
    // short rows, but long ones one after the other: a stream that is read from the first byte to the last is what the
    // processor's own prefetcher follows. Scales are made ready for 16 rows: what has just been written as a vector is not
    // read as single numbers until it has left the store buffer, and products would wait for it.
    template <bool SAME>
    void all_rows(const Input& in, const float* sums, int64_t batch, int64_t first, int64_t end, Room& room, float* y,
                  int64_t stride) const {
        const bool long_rows = w_.row_bytes > kLongRow;
        for (int64_t r = first; r < end; r += kPanel) {
            const int count = static_cast<int>(std::min<int64_t>(kPanel, end - r));
            const uint8_t* codes[kPanel];
            Floats lost[kPanel];  // the product of scales and sums
            int i = 0;
            for (; i + 4 <= count; i += 4) ready<4, SAME>(r + i, i, sums, room, codes + i, lost + i);
            for (; i < count; ++i) ready<1, SAME>(r + i, i, sums, room, codes + i, lost + i);
            fetch_scales(r);
            i = 0;
            if (Codes::BYTES == 64 || (long_rows && LONG_ROWS == 4)) {
                for (; i + 4 <= count; i += 4) rows<4, SAME, kFar>(in, sums, batch, i, codes, lost, room, y + r, stride);
            } else if (!long_rows) {
                for (; i + SHORT_ROWS <= count; i += SHORT_ROWS)
                    rows<SHORT_ROWS, SAME, kNear>(in, sums, batch, i, codes, lost, room, y + r, stride);
            }
            for (; i < count; ++i) rows<1, SAME, kNext>(in, sums, batch, i, codes, lost, room, y + r, stride);
        }
    }

    // What the products of R rows need, from place `i` of the room on.
    template <int R, bool SAME>
    void ready(int64_t r, int i, const float* sums, Room& room, const uint8_t** codes, Floats* lost) const {
        const uint8_t* from[R];
        float *scales = room.scales.data() + i * padded_, *zeros = room.zeros.data() + i * padded_;
        places_of<R>(r, i, room, codes, from);
        row_scales<R>(w_, r, from, scales, padded_, sums, lost);
        for (int k = 0; k < R && w_.zeros != nullptr; ++k)
            zero_points(r + k, scales + k * padded_, zeros + k * padded_, room.small.data());
#if NSTF_PAIRED
        if (!SAME && PAIRS) block_by_block<R>(scales, room.by_block.data() + i * padded_);
#endif
    }

    // Scales and zero points, of which a row is read at once, go into the first cache some rows before they are needed.
    void fetch_scales(int64_t r) const {
        const int64_t later = r + later_;
        const auto fetch = [&](const void* all, int64_t bytes) __attribute__((always_inline)) {
            const uint8_t* from = static_cast<const uint8_t*>(all) + later * bytes;
            for (int64_t i = 0; i < kPanel * bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
        };
        fetch(w_.scale, w_.groups * scale_size(w_.scale_kind));
        if (w_.zeros != nullptr) fetch(w_.zeros, w_.zero_bytes);
    }

    // R rows of codes, from the room's `at` on, times each row of activations. SAME: the groups are the blocks. AHEAD: bytes between
    // what is read and what is fetched into the caches. sums: of activations by group. y: of the room's first row.
    template <int R, bool SAME, int64_t AHEAD>
    void rows(const Input& in, const float* sums, int64_t batch, int at, const uint8_t* const* from, const Floats* first_lost,
              Room& room, float* y, int64_t stride) const {
        const uint8_t* codes[R];
        Floats lost[R];  // the product of scales, or of zero points, and sums
        each<R>([&](auto i) __attribute__((always_inline)) { codes[i] = from[at + i], lost[i] = first_lost[at + i]; });
        const float *scales = room.scales.data() + at * padded_, *zeros = room.zeros.data() + at * padded_;
        const Floats factor = set(factor_);
        // Copies, which the compiler knows to stay as they are.
        const Codes unpack = codes_;
        const int64_t chunks = chunks_, chunk_bytes = Codes::BYTES > 0 ? Codes::BYTES : chunk_bytes_, padded = padded_;
        const int32_t* group_of = group_of_.data();
#if NSTF_PAIRED
        const float* by_block = SAME || !PAIRS ? scales : room.by_block.data() + at * padded_;
#endif
        for (int64_t b = 0; b < batch; ++b) {
            const int8_t* q = in.codes.data() + b * in.stride;
            const float* fine = in.scales.data() + b * in.scales_stride;
            // The last of R rows begins R - 1 rows further on, and must have come by then.
            const uint8_t* ahead = codes[0] + (R - 1) * w_.row_bytes + AHEAD;
            Floats total[R];
            each<R>([&](auto i) __attribute__((always_inline)) { total[i] = zero_floats(); });
            int64_t c = 0;
#if NSTF_PAIRED
            if constexpr (PAIRS) c = pairs<R, AHEAD>(unpack, codes, q, fine, by_block, ahead, total);
#endif
            for (; c < chunks; ++c) {
                Bytes x[PARTS];
                each<PARTS>([&](auto p) __attribute__((always_inline)) { x[p] = load_bytes(q + c * kChunk + p * 4 * LANES); });
                constexpr int LEVEL = AHEAD == kFar ? 2 : 3;
                if constexpr (R * Codes::BYTES >= 64) {
                    each<R * Codes::BYTES / 64>(
                        [&](auto i) __attribute__((always_inline)) { __builtin_prefetch(ahead + 64 * i, 0, LEVEL); });
                } else {
                    for (int64_t i = 0; i < R * chunk_bytes; i += 64) __builtin_prefetch(ahead + i, 0, LEVEL);
                }
                ahead += R * chunk_bytes;
                Floats by[SUMS];
                each<SUMS>([&](auto k) __attribute__((always_inline)) { by[k] = load(fine + c * FINE + k * LANES); });
                const int64_t g0 = SAME ? 2 * c : group_of[2 * c], g1 = SAME ? 2 * c + 1 : group_of[2 * c + 1];
                each<R>([&](auto i) __attribute__((always_inline)) {
                    Bytes w[PARTS];
                    const float* s = scales + i * padded;
                    const auto add = [&](auto k, Ints found) __attribute__((always_inline)) {
                        const Floats scale = mul(by[k], block_scales<Codes::EVEN_ODD>(s + g0, s + g1, k));
                        total[i] = fma(to_floats(found), scale, total[i]);
                    };
#if NSTF_WORDS
                    if constexpr (Codes::TABLE) {
                        Bytes sizes[PARTS];
                        unpack.with_sizes(codes[i] + c * chunk_bytes, w, sizes);
                        add(std::integral_constant<int, 0>{}, add_ints(signed_products(sizes[0], w[0], x[0]),
                                                                       signed_products(sizes[1], w[1], x[1])));
                        return;
                    }
#endif
                    unpack(codes[i] + c * chunk_bytes, w);
                    each<SUMS>([&](auto k) __attribute__((always_inline)) { add(k, products(w, x, k)); });
                });
            }
            // Without zero points of its own, the middle of a format is that of every group.
            const float* lost_by = w_.zeros == nullptr ? scales : zeros;
            const Floats middle = set(w_.zeros == nullptr ? centre_ : 1.0f);
            if (b > 0 || w_.zeros != nullptr) {
                each<R>([&](auto i) __attribute__((always_inline)) { lost[i] = zero_floats(); });
                for (int64_t g = 0; g < w_.groups; g += LANES) {
                    const Floats sum = load(sums + b * padded + g);
                    each<R>([&](auto i) __attribute__((always_inline)) { lost[i] = fma(load(lost_by + i * padded + g), sum, lost[i]); });
                }
            }
            each<R>([&](auto i) __attribute__((always_inline)) { total[i] = mul(negative_fma(lost[i], middle, total[i]), factor); });
            if constexpr (R == 4) {
                store_four_sums(y + b * stride + at, total);
            } else {
                each<R>([&](auto i) __attribute__((always_inline)) { y[b * stride + at + i] = sum_of(total[i]); });
            }
        }
    }

#if NSTF_PAIRED
    // The scales of R rows by block, from those by group.
    template <int R>
    void block_by_block(const float* scales, float* out) const {
        for (int64_t j = 0; j < blocks_; j += LANES)
            each<R>([&](auto i) __attribute__((always_inline)) {
                store(out + i * padded_ + j, picked(scales + i * padded_ + group_of_[j], in_sixteen_.data() + j));
            });
    }

    // The chunks of R rows two by two, added to `total`; how many there were.
    template <int R, int64_t AHEAD>
    int64_t pairs(const Codes& unpack, const uint8_t* const* codes, const int8_t* q, const float* fine, const float* by_block,
                  const uint8_t*& ahead, Floats* total) const {
        const int64_t chunks = chunks_ / 2 * 2, padded = padded_;
        const int64_t chunk_bytes = Codes::BYTES > 0 ? Codes::BYTES : chunk_bytes_;
        for (int64_t c = 0; c < chunks; c += 2) {
            constexpr int LEVEL = AHEAD == kFar ? 2 : 3;
            const uint8_t* lines = ahead;
            ahead += 2 * R * chunk_bytes;
            Bytes x[2];
            pair_bytes<Codes::EVEN_ODD>(q + c * kChunk, x);
            const Floats by = pair_scales<Codes::EVEN_ODD>(fine + c * FINE);
            each<R>([&](auto i) __attribute__((always_inline)) {
                // At most two lines for a row: a loop over all of them took longer than some of the products.
                if (lines + i * 64 < ahead) __builtin_prefetch(lines + i * 64, 0, LEVEL);
                if (lines + (R + i) * 64 < ahead) __builtin_prefetch(lines + (R + i) * 64, 0, LEVEL);
                Bytes w[2];
                unpack.pair(codes[i] + c * chunk_bytes, w);
                const Floats scale = mul(by, four_blocks(by_block + i * padded + 2 * c));
                const Ints found = widened(more<Codes::WIDE>(first<Codes::WIDE>(w[0], x[0]), w[1], x[1]));
                total[i] = fma(to_floats(found), scale, total[i]);
            });
        }
        return chunks;
    }
#endif

    // Vector k of the sums of products of a chunk.
    static Ints products(const Bytes* w, const Bytes* x, int k) {
        if constexpr (SUMS == PARTS) {
            return widened(first<Codes::WIDE>(w[k], x[k]));
        } else if constexpr (Codes::WIDE && SIGNED) {
            return add_ints(widened(first<true>(w[k], x[k])), widened(first<true>(w[k + SUMS], x[k + SUMS])));
        } else {
            return widened(more<Codes::WIDE>(first<Codes::WIDE>(w[k], x[k]), w[k + SUMS], x[k + SUMS]));
        }
    }

    // What the middle of the format adds to the sums of products of each block: [batch][blocks]; null where zero points, or none, are
    // taken off. Sums of activations are whole numbers times their scale.
    const int32_t* batch_middles(const Input& in, int64_t batch, Room& room) const {
        if (w_.zeros != nullptr || centre_ == 0) return nullptr;
        int32_t* out = room.middles.grow(batch * blocks_);
        for (int64_t b = 0; b < batch; ++b) {
            const float *sums = in.sums.data() + b * in.sums_stride, *by = in.scales.data() + b * in.scales_stride;
            for (int64_t j = 0; j < blocks_; ++j) {
                // At most 127 times the block's length; NaN or infinite activations make their result NaN elsewhere.
                const float whole = by[j] > 0 ? sums[j] / by[j] : 0.0f;
                out[b * blocks_ + j] =
                    std::fabs(whole) < 8192.0f ? static_cast<int32_t>(centre_ * std::nearbyint(whole)) : 0;
            }
        }
        return out;
    }

    // `count` rows of codes for all activations.
    void panel(const Input& in, const int32_t* middles, int64_t batch, int64_t r, int count, Room& room, float* y,
               int64_t stride) const {
        uint8_t* panel = room.panel.grow(chunks_ * 1024 * CODE_BYTES + blocks_ * 128);
        float* scales = reinterpret_cast<float*>(panel + chunks_ * 1024 * CODE_BYTES);  // [block][16], then the zero points
        float* zeros = scales + blocks_ * kPanel;
        const uint8_t* rows[kPanel];
        for (int i = 0; i < kPanel; ++i) {
            Floats unused;
            one_row_scales(w_, r + std::min(i, count - 1), room.scales.data() + i * padded_, padded_, room.small.data(), &unused);
            rows[i] = row(r + std::min(i, count - 1), i, room);
        }
        // The next 16 rows follow these in memory. The processor's own prefetcher loses its way among 16 short streams.
        const uint8_t* ahead = w_.codes + (r + kPanel) * w_.row_bytes;
        for (int64_t c = 0; c < chunks_; ++c) {
            for (int64_t i = 0; i < kPanel * chunk_bytes_; i += 64) __builtin_prefetch(ahead + i, 0, 2);
            ahead += kPanel * chunk_bytes_;
            for (int h = 0; h < ROW_BLOCKS; ++h) {
                Bytes v[PARTS][LANES];
                for (int i = 0; i < LANES; ++i) {
                    Bytes parts[PARTS];
                    codes_(rows[h * LANES + i] + c * chunk_bytes_, parts);
                    for (int p = 0; p < PARTS; ++p) v[p][i] = parts[p];
                }
                for (int p = 0; p < PARTS; ++p) {
                    transpose(v[p]);
                    uint8_t* to = panel + CODE_BYTES * (c * 1024 + p * LANES * 64) + h * 4 * LANES;
                    for (int i = 0; i < LANES; ++i) {
#if NSTF_WORDS
                        if (WORDS) {
                            store_bytes(to + 128 * i, even_bytes(v[p][i]));
                            store_bytes(to + 128 * i + 64, odd_bytes(v[p][i]));
                            continue;
                        }
#endif
                        store_bytes(to + 64 * i, v[p][i]);
                    }
                }
            }
        }
        for (int64_t j = 0; j < blocks_; ++j)
            for (int i = 0; i < kPanel; ++i) {
                const int64_t g = i * padded_ + group_of_[static_cast<size_t>(j)];
                scales[j * kPanel + i] = factor_ * room.scales.data()[g];
                if (w_.zeros != nullptr) zeros[j * kPanel + i] = factor_ * room.zeros.data()[g];
            }
        for (int i = 0; i < count; i += LANES * BLOCKS) {
            const Panel part = {panel + 4 * i, scales + i, zeros + i, middles, count - i};
            float* to = y + r + i;
            switch (codes_.run()) {
                case 8: all_tokens<8>(in, batch, part, to, stride); break;
                case 4: all_tokens<4>(in, batch, part, to, stride); break;
                case 2: all_tokens<2>(in, batch, part, to, stride); break;
                default: all_tokens<1>(in, batch, part, to, stride);
            }
        }
    }

    struct Panel {  // some rows of one
        const uint8_t* codes;
        const float *scales, *zeros;
        const int32_t* middles;
        int count;
    };
    // What is taken off the sums of products of a block.
    enum class Lost { kNothing, kMiddle, kZeros };

    template <int RUN>
    void all_tokens(const Input& in, int64_t batch, const Panel& panel, float* y, int64_t stride) const {
        if (w_.zeros != nullptr) all_tokens<RUN, Lost::kZeros>(in, batch, panel, y, stride);
        else if (panel.middles != nullptr) all_tokens<RUN, Lost::kMiddle>(in, batch, panel, y, stride);
        else all_tokens<RUN, Lost::kNothing>(in, batch, panel, y, stride);
    }
    template <int RUN, Lost LOST>
    void all_tokens(const Input& in, int64_t batch, const Panel& panel, float* y, int64_t stride) const {
        int64_t b = 0;
        for (; b + TOKENS <= batch; b += TOKENS) tokens<TOKENS, RUN, LOST>(in, b, panel, y + b * stride, stride);
        if (TOKENS > 4)
            for (; b + 4 <= batch; b += 4) tokens<4, RUN, LOST>(in, b, panel, y + b * stride, stride);
        for (; b < batch; ++b) tokens<1, RUN, LOST>(in, b, panel, y + b * stride, stride);
    }

    template <int T, int RUN, Lost LOST>
    void tokens(const Input& in, int64_t b, const Panel& panel, float* y, int64_t stride) const {
        const float *by = in.scales.data() + b * in.scales_stride, *sums = in.sums.data() + b * in.sums_stride;
        const int64_t by_stride = in.scales_stride, sums_stride = in.sums_stride, blocks = blocks_;
        const int32_t* middles = LOST == Lost::kMiddle ? panel.middles + b * blocks : nullptr;
        using Code = std::conditional_t<WORDS, int16_t, int8_t>;
        const Code* q = nullptr;
        if constexpr (WORDS) q = in.wide.data();
        else q = in.codes.data();
        const Rows<T, Code> rows(q + b * in.stride, in.stride);
        Floats total[T][BLOCKS];
        each<T>([&](auto t) __attribute__((always_inline)) {
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) { total[t][h] = zero_floats(); });
        });
        for (int64_t c = 0; c < chunks_; ++c)
            each<2>([&](auto half) __attribute__((always_inline)) {
                const int64_t j = 2 * c + half, word = c * 16 + half * SECOND<Codes::EVEN_ODD>;  // the block's first one
                Sums<T> sum;
#if NSTF_WORDS
                if constexpr (WORDS) {
                    block_of_words<T, Codes::EVEN_ODD>(reinterpret_cast<const int16_t*>(panel.codes) + word * 64, rows, word * 4, sum);
                } else
#endif
                {
                    block_of_bytes<T, RUN, Codes::WIDE, Codes::EVEN_ODD>(panel.codes + word * 64, rows, word * 4, sum);
                }
                Floats s[BLOCKS], z[BLOCKS];
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    s[h] = load(panel.scales + j * kPanel + h * LANES);
                    if (LOST == Lost::kZeros) z[h] = load(panel.zeros + j * kPanel + h * LANES);
                });
                each<T>([&](auto t) __attribute__((always_inline)) {
                    const Floats scale = set(by[t * by_stride + j]);
                    each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                        Ints found = sum[t][h];
                        if (LOST == Lost::kMiddle) found = sub_ints(found, set_int(middles[t * blocks + j]));
                        total[t][h] = fma(to_floats(found), mul(scale, s[h]), total[t][h]);
                        if (LOST == Lost::kZeros) total[t][h] = negative_fma(z[h], set(sums[t * sums_stride + j]), total[t][h]);
                    });
                });
            });
        for (int t = 0; t < T; ++t)
            for (int h = 0; h < BLOCKS; ++h)
                if (const int count = std::min(LANES, panel.count - h * LANES); count > 0)
                    store_first(y + t * stride + h * LANES, total[t][h], count);
    }

    PackedView view_;
    const PackedMatrix& w_;
    Codes codes_;
    Spread zero_codes_;
    int64_t chunks_, blocks_, padded_, chunk_bytes_;
    float centre_, factor_;
    int64_t in_place_;  // rows_in_place()
    int64_t later_;     // how many rows ahead scales are fetched
    std::vector<int32_t> group_of_;    // of a block
    std::vector<int32_t> in_sixteen_;  // the same, counted from the group of the first of each 16 blocks
    ByteRows bytes_;
};

inline Shared make(const PackedView& view) {
    const PackedMatrix& w = view.w;
    if (w.code == Code::kBytes) return std::make_shared<PackedInt8<EightBits>>(view);
    if (w.code == Code::kBits) return std::make_shared<PackedInt8<OddBits>>(view);
    if (uniform(w)) return std::make_shared<PackedInt8<Nibbles>>(view);
    return std::make_shared<PackedInt8<Levels>>(view);
}
