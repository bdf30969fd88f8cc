#include "isa.h"

#include <atomic>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nstf {
namespace {

std::vector<Isa> found() {
    std::vector<Isa> all;
#if NSTF_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (vnni && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        all.push_back(Isa::kAvx512Vbmi);
    if (vnni) all.push_back(Isa::kAvx512Vnni);
    if (avx512) all.push_back(Isa::kAvx512);
    if (avx2 && __builtin_cpu_supports("avxvnni")) all.push_back(Isa::kAvx2Vnni);
    if (avx2) all.push_back(Isa::kAvx2);
#elif defined(__aarch64__)
#if NSTF_DOTPROD && defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) all.push_back(Isa::kNeonDot);
#elif NSTF_DOTPROD && defined(__ARM_FEATURE_DOTPROD)
    all.push_back(Isa::kNeonDot);
#endif
    all.push_back(Isa::kNeon);
#endif
    all.push_back(Isa::kPortable);
    return all;
}

std::atomic<Isa>& chosen() {
    static std::atomic<Isa> one{isas().front()};
    return one;
}

}  // namespace

const char* name(Isa isa) {
    switch (isa) {
        case Isa::kPortable: return "portable";
        case Isa::kNeon: return "neon";
        case Isa::kNeonDot: return "neon-dotprod";
        case Isa::kAvx2: return "avx2";
        case Isa::kAvx2Vnni: return "avx2-vnni";
        case Isa::kAvx512: return "avx512";
        case Isa::kAvx512Vnni: return "avx512-vnni";
        case Isa::kAvx512Vbmi: return "avx512-vbmi";
    }
    return "";
}

const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = found();
    return all;
}

Isa isa() { return chosen().load(std::memory_order_relaxed); }

void use_isa(const std::string& wanted) {
    for (Isa i : isas())
        if (wanted.empty() || wanted == name(i)) {
            chosen() = i;
            return;
        }
    std::string known;
    for (Isa i : isas()) known += std::string(known.empty() ? "" : ", ") + name(i);
    throw std::invalid_argument("no instruction set '" + wanted + "' here; there are " + known);
}

}  // namespace nstf
