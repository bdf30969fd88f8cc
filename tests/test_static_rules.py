"""Rules that keep a stranger's file from being run, and errors from being swallowed: over every file of ours."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("nstf_convert", "runtime", "kernels", "analyzers", "decomposers", "quantizers", "integrations")
# The one file that may call torch.load, always with weights_only=True.
LOADS = "nstf_convert/checkpoint/torch_bin.py"
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
# Files whose tensors C++ reads and writes by address: a process may have set another default dtype or device.
BY_ADDRESS = ("kernels/cpu/", "runtime/engine", "runtime/fused", "runtime/messages")
MAKERS = {
    f"torch.{name}"
    for name in "arange as_tensor empty eye full linspace ones rand randint randn tensor zeros".split()
}


def files() -> Iterator[tuple[str, ast.Module]]:
    """One tree at a time: kept, they are millions of objects that Python looks through for garbage all the while."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.Call) -> str:
    """`a.b.c` of a call a.b.c(...)."""
    parts, at = [], node.func
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return ".".join(reversed([*parts, at.id])) if isinstance(at, ast.Name) else ""


def keywords(node: ast.Call) -> dict[str | None, object]:
    return {k.arg: getattr(k.value, "value", None) for k in node.keywords}


def narrows(test: ast.expr) -> bool:
    """`x is not None`, `isinstance(x, T)`, or several of them: for the type checker, and no check of input."""
    if isinstance(test, ast.BoolOp):
        return all(narrows(value) for value in test.values)
    if isinstance(test, ast.Compare):
        return all(isinstance(op, ast.IsNot) for op in test.ops)
    return isinstance(test, ast.Call) and called(test) == "isinstance"


def broken(name: str, tree: ast.Module) -> Iterator[str]:
    """What a file does against the rules."""
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if UNSAFE_MODULES & {n.partition(".")[0] for n in names}:
                yield f"{where} imports {', '.join(names)}"
        elif isinstance(node, ast.Call):
            call, given = called(node), keywords(node)
            if call in UNSAFE_CALLS or call in ("os.system", "os.popen"):
                yield f"{where} calls {call}"
            if call == "torch.load" and (name != LOADS or given.get("weights_only") is not True):
                yield f"{where} calls torch.load"
            if call.endswith(("yaml.load", "yaml.unsafe_load")) or call == "np.load":
                yield f"{where} calls {call}"
            if given.get("shell") is True or given.get("trust_remote_code") is True:
                yield f"{where} runs a shell or remote code"
            if name.startswith(BY_ADDRESS) and call in MAKERS and not {"dtype", "device"} <= set(given):
                yield f"{where} calls {call} without dtype and device"
            if given.get("allow_pickle") is True and name != LOADS:
                yield f"{where} allows pickle"
        elif isinstance(node, ast.Assert) and not narrows(node.test):
            yield f"{where} asserts what should raise"
        elif isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            caught = ast.unparse(node.type) if node.type is not None else ""
            if not caught or (silent and caught in ("Exception", "BaseException")):
                yield f"{where} catches everything without a word"


def test_no_file_breaks_a_rule() -> None:
    found = [what for name, tree in files() for what in broken(name, tree)]
    assert found == []


def test_the_rules_see_what_they_forbid() -> None:
    forbidden = (
        "import pickle", "from marshal import loads", "eval('1')", "torch.load(x)", "os.system('x')",
        "subprocess.run('x', shell=True)", "assert x > 0", "try:\n f()\nexcept:\n raise",
        "try:\n f()\nexcept Exception:\n pass", "AutoModel.from_pretrained(x, trust_remote_code=True)", "yaml.load(x)",
    )  # fmt: skip
    for text in forbidden:
        assert len(list(broken("x.py", ast.parse(text)))) == 1, text
    for text in (
        "assert x is not None",
        "torch.nn.load(x)",
        "model.eval()",
        "try:\n f()\nexcept OSError:\n pass",
    ):
        assert list(broken("x.py", ast.parse(text))) == [], text
    for text in ("torch.empty(2)", "torch.zeros(2, dtype=d)", "torch.tensor(x, device='cpu')"):
        assert len(list(broken("kernels/cpu/x.py", ast.parse(text)))) == 1, text
        assert list(broken("kernels/torch/x.py", ast.parse(text))) == [], text
    assert list(broken("runtime/engine.py", ast.parse("torch.full(2, x, dtype=d, device=y.device)"))) == []
    assert list(broken(LOADS, ast.parse("torch.load(x, weights_only=True)"))) == []
    assert list(broken(LOADS, ast.parse("torch.load(x, weights_only=False)"))) != []


# Who imports a module whose name is no literal: each takes it from a list of our own, as its tests show.
DYNAMIC = {"kernels/lazy.py", "kernels/registry.py", "nstf_convert/nstf/__init__.py"}


def test_nothing_is_imported_by_a_name_made_from_data() -> None:
    found = set()
    for name, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node).endswith("import_module"):
                argument = node.args[0]
                ours = isinstance(argument, ast.Constant) or (
                    isinstance(argument, ast.JoinedStr)
                    and isinstance(argument.values[0], ast.Constant)
                    and str(argument.values[0].value).startswith(("nstf.", "nstf_convert."))
                )
                found |= set() if ours else {name}
    assert found == DYNAMIC
