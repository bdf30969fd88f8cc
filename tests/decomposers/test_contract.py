"""What every multilinear method promises, over the list of methods."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import tensorly
import torch

from nstf import decomposers
from nstf.decomposers import cp, tensor_train, tucker
from nstf.decomposers.factors import dense_bytes, dense_leaf, lead_for
from nstf.decomposers.modes import whiten
from nstf.kernels.formats import EncodedTensor, check, decode, stored_bytes
from nstf.kernels.formats.tensor_train import max_ranks
from nstf.quantizers import int_grid
from nstf.quantizers.stats import Stats

METHODS = {"cp": cp, "tucker": tucker, "tensor_train": tensor_train}
VIEWS = [
    ((12, 10), (12, 10)),
    ((12, 10), (3, 4, 10)),
    ((12, 10), (3, 4, 5, 2)),
    ((7, 5, 3), (7, 5, 3)),
    ((6, 5, 3, 3), (6, 5, 3, 3)),
    ((1, 9), (1, 3, 3)),
    ((11, 13), (11, 13)),
]


def tensor_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(size: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * size, size, generator=generator) * torch.logspace(0, -1.5, size)
    x = x @ (torch.eye(size) + 0.3 * torch.randn(size, size, generator=generator) / math.sqrt(size))
    return x.T @ x / x.shape[0]


def full(name: str, view: tuple[int, ...]):
    """Parameters at which nothing is lost."""
    if name == "cp":
        return cp.Params(math.prod(view) // max(view), view)
    if name == "tucker":
        return tucker.Params(view, view)
    return tensor_train.Params(max_ranks(view), view)


def part(name: str, view: tuple[int, ...], share: float):
    """Parameters with about `share` of the full ranks."""
    params = full(name, view)
    if name == "cp":
        return replace(params, rank=max(1, int(params.rank * share)))
    ranks = tuple(max(1, round(r * share)) for r in params.ranks)
    if name == "tensor_train":
        ranks = tensor_train.useful_ranks(ranks, view)
    return replace(params, ranks=ranks)


def relative(w: torch.Tensor, approximation: torch.Tensor) -> float:
    return float((w - approximation).norm() / w.norm())


def int8_leaf(name: str, factor: torch.Tensor, metric: torch.Tensor | None) -> EncodedTensor:
    params = int_grid.Params(bits=8, group=0, lead=lead_for(tuple(factor.shape)))
    return int_grid.encode(factor, params, Stats(metric))


def int4_leaf(name: str, factor: torch.Tensor, metric: torch.Tensor | None) -> EncodedTensor:
    params = int_grid.Params(bits=4, group=8, rounding="ldlq", lead=lead_for(tuple(factor.shape)))
    return int_grid.encode(factor, params, Stats(metric))


def test_the_methods_are_the_files_of_the_folder() -> None:
    assert decomposers.METHODS == ("add", "cp", "svd", "tensor_train", "tucker")
    assert all(callable(decomposers.method(name).proposals) for name in decomposers.METHODS)
    for name in set(decomposers.METHODS) - {"add"}:
        module = decomposers.method(name)
        for attribute in ("PARAMS", "KIND", "decompose", "rank_for_bytes", "rank_for_error"):
            assert hasattr(module, attribute), f"{name} lacks {attribute}"


@pytest.mark.parametrize("name", ["os", "factors", "views", "../svd", "", None])
def test_a_name_that_is_no_method_is_not_imported(name) -> None:
    with pytest.raises(ValueError, match="unknown decomposition"):
        decomposers.method(name)


@pytest.mark.parametrize("shape,view", VIEWS)
@pytest.mark.parametrize("name", METHODS)
def test_full_rank_is_exact(name, shape, view) -> None:
    w = tensor_of(shape)
    d = METHODS[name].decompose(w, full(name, view))
    assert relative(w, d.dense()) < 1e-5
    assert d.dense().shape == shape


@pytest.mark.parametrize("name", METHODS)
def test_full_rank_is_exact_with_statistics_too(name) -> None:
    w = tensor_of((12, 10))
    rows = torch.logspace(0, -2, 12)
    for view in ((3, 4, 10), (12, 5, 2), (3, 4, 5, 2)):
        d = METHODS[name].decompose(w, full(name, view), hessian_of(10), rows)
        assert relative(w, d.dense()) < 1e-5


@pytest.mark.parametrize("shape,view", VIEWS[:5])
@pytest.mark.parametrize("name", METHODS)
def test_error_does_not_grow_with_the_rank(name, shape, view) -> None:
    w = tensor_of(shape)
    errors = [
        relative(w, METHODS[name].decompose(w, part(name, view, share)).dense())
        for share in (0.1, 0.3, 0.6, 1.0)
    ]
    # ALS and HOOI are local searches; the cuts of a train are nested.
    slack = 1e-6 if name == "tensor_train" else 0.02
    assert all(b <= a + slack for a, b in pairwise(errors)), errors


@pytest.mark.parametrize("shape,view", VIEWS)
@pytest.mark.parametrize("name", METHODS)
def test_the_node_is_what_tensorly_reconstructs(name, shape, view) -> None:
    w = tensor_of(shape)
    d = METHODS[name].decompose(w, part(name, view, 0.5))
    f = {n: v.double().numpy() for n, v in d.factors.items()}
    axes = range(len(view))
    if name == "cp":
        rebuilt = tensorly.cp_to_tensor((None, [f[f"factor{i}"] for i in axes]))
    elif name == "tucker":
        modes = [i for i in axes if f"factor{i}" in f]
        rebuilt = tensorly.tenalg.multi_mode_dot(f["core"], [f[f"factor{i}"] for i in modes], modes)
    else:
        rebuilt = tensorly.tt_to_tensor([f[f"core{i}"] for i in axes])
    torch.testing.assert_close(
        d.dense().double(), torch.from_numpy(rebuilt).reshape(shape), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", METHODS)
def test_tensors_of_low_rank_are_recovered(name) -> None:
    generator = torch.Generator().manual_seed(7)
    view = (8, 9, 10)
    if name == "cp":
        factors = [torch.randn(n, 3, generator=generator) for n in view]
        w = torch.einsum("ir,jr,kr->ijk", *factors)
        params = cp.Params(3, view, iterations=300)
    elif name == "tucker":
        factors = [torch.randn(n, r, generator=generator) for n, r in zip(view, (2, 3, 4), strict=True)]
        w = torch.einsum("abc,ia,jb,kc->ijk", torch.randn(2, 3, 4, generator=generator), *factors)
        params = tucker.Params((2, 3, 4), view)
    else:
        cores = [torch.randn(s, generator=generator) for s in ((1, 8, 2), (2, 9, 3), (3, 10, 1))]
        w = torch.einsum("aib,bjc,ckd->ijk", *cores)
        params = tensor_train.Params((2, 3), view)
    for h in (None, hessian_of(10)):
        d = METHODS[name].decompose(w, params, h)
        assert relative(w, d.dense()) < 1e-3 if name == "cp" else relative(w, d.dense()) < 1e-5


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("view", [(3, 4, 10), (12, 5, 2), (3, 4, 5, 2)])
def test_whitened_beats_plain_in_the_norm_of_the_input(name, view) -> None:
    w, h = tensor_of((12, 10)), hessian_of(10)
    rows = torch.logspace(0, -2, 12)
    norm = whiten(w, view, h, row_weight=rows)
    params = part(name, view, 0.4)
    plain = norm.error(METHODS[name].decompose(w, params).dense())
    whitened = norm.error(METHODS[name].decompose(w, params, h, rows).dense())
    assert whitened < plain


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("size", ["channels", "patches"])
def test_convolutions_use_the_covariance_of_channels_or_of_patches(name, size) -> None:
    w = tensor_of((8, 6, 3, 3))
    h = hessian_of(6 if size == "channels" else 54)
    params = part(name, (8, 6, 3, 3), 0.5)
    norm = whiten(w, (8, 6, 3, 3), h)
    plain = norm.error(METHODS[name].decompose(w, params).dense())
    assert norm.error(METHODS[name].decompose(w, params, h).dense()) < plain


@pytest.mark.parametrize("leaf,bound", [(dense_leaf("bfloat16"), 0.01), (int8_leaf, 0.03), (int4_leaf, 0.35)])
@pytest.mark.parametrize("name", METHODS)
def test_rounded_factors_round_trip(name, leaf, bound) -> None:
    w, h = tensor_of((12, 20)), hessian_of(20)
    view = (3, 4, 20)
    norm = whiten(w, view, h)
    d = METHODS[name].decompose(w, part(name, view, 0.5), h)
    encoded = d.encode(leaf)
    check(encoded)
    extra = norm.error(decode(encoded)) ** 2 - norm.error(d.dense()) ** 2
    assert extra < bound**2


@pytest.mark.parametrize("name", METHODS)
def test_refitting_after_rounding_lowers_the_error(name) -> None:
    w, view = tensor_of((16, 32)), (4, 4, 32)
    norm = whiten(w, view)
    d = METHODS[name].decompose(w, part(name, view, 0.5))
    plain = type(d)(d.kind, d.params, d.shape, d.factors, d.metrics)
    assert norm.error(decode(d.encode(int4_leaf))) < norm.error(decode(plain.encode(int4_leaf)))


@pytest.mark.parametrize("name", METHODS)
def test_metrics_fit_the_factors_as_they_are_stored(name) -> None:
    for shape, view in VIEWS[1:6]:
        h = hessian_of(shape[-1]) if len(shape) == 2 else None
        d = METHODS[name].decompose(tensor_of(shape), part(name, view, 0.6), h)
        assert set(d.metrics) == set(d.factors)
        for child, factor in d.factors.items():
            metric = d.metrics[child]
            cols = math.prod(factor.shape[lead_for(tuple(factor.shape)) :])
            assert metric is None or tuple(metric.shape) == (cols, cols)


@pytest.mark.parametrize("size_bytes", [10, 60, 150, 300, 10**5])
@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_rank_for_bytes_never_exceeds_the_bytes_and_cannot_grow(name, size_bytes, steered) -> None:
    module, view, shape = METHODS[name], (3, 4, 10), (12, 10)
    w = tensor_of(shape)
    extra = {"energies": module.energies(w, view)} if steered and name != "cp" else {}
    ranks = module.rank_for_bytes(view, size_bytes, dense_bytes("bfloat16"), **extra)

    def stored(ranks) -> int:
        key = "rank" if name == "cp" else "ranks"
        encoded = module.decompose(w, module.Params(**{key: ranks}, view=view)).encode(dense_leaf("bfloat16"))
        return stored_bytes(encoded.tree, shape)

    if ranks is None:
        assert stored(1 if name == "cp" else (1,) * (3 if name == "tucker" else 2)) > size_bytes
        return
    assert stored(ranks) <= size_bytes
    if name == "cp":
        assert ranks == 12 or stored(ranks + 1) > size_bytes
        return
    most = view if name == "tucker" else max_ranks(view)
    for i in range(len(ranks)):
        larger = (*ranks[:i], ranks[i] + 1, *ranks[i + 1 :])
        useful = ranks[i] < most[i] and module.useful_ranks(larger, view) == larger
        assert not useful or stored(larger) > size_bytes


def test_tucker_for_bytes_leaves_the_other_axes_whole() -> None:
    ranks = tucker.rank_for_bytes((8, 6, 3, 3), 600, dense_bytes("bfloat16"), axes=(0, 1))
    assert ranks is not None and ranks[2:] == (3, 3)


@pytest.mark.parametrize("error", [0.8, 0.4, 0.1])
@pytest.mark.parametrize("name", ["tucker", "tensor_train"])
def test_rank_for_error_holds_the_bound(name, error) -> None:
    module, view = METHODS[name], (3, 4, 10)
    w, h = tensor_of((12, 10)), hessian_of(10)
    ranks = module.rank_for_error(w, error, view, h)
    approximation = module.decompose(w, module.Params(ranks=ranks, view=view), h).dense()
    assert whiten(w, view, h).error(approximation) <= error


def test_rank_for_error_of_cp_holds_the_bound_or_says_no() -> None:
    w, view = tensor_of((12, 10)), (3, 4, 10)
    rank = cp.rank_for_error(w, 0.5, cp.Params(12, view))
    assert rank is not None
    assert whiten(w, view).error(cp.decompose(w, cp.Params(rank, view)).dense()) <= 0.5
    assert cp.rank_for_error(w, 0.01, cp.Params(2, view)) is None


def test_terms_of_cp_do_not_diverge() -> None:
    """A tensor whose best rank-2 CP does not exist (de Silva and Lim 2008): plain ALS runs off to infinity."""
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    terms = [(a, a, b), (a, b, a), (b, a, a)]
    w = sum(torch.einsum("i,j,k->ijk", *t) for t in terms)
    assert isinstance(w, torch.Tensor)
    for bound in (3.0, 20.0):
        params = cp.Params(2, (2, 2, 2), iterations=200, restarts=3, intensity=bound)
        d = cp.decompose(w, params)
        norms = torch.stack([f.square().sum(0) for f in d.factors.values()]).prod(0)
        assert float(norms.sum()) <= bound * float(w.square().sum()) * 1.001
        assert relative(w, d.dense()) < 0.6


@pytest.mark.parametrize("name", METHODS)
def test_zero_tensors_survive(name) -> None:
    d = METHODS[name].decompose(torch.zeros(12, 10), part(name, (3, 4, 10), 0.5), hessian_of(10))
    assert float(decode(d.encode(dense_leaf())).abs().max()) == 0.0


@pytest.mark.parametrize("name", METHODS)
def test_same_seed_gives_the_same_factors_and_leaves_tensorly_alone(name) -> None:
    w = tensor_of((12, 10))
    before = tensorly.get_backend()
    torch.manual_seed(1)
    first = METHODS[name].decompose(w, part(name, (3, 4, 10), 0.5))
    torch.manual_seed(2)
    second = METHODS[name].decompose(w, part(name, (3, 4, 10), 0.5))
    assert all(torch.equal(first.factors[n], second.factors[n]) for n in first.factors)
    assert tensorly.get_backend() == before


@pytest.mark.parametrize("name", METHODS)
def test_bad_views_ranks_and_statistics_are_refused(name) -> None:
    module, w = METHODS[name], tensor_of((12, 10))
    bad = [
        (lambda: module.decompose(w, full(name, (3, 4, 9))), "number of elements"),
        (lambda: module.decompose(w, replace(full(name, (3, 4, 10)), view=(120,))), "between 2 and 8|not in"),
        (lambda: module.decompose(w, full(name, (3, 4, 10)), hessian_of(7)), "belongs to no last axes"),
        (lambda: module.decompose(w * torch.nan, full(name, (3, 4, 10))), "NaN or infinity"),
    ]
    key = "rank" if name == "cp" else "ranks"
    most = getattr(full(name, (3, 4, 10)), key)
    above = most + 1 if name == "cp" else (most[0] + 1, *most[1:])
    bad.append(
        (lambda: module.decompose(w, module.Params(**{key: above}, view=(3, 4, 10))), "not (between|in)")
    )
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
