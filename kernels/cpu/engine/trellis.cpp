// Which kernel a trellis gets.
#include "trellis.h"

#include <stdexcept>

namespace nstf::engine {

Shared trellis(int64_t rows, int64_t cols, std::vector<TrellisSection> sections, std::vector<float> scales, bool exact) {
    if (static_cast<int64_t>(scales.size()) != rows || sections.empty())
        throw std::invalid_argument("trellis: scales or sections are missing");
#if NSTF_X86
    if (!exact && isa() == Isa::kAvx512Vbmi) return trellis_avx512(rows, cols, std::move(sections), std::move(scales));
    if (!exact && has_avx2(isa())) return trellis_avx2(rows, cols, std::move(sections), std::move(scales));
#else
    (void)exact;
#endif
    return std::make_shared<Trellis>(rows, cols, std::move(sections), std::move(scales));
}

}  // namespace nstf::engine
