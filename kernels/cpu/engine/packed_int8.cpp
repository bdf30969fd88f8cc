// Which int8 kernels a matrix of packed codes gets.
#include "int8.h"

namespace nstf::engine {
namespace {

// 2^(c - 127) is made of its exponent alone, which is wrong for two codes.
bool plain_powers(const PackedMatrix& w) {
    if (w.scale_kind != Scale::kPower) return true;
    const uint8_t* codes = static_cast<const uint8_t*>(w.scale);
    for (int64_t i = 0; i < w.rows * w.groups; ++i)
        if (codes[i] == 0 || codes[i] == 255) return false;
    return true;
}

MakeInt8 maker() {
    switch (isa()) {
#if NSTF_X86
        case Isa::kAvx512Vbmi: return packed_int8_avx512_vbmi;
        case Isa::kAvx512Vnni: return packed_int8_avx512_vnni;
        case Isa::kAvx2Vnni: return packed_int8_avx2_vnni;
        // AVX-512 without VNNI (Skylake) has no instruction that adds products of bytes up better than AVX2's, lacks its
        // vpsignb, and runs slower clocked.
        case Isa::kAvx512:
        case Isa::kAvx2: return packed_int8_avx2;
#elif defined(__aarch64__)
#if NSTF_DOTPROD
        case Isa::kNeonDot: return packed_int8_neon_dot;
#endif
        case Isa::kNeon: return packed_int8_neon;
#endif
        default: return nullptr;
    }
}

MakePanels panel_maker() {
    switch (isa()) {
#if NSTF_X86
        case Isa::kAvx512Vbmi: return panels_avx512_vbmi;
        case Isa::kAvx512Vnni: return panels_avx512_vnni;
        case Isa::kAvx2Vnni: return panels_avx2_vnni;
        case Isa::kAvx512:
        case Isa::kAvx2: return panels_avx2;
#endif
        default: return nullptr;
    }
}

}  // namespace

bool int8_available() { return maker() != nullptr; }

Shared packed_int8(const PackedView& view) {
    const MakeInt8 make = maker();
    if (make == nullptr || view.w.code == Code::kFloat8 || !plain_powers(view.w)) return nullptr;
    return make(view);
}

Shared panels(const PackedView& view, Copies& copies) {
    const MakePanels make = panel_maker();
    return make == nullptr || view.w.code == Code::kFloat8 ? nullptr : make(view, copies);
}

}  // namespace nstf::engine
