// Memory aligned to cache lines, kept and grown but never shrunk: what a token needs is allocated once.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "large_pages.h"

namespace nstf::engine {

// Where a Buffer takes its memory if nothing is said; large_pages.h has another place.
struct Heap {
    static void* take(size_t bytes) {
        void* found = std::aligned_alloc(64, bytes);
        if (found == nullptr) throw std::bad_alloc();
        return found;
    }
    static void give(void* memory, size_t) { std::free(memory); }
};

template <class T, class Memory = Heap>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t count) { grow(count); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_), std::swap(size_, other.size_);
        return *this;
    }
    ~Buffer() { Memory::give(data_, bytes_of(size_)); }

    // At least `count` elements; what was there is lost when it grows, and new memory is zero.
    T* grow(int64_t count) {
        if (count > size_) std::memset(grow_raw(count), 0, bytes_of(count));
        return data_;
    }
    // The same with new memory as it comes, for who writes all of it, perhaps by several threads.
    T* grow_raw(int64_t count) {
        if (count > size_) {
            void* fresh = Memory::take(bytes_of(count));
            Memory::give(data_, bytes_of(size_));
            data_ = static_cast<T*>(fresh);
            size_ = count;
        }
        return data_;
    }
    T* data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    static size_t bytes_of(int64_t count) { return (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64; }
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// Room for `count` numbers until the end of a scope, from what the thread used before: decoding may go through several
// levels of factors, and each has its own.
class Scratch {
  public:
    explicit Scratch(int64_t count) {
        auto& spare = spares();
        if (!spare.empty()) {
            buffer_ = std::move(spare.back());
            spare.pop_back();
        }
        buffer_.grow(count);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        try {
            spares().push_back(std::move(buffer_));
        } catch (const std::bad_alloc&) {  // then the buffer is not kept; leaving here would end the process
        }
    }
    float* data() const { return buffer_.data(); }

  private:
    static std::vector<Buffer<float>>& spares() {
        thread_local std::vector<Buffer<float>> kept;
        return kept;
    }
    Buffer<float> buffer_;
};

}  // namespace nstf::engine
