"""Every model of a task that transformers has, small and of random weights: converted, loaded and run on a device.

    python benchmarks/kinds.py [--task causal] [--device cuda] [--effort balanced] [--jobs 8] [KIND ...]

For each kind of model one line: how far the file's outputs on the device are from the same file's on the CPU, in float32
and in bfloat16, beside how far the original's are, in standard deviations of the outputs; whether greedy generation gives
the same tokens twice, for models that continue a text; seconds. Kinds that transformers itself cannot build or run with
these sizes are named so. Exit code 1 where a file fails, generates other tokens the second time, or is further off in
float32 than LEAST and FACTOR times its original; in bfloat16 routers' near ties decide.
"""

import argparse
import inspect
import json
import logging
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY = Path(__file__).parents[1] / "examples" / "tiny_llama" / "model"
TEXT = Path(__file__).parents[1] / "examples" / "data" / "prose.txt"
WINDOWS, TOKENS, NEW = 4, 32, 12
# Larger ones ignore the sizes below: whole vision towers, or tables of their own.
MOST_WEIGHTS = 3e7
# Of the checkpoint's bytes: what tables and stacks that nothing shortens leave room for.
BUDGET = 0.8
# A file on the device may be so many times as far from the CPU as its original is, and at least so far.
FACTOR, LEAST = 3.0, 1e-3

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size")
FFNS = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_FFNS = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")
SIZES: dict[str, Any] = {
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(WIDTHS, 64),
    **dict.fromkeys(FFNS, 128),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(EXPERT_FFNS, 64),
    **dict.fromkeys(
        ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"), 16
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_d_head"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"), 1
    ),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "mamba_expand", "eos_token_id"), 2),
    "mamba_n_heads": 8,
    "rotary_pct": 0.5,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
    "num_frames": 4,
    "depth": 2,
}


# The mappings of transformers; of those of text, what models read are tokens.
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "pictures": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "films": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "sounds": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "letters": "MODEL_FOR_CTC_MAPPING_NAMES",
}
WRITING = ("causal", "seq2seq", "pictures")  # what they write is compared, too
SAMPLES_OF_SOUND = 4000


def kinds(task: str) -> dict[str, str]:
    """The class of each kind of model for a task."""
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, TASKS[task])
    return {kind: name[0] if isinstance(name, tuple) else name for kind, name in sorted(found.items())}


def vocabulary() -> int:
    return len(json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"])


def small(config_class: Any) -> Any:
    """A config of the sizes that its class knows, and so are the configs inside of it."""
    from transformers import PretrainedConfig

    known = {*inspect.signature(config_class.__init__).parameters}
    known |= {*getattr(config_class, "__dataclass_fields__", {})}
    sizes = SIZES | {"vocab_size": vocabulary() + 64}
    given = {key: value for key, value in sizes.items() if key in known}
    try:
        parts = {k: v for k, v in vars(config_class(**given)).items() if isinstance(v, PretrainedConfig)}
    except Exception:  # sizes for each stage: as they are
        return config_class()
    return config_class(**given, **{key: small(type(part)).to_dict() for key, part in parts.items()})


def inputs_of(model: Any, task: str) -> dict[str, Tensor]:
    """Two inputs that the model reads. Raises what nstf raises for a model whose inputs cannot be made up."""
    from nstf_convert.pipeline.calibrate.text import input_shape

    generator = torch.Generator().manual_seed(1)
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_ids" or task == "pictures":
        given = {"input_ids": torch.arange(2 * 24).reshape(2, 24) * 7 % vocabulary()}
    elif name == "input_values" and model.config.model_type != "audio-spectrogram-transformer":
        given = {name: torch.randn(2, SAMPLES_OF_SOUND, generator=generator)}
    else:
        streamed: Any = SimpleNamespace(module=model)
        name, shape = input_shape(streamed)
        given = {name: torch.randn(2, *shape, generator=generator)}
    if getattr(model.config, "is_encoder_decoder", False) and task != "classes":
        given["decoder_input_ids"] = torch.arange(2 * 10).reshape(2, 10) * 3 % vocabulary()
    return given


def dataset_of(model: Any, task: str, folder: Path) -> Path | None:
    """What a conversion is given: a text, sounds, or nothing where images are made up."""
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_ids" or task == "pictures":
        return TEXT
    if name != "input_values" or model.config.model_type == "audio-spectrogram-transformer":
        return None
    path = folder.with_name("sounds.safetensors")
    save_file({name: torch.randn(8, SAMPLES_OF_SOUND, generator=torch.Generator().manual_seed(2))}, path)
    return path


def outputs(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The first floating-point output: logits where there are some."""
    dtype = next(model.parameters()).dtype
    moved = {n: v.to(model.device, dtype if v.is_floating_point() else v.dtype) for n, v in given.items()}
    found = model(**moved)
    logits = getattr(found, "logits", None)
    first: Tensor = logits if logits is not None else next(v for v in found.values() if v.is_floating_point())
    return first


def write(kind: str, name: str, folder: Path) -> Any:
    """A small model of the kind, beside a tokenizer. Raises what transformers raises."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[kind])
    config = small(config_class)
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        weights = sum(p.numel() for p in model_class(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights / 1e6:.0f} M weights")
    torch.manual_seed(0)
    model = model_class(config).eval()
    if not hasattr(config, "vocab_size"):
        for weight in model.parameters():  # those of convolutions would let nothing through
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=(weight[0].numel() or 1) ** -0.5)
    if getattr(model, "generation_config", None) and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return model


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.float().cpu() - expected).abs().max() / expected.std())


