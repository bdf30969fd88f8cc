"""Structure against the same bytes spent on rate: tensors in several forms of equal bytes, each measured on held-out text.

    python benchmarks/equal_bytes.py experts MODEL --dataset FILE --eval NAME=PATH ... [--bits 2 3] [--device cuda]
    python benchmarks/equal_bytes.py low-rank MODEL --dataset FILE --eval NAME=PATH ... [--bits 1.5 2] [--heal-steps 100]

`experts`: all stacks of experts, the other tensors as they are. The bytes are those of integers in groups of 64, so many
bits each; beside them stand trellis codes of the largest rate that fits, what `tucker`, `svd` and `tensor_train` propose
there (shared subspaces, with factors in several formats), and sums of a low-bit code for each expert with something that all
share: one matrix for all experts, or a low rank over the stack. `read`: bytes that one token's experts take from memory, as
a share of those of the integers; where a token is bound by reading, its time follows them.

`low-rank`: all matrices that are no tables, in trellis codes of --bits. Beside these a low rank, or the rows or columns
that count most in 8 bits. Under each form the same bytes spent on rate alone: of each tensor the finest rate that they pay
for, with what the tensors before it have left over. With --heal-steps each low rank and its control are healed as well,
for as many steps each: 16-bit factors are adapters that learn.

Forms are recipes that the conversion's own encoder carries out, with the statistics of a calibration on --dataset; KLD is
against the original model, in nats, over the last 255 tokens of windows of 512.
"""

import argparse
import logging
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from equal_bytes_forms import Form, Lines, at_rate, expert_forms, in_rate, integers, matrix_forms, read_bytes

from nstf.proposals import Recipe
from nstf_convert.budget import Budget
from nstf_convert.gates.evaluate import evaluate_language_model, text_windows
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

TABLES = ("embedding", "position", "head")
EXPERT_BITS, MATRIX_BITS = (2.0, 3.0), (1.5, 2.0)


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
        self, session: Session, units: Sequence[Unit], texts: Mapping[str, Path], windows: int
    ) -> None:
        self.session, self.units = session, {u.name: u for u in units}
        tokenizer = session.tokenizer()
        self.windows = {
            n: text_windows(tokenizer, p.read_text(encoding="utf-8"), 512, windows) for n, p in texts.items()
        }

    def chosen(self, form: Form, sizes: Mapping[str, int]) -> dict[str, Recipe | Lines] | None:
        """One form at some bytes of every unit; None where a unit has no such form."""
        found = {n: form(u, sizes.get(n, 0)) for n, u in self.units.items()}
        made = {n: r for n, r in found.items() if r is not None}
        return made if len(made) == len(found) else None

    def row(self, found: Mapping[str, Recipe | Lines], share: float = 1.0, heal_steps: int = 0) -> Row:
        """What a mix takes and loses. share: of all experts, those of a token. heal_steps: 0 is no healing; lines are not
        healed."""
        chosen = {n: r for n, r in found.items() if isinstance(r, Recipe)}
        given = {n: r for n, r in found.items() if isinstance(r, Lines)}
        start, encoder = time.monotonic(), self.session.encoder
        done = encoder.encode_all([(self.units[n], r) for n, r in chosen.items()], lambda unit: None)
        made = encoder.each(
            [self.units[n] for n in given], lambda u: given[u.name].make(self.session, u), lambda unit: None
        )
        stored = mixes.weights_of(
            self.session, chosen, self._healed(chosen, heal_steps) if heal_steps else None
        )
        seconds = time.monotonic() - start
        test = self.session.streamed(lambda n: made[n][1] if n in made else stored(n))
        kld = [
            evaluate_language_model(self.session.reference(), test, w).mean_kl for w in self.windows.values()
        ]
        test.weights.clear()
        first = self.units[next(iter(found))]
        recipe = found[first.name]
        tree = recipe.base if isinstance(recipe, Lines) else recipe
        said = recipes.describe(recipes.tree_of(tree, first.inner_shape, first.lead))
        size = sum(self.bytes_of(found).values())
        read = sum(read_bytes(self.units[n], r, share) for n, r in chosen.items()) if chosen else float(size)
        expected = sum(r.loss for r in done.values()) + sum(v for v, _ in made.values())
        return Row(said, size, read, expected, kld, seconds)

    def bytes_of(self, found: Mapping[str, Recipe | Lines]) -> dict[str, int]:
        """By tensor."""
        return {
            n: r.size(self.units[n]) if isinstance(r, Lines) else arrays_bytes(self.units[n], r)
            for n, r in found.items()
        }

    def _healed(self, mix: Mapping[str, Recipe], steps: int) -> mixes.Loader:
        tuned = heal(self.session, mix, 0.0, steps=steps)
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
    print(f"{len(units)} tensors, {sum(u.elements for u in units)} weights", flush=True)
    bench = Bench(session, units, texts, args.windows)
    if experts:
        _experts(bench, args, until)
    else:
        _low_rank(bench, args, until)


