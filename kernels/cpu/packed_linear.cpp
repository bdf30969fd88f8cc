// Activations times a matrix of packed codes, without the dense matrix; and rows of it decoded, for large batches.
//
// The row kernels (packed_rows.h) are compiled for AVX-512, AVX2 and the baseline, and one is chosen once by CPUID; other
// compilers and processors get the portable one. Activations and sums are float32.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "half.h"
#include "isa.h"
#include "packed_matrix.h"
#include "parallel.h"

#if NSTF_X86
#include <immintrin.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace nstf {
namespace {

// Enough work to be worth handing over, few enough rows to share evenly; even, since rows go in pairs.
inline int64_t rows_per_task(const PackedMatrix& w, int64_t rows, int threads) {
    const int64_t most = (rows + threads - 1) / threads;
    return std::max<int64_t>(2, std::min<int64_t>((1 << 16) / w.cols, most) / 2 * 2);
}

// NSTF_ISA says which set: GCC before 13 does not define __AVX2__ and so on after a pragma in C++ (PR 87299).
#define NSTF_ISA 0
namespace portable {
#include "packed_rows.h"
}
#undef NSTF_ISA

#if NSTF_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define NSTF_ISA 2
namespace avx2 {
#include "packed_rows.h"
}
#undef NSTF_ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define NSTF_ISA 512
namespace avx512 {
#include "packed_rows.h"
}
#undef NSTF_ISA
#pragma GCC pop_options
#endif

struct Variant {
    const char* name;
    MatmulFn matmul;
    DecodeFn decode;
};

// The row kernels of this processor, fastest first.
std::vector<Variant> variants() {
    std::vector<Variant> found;
#if NSTF_X86
    const Isa best = isas().front();
    if (has_avx512(best)) found.push_back({"avx512", avx512::matmul, avx512::decode});
    if (has_avx2(best)) found.push_back({"avx2", avx2::matmul, avx2::decode});
#endif
    found.push_back({"portable", portable::matmul, portable::decode});
    return found;
}

// The one named, or the one of the instruction set in use.
const Variant& variant(std::string wanted) {
    static const std::vector<Variant> all = variants();
    if (wanted.empty()) wanted = has_avx512(isa()) ? "avx512" : has_avx2(isa()) ? "avx2" : "portable";
    for (const Variant& v : all)
        if (wanted == v.name) return v;
    throw std::invalid_argument("no row kernel '" + wanted + "' on this processor");
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

int64_t groups_of(int64_t cols, int64_t group) { return (cols + group - 1) / group; }

void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

// A PackedMatrix and the arrays it points into.
class PackedLinear {
  public:
    PackedLinear(const std::string& kind, int64_t cols, int64_t group, int bits, Bytes codes, Any scale,
                 std::optional<Any> super_, std::optional<Bytes> zeros, std::optional<Any> table,
                 const std::string& isa)
        : codes_(codes), scale_(scale), super_(super_), zeros_(zeros), variant_(variant(isa)) {
        require(cols > 0 && group >= 0 && bits >= 2 && bits <= 8, "cols, group or bits out of range");
        w_.rows = static_cast<int64_t>(codes.shape(0));
        w_.cols = cols;
        w_.group = group == 0 ? cols : std::min(group, cols);
        w_.groups = groups_of(cols, w_.group);
        require(w_.groups == 1 || w_.group % 32 == 0, "groups must be whole rows or multiples of 32 columns");
        w_.bits = bits;
        w_.codes = codes.data();
        w_.row_bytes = (cols * bits + 7) / 8;
        w_.codes_end = w_.codes + w_.rows * w_.row_bytes;
        require(static_cast<int64_t>(codes.shape(1)) == w_.row_bytes, "codes do not have the width of their columns");
        set_kind(kind, table);
        set_scale();
        if (zeros) {
            require(kind == "int", "only kind int has zero points");
            w_.zeros = zeros->data();
            w_.zero_bytes = (w_.groups * bits + 7) / 8;
            require(static_cast<int64_t>(zeros->shape(0)) == w_.rows, "zeros must have a row for each row");
            require(static_cast<int64_t>(zeros->shape(1)) == w_.zero_bytes, "zeros have the wrong width");
        }
    }

    // Addresses of contiguous float32 arrays, x [batch, cols] and y [batch, rows]: passing the arrays themselves costs
    // several microseconds each, a tenth of a small product. The one caller has just checked or made both.
    void matmul_at(uintptr_t x, int64_t batch, uintptr_t y, int threads) const {
        require(batch >= 0 && x % alignof(float) == 0 && y % alignof(float) == 0, "not addresses of floats");
        nb::gil_scoped_release release;
        variant_.matmul(w_, reinterpret_cast<const float*>(x), batch, reinterpret_cast<float*>(y), std::max(1, threads));
    }

    void decode(int64_t start, Output out, int threads) const {
        const int64_t count = static_cast<int64_t>(out.shape(0));
        require(start >= 0 && start + count <= w_.rows, "rows out of range");
        require(static_cast<int64_t>(out.shape(1)) == w_.cols, "out must have the matrix's columns");
        nb::gil_scoped_release release;
        variant_.decode(w_, start, count, out.data(), std::max(1, threads));
    }

    // Codes of FP8 that mean NaN, which the row kernels would read as a number.
    bool has_nan() const {
        if (w_.code != Code::kFloat8) return false;
        const int64_t n = w_.rows * w_.row_bytes;
        int found = 0;
        for (int64_t i = 0; i < n; ++i) {
            const uint8_t c = w_.codes[i];
            found |= fnuz_ ? c == 0x80 : (c & 0x7f) == 0x7f;
        }
        return found != 0;
    }

    const char* isa() const { return variant_.name; }

    // For the engine, which keeps this object alive.
    uintptr_t view() {
        view_ = {w_, variant_.matmul, variant_.decode, variant_.name};
        return reinterpret_cast<uintptr_t>(&view_);
    }

  private:
    void set_kind(const std::string& kind, const std::optional<Any>& table) {
        static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        if (kind == "int") {
            w_.code = w_.bits == 4 ? Code::kTable4 : w_.bits == 8 ? Code::kBytes : Code::kBits;
            for (int i = 0; i < 16; ++i) w_.table[i] = static_cast<float>(i - 8);
        } else if (kind == "grid") {
            require(table && table->size() == 16 && table->dtype() == nb::dtype<uint16_t>(), "table must be 16 halves");
            const uint16_t* t = static_cast<const uint16_t*>(table->data());
            for (int i = 0; i < 16; ++i) w_.table[i] = half_to_float(t[i]);
        } else if (kind == "mxfp4") {
            for (int i = 0; i < 16; ++i) w_.table[i] = i < 8 ? e2m1[i] : -e2m1[i - 8];
        } else {
            fnuz_ = kind == "e4m3fnuz";
            require(fnuz_ || kind == "e4m3fn", "unknown kind");
            w_.code = Code::kFloat8;
            w_.factor = fnuz_ ? 128.0f : 256.0f;
        }
        require(kind == "int" || w_.bits == (w_.code == Code::kFloat8 ? 8 : 4), "bits do not fit the kind");
    }

    void set_scale() {
        w_.scale = scale_.data();
        require(static_cast<int64_t>(scale_.size()) == w_.rows * w_.groups, "scale must be [rows, groups]");
        if (scale_.dtype() == nb::dtype<uint16_t>()) {
            w_.scale_kind = Scale::kHalf;
        } else if (scale_.dtype() == nb::dtype<float>()) {
            w_.scale_kind = Scale::kFloat;
        } else {
            require(scale_.dtype() == nb::dtype<uint8_t>(), "scale must be float16 bits, float32 or uint8");
            w_.scale_kind = super_ ? Scale::kSteps : Scale::kPower;
        }
        if (super_) {
            require(super_->dtype() == nb::dtype<uint16_t>() && static_cast<int64_t>(super_->size()) == w_.rows,
                    "super must be one half for each row");
            w_.super_ = static_cast<const uint16_t*>(super_->data());
        }
    }

    Bytes codes_;
    Any scale_;
    std::optional<Any> super_;
    std::optional<Bytes> zeros_;
    const Variant& variant_;
    bool fnuz_ = false;
    PackedMatrix w_;
    PackedView view_;
};

}  // namespace
}  // namespace nstf

void bind_packed_linear(nb::module_& m) {
    using nstf::PackedLinear;
    nb::class_<PackedLinear>(m, "PackedLinear")
        .def(nb::init<const std::string&, int64_t, int64_t, int, nstf::Bytes, nstf::Any, std::optional<nstf::Any>,
                      std::optional<nstf::Bytes>, std::optional<nstf::Any>, const std::string&>(),
             "kind"_a, "cols"_a, "group"_a, "bits"_a, "codes"_a, "scale"_a, "super_scale"_a = nb::none(),
             "zeros"_a = nb::none(), "table"_a = nb::none(), "isa"_a = "")
        .def("matmul_at", &PackedLinear::matmul_at, "x"_a, "batch"_a, "y"_a, "threads"_a)
        .def("decode", &PackedLinear::decode, "start"_a, "out"_a, "threads"_a)
        .def("has_nan", &PackedLinear::has_nan)
        .def("view", &PackedLinear::view)
        .def_prop_ro("isa", &PackedLinear::isa);
    m.def(
        "row_kernels",
        [] {
            std::vector<std::string> names;
            for (const auto& v : nstf::variants()) names.emplace_back(v.name);
            return names;
        },
        "The instruction sets of this processor that have a row kernel, fastest first.");
}