@torch.inference_mode()
def run(kind: str, task: str, device: str, effort: str) -> tuple[bool, str]:
    """(whether all is well, the line) of one kind."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers

    import nstf_convert
    from nstf.runtime import load

    transformers.utils.logging.disable_progress_bar()
    start, writes = time.perf_counter(), task in WRITING
    types = (torch.float32, torch.bfloat16)
    with tempfile.TemporaryDirectory() as temporary:
        folder, file = Path(temporary) / "model", Path(temporary) / "model.nstf"
        try:
            original = write(kind, kinds(task)[kind], folder)
            given = inputs_of(original, task)
            texts = given.get("input_ids")
            plain = outputs(original, given).float()
            theirs = [apart(outputs(original.to(device, t), given), plain) for t in types]
            if not all(map(math.isfinite, theirs)):
                raise ArithmeticError("its outputs are not finite")
            if writes and texts is not None:
                original.generate(texts[:1].to(device), max_new_tokens=2, do_sample=False)
        except Exception as error:  # whatever transformers raises
            return True, f"{kind}: not by transformers: {type(error).__name__} {str(error)[:80]}"
        try:
            options: dict[str, Any] = {"samples": WINDOWS, "seq_len": TOKENS, "effort": effort}
            options["dataset"] = dataset_of(original, task, folder)
            with torch.inference_mode(False):
                nstf_convert.convert(folder, budget=BUDGET, output=file, device=device, **options)
            expected, ours, twice = outputs(load(file, dtype=types[0]), given), [], True
            for dtype in types:
                model = load(file, device=device, dtype=dtype)
                ours.append(apart(outputs(model, given), expected))
                if writes and texts is not None:
                    first = texts[:1].to(device)
                    twice &= torch.equal(
                        *(model.generate(first, max_new_tokens=NEW, do_sample=False) for _ in "12")
                    )
        except Exception as error:  # of one kind: the others go on
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "nstf" in f.filename]
            at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            return False, f"{kind}: FAILED: {type(error).__name__}: {str(error)[:200]} ({at})"
    well = twice and ours[0] <= max(FACTOR * theirs[0], LEAST)
    pairs = zip(types, ours, theirs, strict=True)
    said = ", ".join(f"{str(t)[6:]} {own:.1e} (original {other:.1e})" for t, own, other in pairs)
    generated = "the same tokens twice" if twice else "OTHER TOKENS the second time"
    generated = generated if writes else "nothing to write"
    seconds = time.perf_counter() - start
    return well, f"{kind}: {said}, {generated}, {seconds:.0f} s{'' if well else '  <-- too far'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="as `model_type` has them; all by default")
    parser.add_argument("--task", default="causal", choices=TASKS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--effort", default="fast", choices=("fast", "balanced", "best"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(kinds(args.task)):
        parser.error(f"transformers has no such model for {args.task}: {', '.join(sorted(unknown))}")
    wrong, counts = [], {"not by transformers": 0, "well": 0}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        work = partial(run, task=args.task, device=args.device, effort=args.effort)
        for well, line in pool.imap_unordered(work, args.kinds or kinds(args.task)):
            print(line, flush=True)
            if not well:
                wrong.append(line)
            counts["not by transformers" if ": not by transformers" in line else "well"] += well
    print(
        f"{counts['well']} well, {len(wrong)} not, {counts['not by transformers']} that transformers does not run"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
