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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from nstf.kernels.convolution import convolve
from nstf.kernels.cpu.convolution import After
from nstf.runtime.modules import EncodedConv, geometry_of
from nstf.runtime.parameter import EncodedParameter

log = logging.getLogger("nstf")

_SUMS = (operator.add, operator.iadd, torch.add)
_BOUNDS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((nn.ReLU, functional.relu, torch.relu, torch.relu_, "relu", "relu_"), (0.0, math.inf)),
    **dict.fromkeys((nn.ReLU6, functional.relu6), (0.0, 6.0)),
}


def choose_products(model: nn.Module, exact: bool) -> None:
    """Whether a model's convolutions have int8 activations or float32."""
    for module in model.modules():
        if isinstance(module, EncodedConv):
            module.exact_products = exact


# What does nothing outside training, and there a plan is not used.
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)


def fuse(model: nn.Module) -> int:
    """Lets the convolutions of a model's modules take in what follows them. Returns how many do.

    Not done by `load`, for two reasons. While torch.fx reads the code no other thread may run any model. And numbers
    that the code reads from its modules (a gain, a flag) count as they are now. Normalisations and parts that are replaced,
    added or taken away later are seen: such a module runs its own code until it is fused again.
    """
    if isinstance(model, Fused):
        # It may have been changed since, which its plan sees and then leaves alone: planned again from its own class.
        model.__class__ = type(model).__bases__[1]
        del model.__dict__["_fused_plan"]
    if _image_convolutions(model) == 0:
        return 0
    plan = _planned(model)
    if plan is None:
        return sum(fuse(child) for child in model.children())
    model.__dict__["_fused_plan"] = plan
    base: Any = type(model)
    model.__class__ = _fused_class(base)
    return sum(isinstance(step, _Convolution) for step in plan.steps)


class Fused:
    """A module that runs its convolutions with what follows them."""


@cache
def _fused_class(base: Any) -> type[nn.Module]:
    """A class like `base` whose `forward` runs the plan where it may; callers that read its signature find base's own."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Plan = self.__dict__["_fused_plan"]
        if len(args) == 1 and not kwargs and not self.training and plan.usable(args[0]):
            return plan.run(args[0])
        return base.forward(self, *args, **kwargs)

    return type(base.__name__, (Fused, base), {"forward": forward})


@dataclass
class _Convolution:
    """One kernel: a convolution, and a normalisation, a sum and a bound if they follow. out, x, added: names of values."""

    out: str
    x: str
    convolution: Any
    normalisation: nn.BatchNorm2d | None = None
    added: str | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)

    def run(self, values: dict[str, Any]) -> Tensor:
        gain, bias = self._scaled()
        added: Any = None if self.added is None else values[self.added]
        image = added if isinstance(added, Tensor) else None
        plain = added is None or image is not None
        y = convolve(
            values[self.x],
            self.convolution.weight_encoded.encoded,
            bias,
            geometry_of(self.convolution),
            after=After(gain, image, *self.bounds) if plain else After(gain),
        )
        return y if plain else (y + added).clamp(*self.bounds)  # a number, such as a side of the image

    def _scaled(self) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of the products: a few numbers for each output, so made at every call."""
        norm, own = self.normalisation, _held(self.convolution, "bias")
        if norm is None:
            return None, own
        mean, variance = _numbers(norm, "running_mean"), _numbers(norm, "running_var")
        assert mean is not None and variance is not None, "a normalisation without statistics is not fused"
        weight, beta, before = _numbers(norm, "weight"), _numbers(norm, "bias"), _float(own)
        gain = torch.rsqrt(variance + norm.eps)
        gain = gain if weight is None else gain * weight
        mean = mean if before is None else mean - before
        return gain, -mean * gain if beta is None else torch.addcmul(beta, mean, gain, value=-1)


def _numbers(module: nn.Module, name: str) -> Tensor | None:
    """A module's buffer or parameter, or None."""
    return _float(_held(module, name))


def _held(module: nn.Module, name: str) -> Any:
    """`getattr`, past the module's own, which takes longer than the sums of a normalisation."""
    found = module._buffers.get(name)
    found = module._parameters.get(name) if found is None else found
    return getattr(module, name) if found is None else found


def _float(stored: Tensor | None) -> Tensor | None:
    return stored if stored is None or stored.dtype == torch.float32 else stored.float()


class _Value(NamedTuple):
    """A value by its name, in the place of an argument."""

    name: str


@dataclass
class _Other:
    """An operation as the module's code has it. target: a module, a function or a method's name."""

    out: str
    target: Any
    args: Any
    kwargs: Any
    reads: frozenset[str]

    def run(self, values: dict[str, Any]) -> Any:
        args, kwargs = _filled(self.args, values), _filled(self.kwargs, values)
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


def _filled(argument: Any, values: dict[str, Any]) -> Any:
    """An argument with the values that it names."""
    if isinstance(argument, _Value):
        return values[argument.name]
    if isinstance(argument, tuple | list):
        return type(argument)(_filled(a, values) for a in argument)
    if isinstance(argument, dict):
        return {k: _filled(a, values) for k, a in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_filled(a, values) for a in (argument.start, argument.stop, argument.step)))
    return argument


def _plain(argument: Any) -> Any:
    """An argument of a trace with names in the place of its nodes."""
    if isinstance(argument, fx.Node):
        return _Value(argument.name)
    if isinstance(argument, tuple | list):
        return (tuple if isinstance(argument, tuple) else list)(_plain(a) for a in argument)
    if isinstance(argument, Mapping):
        return {k: _plain(a) for k, a in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_plain(a) for a in (argument.start, argument.stop, argument.step)))
    return argument


