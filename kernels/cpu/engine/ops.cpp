#include "ops_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../half.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NSTF_X86 1
#include <immintrin.h>
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
    __builtin_cpu_init();
    static const bool narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                               __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    static const bool wide = narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (wide) return avx512::kOps;
    if (narrow) return avx2::kOps;
#endif
    return portable::kOps;
}

}  // namespace nstf::engine
