"""From names in a file to parameter names of transformers' module tree, without reading a weight.

transformers 5 renames and fuses some weights at load (Mixtral's experts become `mlp.experts.gate_up_proj`,
[E, 2 * ffn, in]). We use its own tables: the model is built on the meta device for its names and shapes, the
tables' operations run on meta tensors to learn what they give, and again on real ones when one is asked for.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from nstf.errors import CorruptError, NstfError, UnsupportedError, out_of_memory
from nstf.runtime.artifact.config import Limits, check_config, limits_of_shapes
from nstf.runtime.skeleton import exported
from nstf_convert.checkpoint.memory import empty
from nstf_convert.checkpoint.source import TensorInfo, torch_dtype

Read = Callable[[str], Tensor]
MAX_LAYERS_FLOOR = 512
# Of the classes that a config names, those that are tried: where tensors have no place, each is built.
MOST_CLASSES = 8
COUNTS = re.compile(r"(^|_)n?_?(layers?|blocks?|experts|stages|depths?|repeats)$")


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made: the stored tensors it needs, what comes out, and how."""

    sources: tuple[str, ...]
    info: TensorInfo
    build: Callable[[Read], Tensor]
    as_stored: bool = False


@dataclass(frozen=True)
class Plan:
    """Parameters by name, and what was noticed.

    tied: alias -> name, where the class ties them and the file leaves the alias out; declared: the class ties
    them and the file has both; missing: parameters that are neither in the file nor tied; misfit: elements of
    missing parameters and of tensors without a place.
    """

    recipes: Mapping[str, Recipe]
    architecture: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    misfit: int = 0
    notes: tuple[str, ...] = ()


def plain(name: str, info: TensorInfo) -> Recipe:
    """The recipe of a tensor that is used as it is stored."""
    return Recipe((name,), info, lambda read: read(name), as_stored=True)


def plain_plan(infos: Mapping[str, TensorInfo], notes: tuple[str, ...] = ()) -> Plan:
    """Every tensor under the name in the file."""
    return Plan({name: plain(name, info) for name, info in infos.items()}, notes=notes)


def plan_names(infos: Mapping[str, TensorInfo], config: Mapping[str, Any] | None, where: str) -> Plan:
    """The plan for a checkpoint with this config; names stay as they are for a model transformers lacks.

    Raises CorruptError when config and tensors contradict each other.
    """
    if config is None:
        return plain_plan(infos)
    candidates = model_classes(config)
    if not candidates:
        kind = str(config.get("model_type"))[:60]
        note = f"model type {kind!r} is unknown to transformers: tensors keep the file's names"
        return plain_plan(infos, (note,))
    best: Plan | None = None
    smallest = math.inf
    for cls in candidates:
        plan = _match(cls, infos, config, where)
        if plan is not None and plan.misfit < smallest:
            best, smallest = plan, plan.misfit
        if smallest == 0:
            break
    if best is None:
        return plain_plan(
            infos, (f"{where}: config.json does not describe these tensors: they keep the file's names",)
        )
    _refuse_holes(best, where)
    return best


def model_classes(config: Mapping[str, Any]) -> list[Any]:
    """transformers' classes for a config: the one it names, then the plain model.

    Empty when there is none.
    """
    import transformers

    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return []
    config_class = transformers.CONFIG_MAPPING[config["model_type"]]
    stated = config.get("architectures")
    # A class that is tried may be built.
    named = [
        exported(name)
        for name in (stated if isinstance(stated, list) else [])[:MOST_CLASSES]
        if isinstance(name, str) and name.isidentifier()
    ]
    found: list[Any] = list(dict.fromkeys(cls for cls in named if _is_model_class(cls)))
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    ):
        try:
            listed = mapping.get(config_class, None)
        except (ValueError, ImportError):  # a class that transformers lists and lacks (5.23: of one model)
            continue
        for cls in listed if isinstance(listed, tuple | list) else (listed,):
            if _is_model_class(cls) and cls not in found:
                found.append(cls)
    return found


def _is_model_class(cls: object) -> bool:
    """Whether it is a model of transformers that can run, and not one of its abstract bases."""
    import transformers

    return (
        isinstance(cls, type)
        and issubclass(cls, transformers.PreTrainedModel)
        and getattr(cls, "forward", None) is not torch.nn.Module.forward
    )


