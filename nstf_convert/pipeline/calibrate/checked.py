"""A calibration file that was given, checked before anything is made from it: it may be a stranger's, or damaged.

The digests say whether it is as it was written. Everything else here says whether nstf can have written it for this model:
a value that nobody would write must end in one line here, and not in a library far behind.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nstf.errors import CorruptError, NstfError, out_of_memory
from nstf_convert.made_up import longest_window
from nstf_convert.pipeline.attention import simulate
from nstf_convert.pipeline.attention.facts import check_attention
from nstf_convert.pipeline.calibrate.batches import digest, model_output, split_batches
from nstf_convert.pipeline.calibrate.facts import SPLITS, Problem, check_metadata, short
from nstf_convert.pipeline.calibrate.hessians import weights_of_moments
from nstf_convert.pipeline.calibrate.text import Batch, Data, tokens_of
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.store.tensorfile import TensorFile
from nstf_convert.streamed import StreamedModel

# No sum of squared gradients and no second moment is larger; what is computed of them stays within float32.
MOST, MOST_LOSS = 1e18, 1e24
# By this share an element of a second moment may be beyond what the diagonal allows, and differ from its mirror image.
CLOSE = 1e-3
# Elements of a Hessian that are looked at together.
STEP = 1 << 24
# What inputs can be, and those that are tokens.
INPUTS = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip
IDS = ("input_ids", "decoder_input_ids")
KINDS = ("hessian", "token_weight", "sensitivity", "sensitivity_in", "frequency", "experts", "attention")


def check_given(file: TensorFile, model: StreamedModel, units: Mapping[str, Unit]) -> None:
    """Raises CorruptError unless the file is as it was written, and as nstf writes one for this model."""
    try:
        file.verify()
    except CorruptError as error:
        raise CorruptError(
            f"the calibration file {file.path} is damaged: write it anew with `nstf calibrate`"
        ) from error
    try:
        check_metadata(file.metadata)
        _Check(file, model, units).run()
    except Problem as problem:
        raise CorruptError(
            f"the calibration file {file.path} is none that nstf writes for this model ({problem}): write it anew with "
            "`nstf calibrate`"
        ) from problem


class _Check:
    def __init__(self, file: TensorFile, model: StreamedModel, units: Mapping[str, Unit]) -> None:
        self.file, self.model, self.units = file, model, units
        self.facts = file.metadata
        self.language = self.facts["language"]
        self.names: dict[str, list[str]] = {}
        for name in sorted(file.names()):
            kind, mark, rest = name.partition(":")
            if not mark or not rest or kind not in (*KINDS, *SPLITS, *SPLITS.values()):
                raise Problem(f"tensor {short(name)}")
            self.names.setdefault(kind, []).append(rest)

    def run(self) -> None:
        if self.language and not self.model.is_causal_lm:
            raise Problem("its text is a language model's")
        self._batches()
        for name in self.names.get("sensitivity", []):
            self._sensitivity(name)
        for kind in ("frequency", "sensitivity_in"):
            for name in self.names.get(kind, []):
                self._of_table(kind, name)
        self._hessians()
        self._experts()
        if "attention" in self.facts or "attention" in self.names:
            self._attention()

    def _tensor(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that is there; shape None: any of one axis."""
        found = self.file.find(name)
        if found is None:
            raise Problem(f"{short(name)} is missing")
        right = found.ndim == 1 if shape is None else tuple(found.shape) == shape
        if found.dtype != dtype or not right:
            kind = str(found.dtype).removeprefix("torch.")
            raise Problem(f"{short(name)} is {kind} {list(found.shape)}")
        return found

    def _numbers(
        self, name: str, shape: tuple[int, ...] | None, most: float, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A tensor of numbers from 0 to `most`."""
        found = self._tensor(name, shape, dtype)
        if found.numel():
            low, high = (float(v) for v in found.aminmax())
            if not 0 <= low <= high <= most:  # of NaN neither is true
                raise Problem(f"{short(name)} holds {low:.3g} to {high:.3g}")
        return found

    def _unit(self, name: str, kind: str) -> Unit:
        unit = self.units.get(name)
        if unit is None:
            raise Problem(f"{kind}: the model has no tensor {short(name)}")
        return unit

    # Batches and what the original model makes of them.

    def _batches(self) -> None:
        signature: Any = None
        found = {split: self._split(split) for split in SPLITS}
        for split, batches in found.items():
            for i, batch in enumerate(batches):
                kinds = {n: (tuple(v.shape), v.dtype) for n, v in batch.items()}
                signature = signature or kinds
                if kinds != signature:
                    raise Problem(f"batch {split}:{i} has other inputs than the first one")
                for name, value in batch.items():
                    self._input(f"{split}:{i}:{name}", name, value)
        if digest(found["held_out"]) != self.facts["held_out_digest"]:
            raise Problem("its held-out batches are not those that its metadata names")
        shape = self._window(found["held_out"][0]) if self.language else self._run(found["held_out"][0])
        for split, reference in SPLITS.items():
            if reference is None:
                continue
            wanted = {str(i) for i in range(len(found[split]))}
            if set(self.names.get(reference, [])) != wanted:
                raise Problem(f"there are {len(wanted)} batches of {split}, and other numbers of references")
            for own in sorted(wanted):
                value = self._tensor(f"{reference}:{own}", shape)
                if not bool((value.abs() <= MOST).all()):  # nor NaN
                    raise Problem(f"{reference}:{own} is not finite")

    def _split(self, split: str) -> list[Batch]:
        """The batches of a split, when there are as many as the metadata says, and each has the same inputs."""
        found: dict[str, set[str]] = {}
        for rest in self.names.get(split, []):
            index, _, key = rest.partition(":")
            found.setdefault(index, set()).add(key)
        count = self.facts[split]
        # Counted before a list of that length is made.
        if count != len(found) or set(found) != {str(i) for i in range(len(found))}:
            raise Problem(f"{split} is {count}, there are {len(found)} batches")
        if any(keys != found["0"] or "" in keys for keys in found.values()):
            raise Problem(f"the batches of {split} have different inputs")
        return split_batches(self.file, split)

    def _input(self, full: str, name: str, value: Tensor) -> None:
        if value.ndim == 0 or value.shape[0] != 1 or value.numel() == 0:
            raise Problem(f"{short(full)} has shape {list(value.shape)}")
        if value.dtype not in INPUTS or (name in IDS and value.is_floating_point()):
            raise Problem(f"{short(full)} is {str(value.dtype).removeprefix('torch.')}")
        if value.is_floating_point():
            if not bool(value.isfinite().all()):
                raise Problem(f"{short(full)} is not finite")
        elif name in IDS:
            low, high = (int(v) for v in value.to(torch.int64).aminmax())
            if low < 0 or high >= self._vocabulary():
                raise Problem(f"{short(full)} holds token {high if low >= 0 else low}")

    def _vocabulary(self) -> float:
        """Tokens that the model has an embedding of, and a language model logits for."""
        sizes = [tokens_of(self.model), self._head_shape()[0] if self.language else None]
        return min((size for size in sizes if size is not None), default=math.inf)

    def _head_shape(self) -> tuple[int, int]:
        """(vocabulary, hidden size)."""
        rows, cols = self.model.head.weight.shape  # type: ignore[union-attr, misc, operator]
        return (int(rows), int(cols)) if isinstance(self.model.head, nn.Linear) else (int(cols), int(rows))

    def _window(self, batch: Batch) -> tuple[int, ...]:
        """The shape of a language model's reference."""
        ids = batch.get("input_ids")
        if set(batch) != {"input_ids"} or ids is None or ids.ndim != 2 or ids.dtype != torch.int64:
            raise Problem("its batches are no windows of tokens")
        tokens, source = ids.shape[1], self.facts["source"]
        if not 2 <= tokens <= longest_window(self.model):
            raise Problem(f"its windows have {tokens} tokens")
        if any(source.get(name, tokens) != tokens for name in ("seq_len", "window_tokens")):
            raise Problem("its windows are of another length than its metadata says")
        if self.facts["fit"] == 0:
            raise Problem("there is no window that was fitted on")
        for split in SPLITS:
            windows = source["fit_windows"] if split == "fit" else self.facts[split]
            if self.facts[f"{split}_tokens"] != windows * tokens:
                raise Problem(f"{split}_tokens is {self.facts[f'{split}_tokens']}")
        width = self._head_shape()[1]
        if self.model.transforms:  # what the head reads may be of another width (RemBERT)
            width = int(getattr(self.model.module.config.get_text_config(), "hidden_size", width))
        return tokens, width

    def _run(self, batch: Batch) -> tuple[int, ...]:
        """The shape of another model's reference: only the model itself can say which inputs it takes."""
        try:
            with torch.no_grad():
                out = model_output(self.model, Data(False, (), (), {}), batch)
        except (NstfError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            line = str(error).splitlines() or [type(error).__name__]
            raise Problem(f"the model does not take its inputs: {line[0][:200]}") from error
        return tuple(out.shape[1:])

    # Statistics.

    def _sensitivity(self, name: str) -> None:
        unit = self._unit(name, "sensitivity")
        rows = None if unit.kept is not None or unit.lead > 1 else (unit.inner_shape[0],)
        self._numbers(f"sensitivity:{name}", rows, MOST)

    def _of_table(self, kind: str, name: str) -> None:
        """What is known of the rows of a table, or of what it gives."""
        unit = self._unit(name, kind)
        if "embedding" not in unit.uses or len(unit.shape) != 2:
            raise Problem(f"{kind}: {short(name)} is no table")
        of_rows = kind == "frequency"
        self._numbers(f"{kind}:{name}", (unit.shape[0 if of_rows else 1],), 1.0 if of_rows else MOST)

    def _hessians(self) -> None:
        entries = self.facts["hessians"]
        if set(self.names.get("hessian", [])) != set(entries):
            raise Problem("its Hessians are not those that its metadata names")
        own = weights_of_moments(self.model, self.language)
        for key, entry in entries.items():
            weights = [self._unit(w, "hessians") for w in entry["weights"]]
            if own.get(key) not in entry["weights"]:
                raise Problem(f"hessians: {short(key)} is no input of {short(entry['weights'][0])}")
            trace = self._hessian(f"hessian:{key}", weights)
            for unit in weights:
                counts = self.file.find(f"sensitivity:{unit.name}")
                if counts is not None and trace * float(counts.sum(dtype=torch.float64)) > MOST_LOSS:
                    raise Problem(f"an error of {short(unit.name)} would count beyond measure")
        for key in self.names.get("token_weight", []):
            if key not in entries:
                raise Problem(f"tensor {short(f'token_weight:{key}')}")
            weight = self._numbers(f"token_weight:{key}", None, MOST)
            if not abs(float(weight.mean()) - 1) < 0.01:
                raise Problem(f"{short(f'token_weight:{key}')} has another mean than 1")

    def _hessian(self, name: str, weights: Sequence[Unit]) -> float:
        """The trace of a second moment of these weights' inputs."""
        found = self.file.find(name)
        size = len(found) if found is not None and found.ndim == 2 else 0
        # How the matrix of a small tensor that is stored as it is lies is not known.
        if size == 0 or any(size not in {u.cols, *(u.shape if u.kept else ())} for u in weights):
            raise Problem(f"{short(name)} has not the size of its weights' inputs")
        found = self._tensor(name, (size, size))
        diagonal = found.diagonal()
        low, high = (float(v) for v in diagonal.aminmax())
        if not 0 <= low <= high <= MOST:
            raise Problem(f"the diagonal of {short(name)} holds {low:.3g} to {high:.3g}")
        # |h_ij| <= sqrt(h_ii h_jj), so that no element is larger than those of the diagonal, and h_ij = h_ji.
        root = diagonal.sqrt() * (1 + CLOSE)
        step = max(1, STEP // size)
        for start in range(0, size, step):
            rows = slice(start, start + step)
            bound = torch.outer(root[rows], root).add_(1e-30)
            part = found[rows]
            good = (part.abs() <= bound).all() and (
                (part - found[:, rows].T).abs_() <= bound.mul_(CLOSE)
            ).all()
            if not bool(good):
                raise Problem(f"{short(name)} is no second moment")
        return float(diagonal.sum(dtype=torch.float64))

    def _experts(self) -> None:
        stacks: dict[str, Any] = dict(self.model.expert_modules())
        for name in self.names.get("experts", []):
            if name not in stacks:
                raise Problem(f"experts: the model has no {short(name)}")
            self._numbers(f"experts:{name}", (int(stacks[name].gate_up_proj.shape[0]),), 1e15)

    def _attention(self) -> None:
        try:
            windows = simulate.check(self.model.module)
        except NstfError as error:
            raise Problem(f"it has an attention profile: {error}") from error
        numbers: Callable[..., Tensor] = self._numbers
        vocabulary = self._vocabulary()

        def ids(name: str, length: int) -> None:
            found = self._tensor(name, (length,), torch.int64)
            low, high = (int(v) for v in found.aminmax())
            if low < 0 or high >= vocabulary:
                raise Problem(f"{name} holds token {high if low >= 0 else low}")

        config = self.model.module.config.get_text_config(decoder=True)
        check_attention(
            self.facts.get("attention"), self.names.get("attention", []), config, windows,
            longest_window(self.model), numbers, ids,
        )  # fmt: skip
