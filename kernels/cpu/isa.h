// The instruction sets that kernels are written for, and which of them is in use.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NSTF_X86 1
#endif
// Other compilers have no pragma for it: they compile what they were told the processor has.
#if defined(__aarch64__) && (!defined(__clang__) || defined(__ARM_FEATURE_DOTPROD))
#define NSTF_DOTPROD 1
#endif

namespace nstf {

// AVX2 means FMA, F16C and BMI2 too, AVX-512 also BW, DQ and VL, VBMI also VNNI and VBMI2.
enum class Isa { kPortable, kNeon, kNeonDot, kAvx2, kAvx2Vnni, kAvx512, kAvx512Vnni, kAvx512Vbmi };

const char* name(Isa isa);

// What this processor and this build have, best first; the last one is portable.
const std::vector<Isa>& isas();

// Kernels are chosen for this one: the best, or the one named last. Made for tests and measurements: a matrix keeps the kernel
// it was made with, so a change in the middle of other work is safe. Throws std::invalid_argument for one that is not here.
Isa isa();
void use_isa(const std::string& name);  // "": the best

inline bool has_avx2(Isa i) { return i >= Isa::kAvx2; }
inline bool has_avx512(Isa i) { return i >= Isa::kAvx512; }

}  // namespace nstf
