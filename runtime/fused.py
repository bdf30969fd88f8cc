"""Convolutions that do what follows them: batch normalisation, the sum with a residual, ReLU.

A network of encoded convolutions spends a fifth of its time reading and writing whole images for those. The C++ kernels do
them on sums that they hold anyway. Which operations follow which is read from the model's own code: a module that takes one
tensor and gives one is traced with torch.fx, and where the trace is a list of operations without conditions, convolutions
take in what follows. Such a module keeps its instance and attributes; its class becomes one derived from its own. It runs
its own code wherever anything but plain inference is asked for: gradients, training mode, hooks, compilation, other
devices and dtypes, what is no image.
"""

import inspect
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from nstf.runtime.experts import EncodedExperts
from nstf.runtime.fused_run import Run, Step, in_runs
from nstf.runtime.fused_steps import POOLINGS, ConvolutionStep, OtherStep, PoolingStep, Value, held_by, plain
from nstf.runtime.modules import EncodedConv, PlainConv
from nstf.runtime.parameter import EncodedParameter

log = logging.getLogger("nstf")

_SUMS = (operator.add, operator.iadd, torch.add)
_BOUNDS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((nn.ReLU, functional.relu, torch.relu, torch.relu_, "relu", "relu_"), (0.0, math.inf)),
    **dict.fromkeys((nn.ReLU6, functional.relu6), (0.0, 6.0)),
}


def choose_products(model: nn.Module, exact: bool) -> None:
    """Whether a model's convolutions and experts have int8 activations or float32."""
    for module in model.modules():
        if isinstance(module, EncodedConv | EncodedExperts):
            module.exact_products = exact


# What does nothing outside training, and there a plan is not used.
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)


def fuse(model: nn.Module) -> int:
    """Lets the convolutions of a model's modules take in what follows them. Returns how many do.

    Not done by `load`, for two reasons. While torch.fx reads the code no other thread may run any model. And numbers
    that the code reads from its modules (a gain, a flag) count as they are now. Normalisations and parts that are replaced,
    added or taken away later are seen: such a module runs its own code until it is fused again.
    """
    for part in model.modules():
        if isinstance(part, Fused):
            # It may have been changed since, which its plan sees and then leaves alone: planned again from its own class.
            part.__class__ = _own_class(part)
            del part.__dict__["_fused_plan"]
    return _fuse(model)


def _fuse(model: nn.Module) -> int:
    if _image_convolutions(model) == 0:
        return 0
    plan = _planned(model)
    if plan is None or not plan.alone:
        # Where more may be asked for than a plan gives, its own code runs with parts that have plans.
        parts = sum(0 if _pooling_taken(child) else _fuse(child) for child in model.children())
        if plan is None:
            return parts
    _take(model, plan)
    return len(plan.fused)


def _take(model: nn.Module, plan: "Plan") -> None:
    model.__dict__["_fused_plan"] = plan
    base: Any = type(model)
    model.__class__ = _fused_class(base)


def _pooling_taken(model: nn.Module) -> bool:
    """A pooling beside fused modules uses the extension's threads as well: torch's own would look for work afterwards, for
    longer than the next layers take."""
    own = _own_class(model)
    if own in POOLINGS:
        model.__class__ = own
        step = PoolingStep("y", model, (Value("x"),), {}, frozenset({"x"}))
        _take(model, Plan("x", "y", [step], [], [], _Given("input", None, True)))
    return own in POOLINGS


def _own_class(model: nn.Module) -> Any:
    return type(model).__bases__[1] if isinstance(model, Fused) else type(model)


class Fused:
    """A module that runs its convolutions with what follows them."""


