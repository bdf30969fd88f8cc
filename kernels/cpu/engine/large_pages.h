// Memory in pages of 2 MiB where the system gives them: what a token reads once from end to end (codes, keys and values).
// With pages of 4 KiB a processor looks up a translation for every 4 KiB and its prefetchers stop at each page's end.
#pragma once

#include <cstddef>

namespace nstf::engine {

// `bytes` of memory, aligned to 64; new pages are zero, those that were given back before need not be. Throws std::bad_alloc.
void* take_large(size_t bytes);
void give_large(void* memory) noexcept;

// Where a Buffer takes its memory.
struct LargePages {
    static void* take(size_t bytes) { return take_large(bytes); }
    static void give(void* memory) { give_large(memory); }
};

}  // namespace nstf::engine
