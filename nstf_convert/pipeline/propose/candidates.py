"""The ways one tensor could be stored, each with its exact price and its expected loss.

Quantised forms are estimated without encoding them (on a sample of rows); decompositions are worked out, their
factors rounded, and their loss computed. Everything lands in the work directory, so another budget finds it there.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nstf import decomposers, quantizers
from nstf.decomposers.views import views
from nstf.kernels.formats import Node, array_specs, dense, leaf_code_bits, node_to_json
from nstf.kernels.formats import shuffle as shuffle_format
from nstf.kernels.formats import trellis as trellis_format
from nstf.kernels.formats.tree import Shape, format_of
from nstf.quantizers import trellis
from nstf.quantizers.stats import Stats, loss
from nstf_convert.export import engines
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit

# Rows an estimate looks at: its error falls with the square root of the weights seen, and 32 rows hold 20,000.
SAMPLE_ROWS = 32
SAMPLE_ELEMENTS = 1 << 15
# Bits per weight at which decompositions are compared with quantised forms of the same size.
DECOMPOSED_BITS = (2.25, 3.25, 4.25, 6.25, 8.25)
# Bits a weight that trellis codes reach.
TRELLIS_BITS = 6
# Rates that rows may have when they differ, in quarter bits.
SECTION_RATES = (4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24)
# Rows that matter less than this, relative to the one that matters most, count as this much in a typical row.
SMALLEST_ENERGY = 1e-6
STRUCTURED_BITS = (2.25, 4.25, 8.25)
# Energies of unfoldings know nothing of the rows' weights: a recipe must look so many times worse to be left out.
MARGIN = 4.0
# Only where they are named or the plan bounds time: what shuffle codes gain is speed.
ON_REQUEST = frozenset({"shuffle"})
# Weights of an expert stack up to which its unfoldings are looked at as a whole.
LARGEST_STACK = 1 << 24
FACTORS = (
    Recipe("int_grid", {"bits": 8, "group": 0, "symmetric": True}),
    Recipe("int_grid", {"bits": 4, "group": 32, "symmetric": True, "scale_bits": 8}),
)
# Relative squared error of rounding a Gaussian factor: range of about 4.5 (row) and 2.6 (32 values) standard deviations.
FACTOR_NOISE = {8: (4.5 / 127) ** 2 / 12, 4: (2.6 / 7) ** 2 / 12}


@dataclass(frozen=True)
class Candidate:
    """One way to store one tensor.

    size_bytes: arrays and header. loss: expected (nats of KLD, or relative squared error), `exact` when the
    tensor was really encoded.
    """

    recipe: Recipe
    tree: Node
    size_bytes: int
    loss: float
    exact: bool = False


def quantised_recipes() -> list[Recipe]:
    """Every quantised form that is tried on every tensor.

    Zero points pay below 6 bits, whole-row scales where a few bytes matter; wide groups at many bits never reach
    the hull, so they are left out.
    """

    def integers(bits: int, group: int, symmetric: bool, scale_bits: int = 8) -> Recipe:
        return Recipe(
            "int_grid", {"bits": bits, "group": group, "symmetric": symmetric, "scale_bits": scale_bits}
        )

    out = []
    for bits in range(2, 9):
        out += [integers(bits, group, True) for group in (32, 64)]
        out.append(integers(bits, 0, True, 16))
        if bits <= 5:
            out += [integers(bits, group, False) for group in ((32, 64) if bits < 5 else (32,))]
        if bits <= 3:
            out += [integers(bits, 128, symmetric) for symmetric in (True, False)]
    out += [Recipe("grid16", {"group": group, "scale_bits": 8}) for group in (32, 64)]
    out += [Recipe("shuffle", {"quarter_bits": q}) for q in shuffle_format.RATES]
    out += [Recipe("fp8", {"variant": variant, "group": 0}) for variant in ("e4m3fn", "e4m3fnuz")]
    return [*out, Recipe("mxfp4", {})]


def simple_recipes(unit: Unit, allowed: set[str], few: bool, timed: bool = False) -> list[Recipe]:
    """The quantised and dense forms of a tensor, of the methods that are allowed. few: where there are trellis codes, only
    integers of more bits than these reach: with fewer they need half a bit more for the same loss. timed: and forms that are
    faster than these, shuffle codes (whose loss is a closed form) and plain groups of 32."""
    engine = engines.engine_of(allowed)
    if engine is not None:
        cols = unit.elements // math.prod(unit.inner_shape[: unit.lead])
        own = engines.recipes(engine, cols, table=unit.role in ("embedding", "position"))
        return [*own, *(r for r in dense_recipes(unit.dtype) if r not in own)]
    out = [r for r in quantised_recipes() if r.method in allowed]
    if few and "trellis" in allowed and may_be_trellis(unit):
        out = [r for r in out if r.params.get("bits", 0) >= TRELLIS_BITS or (timed and _fast(r))]
    return out + dense_recipes(unit.dtype)


def _fast(recipe: Recipe) -> bool:
    """Whether a form is among those that make a file fast: one of each kind and number of bits."""
    plain = recipe.params.get("group") == 32 and recipe.params.get("symmetric", True)
    return recipe.method == "shuffle" or (plain and recipe.method in ("int_grid", "grid16"))


def may_be_trellis(unit: Unit) -> bool:
    """Whether a tensor's rows are as long as a tile of trellis codes is wide."""
    return unit.elements // math.prod(unit.inner_shape[: unit.lead]) >= trellis_format.SIDE


