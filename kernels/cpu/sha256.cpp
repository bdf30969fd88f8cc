// SHA-256 (FIPS 180-4) of sixteen arrays at a time, one in each lane of AVX-512's registers. The processor's own instructions for
// SHA-256 take one array at a time and wait for each pair of rounds: 1.1 GB/s where this does 3 (docs/cpu.md).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define NSTF_SHA 1
#include <immintrin.h>
#else
#define NSTF_SHA 0
#endif

namespace nstf {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

#if NSTF_SHA

#define NSTF_SHA_CODE __attribute__((target("avx512f,avx512bw")))

constexpr int kLanes = 16, kBlock = 64;

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

bool available() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }

// An array on its way: blocks of it are read where it lies, the last one or two (with the length) from `tail`.
struct Stream {
    const uint8_t* at = nullptr;
    int64_t blocks = 0, index = -1;  // left to read at `at`; the array's number
    bool in_tail = false;
    int64_t tail_blocks = 0;
    uint8_t tail[2 * kBlock];
    uint32_t state[8];

    void begin(const uint8_t* data, int64_t size, int64_t number) {
        index = number;
        at = data;
        blocks = size / kBlock;
        in_tail = false;
        const int64_t rest = size % kBlock;
        tail_blocks = rest + 9 > kBlock ? 2 : 1;
        std::memset(tail, 0, sizeof tail);
        if (rest) std::memcpy(tail, data + blocks * kBlock, static_cast<size_t>(rest));
        tail[rest] = 0x80;
        const uint64_t bits = static_cast<uint64_t>(size) * 8;
        for (int i = 0; i < 8; ++i) tail[tail_blocks * kBlock - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
        std::memcpy(state, kStart, sizeof state);
        if (!blocks) to_tail();
    }
    void to_tail() {
        in_tail = true;
        at = tail;
        blocks = tail_blocks;
    }
    // After `count` blocks; whether the array is at its end.
    bool advance(int64_t count) {
        at += count * kBlock;
        blocks -= count;
        if (blocks) return false;
        if (in_tail) return true;
        to_tail();
        return false;
    }
    void digest(uint8_t* out) const {
        for (int i = 0; i < 8; ++i) {
            for (int j = 0; j < 4; ++j) out[4 * i + j] = static_cast<uint8_t>(state[i] >> (24 - 8 * j));
        }
    }
};

// rows[i] becomes the i-th word of all sixteen rows.
NSTF_SHA_CODE inline void transpose(__m512i* rows) {
    __m512i pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    }
    // fours[4 r + c]: words c, c + 4, c + 8, c + 12 of rows 4 r to 4 r + 3, a quarter each.
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x88), low_odd = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xdd);
        rows[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        rows[c + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
        rows[c + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        rows[c + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
}

// `count` blocks of each of up to sixteen streams; lanes without one compute of the first one's blocks what nobody reads.
NSTF_SHA_CODE void run(Stream* const* streams, int active, int64_t count) {
    alignas(64) uint32_t states[8][kLanes];
    const uint8_t* in[kLanes];
    for (int n = 0; n < kLanes; ++n) {
        const Stream& stream = *streams[n < active ? n : 0];
        in[n] = stream.at;
        for (int i = 0; i < 8; ++i) states[i][n] = stream.state[i];
    }
    __m512i state[8];
    for (int i = 0; i < 8; ++i) state[i] = _mm512_load_si512(states[i]);
    const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
    for (int64_t block = 0; block < count; ++block) {
        __m512i w[16];
        for (int n = 0; n < kLanes; ++n) {
            w[n] = _mm512_shuffle_epi8(_mm512_loadu_si512(in[n]), order);
            in[n] += kBlock;
        }
        transpose(w);
        __m512i a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
#pragma GCC unroll 64
        for (int i = 0; i < 64; ++i) {
            if (i >= 16) {
                const __m512i x = w[(i + 1) & 15], y = w[(i + 14) & 15];
                const __m512i s0 = _mm512_ternarylogic_epi32(_mm512_ror_epi32(x, 7), _mm512_ror_epi32(x, 18), _mm512_srli_epi32(x, 3), 0x96);
                const __m512i s1 = _mm512_ternarylogic_epi32(_mm512_ror_epi32(y, 17), _mm512_ror_epi32(y, 19), _mm512_srli_epi32(y, 10), 0x96);
                w[i & 15] = _mm512_add_epi32(_mm512_add_epi32(w[i & 15], w[(i + 9) & 15]), _mm512_add_epi32(s0, s1));
            }
            const __m512i given = _mm512_add_epi32(w[i & 15], _mm512_set1_epi32(static_cast<int>(kRounds[i])));
            const __m512i s1 = _mm512_ternarylogic_epi32(_mm512_ror_epi32(e, 6), _mm512_ror_epi32(e, 11), _mm512_ror_epi32(e, 25), 0x96);
            const __m512i choice = _mm512_ternarylogic_epi32(e, f, g, 0xca);
            const __m512i first = _mm512_add_epi32(_mm512_add_epi32(h, given), _mm512_add_epi32(s1, choice));
            const __m512i s0 = _mm512_ternarylogic_epi32(_mm512_ror_epi32(a, 2), _mm512_ror_epi32(a, 13), _mm512_ror_epi32(a, 22), 0x96);
            const __m512i majority = _mm512_ternarylogic_epi32(a, b, c, 0xe8);
            h = g;
            g = f;
            f = e;
            e = _mm512_add_epi32(d, first);
            d = c;
            c = b;
            b = a;
            a = _mm512_add_epi32(first, _mm512_add_epi32(s0, majority));
        }
        const __m512i found[8] = {a, b, c, d, e, f, g, h};
        for (int i = 0; i < 8; ++i) state[i] = _mm512_add_epi32(state[i], found[i]);
    }
    for (int i = 0; i < 8; ++i) _mm512_store_si512(states[i], state[i]);
    for (int n = 0; n < active; ++n) {
        for (int i = 0; i < 8; ++i) streams[n]->state[i] = states[i][n];
    }
}

void digests(const std::vector<std::pair<const uint8_t*, int64_t>>& arrays, uint8_t* out) {
    // The longest first, so that none is left alone for long.
    std::vector<size_t> order(arrays.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return arrays[a].second > arrays[b].second; });
    Stream streams[kLanes];
    Stream* active[kLanes];
    int count = 0;
    size_t next = 0;
    auto begin = [&](Stream* s) {
        if (next == order.size()) return false;
        const size_t number = order[next++];
        s->begin(arrays[number].first, arrays[number].second, static_cast<int64_t>(number));
        return true;
    };
    for (Stream& s : streams) {
        if (begin(&s)) active[count++] = &s;
    }
    while (count) {
        int64_t blocks = active[0]->blocks;
        for (int n = 1; n < count; ++n) blocks = std::min(blocks, active[n]->blocks);
        run(active, count, blocks);
        for (int n = count - 1; n >= 0; --n) {
            if (!active[n]->advance(blocks)) continue;
            active[n]->digest(out + 32 * active[n]->index);
            if (!begin(active[n])) active[n] = active[--count];
        }
    }
}

#else

bool available() { return false; }
void digests(const std::vector<std::pair<const uint8_t*, int64_t>>&, uint8_t*) {
    throw std::runtime_error("no AVX-512 here");
}

#endif

nb::bytes sha256(const std::vector<Bytes>& arrays) {
    std::vector<std::pair<const uint8_t*, int64_t>> places;
    for (const Bytes& array : arrays) places.emplace_back(array.data(), static_cast<int64_t>(array.size()));
    std::vector<uint8_t> found(32 * arrays.size());
    if (!available()) throw std::runtime_error("no AVX-512 here");
    {
        nb::gil_scoped_release release;
        digests(places, found.data());
    }
    return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size());
}

}  // namespace
}  // namespace nstf

void bind_sha256(nb::module_& m) {
    m.def("sha256_available", &nstf::available, "Whether this processor has what `sha256` needs.");
    m.def("sha256", &nstf::sha256, "arrays"_a, "The digests of arrays, 32 bytes each.");
}
