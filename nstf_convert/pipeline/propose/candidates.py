"""The ways one tensor could be stored, each with its exact price and its expected loss.

Quantised forms are estimated here without encoding them; decompositions are worked out (`structure.py`).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nstf.decomposers.factors import lead_for
from nstf.kernels.formats import EncodedTensor, Node, array_specs, dense, leaf_code_bits, node_to_json
from nstf.kernels.formats.tree import Shape, format_of
from nstf.proposals import Look, Room, Signature, Target, Tools
from nstf.quantizers.stats import Stats, loss
from nstf_convert.export import engines
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.methods import module_of, plain, reach
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit

# Rows an estimate looks at: its error falls with the square root of the weights seen, and 32 rows hold 20,000.
SAMPLE_ROWS = 32
SAMPLE_ELEMENTS = 1 << 15


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


def plain_recipes(
    signature: Signature,
    methods: Iterable[str],
    few: bool,
    timed: bool = False,
    looks: list[Look] | None = None,
    planned: float | None = None,
) -> list[Recipe]:
    """The quantised and dense forms of a tensor, of some methods. few: only those that may win, timed: and those that are
    faster than these. looks: takes the reasons of methods that propose nothing. planned: see Room."""
    allowed = frozenset(methods)
    engine = engines.engine_of(set(allowed))
    if engine is not None:
        own = engines.recipes(engine, signature.cols, table=signature.role in ("embedding", "position"))
        return [*own, *(r for r in dense_recipes(signature.dtype) if r not in own)]
    from_bits = reach(allowed, signature.cols) if few else 0
    room = Room(
        methods=allowed, from_bits=from_bits, planned=planned, quick=few, looks=[] if looks is None else looks
    )
    return plain(signature, Target(timed), room) + dense_recipes(signature.dtype)


def dense_recipes(dtype: str) -> list[Recipe]:
    """The tensor as it is, and for wide dtypes in 16 bits."""
    names = [dtype, "float16", "bfloat16"] if dtype in ("float32", "float64") else [dtype]
    return [Recipe("dense", {"dtype": name}) for name in names]


@dataclass(frozen=True)
class _Priced:
    """A recipe for tensors of one shape. arrays_bytes: of all its `arrays` arrays; header_bytes: for an empty name."""

    tree: Node
    arrays: int
    arrays_bytes: int
    header_bytes: int


# The layers of a model have few shapes between them, and plans ask again and again.
@lru_cache(1 << 14)
def _priced(
    recipe: Recipe, shape: Shape, inner_shape: Shape, lead: int, permute: tuple[int, ...] | None, dtype: str
) -> _Priced:
    tree = recipes.tree_of(recipe, inner_shape, lead)
    if permute is not None:
        kind = format_of("permute")
        tree = Node("permute", kind.Params(permute), {"x": tree})
    entry = {"": {"shape": list(shape), "dtype": dtype, "tree": node_to_json(tree)}}
    specs = array_specs(tree, shape)
    # What a tensor takes in the file's header: its manifest entry, its arrays' entries and their digests.
    header = len(json.dumps(json.dumps(entry, separators=(",", ":"))))
    header += sum(len(path) + len(str(list(s.shape))) + 70 + 24 + 69 for path, s in specs.items())
    return _Priced(tree, len(specs), sum(s.size_bytes for s in specs.values()), header)


def price(unit: Unit, recipe: Recipe) -> tuple[Node, int]:
    """(tree of the whole tensor, bytes on disk): exact arrays, header within a few bytes, never below."""
    found = _priced(recipe, unit.shape, unit.inner_shape, unit.lead, unit.permute, unit.dtype)
    # The manifest is text within text: what is escaped in a name is escaped twice.
    name = len(json.dumps(json.dumps(unit.name))) - len(json.dumps(json.dumps("")))
    return found.tree, found.arrays_bytes + found.header_bytes + name + found.arrays * len(unit.name)


def least_bytes(unit: Unit, recipe: Recipe) -> int:
    """Bytes of the whole tensor's arrays: what a recipe takes on disk at least."""
    found = _priced(recipe, unit.shape, unit.inner_shape, unit.lead, unit.permute, unit.dtype)
    return found.arrays_bytes


