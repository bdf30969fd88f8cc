"""HQQ (Badri and Shaji 2023): data-free half-quadratic quantisation of the linear layers; the table stays bfloat16."""

import sys
from pathlib import Path

FAMILY = "HQQ"
# bits and group size; its authors' choices for 4, 3 and 2 bits.
TYPES = ("4bit-g64", "3bit-g64", "2bit-g16")
PACKAGES = ("hqq==0.2.8.post1",)


def main(source: Path, out: Path, kind: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    # Its file name is the package's name: the program's own folder must not come first.
    sys.path.pop(0)
    from hqq.core.quantize import Quantizer

    sys.path.append(str(Path(__file__).parent))
    from worker import is_linear, save_float32, save_packed, weights_of

    bits, group = int(kind[0]), int(kind.rpartition("g")[2])
    packed, expanded = {}, {}
    for name, weight in weights_of(source).items():
        if not is_linear(name):
            packed[name] = weight
            continue
        codes, meta = Quantizer.quantize(
            weight.float(), nbits=bits, channel_wise=True, group_size=group, optimize=True, axis=1,
            compute_dtype=torch.float32, device="cpu",
        )  # fmt: skip
        for part in ("scale", "zero"):
            half = meta[part].to(torch.float16)
            packed[f"{name}.{part}"] = half.contiguous()
            meta[part] = half.float()
        packed[f"{name}.codes"] = codes.data.contiguous()
        expanded[name] = Quantizer.dequantize(codes, meta).reshape(weight.shape)
    save_packed(source, out / "packed", packed)
    save_float32(source, out / "float32", expanded)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[5]))
else:
    from peers import Made, Work, isolated

    def make(kind: str, work: Work) -> Made:
        """Runs HQQ on every linear layer."""
        return isolated.make(__file__, kind, work, PACKAGES)
