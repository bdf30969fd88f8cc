"""GPTQ (Frantar et al. 2023) by llm-compressor: asymmetric integers in groups of 64; the table stays bfloat16."""

import sys
from pathlib import Path

FAMILY = "GPTQ (llm-compressor)"
TYPES = ("4bit-g64", "3bit-g64")
PACKAGES = ("llmcompressor==0.14.0.1",)


def main(source: Path, out: Path, kind: str, ids: Path, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    # This folder holds files named like packages that others look for.
    sys.path.pop(0)
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    sys.path.append(str(Path(__file__).parent))
    from worker import is_linear, packed_layer, save_float32, save_packed, weights_of

    windows = load_file(ids)["input_ids"]
    data = Dataset.from_dict(
        {"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()}
    )
    # float32: bfloat16 is slow on most CPUs, and less exact.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    bits, group = int(kind[0]), int(kind.rpartition("g")[2])
    scheme = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": False,
            "strategy": "group",
            "group_size": group,
        },
    }
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(
        model=model, dataset=data, recipe=recipe, max_seq_length=windows.shape[1],
        num_calibration_samples=windows.shape[0],
    )  # fmt: skip
    expanded, packed = {}, {n: w for n, w in weights_of(source).items() if not is_linear(n)}
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if not is_linear(weight):
            continue
        expanded[weight] = module.weight.data
        scale, zero = module.weight_scale.data, module.weight_zero_point.data + 2 ** (bits - 1)
        packed |= packed_layer(weight, module.weight.data, scale, zero, bits, group)
    save_packed(source, out / "packed", packed)
    save_float32(source, out / "float32", expanded)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
else:
    from peers import Made, Work, isolated

    def make(kind: str, work: Work) -> Made:
        """Runs GPTQ on every linear layer, calibrated on the same windows."""
        return isolated.make(__file__, kind, work, PACKAGES)
