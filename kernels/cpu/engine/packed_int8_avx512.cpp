// The int8 kernels for AVX-512 with VNNI, with and without VBMI.
#include "../parallel.h"
#include "convolution.h"
#include "int8.h"
#include "panel_place.h"

#if NSTF_X86

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#define NSTF_VBMI 0
namespace nstf::engine {
namespace avx512_vnni {
namespace {
constexpr Isa SELF = Isa::kAvx512Vnni;
#include "int8_avx512.h"
#include "packed_int8.h"
#include "panel_int8.h"
#include "convolve_int8.h"
}  // namespace
}  // namespace avx512_vnni
const ConvolutionKernels& convolution_avx512() { return avx512_vnni::kConvolution; }
Shared packed_int8_avx512_vnni(const PackedView& view) { return avx512_vnni::make(view); }
Shared panels_avx512_vnni(const PackedView& view, Copies& copies) {
    return avx512_vnni::make_panels(view, copies);
}
}  // namespace nstf::engine
#undef NSTF_VBMI
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,prefer-vector-width=512")
#define NSTF_VBMI 1
namespace nstf::engine {
namespace avx512_vbmi {
namespace {
constexpr Isa SELF = Isa::kAvx512Vbmi;
#include "int8_avx512.h"
#include "packed_int8.h"
#include "panel_int8.h"
}  // namespace
}  // namespace avx512_vbmi
Shared packed_int8_avx512_vbmi(const PackedView& view) { return avx512_vbmi::make(view); }
Shared panels_avx512_vbmi(const PackedView& view, Copies& copies) {
    return avx512_vbmi::make_panels(view, copies);
}
}  // namespace nstf::engine
#undef NSTF_VBMI
#pragma GCC pop_options

#endif
