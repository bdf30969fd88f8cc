// A cache that finds no memory for its pages holds what came before them, and says so.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "engine/ops_table.h"
#include "engine/page_cache.h"

static bool out = false;

namespace nstf::engine {
// Where pages come from (large_pages.cpp).
void* take_large(std::size_t bytes) {
    if (out) throw std::bad_alloc();
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}
void give_large(void* memory, std::size_t) noexcept { std::free(memory); }
// Nothing is computed here.
const Ops& ops() { std::abort(); }
const PageOps& page_ops() { std::abort(); }
}  // namespace nstf::engine

int main() {
    nstf::engine::PageCache cache(2, 512);
    cache.add_layer({});
    cache.prepare(0, 100);
    cache.finish();
    if (cache.resumable(100) != 100) return 1;
    out = true;
    try {
        cache.prepare(64, 6400);
        return 2;
    } catch (const std::bad_alloc&) {
    }
    out = false;
    if (cache.resumable(100) != 0 || cache.resumable(64) != 64) return 3;
    cache.prepare(64, 6400);
    if (cache.resumable(6464) != 6464) return 4;
    std::puts("ok");
}
