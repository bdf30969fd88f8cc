"""Structure against the same bytes spent on rate: tensors in several forms of equal bytes, each measured on held-out text.

    python benchmarks/equal_bytes.py experts MODEL --dataset FILE --eval NAME=PATH ... [--bits 2 3] [--device cuda]
    python benchmarks/equal_bytes.py low-rank MODEL --dataset FILE --eval NAME=PATH ... [--bits 1.5 2.25] [--heal-steps 60]

`experts`: all stacks of experts, the other tensors as they are. The bytes are those of integers in groups of 64, so many
bits each; beside them stand trellis codes of the largest rate that fits, what `tucker`, `svd` and `tensor_train` propose
there (shared subspaces, with factors in several formats), and sums of a low-bit code for each expert with something that all
share: one matrix for all experts, or a low rank over the stack. `read`: bytes that one token's experts take from memory, as
a share of those of the integers; where a token is bound by reading, its time follows them.

`low-rank`: all matrices that are no tables. Codes at a rate, and a low rank, or the rows or columns that count most, beside
codes of a lower one. With --heal-steps every form is healed, so that 16-bit factors are adapters that learn.

Forms are recipes that the conversion's own encoder carries out, with the statistics of a calibration on --dataset; KLD is
against the original model, in nats, over the last 255 tokens of windows of 512.
"""

import argparse
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from nstf.analyzers.signatures import Signature
from nstf.decomposers import svd, tensor_train, tucker
from nstf.decomposers.add import FACTOR
from nstf.decomposers.views import views
from nstf.proposals import FactorForm, Recipe, Room, Target
from nstf.quantizers import trellis
from nstf.quantizers.stats import loss
from nstf_convert.budget import Budget
from nstf_convert.gates.evaluate import evaluate_language_model, text_windows
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.structure import factor_forms
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

GROUP = 64
TABLES = ("embedding", "position", "head")
EXPERT_BITS, MATRIX_BITS = (2.0, 3.0), (1.25, 1.5, 1.75, 2.25)


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
        "one matrix for all, int4, + trellis codes": summed(one_matrix(4), codes),
        "one matrix for all, int2, + trellis codes": summed(one_matrix(2), codes),
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


def matrix_forms() -> dict[str, Form]:
    """By name."""

    def lines(axis: int, count: int) -> Form:
        def form(unit: Unit, size: int) -> Lines | None:
            # A byte a weight; for the line a scale and its number.
            spent = count * (unit.inner_shape[1 - axis] + 4)
            base = codes(unit, size - spent) if count <= unit.inner_shape[axis] // 4 else None
            return None if base is None else Lines(axis, count, base)

        return form

    forms: dict[str, Form] = {"trellis codes": codes}
    for rank in (4, 8, 16, 32):
        forms[f"rank {rank}, 4 bits, + trellis codes"] = summed(low_rank(rank), codes)
    for rank in (2, 4):
        plain = low_rank(rank, Recipe("dense", {"dtype": "bfloat16"}))
        forms[f"rank {rank}, 16 bits, + trellis codes"] = summed(plain, codes)
    for count in (4, 16):
        forms[f"{count} outlier columns + trellis codes"] = lines(1, count)
        forms[f"{count} outlier rows + trellis codes"] = lines(0, count)
    forms["integers"] = whole
    for rank in (4, 16):
        forms[f"rank {rank}, 4 bits, + integers"] = summed(low_rank(rank), whole)
    return forms


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


@dataclass(frozen=True)
class Row:
    """form: that of the first unit, in words; size, read: bytes; kld: of each text."""

    form: str
    size: int
    read: float
    expected: float
    kld: list[float]
    seconds: float


