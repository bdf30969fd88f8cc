// The int8 kernels for AArch64, with and without its dot product instructions.
#include "../half.h"
#include "convolution.h"
#include "int8.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define NSTF_DOT 0
namespace nstf::engine {
namespace neon {
namespace {
constexpr Isa SELF = Isa::kNeon;
#include "int8_neon.h"
#include "packed_int8.h"
#include "convolve_int8.h"
}  // namespace
}  // namespace neon
const ConvolutionKernels& convolution_neon() { return neon::kConvolution; }
Shared packed_int8_neon(const PackedView& view) { return neon::make(view); }
}  // namespace nstf::engine
#undef NSTF_DOT

#if NSTF_DOTPROD
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define NSTF_DOT 1
namespace nstf::engine {
namespace neon_dot {
namespace {
constexpr Isa SELF = Isa::kNeonDot;
#include "int8_neon.h"
#include "packed_int8.h"
#include "convolve_int8.h"
}  // namespace
}  // namespace neon_dot
const ConvolutionKernels& convolution_neon_dot() { return neon_dot::kConvolution; }
Shared packed_int8_neon_dot(const PackedView& view) { return neon_dot::make(view); }
}  // namespace nstf::engine
#undef NSTF_DOT
#if !defined(__clang__)
#pragma GCC pop_options
#endif
#endif

#endif
