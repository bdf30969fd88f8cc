// The extension module; each kernel file registers its functions through one bind_* function.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_packed_linear(nb::module_& m);
void bind_ldlq(nb::module_& m);
void bind_trellis(nb::module_& m);
void bind_shuffle(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_bandwidth(nb::module_& m);
void bind_sha256(nb::module_& m);
void bind_awake(nb::module_& m);
void bind_shared_box(nb::module_& m);

NB_MODULE(_ext, m) {
    m.doc() = "Compiled CPU kernels of nstf";
    // Commands do not look for garbage before they end (gc.freeze), and a signal may end one anywhere: what is alive then is
    // no leak, and a list of it would be the last that a user reads.
    nb::set_leak_warnings(false);
    bind_packed_linear(m);
    bind_ldlq(m);
    bind_trellis(m);
    bind_shuffle(m);
    bind_engine(m);
    bind_sampler(m);
    bind_bandwidth(m);
    bind_sha256(m);
    bind_awake(m);
    bind_shared_box(m);
}
