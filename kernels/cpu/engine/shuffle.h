// Shuffle codes (kernels/formats/shuffle.py): a level is the sum of two bytes, each read from a table of 16 at a symbol of four
// bits. A group of 32 rows of 64 columns is 2 q times 32 bytes, each the symbols of one step, low half first.
#pragma once

#include <vector>

#include "leaves.h"

namespace nstf::engine {

constexpr int kGroupRows = 32, kSegmentGroups = 8;  // rows whose symbols lie together; groups after which paths start anew
constexpr float kCentre = 31.5f;                    // the level that stands for zero

struct StoredShuffle {
    int64_t rows, cols;
    int quarter_bits;
    const uint8_t* codes;  // [groups][chunks of 64 columns][2 quarter_bits][32]
    std::vector<uint8_t> tables;  // [phases][A, B][16]
    std::vector<float> scales;    // what a level is worth, by row
    int64_t chunks() const { return (cols + 63) / 64; }
    int phases() const { return static_cast<int>(tables.size() / 32); }
    const uint8_t* group(int64_t g) const { return codes + g * chunks() * quarter_bits * 64; }
    // The last two symbols of the group before, from chunk to chunk `stride` apart: what a group's first rows depend on.
    struct Before {
        const uint8_t* bytes;
        int64_t stride;
    };
    Before before(int64_t g) const {
        static const uint8_t zeros[64] = {};
        if (g % kSegmentGroups == 0) return {zeros, 0};
        return {group(g - 1) + (quarter_bits - 1) * 64, quarter_bits * 64};
    }
};

// Which rows of a group end at which of its 2 q symbols: up to two, from `first` on.
constexpr int ends_at(int q, int row) { return ((row + 1) * q + 15) / 16 - 1; }
constexpr int first_row(int q, int symbol) {
    int r = 0;
    while (r < kGroupRows && ends_at(q, r) < symbol) ++r;
    return r;
}
constexpr int rows_at(int q, int symbol) { return first_row(q, symbol + 1) - first_row(q, symbol); }

// Throws std::invalid_argument for sizes that do not fit together.
Shared shuffle(StoredShuffle stored, int64_t bytes, bool exact);

// The leaf in one instruction set; each of the files shuffle_*.cpp holds some.
using MakeShuffle = Shared (*)(StoredShuffle, bool exact);
#if NSTF_X86
Shared shuffle_vbmi(StoredShuffle, bool exact);
Shared shuffle_avx512(StoredShuffle, bool exact);
Shared shuffle_avx2_vnni(StoredShuffle, bool exact);
Shared shuffle_avx2(StoredShuffle, bool exact);
#elif defined(__aarch64__)
Shared shuffle_neon(StoredShuffle, bool exact);
#if NSTF_DOTPROD
Shared shuffle_neon_dot(StoredShuffle, bool exact);
#endif
#endif

// In float32: groups of rows are decoded into the caches and multiplied there. The decoding is slow; sets with a shuffle have theirs.
class Shuffle : public Leaf {
  public:
    explicit Shuffle(StoredShuffle stored) : Leaf(stored.rows, stored.cols), stored_(std::move(stored)) {}
    uintptr_t key() const override { return 1; }
    int64_t unit() const override { return kGroupRows; }
    std::string kernel() const override { return "shuffle float32"; }
    Ahead codes(int64_t first, int64_t end) const override {
        const uint8_t* from = stored_.group(first / kGroupRows);
        return {from, stored_.group((end + kGroupRows - 1) / kGroupRows) - from};
    }
    void reserve(const float* x, int64_t, Input& in) const override { in.x = x; }
    void prepare(const float*, int64_t, int64_t, Input&) const override {}
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override;
    void decode(int64_t row, float* out) const override { decode_rows(row, 1, out); }
    void decode_rows(int64_t first, int64_t count, float* out) const override;

  protected:
    StoredShuffle stored_;
};

}  // namespace nstf::engine
