// Where the bits of a code lie in a panel (panel_int8.h).
#pragma once

#include <algorithm>

namespace nstf::engine {

struct PanelPlace {
    int vector, shift, count;  // `count` bits from bit `shift` of a vector's bytes
};

// Of a block of `bits` vectors: bits `first` and following of word `word`, from word `bits` on, as many as lie together.
constexpr PanelPlace panel_place(int bits, int word, int first) {
    const int spare = 8 - bits, at = (word - bits) * bits + first;
    return {at / spare, bits + at % spare, std::min(bits - first, spare - at % spare)};
}

}  // namespace nstf::engine
