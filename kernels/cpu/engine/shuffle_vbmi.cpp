// The int8 kernels of shuffle codes for AVX-512 with VNNI and VBMI. A byte permutation looks at six bits of a symbol's byte, in a table
// that repeats every sixteen entries: nothing has to be masked off, neither what stands beside a symbol nor what a shift brings.
// That leaves 14 instructions for 128 weights of 18.
#include "int8.h"
#include "shuffle.h"

#if NSTF_X86

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,prefer-vector-width=512")
#define NSTF_VBMI 1
namespace nstf::engine {
namespace shuffled_vbmi {
namespace {
constexpr Isa SELF = Isa::kAvx512Vbmi;
#include "int8_avx512.h"
using Table = __m512i;
inline Table table_of(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void split(const uint8_t* p, Bytes* out) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    out[0] = _mm512_srlv_epi64(twice, shifts);
}
inline void split_pair(const uint8_t* p, const uint8_t* q, Bytes* out) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    out[0] = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    out[1] = _mm512_srli_epi16(out[0], 4);
}
inline void fetch_here(const uint8_t* p) { __asm__ volatile("prefetcht0 %0" : : "m"(*p)); }
inline Bytes mixed(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes look_up(Table t, Bytes symbols) { return _mm512_permutexvar_epi8(symbols, t); }
inline Bytes sum(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
#include "shuffle_int8.h"
}  // namespace
}  // namespace shuffled_vbmi
Shared shuffle_vbmi(StoredShuffle s, bool exact) { return shuffled_vbmi::make(std::move(s), exact); }
}  // namespace nstf::engine
#undef NSTF_VBMI
#pragma GCC pop_options

#endif
