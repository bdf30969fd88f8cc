"""AutoRound (Cheng et al. 2023): rounding tuned by signed gradients, block by block; the table stays bfloat16."""

import sys
from pathlib import Path

FAMILY = "AutoRound"
TYPES = ("4bit-g64", "3bit-g64", "2bit-g64")
PACKAGES = ("auto-round==0.16.1",)
# Its authors' default.
ITERATIONS = 200


def main(source: Path, out: Path, kind: str, ids: Path, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    # This folder holds files named like packages that others look for.
    sys.path.pop(0)
    from auto_round import AutoRound
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.append(str(Path(__file__).parent))
    from worker import is_linear, packed_layer, save_float32, save_packed, weights_of

    windows = load_file(ids)["input_ids"]
    batches = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in windows]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    bits, group = int(kind[0]), int(kind.rpartition("g")[2])
    rounding = AutoRound(
        model, AutoTokenizer.from_pretrained(source), bits=bits, group_size=group, sym=False, dataset=batches,
        iters=ITERATIONS, nsamples=len(batches), seqlen=windows.shape[1], batch_size=8, device_map="cpu",
        amp=False, low_gpu_mem_usage=False,
    )  # fmt: skip
    tuned, _ = rounding.quantize()
    expanded, packed = {}, {n: w for n, w in weights_of(source).items() if not is_linear(n)}
    for name, module in tuned.named_modules():
        weight = f"{name}.weight"
        if not is_linear(weight):
            continue
        expanded[weight] = module.weight.data
        packed |= packed_layer(weight, module.weight.data, module.scale, module.zp, bits, group)
    save_packed(source, out / "packed", packed)
    save_float32(source, out / "float32", expanded)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
else:
    from peers import Made, Work, isolated

    def make(kind: str, work: Work) -> Made:
        """Runs AutoRound on every linear layer, calibrated on the same windows."""
        return isolated.make(__file__, kind, work, PACKAGES)
