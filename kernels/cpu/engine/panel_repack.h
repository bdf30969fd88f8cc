// Packed codes repacked into panels of 16 rows, for one instruction set: included by panel_int8.h. Every activation meets 16 rows
// at once, so nothing is added up across a vector, and scales of 16 rows are applied as a vector.
//
// A block of 32 columns is eight words of 64 codes, [16 rows][4 columns] each. With codes of BITS bits it takes BITS vectors of 64
// bytes: words 0 to BITS - 1 in the lowest bits of theirs, the bits of the others one after the other in what is left at the top
// (panel_place). A panel is [blocks][BITS][64], its scales [groups][16]. All codes are unsigned, also those of tables.

struct BlockInMemory {
    const uint8_t* at;
    template <int K, int H>
    NSTF_INLINE Bytes get() const { return load_bytes(at + K * 64 + H * 4 * LANES); }
};
#if NSTF_HELD
// A core reads only one vector of 64 bytes a cycle, and the activations have to be read too: each vector of the block once.
template <int BITS>
struct BlockInRegisters {
    Bytes v[BITS];
    NSTF_INLINE explicit BlockInRegisters(const uint8_t* at) {
        each<BITS>([&](auto k) __attribute__((always_inline)) { v[k] = held(load_bytes(at + k * 64)); });
    }
    template <int K, int>
    NSTF_INLINE Bytes get() const { return v[K]; }
};
// Of 8 bits every vector is read once in any case.
template <int BITS>
using Block = std::conditional_t<(BITS < 8), BlockInRegisters<BITS>, BlockInMemory>;
#else
template <int BITS>
using Block = BlockInMemory;
#endif

// Vector H of word K of a block.
template <int BITS, int K, int H, int T, class Source>
NSTF_INLINE Bytes later_word(const Source& block, Bytes got) {
    if constexpr (T < BITS) {
        constexpr PanelPlace at = panel_place(BITS, K, T);
        constexpr int mask = ((1 << at.count) - 1) << T;
        const Bytes v = shifted<at.shift - T>(block.template get<at.vector, H>());
        return later_word<BITS, K, H, T + at.count>(block, T == 0 ? masked(v, mask) : with_masked(got, v, mask));
    } else {
        return got;
    }
}
template <int BITS, int K, int H, class Source>
NSTF_INLINE Bytes panel_word(const Source& block) {
    if constexpr (BITS == 8) return block.template get<K, H>();
    else if constexpr (K < BITS) return masked(block.template get<K, H>(), (1 << BITS) - 1);
    else return later_word<BITS, K, H, 0>(block, Bytes{});
}

// The copy. Needs the arrays of the matrix it was made from until `copies` have run.
template <int BITS, bool TABLE>
struct PanelMatrix {
    PanelMatrix(const PanelMatrix&) = delete;  // `copies` know where it lies
    PanelMatrix(const PackedMatrix& w, Copies& copies)
        : rows(w.rows), cols(w.cols), blocks((cols + kChunk - 1) / kChunk * 2), groups(w.groups), has_zeros(w.zeros != nullptr),
          centre(static_cast<float>(TABLE ? 128 : 1 << (BITS - 1))) {
        for (int64_t j = 0; j < blocks; ++j)
            group_of.push_back(static_cast<int32_t>(std::min(groups - 1, j * kBlock / w.group)) * kPanel);
        if (TABLE) {
            const float top = largest(w);
            round_table(w, 128, table);
            for (int i = 0; i < 16; ++i) levels[i] = top > 0 ? w.table[i] / top * 127 : 0.0f;
        }
        const int64_t panels = (rows + kPanel - 1) / kPanel;
        codes.grow_raw(panels * panel_bytes());
        scales.grow_raw(panels * groups * kPanel);
        if (has_zeros) zero_points.grow_raw(panels * groups * kPanel);
        steps.resize(static_cast<size_t>(panels * kPanel));
        copies.add(panels, [this, w](int64_t p) { repack(w, p); });
    }

    int64_t panel_bytes() const { return blocks * BITS * 64; }

