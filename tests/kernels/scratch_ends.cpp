// Room that cannot be kept for later, since there is no memory for the list of it, is given back: the process goes on.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "engine/buffer.h"

static bool out = false;

void* operator new(std::size_t size) {
    void* found = out ? nullptr : std::malloc(size);
    if (found == nullptr) throw std::bad_alloc();
    return found;
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

int main() {
    for (bool now : {true, false, true}) {
        out = now;
        nstf::engine::Scratch room(100);
        room.data()[99] = 1;
    }
    out = false;
    std::puts("ok");
}
