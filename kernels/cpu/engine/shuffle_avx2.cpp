// The int8 kernels of shuffle codes for AVX2, with and without AVX-VNNI.
#include "int8.h"
#include "shuffle.h"

#if NSTF_X86

#include <immintrin.h>

#define NSTF_SHUFFLE_PIECES                                                                                      \
    using Table = __m256i;                                                                                       \
    inline Table table_of(const uint8_t* p) {                                                                    \
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));                 \
    }                                                                                                            \
    inline void split(const uint8_t* p, Bytes* out) {                                                            \
        const __m256i both = load_bytes(p), mask = _mm256_set1_epi8(15);                                         \
        out[0] = _mm256_and_si256(both, mask);                                                                   \
        out[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);                                             \
    }                                                                                                            \
    inline Bytes mixed(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }                                       \
    inline Bytes look_up(Table t, Bytes symbols) { return _mm256_shuffle_epi8(t, symbols); }                      \
    inline Bytes sum(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define NSTF_VNNI 0
namespace nstf::engine {
namespace shuffled_avx2 {
namespace {
constexpr Isa SELF = Isa::kAvx2;
#include "int8_avx2.h"
NSTF_SHUFFLE_PIECES
#include "shuffle_int8.h"
}  // namespace
}  // namespace shuffled_avx2
Shared shuffle_avx2(StoredShuffle s, bool exact) { return shuffled_avx2::make(std::move(s), exact); }
}  // namespace nstf::engine
#undef NSTF_VNNI
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#define NSTF_VNNI 1
namespace nstf::engine {
namespace shuffled_avx2_vnni {
namespace {
constexpr Isa SELF = Isa::kAvx2Vnni;
#include "int8_avx2.h"
NSTF_SHUFFLE_PIECES
#include "shuffle_int8.h"
}  // namespace
}  // namespace shuffled_avx2_vnni
Shared shuffle_avx2_vnni(StoredShuffle s, bool exact) { return shuffled_avx2_vnni::make(std::move(s), exact); }
}  // namespace nstf::engine
#undef NSTF_VNNI
#pragma GCC pop_options

#endif
