// Pages of a cache of keys and values: 64 positions of one head, as float16 or in a few bits a number.
//
// float16: keys [4 blocks of 16 positions][size][16], values [64][size].
// Few bits: x ~ minimum + scale * code. First the minima and then the scales, float16: one pair per channel, or per position
// and group of 64 channels ([group][64]); then the codes as one matrix [K][N] that is summed over K: K channels and N positions
// for keys, K positions and N channels for values. Codes lie as the instructions for bytes take them: 64 bytes hold 16 columns
// and four rows next to each other, once in 8 bits, twice in 4 (low half first) and four times in 2.
#pragma once

#include <cstdint>

namespace nstf::engine {

constexpr int64_t kPage = 64;
constexpr int64_t kQueries = 32;  // queries of a task at most; four at a time share what is unpacked

// What keys or values are kept as. channel: one minimum and scale per channel of a page, else per position. rotate: the head is
// multiplied by the normalised Hadamard matrix first.
struct Format {
    int bits = 16;
    bool channel = false, rotate = false;
};

inline int64_t up_to(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
// Groups of 64 channels that have a minimum and a scale of their own; one where heads are smaller or no multiple.
inline int64_t channel_groups(int64_t size) { return size % 64 ? 1 : size / 64; }
inline int64_t pairs_of(const Format& f, int64_t size) { return f.channel ? size : kPage * channel_groups(size); }
// Rows of codes in 64 bytes.
inline int64_t rows_together(int bits) { return 32 / bits; }
inline int64_t packed_rows(const Format& f, int64_t size, bool key) {
    return key ? up_to(size, rows_together(f.bits)) : kPage;
}
inline int64_t packed_columns(int64_t size, bool key) { return key ? kPage : up_to(size, 16); }
// Bytes of a page in few bits, as many as the numbers need where `size` is a multiple of 16.
inline int64_t packed_bytes(const Format& f, int64_t size, bool key) {
    return 4 * pairs_of(f, size) + packed_rows(f, size, key) * packed_columns(size, key) * f.bits / 8;
}
inline int64_t half_bytes(int64_t size) { return 2 * kPage * size; }

// One page as a query reads it: in float16, or in few bits where `half` is null. unit: what the numbers were divided by, a power
// of two, 1 as long as float16 holds them.
struct PageSide {
    uint16_t* half = nullptr;
    uint8_t* packed = nullptr;
    float unit = 1;
};

// Which of the positions a query sees: those below `end` that are below a sink or at a recent place, by the pattern of the head
// and by what the group keeps, within the model's own window; and those of the blocks of 128 that are marked, if any are.
struct Rule {
    int64_t end = 0, sink = 0, recent = 0, kept_sink = 0, kept_recent = 0, window = 0;
    const uint8_t* blocks = nullptr;

    static uint64_t below(int64_t limit, int64_t start) {
        if (limit <= start) return 0;
        return limit - start >= kPage ? ~uint64_t{0} : (uint64_t{1} << (limit - start)) - 1;
    }
    // A bit for each position of the page that starts at `start`.
    uint64_t visible(int64_t start) const {
        if (blocks != nullptr && !blocks[start / 128]) return 0;
        return below(end, start) & (below(sink, start) | ~below(recent, start)) &
               (below(kept_sink, start) | ~below(kept_recent, start)) & ~below(window, start);
    }
};

// A query on its way through the pages: the largest score so far, the sum of the exponentials of the distances to it, and the
// sum of the values weighted with them.
struct Going {
    const float* q = nullptr;
    float* sums = nullptr;  // [size]
    float top = -3e38f, total = 0;
    Rule rule;
};

// Queries that share a key head, and a run of its pages.
struct PageTask {
    int64_t size = 0;
    Format keys, values;
    float scale = 1;  // of the scores
    Going* queries = nullptr;
    int64_t count = 0;
    int64_t first = 0, last = 0;  // pages
    int64_t whole = 0;            // pages from here on are read in float16 whatever the format is
    int64_t gap_from = 0, gap_to = 0;  // pages from..to-1 that no query sees, none where to is not larger
    const PageSide *key_pages = nullptr, *value_pages = nullptr;
};

struct PageOps {
    // Continues every query over the pages.
    void (*attend)(const PageTask& task);
    // A whole page of one head, keys or values, from float16 into few bits.
    void (*pack)(const Format& format, int64_t size, bool key, const uint16_t* half, uint8_t* packed);
    // One position of a head, [size], rotated already, into its place of a page in 8 bits by position.
    void (*pack_one)(const Format& format, int64_t size, bool key, const float* x, int64_t position, uint8_t* packed);
    // A page of keys as numbers, in the order of float16 pages and rotated where its format says so.
    void (*unpack_keys)(const Format& format, int64_t size, const PageSide& page, bool half, float* out);
    // Sums of products of a page of keys, [4][size][16], and groups of queries, [rows][size][16]; out: [row][groups], a page's own
    // groups of `stride` positions.
    void (*diagonals)(const float* queries, const float* page, int64_t size, int64_t rows, int64_t stride, float* out,
                      int64_t groups);
    // A head times the Hadamard matrix, in place.
    void (*turn)(float* head, int64_t size);
};

const PageOps& page_ops();

}  // namespace nstf::engine
