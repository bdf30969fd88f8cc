// Packed codes in float32: the row kernels of packed_linear, a range of rows at a time.
#include "leaves.h"

namespace nstf::engine {
namespace {

int64_t scale_bytes(Scale kind) {
    return kind == Scale::kFloat ? 4 : kind == Scale::kHalf ? 2 : 1;
}

class PackedExact : public Leaf {
  public:
    explicit PackedExact(const PackedView& view) : Leaf(view.w.rows, view.w.cols), view_(view) {}
    uintptr_t key() const override { return 1; }
    void reserve(const float* x, int64_t, Input& in) const override { in.x = x; }
    void prepare(const float*, int64_t, int64_t, Input&) const override {}
    int64_t unit() const override { return 2; }
    Ahead codes(int64_t first, int64_t end) const override {
        return {view_.w.codes + first * view_.w.row_bytes, (end - first) * view_.w.row_bytes};
    }
    void run(const Input& in, int64_t batch, int64_t first, int64_t end, float* y, int64_t stride) const override {
        PackedMatrix w = view_.w;
        w.rows = end - first;
        w.stride = stride;
        w.codes += first * w.row_bytes;
        w.scale = static_cast<const uint8_t*>(w.scale) + first * w.groups * scale_bytes(w.scale_kind);
        if (w.super_ != nullptr) w.super_ += first;
        if (w.zeros != nullptr) w.zeros += first * w.zero_bytes;
        view_.matmul(w, in.x, batch, y + first, 1);
    }
    void decode(int64_t row, float* out) const override { view_.decode(view_.w, row, 1, out, 1); }
    void decode_rows(int64_t first, int64_t count, float* out) const override { view_.decode(view_.w, first, count, out, 1); }
    std::string kernel() const override { return std::string("packed float32, ") + view_.isa; }

  private:
    PackedView view_;
};

}  // namespace

Shared packed_exact(const PackedView& view) { return std::make_shared<PackedExact>(view); }

}  // namespace nstf::engine
