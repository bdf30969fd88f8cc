"""Forms of tensors that `equal_bytes.py` compares: recipes within some bytes, or beside codes of a rate."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nstf.analyzers.signatures import Signature
from nstf.decomposers import svd, tensor_train, tucker
from nstf.decomposers.add import FACTOR
from nstf.decomposers.views import views
from nstf.kernels.formats import shuffle as shuffle_form
from nstf.proposals import FactorForm, Recipe, Room, Target
from nstf.quantizers import shuffle, trellis
from nstf.quantizers.stats import loss
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.structure import factor_forms
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

GROUP = 64


@dataclass(frozen=True)
class Lines:
    """The columns (axis 1) or rows (0) whose energy counts most, in 8 bits, beside a base that has zeros there: a residual
    whose rank is their number, without the factor that would say where they are."""

    axis: int
    count: int
    base: Recipe

    def make(self, session: Session, unit: Unit) -> tuple[float, Tensor]:
        """(expected loss, the tensor)."""
        inner, stats = session.encoder.inputs(unit)
        energy = inner.double().square()
        if stats.row_weight is not None:
            energy = energy * stats.row_weight.double()[:, None]
        if stats.hessian is not None:
            energy = energy * stats.hessian.double().diagonal()
        chosen = energy.sum(1 - self.axis).topk(self.count).indices
        part = inner.index_select(self.axis, chosen)
        scale = part.abs().amax(1 - self.axis, keepdim=True).clamp_min(1e-30) / 127
        rest = inner.index_fill(self.axis, chosen, 0.0)
        base = recipes.decode(recipes.encode(self.base, rest, stats, unit.lead)).to(inner)
        made = base.reshape(inner.shape).index_copy(self.axis, chosen, (part / scale).round() * scale)
        lost = loss(inner, made, stats, unit.lead)
        return lost, made if unit.permute is None else made.permute(unit.permute)

    def size(self, unit: Unit) -> int:
        """Bytes: one for each weight of a line, four for its scale and its number, and the base."""
        return self.count * (unit.inner_shape[1 - self.axis] + 4) + arrays_bytes(unit, self.base)


# A form of a tensor within some bytes; None where it has none.
Form = Callable[[Unit, int], Recipe | Lines | None]


def integers(bits: int) -> Recipe:
    """Integers in groups, with 8-bit scales."""
    return Recipe("int_grid", {"bits": bits, "group": GROUP, "symmetric": True, "scale_bits": 8})


def whole(unit: Unit, size: int) -> Recipe | None:
    """Integers of the most bits that fit."""
    fits = [integers(b) for b in range(2, 9) if arrays_bytes(unit, integers(b)) <= size]
    return fits[-1] if fits else None


def codes(unit: Unit, size: int) -> Recipe | None:
    """Trellis codes of the largest rate that fits."""
    rates = [Recipe("trellis", {"quarter_bits": q}) for q in sorted(trellis.MSE)]
    fits = [r for r in rates if arrays_bytes(unit, r) <= size]
    return fits[-1] if fits else None


def shuffled(unit: Unit, size: int) -> Recipe | None:
    """Shuffle codes of the largest rate that fits; of experts whose rows end within a path none."""
    rates = [Recipe("shuffle", {"quarter_bits": q}) for q in sorted(shuffle.MSE)]
    fits = [r for r in rates if arrays_bytes(unit, r) <= size]
    return fits[-1] if fits and unit.inner_shape[-2] % shuffle_form.SEGMENT == 0 else None


def summed(correction: Callable[[Unit], Recipe | None], base: Callable[[Unit, int], Recipe | None]) -> Form:
    """What is made first, and a base for what it leaves in the bytes that are left."""

    def form(unit: Unit, size: int) -> Recipe | None:
        first = correction(unit)
        chosen = None if first is None else base(unit, size - arrays_bytes(unit, first))
        if first is None or chosen is None:
            return None
        return Recipe("add", {}, {"base": chosen, "correction": first})

    return form


def low_rank(rank: int, factor: Recipe = FACTOR) -> Callable[[Unit], Recipe | None]:
    """Of a fourth of the matrix's rank at most."""
    recipe = Recipe("svd", {"rank": rank}, {"factor": factor})
    return lambda unit: recipe if rank <= min(unit.cols, unit.elements // unit.cols) // 4 else None


def expert_forms(session: Session) -> dict[str, Form]:
    """By name."""

    def one_matrix(bits: int) -> Callable[[Unit], Recipe]:
        def correction(unit: Unit) -> Recipe:
            shape = unit.inner_shape
            params = {"ranks": [1, *shape[1:]], "view": list(shape), "iterations": 0}
            return Recipe("tucker", params, {"factor": integers(bits)})

        return correction

    def proposed(method: str, factor: FactorForm) -> Form:
        return lambda unit, size: _proposed(session, unit, size, method, factor)

    int8, int4 = factor_forms()
    recipe = Recipe("trellis", {"quarter_bits": 12})
    coded = FactorForm(recipe, recipes.bytes_of(recipe), 3.0, trellis.MSE[12])
    return {
        "integers": whole,
        "trellis codes": codes,
        "shuffle codes": shuffled,
        "one matrix for all, int4, + trellis codes": summed(one_matrix(4), codes),
        "one matrix for all, int2, + trellis codes": summed(one_matrix(2), codes),
        "one matrix for all, int4, + shuffle codes": summed(one_matrix(4), shuffled),
        "low rank over the stack + trellis codes": summed(low_rank(32), codes),
        "Tucker, factors int8": proposed("tucker", int8),
        "Tucker, factors int4": proposed("tucker", int4),
        "Tucker, factors trellis 3": proposed("tucker", coded),
        "low rank over the stack, factors trellis 3": proposed("svd", coded),
        "tensor train, factors int4": proposed("tensor_train", int4),
    }


def _proposed(session: Session, unit: Unit, size: int, method: str, factor: FactorForm) -> Recipe | None:
    """What a decomposition proposes at some bytes where nothing is ruled out; Tucker without sweeps over its bases."""
    inner, stats = session.encoder.inputs(unit)
    known = Signature(inner, stats, unit.lead, unit.role, unit.dtype, session.config)
    if method != "tucker" or factor.recipe.method != "trellis":
        module = {"tucker": tucker, "svd": svd, "tensor_train": tensor_train}[method]
        found = module.proposals(
            known, Target(), Room(frozenset((method,)), sizes=(size,), factors=(factor,))
        )
        recipe = found[0] if found else None
    else:
        # Trellis codes take rows of 16 columns and more: the axis of the experts stays whole.
        view = next(v.dims for v in views(unit.role, unit.inner_shape, session.config) if len(v.dims) == 3)
        energies = [known.unfolding(view, (i,)).energies for i in range(3)]
        ranks = tucker.rank_for_bytes(view, size, factor.bytes_of, (1, 2), energies)
        params = {"ranks": list(ranks or ()), "view": list(view)}
        recipe = (
            Recipe("tucker", params, {"factor": factor.recipe}) if ranks and min(ranks[1:]) >= 16 else None
        )
    if recipe is None or method != "tucker":
        return recipe
    return replace(recipe, params={**recipe.params, "iterations": 0})


def at_rate(quarter_bits: int) -> Form:
    """Trellis codes of a stated rate, whatever the bytes."""
    recipe = Recipe("trellis", {"quarter_bits": quarter_bits})
    return lambda unit, size: recipe


def matrix_forms(quarter_bits: int) -> dict[str, Form]:
    """By name: codes of a rate with something beside them that takes bytes of its own."""
    base = Recipe("trellis", {"quarter_bits": quarter_bits})

    def beside(correction: Callable[[Unit], Recipe | None]) -> Form:
        return summed(correction, lambda unit, size: base)

    def lines(axis: int, count: int) -> Form:
        return lambda unit, size: Lines(axis, count, base) if count <= unit.inner_shape[axis] // 4 else None

    plain = Recipe("dense", {"dtype": "bfloat16"})
    found = {f"rank {r}, 4 bits": beside(low_rank(r)) for r in (4, 8, 16)}
    found |= {f"rank {r}, 16 bits": beside(low_rank(r, plain)) for r in (2, 4, 8)}
    for count in (4, 16):
        found[f"{count} outlier columns"] = lines(1, count)
        found[f"{count} outlier rows"] = lines(0, count)
    return found


def in_rate(units: Sequence[Unit], quarter_bits: int, sizes: Mapping[str, int]) -> dict[str, Recipe]:
    """Codes alone in the bytes of a form, of no lower rate: of each unit the finest that fits in the form's bytes of it and
    what the units before have left over. sizes: the form's bytes of each unit."""
    found, spare = {}, 0
    for unit in units:
        rates = [Recipe("trellis", {"quarter_bits": q}) for q in sorted(trellis.MSE) if q >= quarter_bits]
        spare += sizes[unit.name]
        fits = [r for r in rates if arrays_bytes(unit, r) <= spare]
        if not fits:
            raise ValueError(f"{unit.name}: {spare} bytes are fewer than its codes of that rate take")
        found[unit.name] = fits[-1]
        spare -= arrays_bytes(unit, fits[-1])
    return found


def read_bytes(unit: Unit, recipe: Recipe, share: float) -> float:
    """Bytes that one token's experts take from memory, `share` of all experts: of what all of them share the whole."""
    if recipe.method == "add":
        return sum(read_bytes(unit, part, share) for part in recipe.parts.values())
    size, shape = arrays_bytes(unit, recipe), unit.inner_shape
    if "factor" not in recipe.parts:
        return share * size
    bytes_of = recipes.bytes_of(recipe.parts["factor"])
    apart = 0
    if recipe.method == "svd":
        apart = bytes_of((math.prod(shape[: unit.lead]), int(recipe.params["rank"])))
    elif recipe.method == "tucker" and recipe.params["ranks"][0] == shape[0]:
        apart = bytes_of(tuple(recipe.params["ranks"]))
    return size - (1 - share) * apart
