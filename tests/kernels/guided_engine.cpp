// Trees of matrices and caches of keys and values made of a fuzzer's bytes, for libFuzzer (test_guided_engine.py): what is refused
// throws std::exception; what is not is multiplied and decoded, and both have to agree.
//
// The numbers of arrays come from a small generator, whose seed is of the bytes too: coverage is to find sizes and trees. Those that
// mean something (the section of each row) are of the bytes themselves.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "engine/attend.h"
#include "engine/leaves.h"
#include "engine/shuffle.h"
#include "engine/stored.h"
#include "half.h"
#include "parallel.h"

namespace nstf {
namespace {

int64_t rows_per_task(const PackedMatrix& w, int64_t rows, int threads) {
    return std::max<int64_t>(2, std::min<int64_t>((1 << 16) / w.cols, (rows + threads - 1) / threads) / 2 * 2);
}
#define NSTF_ISA 0
#include "packed_rows.h"
#undef NSTF_ISA

using namespace engine;

struct Fuzz {
    const uint8_t* at;
    size_t left;
    uint32_t state = 1;
    // In the order of libFuzzer's own provider: what steers comes first.
    uint8_t byte() { return left == 0 ? 0 : (--left, *at++); }
    int64_t below(int64_t n) { return (byte() | byte() << 8) % n; }
    bool flip() { return byte() & 1; }
    uint32_t draw() { return state = state * 1664525u + 1013904223u; }
};

using Store = std::vector<std::shared_ptr<void>>;

template <class T, class F>
T* stored(Store& store, int64_t count, F value) {  // its own allocation, so that the next byte is no one's
    std::shared_ptr<T> made(new T[static_cast<size_t>(count)], [](T* p) { delete[] p; });
    for (int64_t i = 0; i < count; ++i) made.get()[i] = value();
    store.push_back(made);
    return made.get();
}

class Maker {
  public:
    explicit Maker(Fuzz& f) : f_(f) { f_.state = f_.byte() + 1; }
    Store store;

    // plain: a row is decoded from few rows of the leaves. Products over others take powers of their sizes; compile_matrix
    // (kernels/cpu/engine_matrix.py) makes none that do.
    Shared tree(int64_t rows, int64_t cols, int depth, bool plain = false) {
        switch (f_.below(depth == 0 ? 4 : plain ? 6 : 13)) {
            case 0: return packed(rows, cols);
            case 1: return trellis_codes(rows, cols);
            case 2: return shuffle_codes(rows, cols);
            case 3: return numbers(rows, cols);
            case 4: {
                Shared x = tree(rows, cols, depth - 1, plain);
                return sum(x, tree(rows, cols, depth - 1, plain));
            }
            case 5: {
                Shared x = tree(rows, cols, depth - 1, plain);
                return rotated(x, rotation_signs(cols, f_.byte(), 0), block(cols), 1 + f_.byte());
            }
            case 6: {
                const int64_t rank = 1 + f_.below(40);
                Shared a = tree(rows, rank, depth - 1, true);
                return low_rank(a, tree(rank, cols, depth - 1, true));
            }
            case 7: return rotated_rows(tree(rows, cols, depth - 1, true), rotation_signs(rows, f_.byte(), 1), block(rows));
            case 8: return transposed(tree(cols, rows, depth - 1, true));
            case 9: {
                const int64_t by = divisor(rows * cols);
                return reshaped(tree(rows * cols / by, by, depth - 1, true), rows, cols);
            }
            default: return chain_of(rows, cols, depth);
        }
    }

  private:
    int block(int64_t size) {
        int found = 1 << f_.below(8);
        while (size % found) found /= 2;
        return found;
    }
    int64_t divisor(int64_t size) {
        int64_t found = 1 + f_.below(96);
        while (size % found) --found;
        return found;
    }
    float small() { return static_cast<float>(static_cast<int32_t>(f_.draw() >> 16 & 255) - 128) / 128; }

