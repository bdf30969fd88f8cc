// Packed codes repacked into panels of 16 rows, for one instruction set: included after packed_int8.h. Every activation meets 16 rows
// at once, so nothing is added up across a vector, and scales of 16 rows are applied as a vector.
//
// A block of 32 columns is eight words of 64 codes, [16 rows][4 columns] each. With codes of BITS bits it takes BITS vectors of 64
// bytes: words 0 to BITS - 1 in the lowest bits of theirs, the bits of the others one after the other in what is left at the top
// (panel_place). A panel is [blocks][BITS][64], its scales [groups][16]. All codes are unsigned, also those of tables.



// A block where it lies.
struct Lying {
    const uint8_t* at;
    template <int K, int H>
    NSTF_INLINE Bytes get() const { return load_bytes(at + K * 64 + H * 4 * LANES); }
};
#if NSTF_HELD
// And in registers: a core reads only one vector of 64 bytes a cycle, and the activations have to be read too.
template <int BITS>
struct Held {
    Bytes v[BITS];
    NSTF_INLINE explicit Held(const uint8_t* at) {
        each<BITS>([&](auto k) __attribute__((always_inline)) { v[k] = held(load_bytes(at + k * 64)); });
    }
    template <int K, int>
    NSTF_INLINE Bytes get() const { return v[K]; }
};
#endif

// Vector H of word K of a block.
template <int BITS, int K, int H, int T, class Block>
NSTF_INLINE Bytes later_word(const Block& block, Bytes got) {
    if constexpr (T < BITS) {
        constexpr PanelPlace at = panel_place(BITS, K, T);
        constexpr int mask = ((1 << at.count) - 1) << T;
        const Bytes v = shifted<at.shift - T>(block.template get<at.vector, H>());
        return later_word<BITS, K, H, T + at.count>(block, T == 0 ? masked(v, mask) : with_masked(got, v, mask));
    } else {
        return got;
    }
}
template <int BITS, int K, int H, class Block>
NSTF_INLINE Bytes panel_word(const Block& block) {
    if constexpr (BITS == 8) return block.template get<K, H>();
    else if constexpr (K < BITS) return masked(block.template get<K, H>(), (1 << BITS) - 1);
    else return later_word<BITS, K, H, 0>(block, Bytes{});
}

template <int BITS, bool TABLE>
class PanelInt8 : public Leaf {
  public:
    PanelInt8(const PackedView& view, int threads)
        : Leaf(view.w.rows, view.w.cols), blocks_((cols + kChunk - 1) / kChunk * 2), groups_(view.w.groups),
          zeros_(view.w.zeros != nullptr) {
        const PackedMatrix& w = view.w;
        for (int64_t j = 0; j < blocks_; ++j)
            group_of_.push_back(static_cast<int32_t>(std::min(groups_ - 1, j * kBlock / w.group)) * kPanel);
        centre_ = static_cast<float>(TABLE ? 128 : 1 << (BITS - 1));
        if (TABLE) {
            const float top = largest(w);
            round_table(w, 128, table_);
            for (int i = 0; i < 16; ++i) levels_[i] = top > 0 ? w.table[i] / top * 127 : 0.0f;
        }
        const int64_t panels = (rows + kPanel - 1) / kPanel;
        codes_.grow_raw(panels * panel_bytes());
        scales_.grow_raw(panels * groups_ * kPanel);
        if (zeros_) zero_points_.grow_raw(panels * groups_ * kPanel);
        steps_.resize(static_cast<size_t>(panels * kPanel));
        auto task = [&](int64_t p) { repack(w, p); };
        parallel_for(threads, panels, task);
    }

