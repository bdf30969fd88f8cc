// A cache that finds no memory for its pages holds what came before them, and says so.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "engine/ops_table.h"
#include "engine/page_cache.h"

static bool out = false;

// The C library's name, which buffers ask by.
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
    void* found = nullptr;
    return out || posix_memalign(&found, alignment, size) != 0 ? nullptr : found;
}

namespace nstf::engine {
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
