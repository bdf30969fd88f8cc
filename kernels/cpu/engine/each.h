// Included inside a namespace and a set of instructions, which the functions must share with what they call.

#undef NSTF_INLINE
#define NSTF_INLINE inline __attribute__((always_inline))

// f(0) to f(N - 1) with numbers that the compiler knows early: arrays of vectors that are indexed by them stay in registers, where
// a loop that is unrolled late leaves them in memory and stores them every time.
template <class F, int... I>
NSTF_INLINE void each_of(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
NSTF_INLINE void each(F f) {
    each_of(f, std::make_integer_sequence<int, N>{});
}