def meta_model(cls: Any, config: Mapping[str, Any], limits: Limits, where: str) -> Any:
    """The model of class `cls` on the meta device: names and shapes, no memory. limits: of the file's tensors.

    Raises CorruptError, also for a config that makes more of a model than these tensors can fill.
    """
    import transformers

    from nstf.runtime.offline import without_hub
    from nstf.runtime.skeleton import building

    _refuse_absurd(config, limits.tensors, where)
    check_config(config, limits, where)
    # A checkpoint may hold several parameters in one tensor.
    most = replace(limits, tensors=4 * limits.tensors)
    config_class = transformers.CONFIG_MAPPING[config["model_type"]]
    try:
        with without_hub():
            settings = config_class.from_dict(copy.deepcopy(dict(config)))
            with torch.device("meta"), building(most):
                return cls(settings)
    except ImportError as error:
        raise UnsupportedError(
            f"{where}: transformers builds no {cls.__name__} without a package that is missing: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    except Exception as error:
        if out_of_memory(error):
            raise NstfError(
                f"{where}: not enough memory for its model; free some, or raise its limit"
            ) from error
        # Any exception type: config classes and models check their values in many ways.
        text = " ".join(str(error).split())[:200]
        raise CorruptError(
            f"{where}: config.json does not give a {cls.__name__} ({type(error).__name__}: {text})"
        ) from error


def _refuse_absurd(config: Mapping[str, Any], tensor_count: int, where: str) -> None:
    """A config of 2**40 layers would be built for ever: no model has many more layers than its file has tensors."""
    limit = max(MAX_LAYERS_FLOOR, tensor_count)
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_absurd(value, tensor_count, where)
        elif COUNTS.search(key):
            numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
            largest = (
                sum(numbers) if key.endswith(("depths", "repeats", "blocks")) else max(numbers, default=0)
            )
            if largest > limit:
                raise CorruptError(
                    f"{where}: config.json says {key} is {largest}, but the file has {tensor_count} tensors"
                )


def _match(cls: Any, infos: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str) -> Plan | None:
    """The plan if the model is of class `cls`; None when less than half of the bytes have a place in it."""
    model = meta_model(cls, config, limits_of_shapes([i.shape for i in infos.values()]), where)
    expected = _shapes(model)
    recipes, unused = _recipes(model, infos, expected, where)
    total = sum(info.size_bytes for info in infos.values())
    used = sum(recipe.info.size_bytes for recipe in recipes.values())
    if 2 * used < total:
        return None
    return _checked(model, recipes, {name: infos[name] for name in unused}, where)


def plan_of_recipes(recipes: Mapping[str, Recipe], config: Mapping[str, Any], where: str) -> Plan:
    """The plan of parameters that have transformers' names already, checked against the config's model."""
    classes = model_classes(config)
    if not classes:
        raise UnsupportedError(
            f"{where}: transformers does not know the model type {config.get('model_type')!r}"
        )
    model = meta_model(classes[0], config, limits_of_shapes([r.info.shape for r in recipes.values()]), where)
    expected = _shapes(model)
    unused = {name: recipe.info for name, recipe in recipes.items() if name not in expected}
    plan = _checked(model, {name: r for name, r in recipes.items() if name in expected}, unused, where)
    _refuse_holes(plan, where)
    return plan


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def _checked(model: Any, recipes: dict[str, Recipe], unused: Mapping[str, TensorInfo], where: str) -> Plan:
    """The plan, once every shape agrees with the model's."""
    expected = _shapes(model)
    for name, recipe in recipes.items():
        if recipe.info.shape != expected[name]:
            raise CorruptError(
                f"{where}: tensor {name!r} has shape {list(recipe.info.shape)} but config.json makes it "
                f"{list(expected[name])}"
            )
    stated = getattr(model, "all_tied_weights_keys", None) or {}
    tied, missing = _left_out(stated, recipes, expected)
    made = _computed(model, missing, recipes)
    recipes, missing = recipes | made, tuple(name for name in missing if name not in made)
    declared = {alias: name for alias, name in stated.items() if alias in recipes and name in recipes}
    notes = []
    if unused:
        notes.append(
            f"{len(unused)} tensors have no place in {type(model).__name__} and are left out: "
            f"{', '.join(list(unused)[:5])}"
        )
    if missing:
        notes.append(
            f"{len(missing)} parameters of {type(model).__name__} are not in the file: "
            f"{', '.join(missing[:5])}"
        )
    misfit = sum(math.prod(expected[n]) for n in missing) + sum(math.prod(i.shape) for i in unused.values())
    return Plan(recipes, type(model).__name__, tied, declared, missing, misfit, tuple(notes))


def _recipes(
    model: Any, infos: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], where: str
) -> tuple[dict[str, Recipe], list[str]]:
    """Recipes by parameter name, and the stored names that no parameter uses."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    meta = dict.fromkeys(expected, True)
    recipes: dict[str, Recipe] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    unused = []
    for name in sorted(infos, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        if target not in meta and name in meta:
            target, pattern = name, None
        if target not in meta:
            unused.append(name)
        elif pattern is None:
            if target in recipes:
                raise CorruptError(
                    f"{where}: tensors {recipes[target].sources[0]!r} and {name!r} are both {target!r}"
                )
            recipes[target] = plain(name, infos[name])
        else:
            groups.setdefault(target, []).append((pattern, name))
    for target, members in groups.items():
        made = _converted(by_pattern[members[0][0]], target, members, infos, model, where)
        recipes |= {name: recipe for name, recipe in made.items() if name in meta}
    return recipes, unused


def _converted(
    converter: Any,
    target: str,
    members: list[tuple[str, str]],
    infos: Mapping[str, TensorInfo],
    model: Any,
    where: str,
) -> dict[str, Recipe]:
    """The recipes that one of transformers' weight converters gives for the tensors it collects."""
    sources = tuple(name for _, name in members)

    def read_meta(name: str) -> Tensor:
        return torch.empty(infos[name].shape, dtype=torch_dtype(infos[name].dtype), device="meta")

    run = partial(_run_converter, converter, target, members, model)
    try:
        outcome = run(read_meta)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise CorruptError(f"{where}: the tensors of {target!r} do not fit together ({text})") from error
    stacked = _expert_stack(converter, members)
    return {
        name: Recipe(
            sources,
            TensorInfo.of(tuple(t.shape), str(t.dtype).removeprefix("torch.")),
            partial(_fill_stack, stacked, tuple(t.shape), t.dtype) if stacked else partial(_pick, run, name),
        )
        for name, t in outcome.items()
    }


