"""What a mix costs in time, and how much of it the options allow.

Seconds are those of the products of one token with all matrices. With several targets a tensor's seconds are those on the
target where it is slowest beside a common measure, every matrix in 4-bit integers: the sum is then an upper bound for each
of the targets, so that no target pays for another. A mean would let a file be slow on one of them.
"""

import contextlib
import copy
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nstf.errors import BudgetError, UsageError
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.runtime.engine import MATRICES
from nstf.runtime.skeleton import build_skeleton
from nstf.runtime.stacking import agree
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.calibrate.text import input_shape
from nstf_convert.pipeline.outcome import Planned
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe, tree_of
from nstf_convert.pipeline.propose.table import Table, key_of
from nstf_convert.pipeline.propose.units import Unit, fused_groups
from nstf_convert.pipeline.session import Session
from nstf_convert.speed import targets
from nstf_convert.speed.convolutions import Layer, layers_of
from nstf_convert.speed.prices import Prices, Stored
from nstf_convert.speed.token import Token

# Formats whose file of the same size is the yardstick of `balance`, and the least share of its speed.
PLAIN = ("int_grid", "grid16")
BALANCE = 0.9
# A name within a layer.
_LAYER = re.compile(r"\blayers\.(\d+)\.(.*)$")
# Rows of activations that stand for a prompt.
PREFILL = 128
# The common measure of several targets.
COMMON = Recipe("int_grid", {"bits": 4, "group": 32, "symmetric": True, "scale_bits": 8})


@dataclass(frozen=True)
class Bound:
    """Seconds a token may take at most. why: in words, for the report."""

    seconds: float
    why: str