    void decode(int64_t row, float* out) const {
        const uint8_t* block = codes.data() + row / kPanel * panel_bytes();
        const int64_t place = row % kPanel, at = row / kPanel * kPanel * groups + place;
        alignas(64) uint8_t words[8 * 64];
        for (int64_t j = 0; j < blocks; ++j, block += BITS * 64) {
            each<8>([&](auto k) __attribute__((always_inline)) {
                each<ROW_BLOCKS>([&](auto h) __attribute__((always_inline)) {
                    store_bytes(words + k * 64 + h * 4 * LANES,
                                panel_word<BITS, decltype(k)::value, decltype(h)::value>(BlockInMemory{block}));
                });
            });
            const int64_t group = at + group_of[static_cast<size_t>(j)];
            const float scale = (1.0f + scales.data()[group]) * steps[static_cast<size_t>(row)];
            const float zero = has_zeros ? static_cast<float>(zero_points.data()[group]) : centre;
            for (int64_t c = 0; c < std::min(kBlock, cols - j * kBlock); ++c) {
                const uint8_t code = words[c / 4 * 64 + place * 4 + c % 4];
                out[j * kBlock + c] = (TABLE ? levels[code & 15] : static_cast<float>(code) - zero) * scale;
            }
        }
    }

    int64_t rows, cols, blocks, groups;
    bool has_zeros;
    float centre;
    alignas(16) uint8_t table[16] = {};
    float levels[16] = {};  // the table before it was rounded
    Buffer<uint8_t, LargePages> codes, scales, zero_points;
    std::vector<float> steps;       // of a row: what its scales are multiplied by
    std::vector<int32_t> group_of;  // where the scales of a block are

  private:
    // Panel p, from rows as they are stored. Rows beyond the last one repeat it.
    void repack(const PackedMatrix& w, int64_t p) {
        const Spread spread(BITS == 8 ? 7 : BITS);
        const int64_t chunk_bytes = BITS * 8, row_bytes = blocks / 2 * chunk_bytes;
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
        uint8_t* to = codes.data() + p * panel_bytes();
        for (int64_t c = 0; c < blocks / 2; ++c, to += 2 * BITS * 64) {
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
            each<BITS>([&](auto t) __attribute__((always_inline)) {
                constexpr int T = decltype(t)::value;
                constexpr PanelPlace at = panel_place(BITS, K, T);
                out[at.vector] = any_of(out[at.vector], shifted<T - at.shift>(masked(v, 1 << T)));
            });
        });
        each<BITS>([&](auto k) __attribute__((always_inline)) { store_bytes(to + k * 64 + H * 4 * LANES, out[k]); });
    }

    // The scales and zero points of a row, for place `to`. A row's only scale is its step.
    void row_scales(const PackedMatrix& w, int64_t r, int64_t to) {
        const int64_t at = to / kPanel * groups * kPanel + to % kPanel;
        const float factor = TABLE ? largest(w) / 127 : 1.0f;
        float step = 0;
        if (w.scale_kind == Scale::kSteps) {
            step = float_of_half(w.super_[r]) * (1.0f / 256);
            for (int64_t g = 0; g < groups; ++g) scales.data()[at + g * kPanel] = static_cast<const uint8_t*>(w.scale)[r * groups + g];
        } else {
            step = w.scale_kind == Scale::kHalf ? float_of_half(static_cast<const uint16_t*>(w.scale)[r]) : static_cast<const float*>(w.scale)[r];
            scales.data()[at] = 0;
        }
        steps[static_cast<size_t>(to)] = step * factor;
        if (!has_zeros) return;
        const uint8_t* zeros = w.zeros + r * w.zero_bytes;
        for (int64_t g = 0; g < groups; ++g) {
            int code = 0;
            for (int i = 0; i < BITS; ++i) code |= (zeros[(g * BITS + i) / 8] >> ((g * BITS + i) % 8) & 1) << i;
            zero_points.data()[at + g * kPanel] = static_cast<uint8_t>(code);
        }
    }
};