def trellis_recipes(unit: Unit, inner: Tensor, stats: Stats) -> list[tuple[Recipe, float]]:
    """Trellis codes at every rate with their expected losses: one rate for all rows, and rates by row.

    The rates by row are the best there are at a price per byte; the prices are those at which a typical row gets each rate.
    """
    if not may_be_trellis(unit):
        return []
    params = recipes.quantiser_params(Recipe("trellis", {}), unit.inner_shape, unit.lead)
    energy = trellis.row_energy(inner, params, stats)
    losses = {q: trellis.unit_loss(q, inner, params, stats) for q in trellis.MSE}
    total = float(energy.sum())
    out = [(Recipe("trellis", {"quarter_bits": q}), total * losses[q]) for q in sorted(losses)]
    if unit.lead != 1 or len(energy) < 2 * trellis.SMALLEST_SECTION:
        return out
    cols = unit.elements // len(energy)
    typical = float(energy.clamp_min(float(energy.max()) * SMALLEST_ENERGY).log().mean().exp())
    allowed = {q: losses[q] for q in SECTION_RATES}
    energy = energy.cpu()  # a GPU would be asked for every price
    found = []
    for q in sorted(losses):
        # At this price the loss saved by the last byte is the same for all rows: dloss/dbyte = 2 ln 2 loss / (cols / 8).
        price = typical * losses[q] * 2 * math.log(2) / (cols / 8)
        found.append(trellis.best_sections(energy, allowed, cols, price))
    different = [s for s in dict.fromkeys(found) if len(s) > 1]
    values = trellis.estimate_many(inner, [replace(params, sections=s) for s in different], stats)
    recipes_ = [Recipe("trellis", {"sections": [list(section) for section in s]}) for s in different]
    return [*out, *zip(recipes_, values, strict=True)]


def dense_recipes(dtype: str) -> list[Recipe]:
    """The tensor as it is, and for wide dtypes in 16 bits."""
    names = [dtype, "float16", "bfloat16"] if dtype in ("float32", "float64") else [dtype]
    return [Recipe("dense", {"dtype": name}) for name in names]


def header_bytes(name: str, tree: Node, shape: Shape, dtype: str) -> int:
    """Bytes a tensor takes in the file's header: its manifest entry, its arrays' entries and their digests."""
    entry = json.dumps(
        {name: {"shape": list(shape), "dtype": dtype, "tree": node_to_json(tree)}}, separators=(",", ":")
    )
    total = len(json.dumps(entry))
    for path, spec in array_specs(tree, shape).items():
        total += len(name) + len(path) + len(str(list(spec.shape))) + 70 + 24 + 69
    return total


def price(unit: Unit, recipe: Recipe) -> tuple[Node, int]:
    """(tree of the whole tensor, bytes on disk): exact arrays, header within a few bytes, never below."""
    inner = recipes.tree_of(recipe, unit.inner_shape, unit.lead)
    tree = inner
    if unit.permute is not None:
        kind = format_of("permute")
        tree = Node("permute", kind.Params(unit.permute), {"x": inner})
    arrays = sum(s.size_bytes for s in array_specs(tree, unit.shape).values())
    return tree, arrays + header_bytes(unit.name, tree, unit.shape, unit.dtype)


def bits_of(unit: Unit, tree: Node) -> tuple[float, float]:
    """(nominal, on disk) bits per weight of a stored tensor; on disk counts scales, not the header."""
    arrays = sum(s.size_bytes for s in array_specs(tree, unit.shape).values())
    return leaf_code_bits(tree, unit.shape) / unit.elements, arrays * 8 / unit.elements


