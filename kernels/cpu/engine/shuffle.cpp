// Shuffle codes without an instruction set of their own, and which kernel a matrix gets.
#include "shuffle.h"

#include <algorithm>
#include <stdexcept>

#include "ops_table.h"

namespace nstf::engine {
namespace {

// The levels of rows first..end-1 of a group in one chunk.
void levels(const StoredShuffle& s, const uint8_t* codes, const uint8_t* before, int first, int end, uint8_t (*out)[64]) {
    const int q = s.quarter_bits, phases = s.phases();
    auto symbol = [&](int i, int k) {  // -2 and -1: of the group before
        // By a name: GCC 12 with -fsanitize=undefined forgets the index of a conditional pointer.
        const uint8_t* from = i < 0 ? before + (i + 2) * 32 : codes + i * 32;
        const uint8_t byte = from[k / 2];
        return k & 1 ? byte >> 4 : byte & 15;
    };
    for (int r = first; r < end; ++r) {
        const int at = ends_at(q, r);
        const bool second = r > 0 && ends_at(q, r - 1) == at;
        const uint8_t *a_table = s.tables.data() + r % phases * 32, *b_table = a_table + 16;
        for (int k = 0; k < 64; ++k) {
            const int a = symbol(at, k), b = symbol(at - 1, k), c = symbol(at - 2, k);
            out[r - first][k] =
                static_cast<uint8_t>(a_table[a ^ (second ? b : c)] + b_table[second ? a ^ c : b]);
        }
    }
}

MakeShuffle maker() {
    switch (isa()) {
#if NSTF_X86
        case Isa::kAvx512Vbmi: return shuffle_vbmi;
        case Isa::kAvx512Vnni: return shuffle_avx512;
        case Isa::kAvx2Vnni: return shuffle_avx2_vnni;
        case Isa::kAvx512:  // as for packed codes, nothing is better than AVX2 without VNNI
        case Isa::kAvx2: return shuffle_avx2;
#elif defined(__aarch64__)
#if NSTF_DOTPROD
        case Isa::kNeonDot: return shuffle_neon_dot;
#endif
        case Isa::kNeon: return shuffle_neon;
#endif
        default: return nullptr;
    }
}

}  // namespace

void Shuffle::decode_rows(int64_t first, int64_t count, float* out) const {
    uint8_t found[kGroupRows][64];
    for (int64_t row = first; row < first + count;) {
        const int64_t g = row / kGroupRows;
        const int from = static_cast<int>(row % kGroupRows);
        const int end = static_cast<int>(std::min<int64_t>(kGroupRows, from + first + count - row));
        const auto before = stored_.before(g);
        for (int64_t c = 0; c < stored_.chunks(); ++c) {
            levels(stored_, stored_.group(g) + c * stored_.quarter_bits * 64, before.bytes + c * before.stride, from, end, found);
            for (int r = 0; r < end - from; ++r) {
                const float scale = stored_.scales[static_cast<size_t>(row + r)];
                float* to = out + (row - first + r) * cols + c * 64;
                for (int64_t k = 0; k < std::min<int64_t>(64, cols - c * 64); ++k)
                    to[k] = (static_cast<float>(found[r][k]) - kCentre) * scale;
            }
        }
        row += end - from;
    }
}

void Shuffle::run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const {
    thread_local Buffer<float> room;
    float* w = room.grow(kGroupRows * cols);
    for (int64_t r = first; r < end; r += kGroupRows) {
        const int64_t count = std::min<int64_t>(kGroupRows, end - r);
        decode_rows(r, count, w);
        ops().products(in.x, batch, cols, w, count, cols, y + r, stride);
    }
}

Shared shuffle(StoredShuffle s, int64_t bytes, bool exact) {
    if (s.quarter_bits < 8 || s.quarter_bits > 20) throw std::invalid_argument("shuffle: no such rate");
    if (static_cast<int64_t>(s.scales.size()) != s.rows || s.tables.empty() || s.tables.size() % 32 || 32 % s.phases() ||
        bytes != (s.rows + kGroupRows - 1) / kGroupRows * s.chunks() * s.quarter_bits * 64)
        throw std::invalid_argument("shuffle: arrays of another size");
    if (const MakeShuffle make = maker(); make != nullptr) return make(std::move(s), exact);
    return std::make_shared<Shuffle>(std::move(s));
}

}  // namespace nstf::engine
