#include "large_pages.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <utility>

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
            const bool fits = reserved_ != nullptr && !used_ && bytes <= chunks_.at(reserved_).bytes;
            uint8_t* const fresh = fits ? reserved_ : map(bytes, kChunk);
            if (fresh == nullptr) return nullptr;
            used_ = used_ || fits;
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
        auto* const block = static_cast<uint8_t*>(memory);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto found = chunk_of(block);
            if (found == chunks_.end()) return false;
            if (found->first != reserved_) {
                give(found, block, bytes);
                return true;
            }
        }
        leave_ = true;  // no pages should be found for what is given back
        const std::lock_guard<std::mutex> step(step_);
        const std::lock_guard<std::mutex> lock(mutex_);
        give(chunk_of(block), block, bytes);
        return true;
    }

    void reserve(size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (reserved_ != nullptr || bytes < kPage) return;
        reserved_ = map(bytes, 0);
        used_ = leave_ = false;
    }

    void populate() {
#ifdef MADV_POPULATE_WRITE  // Linux 5.14; pages are found and nothing is written, whoever else writes into them
        for (size_t at = 0; !leave_; at += kPage) {
            const std::lock_guard<std::mutex> step(step_);
            uint8_t* begin = nullptr;
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                if (reserved_ == nullptr || at >= chunks_.at(reserved_).bytes) return;
                begin = reserved_ + at;
            }
            if (madvise(begin, kPage, MADV_POPULATE_WRITE) != 0) return;
        }
#endif
    }

    void release() {
        leave_ = true;
        const std::lock_guard<std::mutex> steps(step_);
        const std::lock_guard<std::mutex> lock(mutex_);
        uint8_t* const begin = std::exchange(reserved_, nullptr);
        if (begin == nullptr) return;
        const Chunk& chunk = chunks_.at(begin);
        if (chunk.live == 0) {
            unmap(begin);
        } else {
            give_pages(begin + chunk.used, chunk.bytes - chunk.used);
        }
    }

    // Held while the process forks, so that the child finds the chunks whole.
    void lock() {
        step_.lock();
        mutex_.lock();
    }
    void unlock() {
        mutex_.unlock();
        step_.unlock();
    }

  private:
    using Found = std::map<uint8_t*, Chunk>::iterator;

    // The chunk that a block lies in, or the end.
    Found chunk_of(uint8_t* block) {
        auto found = chunks_.upper_bound(block);
        if (found == chunks_.begin()) return chunks_.end();
        --found;
        return block < found->first + found->second.bytes ? found : chunks_.end();
    }

    void give(Found chunk, uint8_t* block, size_t bytes) noexcept {
        if (--chunk->second.live == 0) {
            unmap(chunk->first);
        } else {
            give_pages(block, bytes);
        }
    }

    void unmap(uint8_t* chunk) {
        if (current_ == chunk) current_ = nullptr;
        if (reserved_ == chunk) reserved_ = nullptr;
        munmap(chunk, chunks_.at(chunk).bytes);
        chunks_.erase(chunk);
    }

    // A block's pages go back to the system at once, those of 4 KiB at its ends too: what lives longer would hold them.
    static void give_pages(uint8_t* block, size_t bytes) {
        static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const auto begin = (reinterpret_cast<uintptr_t>(block) + page - 1) / page * page;
        const auto end = (reinterpret_cast<uintptr_t>(block) + bytes) / page * page;
        if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    }

    // A new chunk for at least `bytes`, or nullptr. Where address space is short it is no larger than it must be.
    uint8_t* map(size_t bytes, size_t usual) {
        const size_t least = (bytes + kPage - 1) / kPage * kPage;
        for (size_t size : {least > usual ? least : usual, least}) {
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

    std::mutex step_;  // held while pages are found for the reserved chunk, which must not go meanwhile; before mutex_
    std::mutex mutex_;
    std::map<uint8_t*, Chunk> chunks_;
    uint8_t* current_ = nullptr;
    uint8_t* reserved_ = nullptr;
    bool used_ = false;  // blocks are taken from the reserved chunk
    std::atomic<bool> leave_{false};
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

void reserve_large(size_t bytes) noexcept { chunks().reserve(bytes); }
void populate_large() noexcept { chunks().populate(); }
void release_large() noexcept { chunks().release(); }

#else

void reserve_large(size_t) noexcept {}
void populate_large() noexcept {}
void release_large() noexcept {}

void* take_large(size_t bytes) {
    const size_t size = (bytes + 127) / 64 * 64;
    void* const found = size < bytes ? nullptr : std::aligned_alloc(64, size);
    if (found == nullptr) throw std::bad_alloc();
    return found;
}

void give_large(void* memory, size_t) noexcept { std::free(memory); }

#endif

}  // namespace nstf::engine
