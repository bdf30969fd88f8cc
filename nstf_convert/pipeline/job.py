"""What a job's results depend on, and whether any of it changed while it was read."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nstf import __version__
from nstf.errors import UsageError
from nstf_convert import dataset as texts
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.calibrate.make import file_digest
from nstf_convert.pipeline.calibrate.text import own_texts, readable
from nstf_convert.pipeline.store.workdir import content_key
from nstf_convert.streamed import StreamedModel

# When files were changed whose digests are of a part: parts of a job where there are such files.
TIMES = ("checkpoint_times", "datasets_times")
# The texts that are read where none are given: a part of jobs that read any.
OWN_TEXTS = "own_texts"
NOT_TOKENIZER = ("config.json", "generation_config.json")


class Job:
    """The inputs of one conversion as they were when its checkpoint was opened."""

    def __init__(self, options: ConvertOptions, checkpoint: Any) -> None:
        self._options, self._checkpoint = options, checkpoint
        self._stamps = checkpoint.stamps()
        self._datasets: list[tuple[str, list[int]]] = []
        self.parts: dict[str, Any] = {}

    def identify(self, model: StreamedModel | None, device: torch.device) -> None:
        """Fills `parts`, by which a work directory knows its job. Raises UsageError for a dataset that is given twice."""
        options, checkpoint = self._options, self._checkpoint
        self._datasets = [(texts.fingerprint(d), texts.times(d)) for d in options.datasets]
        found = [digest for digest, _ in self._datasets]
        self._check_apart(found)
        # Where digests are of a part of the bytes.
        written = [written_ns for _, written_ns, _ in self._stamps.values()] if checkpoint.is_sampled else []
        times = dict(zip(TIMES, (written, [t for _, at in self._datasets for t in at]), strict=True))
        self.parts = {
            "checkpoint": checkpoint.fingerprint(),
            "datasets": found,
            # They stand in the file, and their bytes count.
            "names of datasets": [readable(Path(d).name) for d in options.datasets],
            "calibration": None if options.calibration is None else file_digest(options.calibration),
            "samples": options.calibration_windows,
            "gradient_windows": options.gradient_windows,
            "reports_apart": options.reports_apart,
            "seq_len": options.seq_len,
            "seed": options.seed,
            "tool": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": device.type,
            "tokenizer": content_key(**self._tokenizer_digests()),
            **{name: at for name, at in times.items() if at},
            **({OWN_TEXTS: content_key(**own_texts())} if self._reads_own_texts(model) else {}),
        }

    def names(self) -> Mapping[str, Any]:
        """What messages call the parts that can change."""
        options = self._options
        datasets = [str(d) for d in options.datasets]
        return {
            "checkpoint": options.model,
            "datasets": datasets,
            "calibration": None if options.calibration is None else str(options.calibration),
            "tokenizer": options.model,
            OWN_TEXTS: "what ships with Python and nstf",
            **dict(zip(TIMES, (options.model, datasets), strict=True)),
        }

    def key(self) -> str:
        """What a calibration of this job is stored under; neither how many threads made it nor when files were changed is
        part of that."""
        apart = ("threads", *TIMES)
        return content_key(**{name: value for name, value in self.parts.items() if name not in apart})

    def written_into(self) -> bool:
        """Whether files of the checkpoint have another time than when they were opened: one that is the same again may have
        been copied over itself, and have held anything in between. A file that took its place is another one."""
        now = self._checkpoint.stamps()
        same = (path for path, (inode, *_) in self._stamps.items() if path in now and now[path][0] == inode)
        return any(now[path] != self._stamps[path] for path in same)

    def check_checkpoint(self) -> None:
        """Raises UsageError where the checkpoint was written into since it was opened: some of what was made is of the one,
        and some of the other. A file that took its place does no harm: the one that is open stays as it is."""
        if self.written_into():
            raise self.changed()

    def changed(self) -> UsageError:
        """What is said of a checkpoint that was written into."""
        return UsageError(
            f"{self._options.model} was written into while it was read: run again when it is complete"
        )

    def check_datasets(self) -> None:
        """Raises UsageError where a dataset is not what it was when the work directory was opened: what was made of it
        would stand there for the other."""
        for dataset, before in zip(self._options.datasets, self._datasets, strict=True):
            if (texts.fingerprint(dataset), texts.times(dataset)) != before:
                raise UsageError(
                    f"the dataset {dataset} changed while it was read: run again when it is complete"
                )

    def _check_apart(self, digests: list[str]) -> None:
        read: set[Path] = set()
        for number, dataset in enumerate(self._options.datasets):
            places = texts.places(dataset)
            if digests[number] in digests[:number] or not places.isdisjoint(read):
                raise UsageError(
                    f"the dataset {dataset} is given twice: what it is measured on would be fitted on"
                )
            read |= places

    def _reads_own_texts(self, model: StreamedModel | None) -> bool:
        """Whether a text is read that was not given."""
        if model is None or self._options.datasets:
            return False
        return model.is_causal_lm or getattr(model.module, "main_input_name", "") == "input_ids"

    def _tokenizer_digests(self) -> dict[str, str]:
        """Of the files that texts or images are read by: with others, the same text has other tokens."""
        files = self._checkpoint.files()
        return {n: hashlib.sha256(files[n]).hexdigest() for n in files if n not in NOT_TOKENIZER}

    def tokens_key(self) -> str:
        """The same, for a calibration that is kept: without templates of chats, which change no tokens of a text."""
        found = {n: d for n, d in self._tokenizer_digests().items() if not n.startswith("chat_template")}
        if (name := "tokenizer_config.json") in found:
            with contextlib.suppress(ValueError, RecursionError):
                stated = json.loads(self._checkpoint.files()[name])
                if isinstance(stated, dict):
                    found[name] = content_key(**{k: v for k, v in stated.items() if k != "chat_template"})
        return content_key(**found)