@cache
def _fused_class(base: Any) -> type[nn.Module]:
    """A class like `base` whose `forward` runs the plan where it may; callers that read its signature find base's own."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Plan = self.__dict__["_fused_plan"]
        if len(args) + len(kwargs) == 1 and not self.training:
            x: Any = args[0] if args else kwargs.get(plan.given.name)
            if plan.usable(x):
                return plan.run(x)
        return base.forward(self, *args, **kwargs)

    return type(base.__name__, (Fused, base), {"forward": forward})


class _Given(NamedTuple):
    """The image that a module is given. name: of the parameter; channels: as many as its code was read for, None: any;
    alone: whether the module has no other parameter and gives a tensor."""

    name: str
    channels: int | None
    alone: bool


class Plan:
    """What a module does: steps in order, and the values that each is the last to read. owners: modules with the
    parts that they are made of; parts: everything inside, with how many parts each has."""

    def __init__(
        self,
        source: str,
        result: str,
        steps: Sequence[Step],
        owners: list[tuple[nn.Module, list[nn.Module | None]]],
        parts: list[tuple[nn.Module, int]],
        given: _Given,
    ) -> None:
        self.source, self.result, self.owners, self.parts, self.given = source, result, owners, parts, given
        self.steps = in_runs(steps, result)
        self.dead = _last_reads(self.steps, result)
        self.fused = [s for s in steps if isinstance(s, ConvolutionStep)]
        self.norms = [s.normalisation for s in self.fused if s.normalisation is not None]
        self.convolutions: list[Any] = [p for p, _ in parts if hasattr(type(p), "exact_products")]

    @property
    def alone(self) -> bool:
        return self.given.alone

    def usable(self, x: Any) -> bool:
        """Whether this call is plain inference on a CPU, and nobody watches the modules inside."""
        if type(x) is not Tensor or x.dim() != 4 or x.device.type != "cpu" or x.dtype != torch.float32:
            return False
        if self.given.channels is not None and x.shape[1] != self.given.channels:
            return False
        if torch.compiler.is_compiling():
            return False
        if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        for owner, inner in self.owners:
            if [*owner._modules.values()] != inner:
                return False  # an adapter may have taken a part's place since
        for norm in self.norms:
            if held_by(norm, "running_mean") is None or held_by(norm, "running_var") is None:
                return False  # it takes those of the batch now
        for part, size in self.parts:
            # Most of this waits for memory: as little is looked at as says enough. Some put a function of theirs in the
            # place of `forward`, some add a part.
            inside = part.__dict__
            if inside["training"] or inside["_forward_hooks"] or inside["_forward_pre_hooks"]:
                return False
            if "forward" in inside or len(inside["_modules"]) != size:
                return False
        for convolution in self.convolutions:
            if convolution.exact_products:
                return False
        return not torch.is_grad_enabled() or not (
            x.requires_grad
            or any(p is not None and p.requires_grad for m, _ in self.parts for p in m._parameters.values())
        )

    def run(self, x: Tensor) -> Any:
        values: dict[str, Any] = {self.source: x}
        for step, dead in zip(self.steps, self.dead, strict=True):
            values[step.out] = step.run(values)
            for name in dead:
                del values[name]
        return values[self.result]


def _image_convolutions(module: nn.Module) -> int:
    return sum(isinstance(m, EncodedConv) and _on_images(m) for m in module.modules())


def _on_images(module: Any) -> bool:
    """Whether it is a convolution over two axes with zeros around the image, and nothing else."""
    of: Any = type(module)
    return issubclass(of, nn.Conv2d) and of.forward is PlainConv.forward and module.padding_mode == "zeros"


class _Proxy(fx.Proxy):
    """A value of a trace in which `y += z` writes into y, as it does in a tensor; torch.fx takes it for y + z."""

    def __getattr__(self, name: str) -> Any:
        if name == "shape" and self.node.op == "placeholder":
            return _Shape(self, name)
        return super().__getattr__(name)


class _Shape(fx.proxy.Attribute):
    """The shape of the image that a module is given. Code that looks at its channels goes on as if they were the first
    convolution's; a plan is used for no others."""

    def __getitem__(self, place: Any) -> Any:
        if place != 1:
            return self.tracer.create_proxy("call_function", operator.getitem, (self, place), {})
        tracer: Any = self.tracer
        tracer.asked = True
        return tracer.channels


def _writes(operation: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _writes(getattr(operator, _name)))