class Timing:
    """Prices of one conversion's tensors in seconds of a token."""

    def __init__(self, session: Session, size_bytes: int) -> None:
        """size_bytes: about what the file will have."""
        options = session.options
        self.session, self.prefer = session, options.prefer
        self.targets = targets.parse(options.target or (), session.machine.on_gpu)
        self.prices = Prices(self.targets, session.threads, size_bytes, session.work)
        self.token = Token(session.config, session.threads, self.prices)
        # A runtime for GPUs stacks these into one matrix where they are stored alike; the CPU's engine has nothing to gain.
        units = [u for u in session.units.values() if len(u.shape) == 2]
        self.groups = {} if any(t.is_cpu for t in self.targets) else fused_groups(units)
        self._uses = {n: uses_of(u, session.config) for n, u in session.units.items()}
        # Convolutions take as long as their images are large: they are priced as they are, an image in the place of a token.
        self._layers = convolution_layers(session)
        self._known: dict[tuple[str, str], tuple[float, ...]] = {}
        self._products: dict[tuple[Hashable, Recipe | None], tuple[float, ...]] = {}
        self._together: dict[tuple[Hashable, ...], bool] = {}
        self._common: tuple[float, ...] | None = None
        self.bounds: dict[int, Bound | None] = {}

    def preferring(self, prefer: str) -> "Timing":
        """The same prices for another preference."""
        other = copy.copy(self)
        other.prefer, other.bounds = prefer, {}
        return other

    @property
    def bounds_time(self) -> bool:
        """Whether plans have a bound on time."""
        return self.prefer != "size" or self.session.options.min_speed is not None

    def prepare(self, table: Table) -> None:
        """Measures all formats of a table in turn, where their target is here."""
        units = self.session.units
        used = [(n, c.tree) for n, found in sorted(table.candidates.items()) for c in found if self._uses[n]]
        self.prices.prepare(
            (tree, units[n].shape, units[n].lead) for n, tree in used if n not in self._layers
        )
        self.prices.prepare_convolutions((self._layers[n], tree) for n, tree in used if n in self._layers)

    def held(self, table: Table) -> Table:
        """The table without formats that a target does not hold; of a tensor that would have none left, all stay."""
        out = {}
        for name, found in table.candidates.items():
            kept = [c for c in found if all(t.holds(c.tree) for t in self.targets)]
            out[name] = kept or found
        return replace(table, candidates=out)

    def on_each(self, name: str, recipe: Recipe | None) -> tuple[float, ...]:
        """Seconds that a token spends on a tensor, by target. None: the tensor as it is."""
        unit = self.session.units[name]
        key = name, "" if recipe is None else key_of(recipe)
        if key not in self._known:
            uses = self._uses[name]
            layer = self._layers.get(name)
            if not uses:
                once = (0.0,) * len(self.targets)
            elif layer is not None:
                once = self.prices.convolution(layer, mixes.tree_of(unit, recipe))
            else:
                once = self._product(unit, recipe)
            self._known[key] = tuple(uses * s for s in once)
        return self._known[key]

    def _product(self, unit: Unit, recipe: Recipe | None) -> tuple[float, ...]:
        """Seconds of a product by target, found once for all tensors of a shape."""
        key = _form(unit), recipe
        if key not in self._products:
            self._products[key] = self.prices.seconds(self._stored(unit, recipe))
        return self._products[key]

    def seconds(self, name: str, candidate: Candidate | Recipe) -> float:
        """What the planner counts for a tensor: one number for all targets."""
        recipe = candidate.recipe if isinstance(candidate, Candidate) else candidate
        found = self.on_each(name, recipe)
        if len(found) == 1:
            return found[0]
        common = self.common_seconds()
        return max(s / c for s, c in zip(found, common, strict=True)) * common[0]

    def of(self, mix: Mapping[str, Recipe]) -> float:
        """`seconds` of a whole mix, without what is saved where tensors run as one."""
        return sum(self.seconds(n, r) for n, r in mix.items()) - sum(
            self.saved(names, mix[names[0]]) for names in self._alike(mix)
        )

    def saved(self, names: Sequence[str], recipe: Recipe) -> float:
        """What a token saves where these tensors, stored alike, run as one: all launches but one, on the target that gains
        least from it."""
        launches = self._launches(names, recipe)
        if len(launches) == 1 or not any(launches):
            return launches[0]
        common = self.common_seconds()
        return min(s / c for s, c in zip(launches, common, strict=True)) * common[0]

    def _launches(self, names: Sequence[str], recipe: Recipe) -> list[float]:
        """The same by target."""
        units = [self.session.units[n] for n in names]
        key = recipe, *map(_form, units)
        if key not in self._together:
            trees = [EncodedTensor(mixes.tree_of(u, recipe), u.shape, {}) for u in units]
            # Tables are fitted to each tensor: grids stay apart.
            self._together[key] = trees[0].tree.kind != "grid" and agree(trees)
        together = self._together[key]
        return [
            (len(names) - 1) * ARCHITECTURES[t.name].launch_s if together and not t.is_cpu else 0.0
            for t in self.targets
        ]

    def _alike(self, mix: Mapping[str, Recipe]) -> list[list[str]]:
        """The groups of tensors that may run as one and have one recipe."""
        members: dict[str, list[str]] = {}
        for name, group in self.groups.items():
            members.setdefault(group, []).append(name)
        return [
            names
            for names in members.values()
            if len(names) > 1 and all(n in mix and mix[n] == mix[names[0]] for n in names)
        ]

    def totals(self, mix: Mapping[str, Recipe]) -> tuple[float, ...]:
        """Seconds of a token's products by target, tensors that stay as they are included."""
        matrices = [n for n, u in self.session.units.items() if len(u.shape) > 1]
        each = [self.on_each(n, mix.get(n)) for n in matrices]
        each += [tuple(-s for s in self._launches(names, mix[names[0]])) for names in self._alike(mix)]
        return tuple(sum(column) for column in zip(*each, strict=True)) or (0.0,) * len(self.targets)

    def rates(self, mix: Mapping[str, Recipe]) -> tuple[float | None, ...]:
        """Predicted tokens a second by target; None where the model's other work is not known."""
        pairs, stored = zip(self.targets, self.totals(mix), strict=True), self._in_engine(mix)
        return tuple(self.token.run(target, seconds, stored) for target, seconds in pairs)

    def _in_engine(self, mix: Mapping[str, Recipe]) -> dict[tuple[int, str], tuple[Node, tuple[int, ...]]]:
        """How the matrices that the CPU's engine knows are stored, by layer and name; other models have none."""
        slots = {f"{inner}.weight": slot for slot, inner in MATRICES.items()}
        found = {}
        for name, unit in self.session.units.items():
            at = _LAYER.search(name)
            slot = (int(at[1]), slots.get(at[2], "")) if at else (0, "head" if "head" in unit.uses else "")
            if slot[1] and len(unit.shape) == 2:
                found[slot] = self._stored(unit, mix.get(name))[:2]
        return found

    def prefill_rates(self, mix: Mapping[str, Recipe]) -> tuple[float | None, ...]:
        """Tokens of a prompt a second, as far as products decide, by target; None where the target is not here."""
        known = [t.is_cpu and t.here for t in self.targets]
        if not any(known) or self._layers:
            return (None,) * len(known)
        units = [u for n, u in self.session.units.items() if self._uses[n]]
        stored = [self._stored(u, mix.get(u.name)) for u in units]
        self.prices.prepare(stored, PREFILL)
        totals = [0.0] * len(known)
        for unit, one in zip(units, stored, strict=True):
            # One row of the head is asked for, whatever the prompt.
            batch = 1 if "head" in unit.uses else PREFILL
            for at, seconds in enumerate(self.prices.seconds(one, batch)):
                totals[at] += self._uses[unit.name] * seconds
        return tuple(PREFILL / s if here and s else None for here, s in zip(known, totals, strict=True))

    def _stored(self, unit: Unit, recipe: Recipe | None) -> Stored:
        tree: Node = mixes.tree_of(unit, recipe)
        return tree, unit.shape, unit.lead

    def common_seconds(self) -> tuple[float, ...]:
        """What the same plain file takes on each target: how times on one compare with times on another."""
        if self._common is None:
            units = [u for u in self.session.units.values() if u.kept is None]
            each = [[self._uses[u.name] * s for s in self._common_of(u)] for u in units if self._uses[u.name]]
            self._common = tuple(sum(column) for column in zip(*each, strict=True)) or (1.0,) * len(
                self.targets
            )
        return self._common

    def _common_of(self, unit: Unit) -> tuple[float, ...]:
        tree, layer = tree_of(COMMON, unit.inner_shape, unit.lead), self._layers.get(unit.name)
        if layer is not None:
            return self.prices.convolution(layer, tree)
        return self.prices.seconds((tree, unit.inner_shape, unit.lead))


