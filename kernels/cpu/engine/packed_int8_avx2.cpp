// The int8 kernels for AVX2, with and without AVX-VNNI.
#include "../parallel.h"
#include "convolution.h"
#include "int8.h"
#include "panel_place.h"

#if NSTF_X86

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define NSTF_VNNI 0
namespace nstf::engine {
namespace avx2 {
namespace {
constexpr Isa SELF = Isa::kAvx2;
#include "int8_avx2.h"
#include "packed_int8.h"
#include "panel_int8.h"
#include "convolve_int8.h"
}  // namespace
}  // namespace avx2
const ConvolutionKernels& convolution_avx2() { return avx2::kConvolution; }
Shared packed_int8_avx2(const PackedView& view) { return avx2::make(view); }
Shared panels_avx2(const PackedView& view, Copies& copies) {
    return avx2::make_panels(view, copies);
}
}  // namespace nstf::engine
#undef NSTF_VNNI
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#define NSTF_VNNI 1
namespace nstf::engine {
namespace avx2_vnni {
namespace {
constexpr Isa SELF = Isa::kAvx2Vnni;
#include "int8_avx2.h"
#include "packed_int8.h"
#include "panel_int8.h"
#include "convolve_int8.h"
}  // namespace
}  // namespace avx2_vnni
const ConvolutionKernels& convolution_avx2_vnni() { return avx2_vnni::kConvolution; }
Shared packed_int8_avx2_vnni(const PackedView& view) { return avx2_vnni::make(view); }
Shared panels_avx2_vnni(const PackedView& view, Copies& copies) {
    return avx2_vnni::make_panels(view, copies);
}
}  // namespace nstf::engine
#undef NSTF_VNNI
#pragma GCC pop_options

#endif
