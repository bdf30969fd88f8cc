"""Levels of every kind: what the sweeps on all devices are compared on."""

from nstf.quantizers import fp8, int_grid, mxfp4
from nstf.quantizers.rounding.levels import Levels

GRID = tuple(
    x**3 + x for x in (-1.0, -0.8, -0.7, -0.5, -0.4, -0.2, -0.1, 0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 1)
)
LEVELS = {
    "int3": int_grid.levels(int_grid.Params(bits=3)),
    "int4-asymmetric": int_grid.levels(int_grid.Params(bits=4, symmetric=False)),
    "int4-scale8": int_grid.levels(int_grid.Params(bits=4, scale_bits=8)),
    "int3-asymmetric-scale8": int_grid.levels(int_grid.Params(bits=3, symmetric=False, scale_bits=8)),
    "int8": int_grid.levels(int_grid.Params(bits=8)),
    "fp8": fp8.levels(fp8.Params()),
    "mxfp4": mxfp4.LEVELS,
    "grid": Levels(4, table=GRID, ratios=(1.0, 0.9, 0.8, 0.7), signs=True),
}