    Shared numbers(int64_t rows, int64_t cols) {
        if (f_.flip()) return dense(rows, cols, stored<float>(store, rows * cols, [&] { return small(); }), Number::kFloat);
        return dense(rows, cols, stored<uint16_t>(store, rows * cols, [&] { return float_to_half(small()); }), Number::kHalf);
    }
    uint8_t* bytes(int64_t count) {
        return stored<uint8_t>(store, count, [&] { return static_cast<uint8_t>(f_.draw() >> 24); });
    }
    std::vector<float> scales(int64_t rows) {
        const float top = 0.1f;
        if (f_.flip()) return trellis_scales(bytes(rows), rows, top);
        return trellis_scales(stored<uint16_t>(store, rows, [&] { return float_to_half(small()); }), rows, top);
    }

    Shared packed(int64_t rows, int64_t cols) {
        PackedView view;
        PackedMatrix& w = view.w;
        w.rows = rows, w.cols = cols;
        w.bits = 2 + static_cast<int>(f_.below(7));
        w.code = w.bits == 4 ? Code::kTable4 : w.bits == 8 ? f_.flip() ? Code::kFloat8 : Code::kBytes : Code::kBits;
        for (int i = 0; i < 16; ++i) w.table[i] = static_cast<float>(i - 8);
        w.group = std::min<int64_t>(cols, 32 * (1 + f_.below(3)));
        w.groups = (cols + w.group - 1) / w.group;
        w.row_bytes = (cols * w.bits + 7) / 8;
        w.codes = bytes(rows * w.row_bytes), w.codes_end = w.codes + rows * w.row_bytes;
        w.scale_kind = Scale::kHalf;
        w.scale = stored<uint16_t>(store, rows * w.groups, [&] { return float_to_half(small() * 0.1f); });
        if (w.code != Code::kFloat8 && f_.flip()) {
            w.zero_bytes = (w.groups * w.bits + 7) / 8;
            w.zeros = bytes(rows * w.zero_bytes);
        }
        view.matmul = matmul, view.decode = nstf::decode, view.isa = "portable";
        return packed_exact(view);
    }

    Shared trellis_codes(int64_t rows, int64_t cols) {
        StoredTrellis s{};
        s.rows = rows, s.cols = cols;
        const int64_t count = 1 + f_.below(4);
        int64_t size = 0;
        for (int64_t i = 0; i < count; ++i) {
            s.quarter_bits.push_back(4 + static_cast<int>(f_.below(21)));
            if (count > 1) s.section_rows.push_back(f_.below(rows + 1));
            size += ((count > 1 ? s.section_rows.back() : rows) + 15) / 16 * ((cols + 15) / 16) * 8 * s.quarter_bits.back();
        }
        s.bytes = f_.byte() == 255 ? f_.below(1000) : size;
        s.codes = bytes(s.bytes);
        static const std::vector<float> quantiles(4096, 0.5f);
        s.quantiles = quantiles.data();
        if (count > 1) {
            s.number_bits = 2;
            s.number_bytes = f_.byte() == 255 ? f_.below(40) : (rows * 2 + 7) / 8;
            s.numbers = stored<uint8_t>(store, s.number_bytes, [&] { return f_.byte(); });
        }
        std::vector<TrellisSection> found = sections(s);
        return trellis(rows, cols, std::move(found), scales(rows), f_.flip());
    }

    Shared shuffle_codes(int64_t rows, int64_t cols) {
        StoredShuffle s{};
        s.rows = rows, s.cols = cols, s.quarter_bits = 8 + static_cast<int>(f_.below(13));
        int phases = 16;
        for (int q = s.quarter_bits; phases > 1 && q % 2 == 0; q /= 2) phases /= 2;
        for (int i = 0; i < 32 * phases; ++i) s.tables.push_back(static_cast<uint8_t>(f_.draw() >> 24 & 31));
        const int64_t size = (rows + 31) / 32 * s.chunks() * s.quarter_bits * 64;
        const int64_t given = f_.byte() == 255 ? f_.below(1000) : size;
        s.codes = bytes(given);
        s.scales = scales(rows);
        return shuffle(std::move(s), given, f_.flip());
    }