def estimates(unit: Unit, inner: Tensor, stats: Stats, wanted: Sequence[Recipe]) -> list[float]:
    """Expected loss of quantised and dense recipes, from a sample of rows."""
    sample, sampled = sample_rows(unit, inner, stats)
    found: dict[int, float] = {}
    for method in dict.fromkeys(r.method for r in wanted):
        at = [i for i, r in enumerate(wanted) if r.method == method]
        own = [wanted[i] for i in at]
        if method == "dense":
            dtypes = [dense.torch_dtype(r.params["dtype"]) for r in own]
            values = [loss(sample, sample.to(d).to(torch.float32), sampled) for d in dtypes]
        else:
            values = recipes.estimate_many(own, sample, sampled, 1)
        found.update(zip(at, values, strict=True))
    return [found[i] for i in range(len(wanted))]


def sample_rows(unit: Unit, inner: Tensor, stats: Stats) -> tuple[Tensor, Stats]:
    """A stratified sample of the rows as a matrix [n, cols], with row weights that stand for all rows.

    Rows are sorted by weight and cut into equal strata; the middle row of each stands for its stratum's total.
    """
    rows = math.prod(inner.shape[: unit.lead])
    matrix = inner.reshape(rows, -1)
    weight = (
        torch.ones(rows, device=matrix.device) if stats.row_weight is None else stats.row_weight.reshape(-1)
    )
    wanted = max(SAMPLE_ROWS, SAMPLE_ELEMENTS // matrix.shape[1])
    if rows <= wanted:
        return matrix, stats.for_rows(weight)
    order = torch.argsort(weight, stable=True)
    edges = (torch.arange(wanted + 1, device=matrix.device) * rows) // wanted
    middle = order[(edges[:-1] + edges[1:]) // 2]
    cumulative = torch.nn.functional.pad(weight[order].double().cumsum(0), (1, 0))
    share = (cumulative[edges[1:]] - cumulative[edges[:-1]]).to(torch.float32)
    return matrix[middle].float(), stats.for_rows(share)


def low_rank_losses(unit: Unit, inner: Tensor, stats: Stats) -> Tensor:
    """Expected loss of every rank 0..n before the factors are rounded, float64 [n + 1]."""
    from nstf.decomposers import svd

    energy = svd.singular_values(inner, stats.hessian, stats.row_weight, unit.lead).square()
    return torch.nn.functional.pad(energy.flip(0).cumsum(0).flip(0), (0, 1)) / 2


def low_rank_that_may_win(
    unit: Unit, inner: Tensor, stats: Stats, rivals: Sequence[tuple[Recipe, float]]
) -> list[Recipe]:
    """Low-rank recipes at the comparison sizes that a bound from below does not rule out.

    No matrix of that rank can lose less than the bound (`svd.low_rank_bounds`), which needs no decomposition, and its
    factors are rounded besides. Where a rival of no more bytes loses less than both, the rank is not tried. rivals: other
    recipes with expected losses.
    """
    from nstf.decomposers import svd

    rows = math.prod(unit.inner_shape[: unit.lead])
    best_at = [(price(unit, r)[1], value) for r, value in rivals]
    possible = []
    for bits in DECOMPOSED_BITS:
        size = int(unit.elements * bits / 8)
        best = min((value for b, value in best_at if b <= size), default=math.inf)
        for factor in FACTORS:
            rank = svd.rank_for_bytes(unit.inner_shape, size, recipes.bytes_of(factor), unit.lead)
            if rank is not None:
                possible.append((Recipe("svd", {"rank": rank}, {"factor": factor}), rank, best))
    erased, *bounds = svd.low_rank_bounds(
        inner.reshape(rows, -1), stats.hessian, stats.row_weight, [0, *(rank for _, rank, _ in possible)]
    )
    return [
        r
        for (r, _, best), bound in zip(possible, bounds, strict=True)
        if bound + _factors_noise(r) * (erased - bound) < best
    ]


def low_rank_recipes(wanted: Sequence[Recipe], tail: Tensor) -> list[tuple[Recipe, float]]:
    """Low-rank recipes with expected losses: what the rank leaves out, plus the factors' rounding.

    Each rounded factor adds noise in proportion to the energy kept; the true loss is found when the plan takes one.
    """
    out = []
    for recipe in wanted:
        rank = int(recipe.params["rank"])
        noise = _factors_noise(recipe) * float(tail[0] - tail[rank])
        out.append((recipe, float(tail[rank]) + noise))
    return out


def _factors_noise(recipe: Recipe) -> float:
    """What rounding the two factors adds, as a share of the energy that they keep."""
    return 2 * FACTOR_NOISE[recipe.parts["factor"].params["bits"]]


def structured_recipes(
    unit: Unit,
    inner: Tensor,
    stats: Stats,
    config: dict[str, Any] | None,
    rivals: Sequence["Candidate"],
    signal: float,
) -> list[Recipe]:
    """CP, Tucker and tensor-train recipes over the tensor's natural views, at the comparison sizes, that may win.

    Tucker's and the tensor train's ranks follow the energies of the unfoldings; CP has a single rank, and its
    alternating least squares are by far the slowest, so it is tried at fewer sizes. An approximation leaves at least the
    energy that an unfolding has beyond the rank there, and what rounding a factor adds: where that share of the whole is
    MARGIN times the share that a rival of no more bytes loses, the recipe is not tried. On very large stacks CP is not tried
    at all. rivals: other candidates; signal: the loss of erasing the tensor.
    """
    whole = unit.elements
    if unit.role == "expert_stack" and whole > LARGEST_STACK:
        # What holds for some experts is taken to hold for all: in float64 the stack takes eight bytes a weight, thrice.
        part = inner[: max(2, inner.shape[0] * LARGEST_STACK // whole)]
        if not _structured_recipes(unit, part, stats.for_rows(None), config, rivals, signal, cp=False):
            return []
        return _structured_recipes(unit, inner, stats, config, rivals, signal, cp=False)
    return _structured_recipes(unit, inner, stats, config, rivals, signal)


def _structured_recipes(
    unit: Unit,
    inner: Tensor,
    stats: Stats,
    config: dict[str, Any] | None,
    rivals: Sequence["Candidate"],
    signal: float,
    cp: bool = True,
) -> list[Recipe]:
    out = []
    grown = unit.elements / inner.numel()
    for view in views(unit.role, tuple(inner.shape), config or {}):
        methods = [m for m in view.methods if m != "svd" and (cp or m != "cp")]
        # CP's factors along an axis are a basis of that rank, as Tucker's are.
        known = {
            m: decomposers.method("tucker" if m == "cp" else m).energies(inner, view.dims, stats.hessian)
            for m in methods
        }
        for name in methods:
            module = decomposers.method(name)
            steer = {} if name == "cp" else {"energies": known[name]}
            for bits in STRUCTURED_BITS[:2] if name == "cp" else STRUCTURED_BITS:
                size = int(inner.numel() * bits / 8)
                best = min((c.loss for c in rivals if c.size_bytes <= size * grown), default=math.inf)
                for factor in FACTORS:
                    ranks = module.rank_for_bytes(view.dims, size, recipes.bytes_of(factor), **steer)
                    if ranks is None:
                        continue
                    kept = [ranks] * len(known[name]) if name == "cp" else ranks
                    if _least(known[name], kept, factor) > MARGIN * best / max(signal, 1e-30):
                        continue
                    params = {"rank": ranks} if name == "cp" else {"ranks": list(ranks)}
                    out.append(Recipe(name, {**params, "view": list(view.dims)}, {"factor": factor}))
    return list({json.dumps(r.to_json()): r for r in out}.values())


def _least(energies: Sequence[Tensor], ranks: Sequence[int], factor: Recipe) -> float:
    """The share of the energy that is lost at least: what an unfolding has beyond its rank, and one factor's rounding."""
    tails = [float(e[r:].sum() / e.sum().clamp_min(1e-30)) for e, r in zip(energies, ranks, strict=True)]
    left = max(tails, default=0.0)
    return left + (1 - left) * FACTOR_NOISE[factor.params["bits"]]


# What a user calls a method, by the kind of node that it stores; `--help` and errors use these names.
FORMAT_NAMES = {"int": "int_grid", "grid": "grid16", "low_rank": "svd"}


def method_families(formats: Sequence[str] | None, timed: bool = False) -> set[str]:
    """The methods that a list of formats allows. None: all, without those of ON_REQUEST unless the plan is `timed`.
    Raises ValueError for an unknown name."""
    known = {*quantizers.METHODS, *decomposers.METHODS, "add", "dense"}
    if formats is None:
        return known if timed else known - ON_REQUEST
    if len(formats) == 1 and formats[0].startswith(engines.MARK):
        return engines.methods(formats[0].removeprefix(engines.MARK))
    chosen = {FORMAT_NAMES.get(f, f) for f in formats}
    unknown = [f for f in formats if FORMAT_NAMES.get(f, f) not in known]
    if unknown:
        shown = {method: name for name, method in FORMAT_NAMES.items()}
        raise ValueError(
            f"unknown format {unknown[0]!r}; known are {', '.join(sorted(shown.get(m, m) for m in known))}"
        )
    return chosen | {"dense"}
