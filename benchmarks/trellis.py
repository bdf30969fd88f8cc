"""Mean squared error of the trellis codes on N(0, 1) against the rate-distortion bound, and the time to encode.

    python benchmarks/trellis.py [--tiles 256] [--rates 2 2.5 3] [--json FILE]

For every rate: the error at the best width (the ratio of the weights' standard deviation to the codebook's), the bound
2^(-2 R) of a Gaussian source (Cover and Thomas, Elements of Information Theory, 10.3.2), the gap between the two in bits,
1/2 log2(error / bound), and for scale the best uniform quantiser of as many levels (whole rates only). The tail-biting
stream is counted exactly: 256 R bits for 256 weights. The figures in quantizers/trellis.py come from here.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from nstf.kernels.formats import trellis
from nstf.kernels.trellis_encode import encode_tiles

RATES = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5, 5, 5.5, 6)
WIDTHS = (1.0, 1.03, 1.06, 1.09, 1.12, 1.16)


def measure(rate: float, tiles: int, device: torch.device) -> dict[str, Any]:
    """The best error over the widths on `tiles` x 256 Gaussian weights, with its standard error, and seconds."""
    q = round(4 * rate)
    x = torch.randn(tiles, trellis.TILE, generator=torch.Generator().manual_seed(0)).to(device)
    codebook = trellis.codebook(q).to(device)
    best: dict[str, Any] = {}
    for width in WIDTHS:
        start = time.perf_counter()
        codes = encode_tiles(x / width, q, codebook)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        values = trellis.section_values(codes[:, None], q, 16 * tiles, 16).reshape(tiles, -1)
        error = (x - width * values).double().square().mean(1)
        if not best or float(error.mean()) < best["mse"]:
            best = {
                "mse": float(error.mean()),
                "se": float(error.std() / tiles**0.5),
                "width": width,
                "seconds": seconds,
            }
    bound = 2.0 ** (-2 * rate)
    return {
        "rate": rate,
        **best,
        "bound": bound,
        "gap_bits": 0.5 * math.log2(best["mse"] / bound),
        "microseconds_per_weight": best["seconds"] * 1e6 / x.numel(),
        "uniform_mse": uniform_mse(int(rate)) if rate == int(rate) else None,
    }


def uniform_mse(bits: int) -> float:
    """The least mean squared error of a uniform quantiser with 2^bits levels on N(0, 1), by numerical integration."""
    x = torch.linspace(-8, 8, 1 << 16, dtype=torch.float64)
    p = torch.exp(-x.square() / 2)
    p /= p.sum()
    levels = 1 << bits
    errors = []
    for step in torch.linspace(0.2, 4.0, 400, dtype=torch.float64) * 4 / levels:
        code = (x / step - 0.5).round().clamp(-levels // 2, levels // 2 - 1)
        errors.append(float((p * (x - (code + 0.5) * step).square()).sum()))
    return min(errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| bits | error | +- | bound 2^-2R | gap, bits | width | uniform grid | us per weight |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for rate in options.rates:
        row = measure(rate, options.tiles, device)
        rows.append(row)
        uniform = "" if row["uniform_mse"] is None else f"{row['uniform_mse']:.5f}"
        print(
            f"| {rate:g} | {row['mse']:.5f} | {row['se']:.5f} | {row['bound']:.5f} | {row['gap_bits']:.3f} "
            f"| {row['width']:g} | {uniform} | {row['microseconds_per_weight']:.1f} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
