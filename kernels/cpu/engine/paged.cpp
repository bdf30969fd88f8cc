#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../half.h"
#include "../isa.h"
#include "buffer.h"
#include "pages.h"

#if NSTF_X86
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nstf::engine {

#define NSTF_ISA 0
#define NSTF_VNNI 0
namespace portable {
#include "paged.h"
}
#undef NSTF_ISA

#if NSTF_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define NSTF_ISA 2
namespace avx2 {
#include "paged.h"
}
#undef NSTF_ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define NSTF_ISA 512
namespace avx512 {
#include "paged.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#undef NSTF_VNNI
#define NSTF_VNNI 1
namespace avx512_vnni {
#include "paged.h"
}
#undef NSTF_ISA
#pragma GCC pop_options
#endif
#undef NSTF_VNNI

const PageOps& page_ops() {
#if NSTF_X86
    if (isa() >= Isa::kAvx512Vnni) return avx512_vnni::kPageOps;
    if (has_avx512(isa())) return avx512::kPageOps;
    if (has_avx2(isa())) return avx2::kPageOps;
#endif
    return portable::kPageOps;
}

}  // namespace nstf::engine