def arrays_bytes(unit: Unit, recipe: Recipe) -> int:
    """Bytes of a recipe's arrays, without what the header takes."""
    return recipes.size_of(recipe, unit.inner_shape, unit.lead)


def bits_of(unit: Unit, tree: Node) -> tuple[float, float]:
    """(nominal, on disk) bits per weight of a stored tensor; on disk counts scales, not the header."""
    arrays = sum(s.size_bytes for s in array_specs(tree, unit.shape).values())
    return leaf_code_bits(tree, unit.shape) / unit.elements, arrays * 8 / unit.elements


def _asks_at_once(device: torch.device) -> bool:
    """Whether all forms of a tensor that round to nearest are estimated together on this device."""
    return device.type == "cuda"


def estimates(signature: Signature, wanted: Sequence[Recipe]) -> list[float]:
    """Expected losses of quantised and dense recipes, from a sample of rows where the method is content with that."""
    inner, stats, lead = signature.weight, signature.stats, signature.lead
    sample, sampled = sample_rows(inner, stats, lead)
    found: dict[int, float] = {}
    # A GPU is asked once for all that is rounded to nearest. On a processor, where that saves nothing, each method keeps
    # products of its own: how many rows these have may move their last bit.
    may = [i for i, r in enumerate(wanted) if r.method != "dense" and recipes.has_forms(r)]
    together = may if _asks_at_once(inner.device) else []
    if together:
        values = recipes.estimate_together([wanted[i] for i in together], sample, sampled, 1)
        found.update(zip(together, values, strict=True))
    for method in dict.fromkeys(r.method for i, r in enumerate(wanted) if i not in found):
        at = [i for i, r in enumerate(wanted) if r.method == method]
        own = [wanted[i] for i in at]
        if method == "dense":
            dtypes = [dense.torch_dtype(r.params["dtype"]) for r in own]
            values = [loss(sample, sample.to(d).to(torch.float32), sampled) for d in dtypes]
        elif every_row(own[0]):
            values = recipes.estimate_many(own, inner, stats, lead)
        else:
            values = recipes.estimate_many(own, sample, sampled, 1)
        found.update(zip(at, values, strict=True))
    return [found[i] for i in range(len(wanted))]


def tools(unit: Unit, known: Signature, rivals: Sequence[Candidate]) -> Tools:
    """What methods estimate their recipes for a tensor with. rivals: its other candidates."""

    def leaf(factor: Recipe, value: Tensor, metric: Tensor | None) -> EncodedTensor:
        encoded = recipes.encode(factor, value.contiguous(), Stats(metric), lead_for(tuple(value.shape)))
        return recipes.on_device(encoded, known.weight.device)

    def estimate(recipe: Recipe, weight: Tensor) -> float:
        if every_row(recipe):
            return recipes.estimate(recipe, weight, known.stats, unit.lead)
        sample, sampled = sample_rows(weight, known.stats, unit.lead)
        return recipes.estimate(recipe, sample, sampled, 1)

    def beaten(recipe: Recipe, value: float) -> bool:
        size = price(unit, recipe)[1]
        return any(c.size_bytes <= size and c.loss <= value for c in rivals)

    remembered = recipes.remembered(known.weight, known.stats, unit.lead)
    return Tools(leaf, estimate, beaten, remembered)


def every_row(recipe: Recipe) -> bool:
    """Whether a quantiser's estimates want all rows."""
    return bool(getattr(module_of(recipe.method), "EVERY_ROW", False))


def sample_rows(inner: Tensor, stats: Stats, lead: int) -> tuple[Tensor, Stats]:
    """A stratified sample of the rows as a matrix [n, cols], with row weights that stand for all rows.

    Rows are sorted by weight and cut into equal strata; the middle row of each stands for its stratum's total.
    """
    rows = math.prod(inner.shape[:lead])
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