    Shared chain_of(int64_t rows, int64_t cols, int depth) {
        const auto kind = static_cast<Decomposition>(f_.below(3));
        std::vector<int64_t> view, ranks;
        for (int64_t side : {rows, cols}) {
            const int64_t one = divisor(side);
            if (f_.flip()) view.push_back(side);
            else view.push_back(one), view.push_back(side / one);
        }
        if (f_.byte() == 255) view.pop_back();
        const size_t n = view.size();
        std::vector<Shared> parts;
        const auto part = [&](int64_t r, int64_t c) { parts.push_back(tree(r, c, depth - 1, true)); };
        if (kind == Decomposition::kCp) {
            ranks = {1 + f_.below(20)};
            for (int64_t size : view) part(size, ranks[0]);
        } else if (kind == Decomposition::kTucker) {
            int64_t core = 1;
            for (int64_t size : view) ranks.push_back(f_.flip() ? size : 1 + f_.below(std::min<int64_t>(size, 12))), core *= ranks.back();
            if (core > 1 << 14) throw std::invalid_argument("large");
            part(core / ranks.back(), ranks.back());
            for (size_t i = 0; i < n; ++i) {
                if (ranks[i] == view[i]) parts.push_back(nullptr);
                else part(view[i], ranks[i]);
            }
        } else {
            for (size_t i = 0; i + 1 < n; ++i) ranks.push_back(1 + f_.below(12));
            for (size_t i = 0; i < n; ++i) part((i == 0 ? 1 : ranks[i - 1]) * view[i], i + 1 == n ? 1 : ranks[i]);
        }
        const Shared made = chain(kind, rows, cols, view, ranks, parts, static_cast<Way>(f_.below(3)));
        if (made == nullptr) throw std::invalid_argument("axes that mix rows and columns");
        return made;
    }

