// Products with packed codes in panels (panel_repack.h), for one instruction set; included after packed_int8.h. Activations are
// rounded as for codes as they are stored, in the columns' order.

#include "panel_repack.h"

template <int BITS, bool TABLE>
class PanelInt8 : public Leaf {
  public:
    PanelInt8(const PackedView& view, Copies& copies) : Leaf(view.w.rows, view.w.cols), m_(view.w, copies) {}

    uintptr_t key() const override { return PANEL_KEY; }
    int64_t unit() const override { return kPanel; }
    void decode(int64_t row, float* out) const override { m_.decode(row, out); }
    std::string kernel() const override { return std::string("panels int8 x int8, ") + name(SELF); }

    void reserve(const float*, int64_t batch, Input& in) const override { reserve_input<false, true>(cols, batch, in); }
    void prepare(const float* x, int64_t first, int64_t end, Input& in) const override {
        prepare_input<false, true>(x, cols, first, end, in);
        if (in.batch < kSeveral) return;
        // One scale for a block: its sum is a whole number times that, so that zero points are taken off without rounding.
        for (int64_t b = first; b < end; ++b) {
            const float* by = in.scales.data() + b * in.scales_stride;
            float* sums = in.sums.data() + b * in.sums_stride;
            // NaN is its own result, whatever comes here: the block's scale is NaN, too.
            for (int64_t j = 0; j < m_.blocks; ++j) sums[j] = by[j] > 0 ? std::nearbyint(sums[j] / by[j]) : 0.0f;
        }
    }