@dataclass
class Plan:
    """What a module does: steps in order, and the values that each is the last to read. places: (module, name, the part of
    that name) of everything inside. sizes: how many parts each module has."""

    source: str
    result: str
    steps: list[_Convolution | _Other]
    dead: list[tuple[str, ...]]
    places: list[tuple[nn.Module, str, nn.Module]]
    sizes: list[tuple[nn.Module, int]]

    def __post_init__(self) -> None:
        found = [s.normalisation for s in self.steps if isinstance(s, _Convolution)]
        self.norms = [n for n in found if n is not None]
        parts = (part for _, _, part in self.places)
        self.convolutions: list[Any] = [p for p in parts if hasattr(type(p), "exact_products")]

    def usable(self, x: Any) -> bool:
        """Whether this call is plain inference on a CPU, and nobody watches the modules inside."""
        if type(x) is not Tensor or x.dim() != 4 or x.device.type != "cpu" or x.dtype != torch.float32:
            return False
        if torch.compiler.is_compiling():
            return False
        if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        for owner, size in self.sizes:
            if len(owner._modules) != size:
                return False
        for norm in self.norms:
            if _held(norm, "running_mean") is None or _held(norm, "running_var") is None:
                return False  # it takes those of the batch now
        for owner, name, part in self.places:
            # An adapter may have taken its place since; others put a function of theirs in the place of `forward`.
            if owner._modules.get(name) is not part or "forward" in part.__dict__:
                return False
            if part.training or part._forward_hooks or part._forward_pre_hooks:
                return False
        for convolution in self.convolutions:
            if convolution.exact_products:
                return False
        return not torch.is_grad_enabled() or not (
            x.requires_grad
            or any(
                p is not None and p.requires_grad for _, _, m in self.places for p in m._parameters.values()
            )
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
    return type(module).forward is nn.Conv2d.forward and module.padding_mode == "zeros"


class _Proxy(fx.Proxy):
    """A value of a trace in which `y += z` writes into y, as it does in a tensor; torch.fx takes it for y + z."""


def _writes(operation: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _writes(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(type(m), "encoded_base") or super().is_leaf_module(m, module_qualified_name)


def _trace(module: nn.Module) -> fx.Graph | None:
    """The operations of a module of one tensor, or None where its code cannot be read so."""
    given = [*inspect.signature(type(module).forward).parameters.values()][1:]
    if len(given) != 1 or given[0].kind not in (given[0].POSITIONAL_ONLY, given[0].POSITIONAL_OR_KEYWORD):
        return None
    before = {m: dict(m.__dict__) for m in module.modules()}
    try:
        return _Tracer().trace(module)
    except Exception as error:  # whatever a model's own code does with something that is no tensor
        log.debug("%s is run as it is: %s", type(module).__name__, error)
        return None
    finally:
        for one, attributes in before.items():  # the code may keep what it saw
            one.__dict__.clear()
            one.__dict__.update(attributes)


def _planned(module: nn.Module) -> Plan | None:
    """A module's plan, or None where no convolution would take anything in."""
    graph = _trace(module)
    if graph is None:
        return None
    parts = dict(module.named_modules())
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(parts[node.target], _NOTHING) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    results = next(n for n in graph.nodes if n.op == "output").args[0]
    if not isinstance(results, fx.Node) or any(n.op == "get_attr" for n in nodes):
        return None

    def module_of(node: Any) -> nn.Module | None:
        return parts[node.target] if isinstance(node, fx.Node) and node.op == "call_module" else None

    held: dict[fx.Node, _Convolution] = {}  # by the node that gives its result so far
    members: set[fx.Node] = set()
    for node in nodes:
        layer, images = module_of(node), [a for a in node.args if isinstance(a, fx.Node)]
        if isinstance(layer, EncodedConv) and _on_images(layer) and len(images) == 1 and not node.kwargs:
            held[node] = _Convolution(node.name, images[0].name, layer)
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
    steps: list[_Convolution | _Other] = []
    for node in nodes:
        if node in members:
            continue
        if node not in held and _changes_its_input(node, module_of(node)):
            return None  # a convolution that waits for what follows it might read the changed values
        target = node.target if module_of(node) is None else module_of(node)
        reads = frozenset(n.name for n in node.all_input_nodes)
        steps.append(
            held.get(node) or _Other(node.name, target, _plain(node.args), _plain(node.kwargs), reads)
        )
    if not members:
        return None
    source = next(n.name for n in graph.nodes if n.op == "placeholder")
    places = [
        (owner, name, part)
        for owner in module.modules()
        for name, part in owner.named_children()
        if not isinstance(part, EncodedParameter)
    ]
    sizes = [(owner, len(owner._modules)) for owner in module.modules()]
    return Plan(source, results.name, steps, _last_reads(steps, results.name), places, sizes)


def _joined(step: _Convolution, node: fx.Node, layer: nn.Module | None, others: list[fx.Node]) -> bool:
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


def _last_reads(steps: list[_Convolution | _Other], result: str) -> list[tuple[str, ...]]:
    """Of each step the values that no later one reads."""
    found: list[tuple[str, ...]] = []
    later = {result}
    for step in reversed(steps):
        if isinstance(step, _Convolution):
            read = {step.x} | ({step.added} if step.added is not None else set())
        else:
            read = set(step.reads)
        unread = {step.out} - later
        found.append(tuple((read - later) | unread))
        later |= read
    return found[::-1]
