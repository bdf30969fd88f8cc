"""Plans as JSON and as what engines take.

`load` is what `nstf.runtime.load(F, **load)` takes under torchrun with so many processes; None for plans it does not run.
`vllm` are arguments of `vllm serve`, and `environment` the variables that go with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nstf_convert.place.machine import Machine
from nstf_convert.place.plans import Plan
from nstf_convert.place.predict import Load, Prediction
from nstf_convert.place.search import Found

VERSION = 1


def to_json(found: Found, machine: Machine, model: str, load: Load, aim: str, top: int) -> dict[str, Any]:
    """Everything that was found, the best plan first."""
    return {
        "nstf_placement": VERSION,
        "model": model,
        "machine": machine.name,
        "note": machine.note,
        "aim": aim,
        "load": {
            "batch": load.batch, "context": load.context, "prompt": load.prompt, "overlap": load.overlap,
        },
        "plans": [plan_json(p, machine) for p in found.predictions[:top]],
        "refused": found.refused,
        "tried": found.tried,
    }  # fmt: skip


def plan_json(found: Prediction, machine: Machine) -> dict[str, Any]:
    """One plan: the division, the prediction, and what engines take."""
    plan, layout = found.plan, found.plan.layout
    names = [machine.devices[i].name for i in plan.devices]
    return {
        "name": layout.name,
        "devices": names,
        "tensor_parallel": layout.ranks,
        "pipeline_parallel": layout.stages,
        "data_parallel": layout.replicas,
        "experts": layout.experts,
        "microbatches": plan.microbatches,
        "stages": [
            {"devices": [[machine.devices[i].name for i in g] for g in s.groups], "layers": [s.first, s.stop]}
            for s in plan.stages
        ],
        "predicted": {
            "step_s": found.step_s,
            "tokens_per_s": found.tokens_per_s,
            "prompt_s": found.prompt_s,
            "memory_bytes": dict(zip(names, map(round, found.memory), strict=True)),
            "links_share": found.links_share,
            "idle_share": found.idle_share,
            "cost_per_token": found.cost_per_token,
        },
        "load": own_arguments(plan),
        "vllm": vllm_arguments(plan),
        "environment": environment(plan, machine),
    }


def own_arguments(plan: Plan) -> dict[str, int] | None:
    """Keyword arguments of `nstf.runtime.load`, which divides by tensor parallelism alone and deals experts out whole; None
    for other plans."""
    layout = plan.layout
    if layout.stages > 1 or layout.replicas > 1 or layout.experts == "slices":
        return None
    return {"tensor_parallel": layout.ranks}


def vllm_arguments(plan: Plan) -> list[str]:
    """The arguments of `vllm serve`."""
    layout = plan.layout
    words = ["--tensor-parallel-size", str(layout.ranks), "--pipeline-parallel-size", str(layout.stages)]
    if layout.replicas > 1:
        words += ["--data-parallel-size", str(layout.replicas)]
    if layout.experts == "whole":
        words.append("--enable-expert-parallel")
    return words


def environment(plan: Plan, machine: Machine) -> dict[str, str]:
    """Which of a host's devices are used, and how many layers each stage of vLLM has where it is not the even number."""
    found: dict[str, str] = {}
    hosts = {machine.devices[i].host for i in plan.devices}
    if len(hosts) == 1 and not any(machine.devices[i].is_cpu for i in plan.devices):
        here = [i for i, d in enumerate(machine.devices) if d.host in hosts]
        numbers = ",".join(str(here.index(i)) for i in plan.devices)
        amd = machine.devices[plan.devices[0]].kind.startswith("gfx")
        found["HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES"] = numbers
    counts = [s.stop - s.first for s in plan.stages]
    if len(set(counts)) > 1:
        found["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, counts))
    return found


def columns() -> Sequence[str]:
    """Of the table of plans."""
    return (
        "plan",
        "devices",
        "layers",
        "tokens/s",
        "ms a token",
        "prompt ms",
        "memory",
        "links",
        "idle",
        "cost",
    )


def row(found: Prediction, machine: Machine, memory: str) -> list[str]:
    """A plan as a line of the table. memory: of the fullest device, in words."""
    plan = found.plan
    names = ",".join(machine.devices[i].name for i in plan.devices)
    if len(names) > 28:
        names = f"{machine.devices[plan.devices[0]].name}..{machine.devices[plan.devices[-1]].name} ({len(plan.devices)})"
    return [
        plan.layout.name, names, "+".join(str(s.stop - s.first) for s in plan.stages), f"{found.tokens_per_s:.1f}",
        f"{1e3 * found.step_s:.3f}", f"{1e3 * found.prompt_s:.1f}", memory, f"{100 * found.links_share:.0f} %",
        f"{100 * found.idle_share:.0f} %", f"{found.cost_per_token:.3g}",
    ]  # fmt: skip
