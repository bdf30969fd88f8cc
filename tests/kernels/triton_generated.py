"""Generated trees through the interpreted Triton kernels; as a program, how many were run and those that are wrong, as JSON.

Triton reads TRITON_INTERPRET when it is imported, so this runs in a process of its own.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import generated_trees
from conftest import random_encoded

from nstf.kernels.formats import decode, node_to_json

# Relative to the sum of absolute products of x and W: float32 sums in chains of factors, where terms cancel.
LIMIT = 2e-3


def main(seed: int, wanted: int) -> None:
    import quick_interpreter

    from nstf.kernels.triton import linear

    quick_interpreter.install()

    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    run, wrong = 0, []
    for number, (tree, shape) in enumerate(generated_trees.trees(seed)):
        encoded = random_encoded(tree, shape, number)
        batch = (1, 3, 17)[number % 3]
        if not (linear.is_known(encoded, batch) and linear._readable(encoded)):
            continue
        weight = decode(encoded)
        x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(number))
        exact = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T + 1e-2
        error = float(((linear.matmul(x, encoded).double() - exact).abs() / size).max())
        run += 1
        if not error < LIMIT:
            wrong.append(
                f"tree {number} at batch {batch} is off by {error:.2g}: {node_to_json(tree)} {shape}"
            )
        if run == wanted:
            break
    print(json.dumps({"run": run, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
