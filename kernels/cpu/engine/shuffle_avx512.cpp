// The int8 kernels of shuffle codes for AVX-512 with VNNI, without VBMI.
#include "int8.h"
#include "shuffle.h"

#if NSTF_X86

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#define NSTF_VBMI 0
namespace nstf::engine {
namespace shuffled_avx512 {
namespace {
constexpr Isa SELF = Isa::kAvx512Vnni;
#include "int8_avx512.h"
using Table = __m512i;
inline Table table_of(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void split(const uint8_t* p, Bytes* out) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    out[0] = _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15));
}
inline void split_pair(const uint8_t* p, const uint8_t* q, Bytes* out) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), mask = _mm512_set1_epi8(15);
    out[0] = _mm512_and_si512(both, mask);
    out[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
inline void fetch_here(const uint8_t* p) { __asm__ volatile("prefetcht0 %0" : : "m"(*p)); }
inline Bytes mixed(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes look_up(Table t, Bytes symbols) { return _mm512_shuffle_epi8(t, symbols); }
inline Bytes sum(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
#include "shuffle_int8.h"
}  // namespace
}  // namespace shuffled_avx512
Shared shuffle_avx512(StoredShuffle s, bool exact) { return shuffled_avx512::make(std::move(s), exact); }
}  // namespace nstf::engine
#undef NSTF_VBMI
#pragma GCC pop_options

#endif