def _form(unit: Unit) -> Hashable:
    """What decides, beside its recipe, how a tensor is stored."""
    return unit.shape, unit.lead, unit.permute, unit.dtype


def uses_of(unit: Unit, config: Mapping[str, object] | None) -> float:
    """How many products with a tensor one token takes: none with a table whose rows are looked up, of a stack of experts
    those that a token is sent to, and one where nothing is known of the model."""
    if len(unit.shape) < 2:
        return 0.0
    if not unit.uses:
        return 1.0
    products = sum(u in ("linear", "head") for u in unit.uses)
    if "experts" in unit.uses:
        total = unit.inner_shape[0]
        active = (config or {}).get("num_experts_per_tok") or (config or {}).get("top_k_experts") or total
        return min(1.0, float(str(active)) / total)
    return float(products)


def convolution_layers(session: Session) -> dict[str, Layer]:
    """The convolutions of a model that reads images or sound, by the tensor they read; inputs of the size of the dataset's,
    or of the config's. None of a model that writes text: its image or sound is read once, and what is counted is a token."""
    if any("head" in u.uses for u in session.units.values()):
        return {}
    if session.model is None or not any(
        len(u.shape) in (3, 4) and "linear" in u.uses for u in session.units.values()
    ):
        return {}
    shape = _input_shape(session)
    if shape is None:
        return {}
    name, size = shape
    if session.options.image_size is not None and len(size) == 3:
        size = (size[0], session.options.image_size, session.options.image_size)
    with torch.device("meta"):
        skeleton = build_skeleton(session.model.config)  # its buffers, too
        found = layers_of(skeleton, {name: torch.empty(1, *size)})
    # A weight that is computed of others (weight normalisation, as wav2vec2's) is no parameter, and none is stored.
    parameters = {p for p, _ in skeleton.named_parameters(remove_duplicate=False)}
    stored = {p: session.model.stored_name(p) for p in found if p in parameters}
    return {name: found[p] for p, name in stored.items() if name in session.units}


def _input_shape(session: Session) -> tuple[str, tuple[int, ...]] | None:
    assert session.model is not None
    name = getattr(session.model.module, "main_input_name", "")
    for path in session.options.datasets or ():
        if Path(path).suffix == ".safetensors":
            with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as arrays:
                if name in arrays.keys():
                    return name, tuple(arrays.get_slice(name).get_shape()[1:])
    try:
        return input_shape(session.model)
    except UsageError:
        return None


def fastest(mixes_found: Iterable[Planned], timing: Timing) -> float | None:
    """The least seconds of some plans."""
    return min((timing.of(p.mix) for p in mixes_found), default=None)


def too_slow(asked: str, fastest_seconds: float, timing: Timing, size_bytes: int) -> BudgetError:
    """The error for a speed that no file of these bytes has. fastest_seconds: of a token's products; 0 where none could be
    fast enough, since the rest of a token takes as long as is asked for all of it."""
    if not fastest_seconds:
        return BudgetError(
            f"`min_speed` {asked} cannot be met on {', '.join(t.name for t in timing.targets)} by a file of any size: "
            "what a token takes beside its products is too long already; ask for less speed",
            size_bytes,
        )
    rate = timing.token.rate(timing.targets[0], fastest_seconds)
    reached = f"{rate:.0f} tokens a second" if rate else f"{1e3 * fastest_seconds:.3g} ms of products a token"
    return BudgetError(
        f"`min_speed` {asked} cannot be met within {size_bytes} bytes on {timing.targets[0].name}: the fastest file "
        f"reaches {reached}; ask for less speed or fewer bytes",
        size_bytes,
    )


def only(table: Table, methods: Sequence[str]) -> Table | None:
    """The table with these methods, and tensors as they are where they have none of them; None when no tensor has one."""
    out, any_left = {}, False
    for name, found in table.candidates.items():
        kept = [c for c in found if c.recipe.method in methods]
        any_left |= bool(kept)
        out[name] = kept or [c for c in found if c.recipe.method == "dense"]
        if not out[name]:
            return None
    return replace(table, candidates=out) if any_left else None
