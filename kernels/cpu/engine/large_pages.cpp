#include "large_pages.h"

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

// Under a sanitizer every block comes from the heap, where reads beyond its end are seen.
#if defined(__SANITIZE_ADDRESS__)
#define NSTF_LARGE_PAGES 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NSTF_LARGE_PAGES 0
#endif
#endif
#if !defined(NSTF_LARGE_PAGES) && defined(__linux__)
#define NSTF_LARGE_PAGES 1
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nstf::engine {

#if NSTF_LARGE_PAGES

namespace {

constexpr size_t kPage = size_t{2} << 20;
// Matrices of small models are smaller than a page, so they share chunks; address space alone is taken at once.
constexpr size_t kChunk = size_t{32} << 20;
// What is smaller is read in no time: a page of 2 MiB for it would be wasted.
constexpr size_t kLeast = size_t{32} << 10;

struct Chunk {
    size_t bytes, used, live;  // live: blocks that were taken and not given back
};

// Chunks by address. One is unmapped when its last block is given back.
class Chunks {
  public:
    void* take(size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (current_ == nullptr || chunks_.at(current_).used + bytes > chunks_.at(current_).bytes) {
            uint8_t* const fresh = map(bytes);
            if (fresh == nullptr) return nullptr;
            current_ = fresh;
        }
        Chunk& chunk = chunks_.at(current_);
        uint8_t* const block = current_ + chunk.used;
        chunk.used += bytes;
        ++chunk.live;
        return block;
    }

    // Whether the memory was taken here.
    bool give(void* memory, size_t bytes) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto* const block = static_cast<uint8_t*>(memory);
        auto found = chunks_.upper_bound(block);
        if (found == chunks_.begin()) return false;
        --found;
        if (block >= found->first + found->second.bytes) return false;
        if (--found->second.live == 0) {
            if (current_ == found->first) current_ = nullptr;
            munmap(found->first, found->second.bytes);
            chunks_.erase(found);
            return true;
        }
        give_pages(block, bytes);
        return true;
    }

    // Held while the process forks, so that the child finds the chunks whole.
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

  private:
    // A block's pages go back to the system at once, those of 4 KiB at its ends too: what lives longer would hold them.
    static void give_pages(uint8_t* block, size_t bytes) {
        static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const auto begin = (reinterpret_cast<uintptr_t>(block) + page - 1) / page * page;
        const auto end = (reinterpret_cast<uintptr_t>(block) + bytes) / page * page;
        if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    }

    // A new chunk for at least `bytes`, or nullptr. Where address space is short it is no larger than it must be.
    uint8_t* map(size_t bytes) {
        const size_t least = (bytes + kPage - 1) / kPage * kPage;
        for (size_t size : {least > kChunk ? least : kChunk, least}) {
            // One page more, of which the ends go back: chunks begin at a page's beginning.
            void* const found = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (found == MAP_FAILED) continue;
            auto* const begin = static_cast<uint8_t*>(found);
            const size_t before = (kPage - reinterpret_cast<uintptr_t>(begin) % kPage) % kPage;
            if (before) munmap(begin, before);
            if (before < kPage) munmap(begin + before + size, kPage - before);
            madvise(begin + before, size, MADV_HUGEPAGE);  // a wish: without it the pages are as they always were
            try {
                chunks_.emplace(begin + before, Chunk{size, 0, 0});
            } catch (const std::bad_alloc&) {
                munmap(begin + before, size);
                return nullptr;
            }
            return begin + before;
        }
        return nullptr;
    }

    std::mutex mutex_;
    std::map<uint8_t*, Chunk> chunks_;
    uint8_t* current_ = nullptr;
};

// Never destroyed: matrices may be freed after the destructors of static objects have run.
Chunks& chunks() {
    static Chunks* const all = [] {
        auto* const made = new Chunks;
        pthread_atfork([] { chunks().lock(); }, [] { chunks().unlock(); }, [] { chunks().unlock(); });
        return made;
    }();
    return *all;
}

}  // namespace

void* take_large(size_t bytes) {
    const size_t size = (bytes + 63) / 64 * 64;
    if (size < bytes) throw std::bad_alloc();
    void* found = size >= kLeast ? chunks().take(size) : nullptr;
    if (found == nullptr) found = std::aligned_alloc(64, size ? size : 64);  // too small, or no room for whole pages
    if (found == nullptr) throw std::bad_alloc();
    return found;
}

void give_large(void* memory, size_t bytes) noexcept {
    if (memory != nullptr && !chunks().give(memory, bytes)) std::free(memory);
}

#else

void* take_large(size_t bytes) {
    const size_t size = (bytes + 127) / 64 * 64;
    void* const found = size < bytes ? nullptr : std::aligned_alloc(64, size);
    if (found == nullptr) throw std::bad_alloc();
    return found;
}

void give_large(void* memory, size_t) noexcept { std::free(memory); }

#endif

}  // namespace nstf::engine