class _Called(nn.Module):
    """A module that is called with one image and nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class _Tracer(fx.Tracer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        first: Any = next(m for m in module.modules() if isinstance(m, EncodedConv) and _on_images(m))
        self.channels, self.asked = int(first.weight_encoded.encoded.shape[1] * first.groups), False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self.module:
            return False
        return hasattr(type(m), "encoded_base") or super().is_leaf_module(m, module_qualified_name)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and is_dataclass(a):  # such as the results of transformers
            given = {f.name: self.create_arg(getattr(a, f.name)) for f in fields(a)}
            return self.create_node("call_function", type(a), (), given)
        return super().create_arg(a)


def _trace(module: nn.Module) -> tuple[fx.Graph, _Given] | None:
    """The operations of a module of one tensor, and whatever else it may be given and is not; or None where its code cannot
    be read so."""
    parameters = [*inspect.signature(type(module).forward).parameters.values()][1:]
    if not parameters:
        return None
    first, others = parameters[0], parameters[1:]
    if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return None
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others):
        return None
    before = {m: dict(m.__dict__) for m in module.modules()}
    tracer = _Tracer(module)
    try:
        for one in before:
            one.__dict__["training"] = False
        graph = tracer.trace(_Called(module))
    except Exception as error:  # whatever a model's own code does with something that is no tensor
        log.debug("%s is run as it is: %s", type(module).__name__, error)
        return None
    finally:
        for one, attributes in before.items():  # the code may keep what it saw
            one.__dict__.clear()
            one.__dict__.update(attributes)
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    made = isinstance(result, fx.Node) and isinstance(result.target, type)
    return graph, _Given(first.name, tracer.channels if tracer.asked else None, not others and not made)


def _planned(module: nn.Module) -> Plan | None:
    """A module's plan, or None where no convolution would take anything in."""
    traced = _trace(module)
    if traced is None:
        return None
    graph, given = traced
    parts = {f"module.{name}": part for name, part in module.named_modules()}
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(parts[str(node.target)], _NOTHING) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    results = next(n for n in graph.nodes if n.op == "output").args[0]
    if not isinstance(results, fx.Node) or any(n.op == "get_attr" for n in nodes):
        return None

    def module_of(node: Any) -> nn.Module | None:
        return parts[str(node.target)] if isinstance(node, fx.Node) and node.op == "call_module" else None

    held: dict[fx.Node, ConvolutionStep] = {}  # by the node that gives its result so far
    members: set[fx.Node] = set()
    for node in nodes:
        layer, images = module_of(node), [a for a in node.args if isinstance(a, fx.Node)]
        if isinstance(layer, EncodedConv) and _on_images(layer) and len(images) == 1 and not node.kwargs:
            held[node] = ConvolutionStep(node.name, images[0].name, layer)
            continue
        if node.kwargs and node.target not in (functional.relu, functional.relu6):
            continue
        # What follows a convolution alone joins it.
        taken = next((a for a in images if a in held and len(a.users) == 1), None)
        if node.target in (operator.iadd, "add_") and taken is not images[0]:
            taken = None  # it changes the other image
        if taken is not None and _joined(held[taken], node, layer, [a for a in images if a is not taken]):
            held[node] = held.pop(taken)
            held[node].out = node.name
            members.add(taken)
    steps: list[Step] = []
    for node in nodes:
        if node in members:
            continue
        if node not in held and _changes_its_input(node, module_of(node)):
            return None  # a convolution that waits for what follows it might read the changed values
        target = node.target if module_of(node) is None else module_of(node)
        reads = frozenset(n.name for n in node.all_input_nodes)
        steps.append(
            held.get(node) or OtherStep(node.name, target, plain(node.args), plain(node.kwargs), reads)
        )
    if not members:
        return None
    source = next(n.name for n in graph.nodes if n.op == "placeholder")
    inside = [m for m in module.modules() if not isinstance(m, EncodedParameter)]
    # An encoded weight may be another one: the extension's steps are then made anew.
    owners = [
        (m, [*m._modules.values()]) for m in inside
        if not all(isinstance(p, EncodedParameter) for p in m._modules.values())
    ]  # fmt: skip
    return Plan(source, results.name, steps, owners, [(m, len(m._modules)) for m in inside[1:]], given)


def _joined(step: ConvolutionStep, node: fx.Node, layer: nn.Module | None, others: list[fx.Node]) -> bool:
    """Takes an operation into a convolution's step, if it is the next that it can do: normalisation, sum, bound."""
    bounded, target = step.bounds != (-math.inf, math.inf), node.target
    if isinstance(layer, nn.BatchNorm2d) and type(layer) is nn.BatchNorm2d and layer.running_mean is not None:
        if step.normalisation is None and step.added is None and not bounded:
            step.normalisation = layer
            return True
        return False
    if target in _SUMS or (node.op == "call_method" and target in ("add", "add_")):
        # Of two images of one shape, which is only known when they are there: `convolve` compares.
        if step.added is None and not bounded and len(others) == 1 and len(node.args) == 2:
            step.added = others[0].name
            return True
        return False
    bounds = _BOUNDS.get(type(layer) if layer is not None else target)
    if bounds is not None and not bounded and not others:
        step.bounds = bounds
        return True
    return False


def _changes_its_input(node: fx.Node, layer: nn.Module | None) -> bool:
    """Whether an operation writes into what it reads."""
    if layer is not None:
        return bool(getattr(layer, "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    name = getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or name.endswith("_") or name in _IN_PLACE_OPERATORS


_IN_PLACE_OPERATORS = frozenset(n for n in dir(operator) if n.startswith("i") and n[1:] in dir(operator)) | {
    "setitem"
}


def _last_reads(steps: Sequence[Step | Run], result: str) -> list[tuple[str, ...]]:
    """Of each step the values that no later one reads."""
    found: list[tuple[str, ...]] = []
    later = {result}
    for step in reversed(steps):
        unread = {step.out} - later
        found.append(tuple((step.reads - later) | unread))
        later |= step.reads
    return found[::-1]