def _run_converter(
    converter: Any, target: str, members: list[tuple[str, str]], model: Any, read: Read
) -> dict[str, Tensor]:
    job = copy.deepcopy(converter)
    for pattern, name in members:
        job.add_tensor(target, name, pattern, partial(read, name))
    out = job.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in out.items()}


def _pick(run: Callable[[Read], dict[str, Tensor]], name: str, read: Read) -> Tensor:
    return run(read)[name].contiguous()


def _expert_stack(converter: Any, members: list[tuple[str, str]]) -> list[list[str]] | None:
    """[part][expert] names if the conversion only stacks experts (and joins parts along dim 1), else None."""
    kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    if kinds not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        return None
    return [[name for p, name in members if p == pattern] for pattern in converter.source_patterns]


def _fill_stack(parts: list[list[str]], shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> Tensor:
    """The stack [E, sum of out, in], with one expert beside it in memory (transformers' way needs two stacks)."""
    result = empty(shape, dtype)
    for expert in range(shape[0]):
        row = 0
        for part in parts:
            tensor = read(part[expert])
            if len(parts) == 1:
                result[expert] = tensor
            else:
                result[expert, row : row + tensor.shape[0]] = tensor
                row += tensor.shape[0]
    return result


def _left_out(
    stated: Mapping[str, str], recipes: Mapping[str, Recipe], expected: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Ties (alias -> name) of parameters the file leaves out, and the parameters that are really missing."""
    families: dict[str, list[str]] = {}
    for target, source in stated.items():
        families.setdefault(source, [source]).append(target)
    ties: dict[str, str] = {}
    for family in families.values():
        present = next((name for name in family if name in recipes), None)
        if present is not None:
            ties |= {name: present for name in family if name not in recipes and name != present}
    return ties, tuple(name for name in expected if name not in recipes and name not in ties)


def _computed(model: Any, missing: tuple[str, ...], recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Recipes of tables that no file holds: transformers leaves Marian's positions out of what it saves, and computes them.

    A microsecond an element, so one larger than all tensors of the file together stays missing.
    """
    most = limits_of_shapes([recipe.info.shape for recipe in recipes.values()]).table_elements
    found = {}
    for name in missing:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf == "weight" and hasattr(module, "create_weight") and module.weight.numel() <= most:
            table = module.weight
            info = TensorInfo.of(tuple(table.shape), str(table.dtype).removeprefix("torch."))
            found[name] = Recipe((), info, partial(_copied, cache(module.create_weight)))
    return found


def _copied(make: Callable[[], Tensor], read: Read) -> Tensor:
    with torch.device("cpu"):
        return make().clone()


def _refuse_holes(plan: Plan, where: str) -> None:
    """A parameter that other layers have but this one lacks means a broken download, not another head."""
    families = {re.sub(r"\d+", "#", name) for name in plan.recipes}
    for name in plan.missing:
        if re.search(r"\d", name) and re.sub(r"\d+", "#", name) in families:
            raise CorruptError(
                f"{where}: parameter {name!r} is missing although other layers have theirs; download it again"
            )