    Fuzz& f_;
};

void wrong(const char* what, double found, double wanted) {
    std::fprintf(stderr, "%s: %g, not %g\n", what, found, wanted);
    std::abort();
}

void matrices(Fuzz& f) {
    Maker maker(f);
    const int64_t rows = 1 + f.below(96), cols = 1 + f.below(96), batch = 1 + f.below(9);
    const int threads = 1 + static_cast<int>(f.below(3));
    const Shared m = maker.tree(rows, cols, static_cast<int>(f.below(4)));
    std::vector<float> w(static_cast<size_t>(rows * cols)), x(static_cast<size_t>(batch * cols)), y(static_cast<size_t>(batch * rows));
    m->decode_rows(0, rows, w.data());
    std::vector<float> row(static_cast<size_t>(cols));
    const int64_t one = f.below(rows);
    m->decode(one, row.data());
    for (int64_t k = 0; k < cols; ++k) {
        const double found = row[static_cast<size_t>(k)], wanted = w[static_cast<size_t>(one * cols + k)];
        if (std::fabs(found - wanted) > 1e-3 * std::max(1.0, std::fabs(wanted))) wrong("a row", found, wanted);
    }
    for (float& v : x) v = static_cast<float>(f.draw() >> 24) / 128 - 1;
    m->multiply(x.data(), batch, y.data(), rows, threads);
    double largest = 0;
    for (float v : w) largest = std::max(largest, std::fabs(static_cast<double>(v)));
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t r = 0; r < rows; ++r) {
            double wanted = 0;
            for (int64_t k = 0; k < cols; ++k)
                wanted += static_cast<double>(x[static_cast<size_t>(b * cols + k)]) * w[static_cast<size_t>(r * cols + k)];
            const double found = y[static_cast<size_t>(b * rows + r)];
            // Products of products cancel: a tree's terms are larger than its values.
            if (std::fabs(found - wanted) > 1e-2 * static_cast<double>(cols) * (largest + 100)) wrong("a product", found, wanted);
        }
}

// A cache as texts use it: tokens behind one another, texts that begin anew or in the middle, copies.
void caches(Fuzz& f) {
    const int64_t kv = 1 + f.below(2), heads = kv * (1 + f.below(3)), size = 2 * (1 + f.below(48));
    LayerPlan plan;
    constexpr int kBits[] = {16, 8, 4, 2};
    for (int64_t h = 0; h < kv && f.flip(); ++h) {
        if (h == 0) plan.groups.resize(static_cast<size_t>(kv));
        GroupPlan& g = plan.groups[static_cast<size_t>(h)];
        g.at_once = f.flip();
        for (Format* one : {&g.keys, &g.values}) *one = {g.at_once ? 8 : kBits[f.below(4)], !g.at_once && f.flip(), f.flip()};
        g.recent = f.flip() ? 1 + f.below(200) : 0, g.sink = f.below(100), g.min_length = f.below(300);
    }
    for (int64_t h = 0; h < heads && f.flip(); ++h) {
        if (h == 0) plan.heads.resize(static_cast<size_t>(heads));
        HeadPlan& one = plan.heads[static_cast<size_t>(h)];
        one.pattern = static_cast<HeadPlan::Pattern>(f.below(3));
        one.sink = f.below(100), one.window = 1 + f.below(200), one.min_length = f.below(300), one.stride = f.flip() ? 8 : 16;
        one.threshold = static_cast<float>(f.below(100)) / 99;
    }
    const AttendShape shape{heads, kv, size, f.flip() ? 1 + f.below(200) : 0, 0.1f};
    PageCache cache[2] = {{kv, size}, {kv, size}};
    for (PageCache& c : cache) c.add_layer(plan.groups);
    Attention attention;
    std::vector<float> q, k, v, out;
    int64_t first[2] = {0, 0};
    for (int turn = 0; turn < 12 && f.left > 0; ++turn) {
        const size_t n = f.flip();
        if (f.byte() < 32) {
            cache[n].copy(cache[1 - n], first[n] = f.below(first[1 - n] + 1));
            continue;
        }
        if (f.byte() < 48) first[n] = cache[n].resumable(f.below(first[n] + 1));
        const int64_t count = f.flip() ? 1 : 1 + f.below(128), position = first[n];
        if (position + count > 600) continue;
        k.resize(static_cast<size_t>(count * kv * size)), v.resize(k.size());
        q.resize(static_cast<size_t>(count * heads * size)), out.resize(q.size());
        for (auto* all : {&k, &v, &q})
            for (float& x : *all) x = static_cast<float>(f.draw() >> 24) / 128 - 1;
        cache[n].prepare(position, count);
        for (int64_t h = 0; h < kv; ++h) {
            for (int64_t t = 0; t < count; ++t) {
                const int64_t from = (t * kv + h) * size;
                cache[n].store(0, h, position + t, k.data() + from, v.data() + from);
            }
            cache[n].pack(0, h);
        }
        attention.run(shape, 0, plan, {{&cache[n], position, count, 0, count == 1 && f.flip()}}, q.data(), out.data(), 2);
        cache[n].finish();
        first[n] = position + count;
        // Values are below 1, and so are means of them; few bits and rotations add a little.
        for (float x : out)
            if (!(std::fabs(x) < 2)) wrong("attention", x, 1);
    }
}

}  // namespace
}  // namespace nstf

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    nstf::Fuzz f{data, size};
    try {
        if (f.flip()) nstf::matrices(f);
        else nstf::caches(f);
    } catch (const std::invalid_argument&) {
    } catch (const std::bad_alloc&) {
    }
    return 0;
}