    uintptr_t key() const override { return PANEL_KEY; }
    int64_t unit() const override { return kPanel; }
    void decode(int64_t row, float* out) const override {
        const uint8_t* block = codes_.data() + row / kPanel * panel_bytes();
        const int64_t place = row % kPanel, at = row / kPanel * kPanel * groups_ + place;
        alignas(64) uint8_t words[8 * 64];
        for (int64_t j = 0; j < blocks_; ++j, block += BITS * 64) {
            each<8>([&](auto k) __attribute__((always_inline)) {
                each<ROW_BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    store_bytes(words + k * 64 + h * 4 * LANES, panel_word<BITS, decltype(k)::value, decltype(h)::value>(Lying{block}));
                });
            });
            const int64_t group = at + group_of_[static_cast<size_t>(j)];
            const float scale = (1.0f + scales_.data()[group]) * steps_[static_cast<size_t>(row)];
            const float centre = zeros_ ? static_cast<float>(zero_points_.data()[group]) : centre_;
            for (int64_t c = 0; c < std::min(kBlock, cols - j * kBlock); ++c) {
                const uint8_t code = words[c / 4 * 64 + place * 4 + c % 4];
                out[j * kBlock + c] = (TABLE ? levels_[code & 15] : static_cast<float>(code) - centre) * scale;
            }
        }
    }
    std::string kernel() const override { return std::string("panels int8 x int8, ") + name(SELF); }

    // In the columns' order; a scale for 8 of them where there are few rows, else for 32, and then sums are whole numbers.
    void reserve(const float*, int64_t batch, Input& in) const override {
        reserve_input<false>(cols, batch, in);
        if (NSTF_WORDS) in.wide.grow(batch * in.stride);
    }
    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        const bool fine = in.batch < kSeveral;
        for (int64_t b = first; b < end; ++b) {
            float *by = in.scales.data() + b * in.scales_stride, *sums = in.sums.data() + b * in.sums_stride;
            int8_t* codes = in.codes.data() + b * in.stride;
            alignas(64) float last[kChunk] = {};  // a chunk that is not whole
            for (int64_t j = 0; j < blocks_; j += 2) {
                const float* from = x + b * cols + j * kBlock;
                if ((j + 2) * kBlock > cols) {
                    std::copy_n(from, cols - j * kBlock, last);
                    from = last;
                }
                quantise<false>(from, fine, codes + j * kBlock, by + (fine ? 8 * j : j), sums + j);
#if NSTF_WORDS
                store_words(codes + j * kBlock, in.wide.data() + b * in.stride + j * kBlock);
#endif
                for (int64_t k = j; !fine && k < j + 2; ++k) {
                    // At most 127 times the block's length; NaN or infinite activations make their result NaN elsewhere.
                    const float whole = by[k] > 0 ? sums[k] / by[k] : 0.0f;
                    sums[k] = std::fabs(whole) < 8192.0f ? std::nearbyint(whole) : 0.0f;
                }
            }
        }
    }

    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t r = first; r < end; r += kPanel) panel(in, batch, r, y + r, stride);
    }

  private:
    static constexpr bool WORDS = NSTF_WORDS && (BITS == 8 || TABLE);
    static constexpr int RUN = run_of(TABLE ? 8 : BITS);
    static constexpr int64_t kUnpackedBlock = 8 * 64 * (WORDS ? 2 : 1);
    int64_t panel_bytes() const { return blocks_ * BITS * 64; }

    template <int K, int H, class Block>
    NSTF_INLINE static Bytes word(const Block& block, Bytes table) {
        const Bytes v = panel_word<BITS, K, H>(block);
        return TABLE ? looked_up(table, v) : v;
    }
    struct AsStored {  // a panel's codes as they lie in it
        static constexpr int MOVED = 0;
        static constexpr int64_t BLOCK = BITS * 64;
        static constexpr int LINES = BITS;
        Bytes table;
        template <int T, class R>
        NSTF_INLINE void sums(const uint8_t* at, const R& rows, int64_t from, Sums<T>& sum) const {
#if NSTF_HELD
            const std::conditional_t<(BITS < 8), Held<BITS>, Lying> block{at};
#else
            const Lying block{at};
#endif
#if NSTF_WORDS
            if constexpr (WORDS) {
                const auto pair = [&](auto i, auto h) __attribute__((always_inline)) {
                    constexpr int I = decltype(i)::value;
                    const Bytes v = word<I / 2, decltype(h)::value>(block, table);
                    return I % 2 == 0 ? even_codes(v) : odd_codes(v);
                };
                return block_of_pairs<T, false>(pair, rows, from, sum);
            } else
#endif
            {
                const auto one = [&](auto k, auto h) __attribute__((always_inline)) {
                    return word<decltype(k)::value, decltype(h)::value>(block, table);
                };
                block_of<T, RUN, false, false>(one, rows, from, sum);
            }
        }
    };
    // The same where few rows of activations have a scale for 8 columns each: add(i, sums of the words 2i and 2i + 1).
    template <int T, class R, class F>
    NSTF_INLINE static void fine_sums(const uint8_t* at, Bytes table, const R& rows, int64_t from, F add) {
#if NSTF_HELD
        const std::conditional_t<(BITS < 8), Held<BITS>, Lying> block{at};
#else
        const Lying block{at};
#endif
        each<4>([&](auto i) __attribute__((always_inline)) {
            Sums<T> sum;
            each<2>([&](auto half) __attribute__((always_inline)) {
                constexpr int K = 2 * decltype(i)::value + decltype(half)::value;
                Bytes w[BLOCKS];
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) { w[h] = word<K, decltype(h)::value>(block, table); });
                each<T>([&](auto t) __attribute__((always_inline)) {
#if NSTF_WORDS
                    if constexpr (WORDS) {
                        const Bytes even = two_words(rows.at[t] + from + 4 * K), odd = two_words(rows.at[t] + from + 4 * K + 2);
                        each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                            const Ints both = add_ints(pairs(even_codes(w[h]), even), pairs(odd_codes(w[h]), odd));
                            sum[t][h] = half == 0 ? both : add_ints(sum[t][h], both);
                        });
                        return;
                    } else
#endif
                    {
                        const Bytes x = four_bytes(rows.at[t] + from + 4 * K);
                        each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                            // Sums of two products, which 16 bits hold up to 6 bits, are not widened yet.
                            if (half == 0) sum[t][h] = RUN == 1 ? widened(first<false>(w[h], x)) : first<false>(w[h], x);
                            else if (RUN == 1) sum[t][h] = add_ints(sum[t][h], widened(first<false>(w[h], x)));
                            else sum[t][h] = widened(more<false>(sum[t][h], w[h], x));
                        });
                    }
                });
            });
            add(i, sum);
        });
    }
    struct AsBytes {  // as `unpacked` leaves them; 16 bits hold them with their sign, and then nothing is taken off the sums
        static constexpr int MOVED = WORDS ? 128 : 0;
        static constexpr int64_t BLOCK = kUnpackedBlock;
        static constexpr int LINES = 0;
        template <int T, class R>
        NSTF_INLINE void sums(const uint8_t* block, const R& rows, int64_t from, Sums<T>& sum) const {
#if NSTF_WORDS
            if constexpr (WORDS) return block_of_words<T, false>(reinterpret_cast<const int16_t*>(block), rows, from, sum);
            else
#endif
                block_of_bytes<T, RUN, false, false>(block, rows, from, sum);
        }
    };

    void panel(const Input& in, int64_t batch, int64_t r, float* y, int64_t stride) const {
        const uint8_t* codes = codes_.data() + r / kPanel * panel_bytes();
        const Bytes table = table_bytes(table_);
        int64_t b = 0;
        if (batch > 4) {
            thread_local Buffer<uint8_t> room;
            uint8_t* bytes = room.grow(blocks_ * kUnpackedBlock);
            unpacked(codes, table, bytes);
            for (; b + TOKENS <= batch; b += TOKENS) tokens<TOKENS>(AsBytes{}, bytes, in, b, r, y, stride);
            if (TOKENS > 4)
                for (; b + 4 <= batch; b += 4) tokens<4>(AsBytes{}, bytes, in, b, r, y, stride);
            for (; b < batch; ++b) tokens<1>(AsBytes{}, bytes, in, b, r, y, stride);
            return;
        }
        if (batch == 4) return tokens<4>(AsStored{table}, codes, in, b, r, y, stride);
        for (; b + 2 <= batch; b += 2) few<2>(table, codes, in, b, r, y, stride);
        for (; b < batch; ++b) few<1>(table, codes, in, b, r, y, stride);
    }

    template <int T>
    __attribute__((noinline)) void few(Bytes table, const uint8_t* codes, const Input& in, int64_t b, int64_t r, float* y,
                                       int64_t stride) const {
        const float *by = in.scales.data() + b * in.scales_stride, *sums = in.sums.data() + b * in.sums_stride;
        const int64_t by_stride = in.scales_stride, sums_stride = in.sums_stride, blocks = blocks_;
        const int32_t* group_of = group_of_.data();
        const uint8_t* scales = scales_.data() + r * groups_;
        const uint8_t* zeros = zeros_ ? zero_points_.data() + r * groups_ : nullptr;
        const auto rows = rows_of<T>(in, b);
        const Floats one = set(1.0f), centre = set(centre_);
        Floats total[T][BLOCKS];
        each<T>([&](auto t) __attribute__((always_inline)) {
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) { total[t][h] = zero_floats(); });
        });
        for (int64_t j = 0; j < blocks; ++j, codes += BITS * 64) {
            each<BITS>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(codes + kFar + 64 * i, 0, 3); });
            Floats found[T][BLOCKS];
            fine_sums<T>(codes, table, rows, j * kBlock, [&](auto i, const Sums<T>& sum) __attribute__((always_inline)) {
                each<T>([&](auto t) __attribute__((always_inline)) {
                    const Floats scale = set(by[t * by_stride + 8 * j + 2 * i]);
                    each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                        const Floats part = to_floats(sum[t][h]);
                        found[t][h] = i == 0 ? mul(part, scale) : fma(part, scale, found[t][h]);
                    });
                });
            });
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                const Floats s = fma(floats_of_bytes(scales + group_of[j] + h * LANES), one, one);
                const Floats z = zeros != nullptr ? floats_of_bytes(zeros + group_of[j] + h * LANES) : centre;
                each<T>([&](auto t) __attribute__((always_inline)) {
                    total[t][h] = fma(negative_fma(z, set(sums[t * sums_stride + j]), found[t][h]), s, total[t][h]);
                });
            });
        }
        store_rows<T>(total, r, y + b * stride, stride);
    }

    template <int T>
    NSTF_INLINE auto rows_of(const Input& in, int64_t b) const {
        using Code = std::conditional_t<WORDS, int16_t, int8_t>;
        const Code* q = nullptr;
        if constexpr (WORDS) q = in.wide.data();
        else q = in.codes.data();
        return Rows<T, Code>(q + b * in.stride, in.stride);
    }
    template <int T>
    NSTF_INLINE void store_rows(const Floats (&total)[T][BLOCKS], int64_t r, float* y, int64_t stride) const {
        const int64_t left = this->rows - r;
        for (int t = 0; t < T; ++t)
            for (int h = 0; h < BLOCKS; ++h)
                if (const int count = static_cast<int>(std::min<int64_t>(LANES, left - h * LANES)); count > 0)
                    store_first(y + t * stride + h * LANES, mul(total[t][h], load(steps_.data() + r + h * LANES)), count);
    }

    // A panel's codes as bytes, or in 16 bits each, for many rows of activations.
    void unpacked(const uint8_t* codes, Bytes table, uint8_t* to) const {
        for (int64_t j = 0; j < blocks_; ++j, codes += BITS * 64) {
            each<BITS>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(codes + kFar + 64 * i, 0, 2); });
            each<8>([&](auto k) __attribute__((always_inline)) {
                each<ROW_BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    const Bytes v = word<decltype(k)::value, decltype(h)::value>(Lying{codes}, table);
#if NSTF_WORDS
                    if constexpr (WORDS) {
                        uint8_t* at = to + j * kUnpackedBlock + k * 128 + h * 4 * LANES;
                        const Bytes w = with_sign(v);
                        store_bytes(at, even_bytes(w));
                        store_bytes(at + 64, odd_bytes(w));
                        return;
                    }
#endif
                    store_bytes(to + j * kUnpackedBlock + k * 64 + h * 4 * LANES, v);
                });
            });
        }
    }

    template <int T, class Codes>
    __attribute__((noinline)) void tokens(const Codes& source, const uint8_t* codes, const Input& in, int64_t b, int64_t r, float* y,
                                          int64_t stride) const {
        const float *by = in.scales.data() + b * in.scales_stride, *wholes = in.sums.data() + b * in.sums_stride;
        const int64_t by_stride = in.scales_stride, wholes_stride = in.sums_stride, blocks = blocks_;
        const int32_t* group_of = group_of_.data();
        const uint8_t* scales = scales_.data() + r * groups_;
        const uint8_t* zeros = zeros_ ? zero_points_.data() + r * groups_ : nullptr;
        const auto rows = rows_of<T>(in, b);
        const Floats one = set(1.0f), centre = set(centre_ - Codes::MOVED), moved = set(Codes::MOVED);
        const bool centred = Codes::MOVED > 0 && zeros == nullptr;
        Floats total[T][BLOCKS];
        each<T>([&](auto t) __attribute__((always_inline)) {
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) { total[t][h] = zero_floats(); });
        });
        for (int64_t j = 0; j < blocks; ++j, codes += Codes::BLOCK) {
            each<Codes::LINES>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(codes + kFar + 64 * i, 0, 3); });
            Sums<T> sum;
            source.template sums<T>(codes, rows, j * kBlock, sum);
            Floats s[BLOCKS], z[BLOCKS];
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                s[h] = fma(floats_of_bytes(scales + group_of[j] + h * LANES), one, one);
                z[h] = zeros != nullptr ? sub(floats_of_bytes(zeros + group_of[j] + h * LANES), moved) : centre;
            });
            each<T>([&](auto t) __attribute__((always_inline)) {
                const Floats scale = set(by[t * by_stride + j]), whole = set(wholes[t * wholes_stride + j]);
                each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    const Floats found = centred ? to_floats(sum[t][h]) : negative_fma(z[h], whole, to_floats(sum[t][h]));
                    total[t][h] = fma(found, mul(scale, s[h]), total[t][h]);
                });
            });
        }
        store_rows<T>(total, r, y + b * stride, stride);
    }

    // Panel p, from rows as they are stored. Rows beyond the last one repeat it.
    void repack(const PackedMatrix& w, int64_t p) {
        const Spread spread(BITS == 8 ? 7 : BITS);
        const int64_t chunk_bytes = BITS * 8, row_bytes = blocks_ / 2 * chunk_bytes;
        thread_local Buffer<uint8_t> room;
        uint8_t* copies = room.grow(kPanel * (row_bytes + kBeyond));
        const uint8_t* in[kPanel];
        for (int i = 0; i < kPanel; ++i) {
            const int64_t r = std::min(rows - 1, p * kPanel + i);
            in[i] = w.codes + r * w.row_bytes;
            if (in[i] + row_bytes + kBeyond > w.codes_end) {
                uint8_t* copy = copies + i * (row_bytes + kBeyond);
                std::copy_n(in[i], std::min(row_bytes, w.row_bytes), copy);
                in[i] = copy;
            }
            row_scales(w, r, p * kPanel + i);
        }
        uint8_t* to = codes_.data() + p * panel_bytes();
        for (int64_t c = 0; c < blocks_ / 2; ++c, to += 2 * BITS * 64) {
            alignas(64) uint8_t words[2 * 8 * 64];
            for (int h = 0; h < ROW_BLOCKS; ++h) {
                Bytes v[PARTS][LANES];
                for (int i = 0; i < LANES; ++i) {
                    Bytes parts[PARTS];
                    const uint8_t* from = in[h * LANES + i] + c * chunk_bytes;
                    if (BITS == 8) each<PARTS>([&](auto k) __attribute__((always_inline)) { parts[k] = load_bytes(from + k * 4 * LANES); });
                    else spread(from, parts);
                    for (int k = 0; k < PARTS; ++k) v[k][i] = parts[k];
                }
                for (int k = 0; k < PARTS; ++k) {
                    transpose(v[k]);
                    for (int i = 0; i < LANES; ++i) store_bytes(words + (k * LANES + i) * 64 + h * 4 * LANES, v[k][i]);
                }
            }
            for (int half = 0; half < 2; ++half)
                each<ROW_BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    store_block<decltype(h)::value>(words + half * 8 * 64, to + half * BITS * 64);
                });
        }
    }

    // Vector H of the words of a block, to their places.
    template <int H>
    static void store_block(const uint8_t* words, uint8_t* to) {
        Bytes out[BITS];
        each<BITS>([&](auto k) __attribute__((always_inline)) { out[k] = load_bytes(words + k * 64 + H * 4 * LANES); });
        each<8 - BITS>([&](auto k) __attribute__((always_inline)) {
            constexpr int K = BITS + decltype(k)::value;
            const Bytes v = load_bytes(words + K * 64 + H * 4 * LANES);
            each<BITS>([&](auto t) __attribute__((always_inline)) {  // bit by bit
                constexpr int T = decltype(t)::value;
                constexpr PanelPlace at = panel_place(BITS, K, T);
                out[at.vector] = any_of(out[at.vector], shifted<T - at.shift>(masked(v, 1 << T)));
            });
        });
        each<BITS>([&](auto k) __attribute__((always_inline)) { store_bytes(to + k * 64 + H * 4 * LANES, out[k]); });
    }

    // The scales and zero points of a row, for place `to`. A row's only scale is its step.
    void row_scales(const PackedMatrix& w, int64_t r, int64_t to) {
        const int64_t at = to / kPanel * groups_ * kPanel + to % kPanel;
        const float factor = TABLE ? largest(w) / 127 : 1.0f;
        float step = 0;
        if (w.scale_kind == Scale::kSteps) {
            step = float_of_half(w.super_[r]) * (1.0f / 256);
            for (int64_t g = 0; g < groups_; ++g) scales_.data()[at + g * kPanel] = static_cast<const uint8_t*>(w.scale)[r * groups_ + g];
        } else {
            step = w.scale_kind == Scale::kHalf ? float_of_half(static_cast<const uint16_t*>(w.scale)[r]) : static_cast<const float*>(w.scale)[r];
            scales_.data()[at] = 0;
        }
        steps_[static_cast<size_t>(to)] = step * factor;
        if (!zeros_) return;
        const uint8_t* zeros = w.zeros + r * w.zero_bytes;
        for (int64_t g = 0; g < groups_; ++g) {
            int code = 0;
            for (int i = 0; i < BITS; ++i) code |= (zeros[(g * BITS + i) / 8] >> ((g * BITS + i) % 8) & 1) << i;
            zero_points_.data()[at + g * kPanel] = static_cast<uint8_t>(code);
        }
    }

    int64_t blocks_, groups_;
    bool zeros_;
    float centre_;
    alignas(16) uint8_t table_[16] = {};
    float levels_[16] = {};  // the table before it was rounded
    Buffer<uint8_t> codes_, scales_, zero_points_;
    std::vector<float> steps_;       // of a row: what its scales are multiplied by
    std::vector<int32_t> group_of_;  // where the scales of a block are
};

// Null for scales that are stored in another way.
inline Shared make_panels(const PackedView& view, int threads) {
    const PackedMatrix& w = view.w;
    const bool plain = w.scale_kind == Scale::kHalf || w.scale_kind == Scale::kFloat;
    if (w.scale_kind != Scale::kSteps && !(plain && w.groups == 1)) return nullptr;
    const auto with = [&](auto bits, auto table) -> Shared {
        return std::make_shared<PanelInt8<decltype(bits)::value, decltype(table)::value>>(view, threads);
    };
    if (w.code == Code::kTable4 && !uniform(w)) return with(std::integral_constant<int, 4>{}, std::true_type{});
    switch (w.bits) {
        case 2: return with(std::integral_constant<int, 2>{}, std::false_type{});
        case 3: return with(std::integral_constant<int, 3>{}, std::false_type{});
        case 4: return with(std::integral_constant<int, 4>{}, std::false_type{});
        case 5: return with(std::integral_constant<int, 5>{}, std::false_type{});
        case 6: return with(std::integral_constant<int, 6>{}, std::false_type{});
        case 7: return with(std::integral_constant<int, 7>{}, std::false_type{});
        case 8: return with(std::integral_constant<int, 8>{}, std::false_type{});
        default: return nullptr;
    }
}
