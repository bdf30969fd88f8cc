// The attention plan of a layer as Python gives it.
#pragma once

#include <nanobind/nanobind.h>

#include "page_cache.h"

namespace nstf::engine {

// heads: a list of (pattern, sink, window, threshold, stride, min_length) per query head, empty for full attention; groups: of
// (sink, recent, min_length, keys, values, at once) per key head, formats as (bits, by channel, rotated), empty for float16.
LayerPlan layer_plan(const nanobind::dict& d);
void bind_attention(nanobind::module_& m);

}  // namespace nstf::engine
