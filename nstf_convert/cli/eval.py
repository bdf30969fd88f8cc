"""`nstf eval`: measures an artifact against its reference and judges it by gates."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import GateFailed, UsageError
from nstf_convert.cli import options
from nstf_convert.cli.convert import accuracy_pairs
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs

if TYPE_CHECKING:
    from nstf_convert.gates.evaluate import Check
    from nstf_convert.measure import Accuracy, Similarity

# Generous: 512-token windows of text have about 2,000 characters, of dense code or CJK fewer.
CHARS_PER_TOKEN = 12


def eval(
    artifact: ArtifactPath,
    reference: Annotated[
        str, typer.Option("--reference", "-r", help="The model the artifact was made from.")
    ],
    dataset: Annotated[
        Path | None, typer.Option(help="Held-out text: .txt, .jsonl, .parquet or a folder.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL divergence, nats.")] = None,
    max_p99_kl: Annotated[float | None, typer.Option(help="Largest 99th percentile of it, nats.")] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Smallest share of equal top tokens, 0 to 1.")
    ] = None,
    max_ppl_ratio: Annotated[
        float | None, typer.Option(help="Largest perplexity over the reference's.")
    ] = None,
    min_cosine: Annotated[float | None, typer.Option(help="Smallest cosine of outputs (encoders).")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text, or inputs of an encoder.")] = 16,
    seq_len: options.SeqLen = 512,
    threads: options.Threads = None,
    junit: Annotated[Path | None, typer.Option(help="Also write the verdict as JUnit XML.")] = None,
    json: options.Json = False,
) -> None:
    """Measure what an artifact lost, and fail (exit code 4) when it lost more than a gate allows.

    Example: nstf eval model.nstf --reference ./model --dataset held-out.txt --max-kl 0.01 --junit gates.xml
    """
    options.check_file(artifact)
    options.check_model(reference)
    for option, value, high in (("--max-kl", max_kl, math.inf), ("--max-p99-kl", max_p99_kl, math.inf),
                                ("--min-top1", min_top1, 1.0), ("--max-ppl-ratio", max_ppl_ratio, math.inf),
                                ("--min-cosine", min_cosine, 1.0)):  # fmt: skip
        check_bound(option, value, high)
    if junit is not None and not junit.parent.is_dir():
        raise UsageError(f"--junit {junit}: the folder {junit.parent} does not exist")
    from nstf_convert.gates.evaluate import Gates, check
    from nstf_convert.gates.junit import junit_xml, write_junit

    start = time.monotonic()
    measured, protocol = measure(artifact, reference, dataset, windows, seq_len, threads)
    gates = Gates(max_kl, max_p99_kl, min_top1, max_ppl_ratio, min_cosine)
    checks = check(gates, measured)
    figures = measured.to_json()
    if junit is not None:
        write_junit(junit, junit_xml(str(artifact), checks, figures | protocol, time.monotonic() - start))
    if json:
        print_json(
            {
                "artifact": str(artifact),
                "reference": reference,
                "measured": figures,
                "protocol": protocol,
                "gates": [gate_json(c) for c in checks],
                "passed": all(c.passed for c in checks),
            }
        )
    else:
        print_pairs(f"{artifact} against {reference}", accuracy_pairs(figures))
        for c in checks:
            typer.echo(f"  {'pass' if c.passed else 'FAIL'}  {c.message()}")
    failed = [c.message() for c in checks if not c.passed]
    if failed:
        raise GateFailed(f"{len(failed)} of {len(checks)} gates failed: {'; '.join(failed)}")


def gate_json(check: "Check") -> dict[str, Any]:
    """One gate's verdict."""
    return {
        "gate": check.option.lstrip("-"),
        "value": check.value,
        "bound": check.bound,
        "passed": check.passed,
    }


def check_bound(option: str, value: float | None, high: float) -> None:
    """Raises UsageError for a bound that no measurement can be held against."""
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or value > high:
        limits = "a number of at least 0" if high == math.inf else "a number from 0 to 1"
        raise UsageError(f"{option} {value:g}: give {limits}")


def measure(
    artifact: Path, reference: str, dataset: Path | None, windows: int, seq_len: int, threads: int | None
) -> "tuple[Accuracy | Similarity, dict[str, Any]]":
    """The figures and the protocol they were measured by. Raises NstfError of every kind."""
    import torch

    from nstf.runtime.artifact import open_artifact
    from nstf_convert.checkpoint import open_checkpoint
    from nstf_convert.gates import evaluate as gates
    from nstf_convert.streamed import StreamedModel

    if threads is not None:
        torch.set_num_threads(threads)
    # Gates decide what is shipped: a damaged file must not pass because the damage is small.
    with open_artifact(artifact, verify=True) as opened, open_checkpoint(reference) as checkpoint:
        if checkpoint.config is None:
            raise UsageError(f"the reference {reference} has no config.json: it cannot be run")
        warn_about_source(opened.manifest.provenance, checkpoint.fingerprint)
        test, ref = StreamedModel.from_artifact(opened), StreamedModel.from_checkpoint(checkpoint)
        tokenizer = load_tokenizer(artifact)
        text = None
        if dataset is not None:
            text = gates.read_text(dataset, CHARS_PER_TOKEN * seq_len * windows)
        if ref.is_causal_lm:
            if text is None:
                raise UsageError("--dataset is missing: give held-out text such as --dataset held-out.txt")
            if tokenizer is None:
                raise UsageError(
                    f"{artifact} holds no tokenizer: a language model cannot be measured on text"
                )
            batch = gates.text_windows(tokenizer, text, seq_len, windows)
            protocol = {"kind": "language model", "windows": int(batch.shape[0]), "seq_len": seq_len,
                        "scored_per_window": seq_len - 1 - seq_len // 2, "dataset": str(dataset)}  # fmt: skip
            return gates.evaluate_language_model(ref, test, batch), protocol
        if text is not None and tokenizer is not None:
            inputs, kind = gates.text_batches(tokenizer, text, seq_len, windows), "text"
        else:
            inputs, kind = gates.synthetic_batches(checkpoint.config, windows, seed=0), "seeded noise"
        protocol = {"kind": "encoder", "inputs": kind, "dataset": str(dataset) if text else None}
        return gates.evaluate_encoder(ref, test, inputs), protocol


def warn_about_source(provenance: Any, fingerprint: Any) -> None:
    """Says so when the artifact was made from another model than the reference."""
    import logging

    recorded = provenance.get("checkpoint")
    if recorded and recorded != fingerprint():
        logging.getLogger(__name__).warning(
            "the artifact was not made from this reference: fingerprints differ"
        )


def load_tokenizer(artifact: Path) -> Any:
    """The artifact's tokenizer, or None when it holds none."""
    from nstf.runtime.artifact import open_artifact

    with open_artifact(artifact) as opened:
        if not {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json"} & set(
            opened.file_names()
        ):
            return None
    import nstf.runtime

    return nstf.runtime.load_tokenizer(artifact)
