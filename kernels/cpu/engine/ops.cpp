#include "ops_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../half.h"
#include "../isa.h"

#if NSTF_X86
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nstf::engine {

#define NSTF_ISA 0
namespace portable {
#include "ops.h"
}
#undef NSTF_ISA

#if NSTF_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define NSTF_ISA 2
namespace avx2 {
#include "ops.h"
}
#undef NSTF_ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define NSTF_ISA 512
namespace avx512 {
#include "ops.h"
}
#undef NSTF_ISA
#pragma GCC pop_options
#endif

const Ops& ops() {
#if NSTF_X86
    if (has_avx512(isa())) return avx512::kOps;
    if (has_avx2(isa())) return avx2::kOps;
#endif
    return portable::kOps;
}

}  // namespace nstf::engine