def _only(forms: dict[str, Form], wanted: Sequence[str] | None) -> dict[str, Form]:
    if unknown := [n for n in wanted or () if n not in forms]:
        sys.exit(f"error: there is no form {unknown[0]!r}; there are: {'; '.join(forms)}")
    return {n: f for n, f in forms.items() if wanted is None or n in wanted}


def _experts(bench: Bench, args: argparse.Namespace, until: float) -> None:
    session, units = bench.session, list(bench.units.values())
    count, elements = units[0].inner_shape[0], sum(u.elements for u in units)
    share = session.reference().module.config.get_text_config().num_experts_per_tok / count
    alike = [similarity(session, u) for u in units]
    print(
        f"one matrix for all {count} experts takes away {sum(alike) / len(alike):.3f} of a stack's energy "
        f"({min(alike):.3f} to {max(alike):.3f})"
    )
    forms = _only(expert_forms(session), args.only)
    names = " | ".join(f"KLD {n}" for n in bench.windows)
    print(f"| form | the first tensor's | bits | expected loss | {names} | read | s |")
    print("|---|---|---|---|" + "---|" * (len(bench.windows) + 2), flush=True)
    for bits in args.bits or EXPERT_BITS:
        sizes = {u.name: arrays_bytes(u, integers(int(bits))) for u in units}
        for name, form in forms.items():
            if time.monotonic() > until:
                print(f"{name}: no time left at {bits} bits", flush=True)
                continue
            found = bench.chosen(form, sizes)
            if found is None:
                print(f"| {name} | none at {bits} bits | | | {'| ' * (len(bench.windows) + 2)}", flush=True)
                continue
            row = bench.row(found, share, args.heal_steps)
            klds = " | ".join(f"{k:.4g}" for k in row.kld)
            print(
                f"| {name} | {row.form} | {8 * row.size / elements:.3f} | {row.expected:.4g} | {klds} "
                f"| {row.read / (share * sum(sizes.values())):.2f} | {row.seconds:.1f} |",
                flush=True,
            )


def _low_rank(bench: Bench, args: argparse.Namespace, until: float) -> None:
    units = list(bench.units.values())
    elements = sum(u.elements for u in units)

    def row(name: str, found: Mapping[str, Recipe | Lines], heal_steps: int = 0) -> None:
        if time.monotonic() > until:
            print(f"{name}: no time left", flush=True)
            return
        made = bench.row(found, heal_steps=heal_steps)
        klds = " | ".join(f"{k:.4g}" for k in made.kld)
        healed = f", healed {heal_steps}" if heal_steps else ""
        expected = "" if heal_steps else f"{made.expected:.4g}"
        print(
            f"| {name}{healed} | {8 * made.size / elements:.4f} | {expected} | {klds} | {made.seconds:.1f} |",
            flush=True,
        )

    print(f"| form | bits | expected loss | {' | '.join(f'KLD {n}' for n in bench.windows)} | s |")
    print("|---|---|---|" + "---|" * (len(bench.windows) + 1), flush=True)
    for bits in args.bits or MATRIX_BITS:
        rate = round(4 * bits)
        plain = bench.chosen(at_rate(rate), {}) or {}
        forms = _only(matrix_forms(rate), args.only)
        mixed = {n: m for n, f in forms.items() if (m := bench.chosen(f, {})) is not None}
        for name in forms:
            if name not in mixed:
                print(
                    f"| {name} beside trellis {bits:g}: a matrix is too small for it | | | {'| ' * len(bench.windows)}|"
                )
        controls = {n: in_rate(units, rate, bench.bytes_of(m)) for n, m in mixed.items()}
        if not args.only_healed:
            row(f"trellis {bits:g}", plain)
            for name, mix in mixed.items():
                row(f"{name} + trellis {bits:g}", mix)
                row("the same bytes in rate", controls[name])
        if not args.heal_steps:
            continue
        if args.heal_only is None or args.only_healed:
            row(f"trellis {bits:g}", plain, args.heal_steps)
        for name, mix in mixed.items():
            if args.heal_only is not None and name not in args.heal_only:
                continue
            if all(isinstance(r, Recipe) for r in mix.values()):
                row(f"{name} + trellis {bits:g}", mix, args.heal_steps)
                row(f"the same bytes in rate as {name}", controls[name], args.heal_steps)


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
    parser.add_argument("--heal-steps", type=int, default=0, help="heal every form for so many steps")
    parser.add_argument(
        "--heal-only",
        nargs="+",
        metavar="NAME",
        help="of `low-rank`: heal only these forms and their controls",
    )
    parser.add_argument(
        "--only-healed", action="store_true", help="of `low-rank`: what is not healed is left out"
    )
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
        with Session(options, Stages(), only_calibrates=True) as session:
            run(session, args, until)


if __name__ == "__main__":
    main()
