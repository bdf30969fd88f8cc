"""`nstf convert --for ENGINE`: the recipes whose values that engine's files hold exactly, at the bytes they take here.

Scales are float16 of their own, as these engines store them: 8-bit scales under a row's float16 have more digits, but for
those that use half of the steps, as GGUF's Q6_K.
"""

from collections.abc import Sequence

from nstf.errors import UsageError
from nstf_convert.pipeline.propose.recipe import Recipe

ENGINES = ("gguf", "compressed-tensors", "onnx")
# Exact there, and in fewer bytes than the next type: 6.56 bits a weight, between Q5_0's 5.5 and Q8_0's 8.5.
_Q6_K = {"bits": 6, "group": 16, "symmetric": True, "scale_bits": 8, "steps": 128}
# How the methods of a conversion say for which engine they are.
MARK = "for:"


def methods(engine: str) -> set[str]:
    """The methods that a conversion for an engine may use. Raises UsageError for an unknown one."""
    if engine not in ENGINES:
        raise UsageError(f"`engine` {engine[:40]!r}: choose one of {', '.join(ENGINES)}")
    found = {r.method for r in recipes(engine, 0)}
    return {*found, "dense", MARK + engine}


def engine_of(allowed: set[str]) -> str | None:
    """The engine that a set of methods is for."""
    return next((m.removeprefix(MARK) for m in sorted(allowed) if m.startswith(MARK)), None)


def recipes(engine: str, cols: int, table: bool = False) -> Sequence[Recipe]:
    """Quantised recipes for a matrix of `cols` columns (0: of any number that fits). table: of an embedding."""
    if engine == "gguf":
        # Q4_0, Q5_0, Q8_0, MXFP4: blocks of 32, whole blocks in a row. Q6_K: blocks of 256.
        if cols % 32:
            return ()
        k_quants = () if cols % 256 else (Recipe("int_grid", {**_Q6_K}),)
        return (*(_integers(b, 32) for b in (4, 5, 8)), *k_quants, Recipe("mxfp4", {}))
    if engine == "compressed-tensors":
        if table:
            # Loaders take tables dense, and in float16: what bfloat16 holds beyond it is lost here, where it is measured.
            return (Recipe("dense", {"dtype": "float16"}),)
        # Without zero points: transformers does not load packed ones.
        wide = [g for g in (32, 64, 128) if cols % g == 0]
        found = [_integers(b, g) for b in (2, 3, 4, 5, 6, 7, 8) for g in (*wide, 0)]
        return found if cols % 32 == 0 else [r for r in found if r.params["bits"] in (4, 8)]
    wide = [g for g in (32, 64, 128) if cols % g == 0]
    found = [_integers(b, g) for b in (2, 4, 8) for g in wide]
    return [*found, *(_integers(b, g, symmetric=False) for b in (2, 4) for g in wide)]


def _integers(bits: int, group: int, symmetric: bool = True) -> Recipe:
    return Recipe("int_grid", {"bits": bits, "group": group, "symmetric": symmetric, "scale_bits": 16})