class Bench:
    """A model that was calibrated, its units of interest, and what is measured on them."""

    def __init__(
        self,
        session: Session,
        units: Sequence[Unit],
        texts: Mapping[str, Path],
        windows: int,
        heal_steps: int | None,
    ) -> None:
        """heal_steps: of healing each form; None: none."""
        self.session, self.units, self.heal_steps = session, {u.name: u for u in units}, heal_steps
        tokenizer = session.tokenizer()
        self.windows = {
            n: text_windows(tokenizer, p.read_text(encoding="utf-8"), 512, windows) for n, p in texts.items()
        }

    def row(self, form: Form, sizes: Mapping[str, int], share: float) -> Row | None:
        """One form at some bytes of every unit; None where a unit has no such form."""
        found = {n: form(u, sizes[n]) for n, u in self.units.items()}
        chosen = {n: r for n, r in found.items() if isinstance(r, Recipe)}
        given = {n: r for n, r in found.items() if isinstance(r, Lines)}
        if len(chosen) + len(given) < len(found) or (given and self.heal_steps is not None):
            return None
        start, encoder = time.monotonic(), self.session.encoder
        done = encoder.encode_all([(self.units[n], r) for n, r in chosen.items()], lambda unit: None)
        made = encoder.each(
            [self.units[n] for n in given], lambda u: given[u.name].make(self.session, u), lambda unit: None
        )
        seconds = time.monotonic() - start
        stored = mixes.weights_of(
            self.session, chosen, None if self.heal_steps is None else self._healed(chosen)
        )
        test = self.session.streamed(lambda n: made[n][1] if n in made else stored(n))
        kld = [
            evaluate_language_model(self.session.reference(), test, w).mean_kl for w in self.windows.values()
        ]
        test.weights.clear()
        first = self.units[next(iter(found))]
        if first.name in given:
            said = f"and {recipes.describe(recipes.tree_of(given[first.name].base, first.inner_shape, first.lead))}"
        else:
            said = recipes.describe(recipes.tree_of(chosen[first.name], first.inner_shape, first.lead))
        size = sum(sizes[n] if n in given else arrays_bytes(self.units[n], chosen[n]) for n in found)
        read = sum(read_bytes(self.units[n], r, share) for n, r in chosen.items()) if chosen else float(size)
        expected = sum(r.loss for r in done.values()) + sum(v for v, _ in made.values())
        return Row(said, size, read, expected, kld, seconds)

    def _healed(self, mix: Mapping[str, Recipe]) -> mixes.Loader:
        tuned = heal(self.session, mix, 0.0, steps=self.heal_steps)
        return tuned.loader(mixes.encoder_loader(self.session))


def similarity(session: Session, unit: Unit) -> float:
    """The share of a stack's energy that one matrix for all experts takes away: 1 / experts for unlike ones."""
    stack = session.encoder.inner(unit).double()
    return float(stack.mean(0).square().sum() * len(stack) / stack.square().sum())


def run(session: Session, args: argparse.Namespace, until: float) -> None:
    """Prints the table."""
    texts = {name: Path(path) for name, _, path in (t.partition("=") for t in args.eval)}
    experts = args.what == "experts"
    wanted = [u for u in session.units.values() if u.kept is None and u.role not in TABLES]
    units = [u for u in wanted if (u.lead == 2) == experts]
    if not units:
        sys.exit(f"error: {args.model} has no such tensors")
    elements, share = sum(u.elements for u in units), 1.0
    print(f"{len(units)} tensors, {elements} weights")
    if experts:
        count = units[0].inner_shape[0]
        share = session.reference().module.config.get_text_config().num_experts_per_tok / count
        alike = [similarity(session, u) for u in units]
        print(
            f"one matrix for all {count} experts takes away {sum(alike) / len(alike):.3f} of a stack's energy "
            f"({min(alike):.3f} to {max(alike):.3f})"
        )
    forms = expert_forms(session) if experts else matrix_forms()
    if unknown := [n for n in args.only or () if n not in forms]:
        sys.exit(f"error: there is no form {unknown[0]!r}; there are: {'; '.join(forms)}")
    forms = {n: f for n, f in forms.items() if args.only is None or n in args.only}
    bench = Bench(session, units, texts, args.windows, args.heal_steps)
    print(
        f"| form | the first tensor's | bits | expected loss | {' | '.join(f'KLD {n}' for n in texts)} | read | s |"
    )
    print("|---|---|---|---|" + "---|" * (len(texts) + 2), flush=True)
    for bits in args.bits or (EXPERT_BITS if experts else MATRIX_BITS):
        recipe = integers(int(bits)) if experts else Recipe("trellis", {"quarter_bits": round(4 * bits)})
        sizes = {u.name: arrays_bytes(u, recipe) for u in units}
        for name, form in forms.items():
            if time.monotonic() > until:
                print(f"{name}: no time left at {bits} bits", flush=True)
                continue
            row = bench.row(form, sizes, share)
            if row is None:
                print(f"| {name} | none at {bits} bits | | | {'| ' * (len(texts) + 2)}", flush=True)
                continue
            kld = " | ".join(f"{v:.4g}" for v in row.kld)
            print(
                f"| {name} | {row.form} | {8 * row.size / elements:.3f} | {row.expected:.4g} | {kld} | "
                f"{row.read / (share * sum(sizes.values())):.2f} | {row.seconds:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("experts", "low-rank"))
    parser.add_argument("model")
    parser.add_argument("--dataset", action="append", required=True)
    parser.add_argument("--eval", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--bits", type=float, nargs="+", help="of the sizes that are compared at")
    parser.add_argument("--windows", type=int, default=32, help="of each text")
    parser.add_argument("--samples", type=int, default=64, help="windows of the calibration")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these forms")
    parser.add_argument("--heal-steps", type=int, help="heal every form for so many steps")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing begins later")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        options = ConvertOptions(
            args.model, Path(folder) / "none.nstf", Budget("ratio", 0.25), tuple(args.dataset), device=args.device,
            samples=args.samples, prefer="size", work_dir=args.work_dir or Path(folder) / "work",
        )  # fmt: skip
        with Session(options, Stages(), may_drop=False) as session:
            session.wait_for_kernels()
            run(session, args, until)


if __name__ == "__main__":
    main()
