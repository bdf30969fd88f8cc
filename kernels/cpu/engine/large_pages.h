// Memory in pages of 2 MiB where the system gives them: what a token reads once from end to end (codes, keys and values).
// With pages of 4 KiB a processor looks up a translation for every 4 KiB and its prefetchers stop at each page's end.
#pragma once

#include <cstddef>

namespace nstf::engine {

// `bytes` of memory, aligned to 64, of any content. Throws std::bad_alloc.
void* take_large(size_t bytes);
// bytes: as many as were taken.
void give_large(void* memory, size_t bytes) noexcept;

// A chunk for blocks of `bytes` in all that will be taken soon; `populate_large`, on a thread of its own, has the system find
// its pages meanwhile, which may take longer than filling them. `release_large` gives back what no block came to lie in; it is
// called once all are taken, or none will be. All without an effect where there are no large pages, or no room.
void reserve_large(size_t bytes) noexcept;
void populate_large() noexcept;
void release_large() noexcept;

// Where a Buffer takes its memory.
struct LargePages {
    static void* take(size_t bytes) { return take_large(bytes); }
    static void give(void* memory, size_t bytes) { give_large(memory, bytes); }
};

}  // namespace nstf::engine
