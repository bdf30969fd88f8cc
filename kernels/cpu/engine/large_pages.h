// Memory in pages of 2 MiB where the system gives them: what a token reads once from end to end (codes, keys and values).
// With pages of 4 KiB a processor looks up a translation for every 4 KiB and its prefetchers stop at each page's end.
#pragma once

#include <cstddef>

namespace nstf::engine {

// `bytes` of memory, aligned to 64, of any content. Throws std::bad_alloc.
void* take_large(size_t bytes);
// bytes: as many as were taken.
void give_large(void* memory, size_t bytes) noexcept;

// Where a Buffer takes its memory.
struct LargePages {
    static void* take(size_t bytes) { return take_large(bytes); }
    static void give(void* memory, size_t bytes) { give_large(memory, bytes); }
};

}  // namespace nstf::engine