    Ahead codes(int64_t first, int64_t end) const override {
        return {m_.codes.data() + first / kPanel * m_.panel_bytes(), (end - first + kPanel - 1) / kPanel * m_.panel_bytes()};
    }
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        for (int64_t r = first; r < end; r += kPanel) panel(in, batch, r, y + r, stride);
    }

  private:
    static_assert(BLOCKS == ROW_BLOCKS, "one product covers the rows of a panel");
    static_assert(kSeveral == 4, "fewer rows have a scale for 8 columns, which `few` reads; from then on it is one for 32");
    static constexpr bool WORDS = NSTF_WORDS && (BITS == 8 || TABLE);
    static constexpr int RUN = run_of(TABLE ? 8 : BITS);
    static constexpr int64_t kUnpackedBlock = 8 * 64 * (WORDS ? 2 : 1);

    template <int K, int H, class Source>
    NSTF_INLINE static Bytes word(const Source& block, Bytes table) {
        const Bytes v = panel_word<BITS, K, H>(block);
        return TABLE ? looked_up(table, v) : v;
    }
    struct AsStored {
        static constexpr int SIGN_OFFSET = 0;
        static constexpr int64_t BLOCK = BITS * 64;
        static constexpr int PREFETCHED_LINES = BITS;
        Bytes table;
        template <int T, class R>
        NSTF_INLINE void sums(const uint8_t* at, const R& rows, int64_t from, Sums<T>& sum) const {
            const Block<BITS> block{at};
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
        const Block<BITS> block{at};
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
        static constexpr int SIGN_OFFSET = WORDS ? 128 : 0;
        static constexpr int64_t BLOCK = kUnpackedBlock;
        static constexpr int PREFETCHED_LINES = 0;
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
        const uint8_t* codes = m_.codes.data() + r / kPanel * m_.panel_bytes();
        const Bytes table = table_bytes(m_.table);
        int64_t b = 0;
        if (batch > kSeveral) {
            thread_local Buffer<uint8_t> room;
            uint8_t* bytes = room.grow(m_.blocks * kUnpackedBlock);
            unpacked(codes, table, bytes);
            for (; b + TOKENS <= batch; b += TOKENS) tokens<TOKENS>(AsBytes{}, bytes, in, b, r, y, stride);
            if (TOKENS > 4)
                for (; b + 4 <= batch; b += 4) tokens<4>(AsBytes{}, bytes, in, b, r, y, stride);
            for (; b < batch; ++b) tokens<1>(AsBytes{}, bytes, in, b, r, y, stride);
            return;
        }
        // Of so many rows unpacking first would take longer than it saves.
        if (batch == kSeveral) return tokens<static_cast<int>(kSeveral)>(AsStored{table}, codes, in, b, r, y, stride);
        for (; b + 2 <= batch; b += 2) few<2>(table, codes, in, b, r, y, stride);
        for (; b < batch; ++b) few<1>(table, codes, in, b, r, y, stride);
    }

    template <int T>
    __attribute__((noinline)) void few(Bytes table, const uint8_t* codes, const Input& in, int64_t b, int64_t r, float* y,
                                       int64_t stride) const {
        const float *by = in.scales.data() + b * in.scales_stride, *sums = in.sums.data() + b * in.sums_stride;
        const int64_t by_stride = in.scales_stride, sums_stride = in.sums_stride, blocks = m_.blocks;
        const int32_t* group_of = m_.group_of.data();
        const uint8_t* scales = m_.scales.data() + r * m_.groups;
        const uint8_t* zeros = m_.has_zeros ? m_.zero_points.data() + r * m_.groups : nullptr;
        const auto rows = rows_of<T>(in, b);
        const Floats one = set(1.0f), centre = set(m_.centre);
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
                    store_first(y + t * stride + h * LANES, mul(total[t][h], load(m_.steps.data() + r + h * LANES)), count);
    }

    // A panel's codes as bytes, or in 16 bits each: many rows of activations do not have to unpack them again.
    void unpacked(const uint8_t* codes, Bytes table, uint8_t* to) const {
        for (int64_t j = 0; j < m_.blocks; ++j, codes += BITS * 64) {
            each<BITS>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(codes + kFar + 64 * i, 0, 2); });
            each<8>([&](auto k) __attribute__((always_inline)) {
                each<ROW_BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    const Bytes v = word<decltype(k)::value, decltype(h)::value>(BlockInMemory{codes}, table);
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
        const int64_t by_stride = in.scales_stride, wholes_stride = in.sums_stride, blocks = m_.blocks;
        const int32_t* group_of = m_.group_of.data();
        const uint8_t* scales = m_.scales.data() + r * m_.groups;
        const uint8_t* zeros = m_.has_zeros ? m_.zero_points.data() + r * m_.groups : nullptr;
        const auto rows = rows_of<T>(in, b);
        const Floats one = set(1.0f), centre = set(m_.centre - Codes::SIGN_OFFSET), offset = set(Codes::SIGN_OFFSET);
        const bool centred = Codes::SIGN_OFFSET > 0 && zeros == nullptr;
        Floats total[T][BLOCKS];
        each<T>([&](auto t) __attribute__((always_inline)) {
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) { total[t][h] = zero_floats(); });
        });
        for (int64_t j = 0; j < blocks; ++j, codes += Codes::BLOCK) {
            each<Codes::PREFETCHED_LINES>(
                [&](auto i) __attribute__((always_inline)) { __builtin_prefetch(codes + kFar + 64 * i, 0, 3); });
            Sums<T> sum;
            source.template sums<T>(codes, rows, j * kBlock, sum);
            Floats s[BLOCKS], z[BLOCKS];
            each<BLOCKS>([&](auto h) __attribute__((always_inline)) {
                s[h] = fma(floats_of_bytes(scales + group_of[j] + h * LANES), one, one);
                z[h] = zeros != nullptr ? sub(floats_of_bytes(zeros + group_of[j] + h * LANES), offset) : centre;
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

    PanelMatrix<BITS, TABLE> m_;
};

// Null for scales that are stored in another way.
inline Shared make_panels(const PackedView& view, Copies& copies) {
    const PackedMatrix& w = view.w;
    const bool plain = w.scale_kind == Scale::kHalf || w.scale_kind == Scale::kFloat;
    if (w.scale_kind != Scale::kSteps && !(plain && w.groups == 1)) return nullptr;
    const auto with = [&](auto bits, auto table) -> Shared {
        return std::make_shared<PanelInt8<decltype(bits)::value, decltype(table)::value>>(view, copies);
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
