// The int8 kernels of shuffle codes for AArch64, with and without its dot product instructions.
#include "../half.h"
#include "int8.h"
#include "shuffle.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define NSTF_SHUFFLE_PIECES                                                                                        \
    using Table = uint8x16_t;                                                                                      \
    inline Table table_of(const uint8_t* p) { return vld1q_u8(p); }                                                \
    inline void split(const uint8_t* p, Bytes* out) {                                                              \
        for (int i = 0; i < 2; ++i) {                                                                              \
            const uint8x16_t both = vld1q_u8(p + 16 * i);                                                          \
            out[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));                                          \
            out[2 + i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));                                                 \
        }                                                                                                          \
    }                                                                                                              \
    inline Bytes mixed(Bytes a, Bytes b) { return veorq_s8(a, b); }                                                \
    inline Bytes look_up(Table t, Bytes symbols) {                                                                 \
        return vreinterpretq_s8_u8(vqtbl1q_u8(t, vreinterpretq_u8_s8(symbols)));                                   \
    }                                                                                                              \
    inline Bytes sum(Bytes a, Bytes b) { return vaddq_s8(a, b); }

#define NSTF_DOT 0
namespace nstf::engine {
namespace shuffled_neon {
namespace {
constexpr Isa SELF = Isa::kNeon;
#include "int8_neon.h"
NSTF_SHUFFLE_PIECES
#include "shuffle_int8.h"
}  // namespace
}  // namespace shuffled_neon
Shared shuffle_neon(StoredShuffle s, bool exact) { return shuffled_neon::make(std::move(s), exact); }
}  // namespace nstf::engine
#undef NSTF_DOT

#if NSTF_DOTPROD
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define NSTF_DOT 1
namespace nstf::engine {
namespace shuffled_neon_dot {
namespace {
constexpr Isa SELF = Isa::kNeonDot;
#include "int8_neon.h"
NSTF_SHUFFLE_PIECES
#include "shuffle_int8.h"
}  // namespace
}  // namespace shuffled_neon_dot
Shared shuffle_neon_dot(StoredShuffle s, bool exact) { return shuffled_neon_dot::make(std::move(s), exact); }
}  // namespace nstf::engine
#undef NSTF_DOT
#if !defined(__clang__)
#pragma GCC pop_options
#endif
#endif

#endif
