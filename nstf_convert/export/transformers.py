"""`--to transformers`: the encoded form, which from_pretrained loads after `import nstf.integrations.transformers`."""

from pathlib import Path

from nstf.kernels.formats import stored_bytes
from nstf.runtime.artifact import Artifact
from nstf_convert.export.hf import files_bytes
from nstf_convert.export.plan import ExportPlan, Item
from nstf_convert.export.writing import Files, listed
from nstf_convert.pipeline.propose.recipe import describe


def plan(artifact: Artifact, dtype: str | None) -> ExportPlan:
    """Every tensor as it is. Raises nothing; the model's class is checked when it is written."""
    items = []
    for name in artifact.names():
        if artifact.stored_name(name) == name:
            record = artifact.record(name)
            size, word = stored_bytes(record.tree, record.shape), describe(record.tree)
            items.append(Item(name, (name,), word, word, "exact", size, size))
    notes: tuple[str, ...] = ()
    if artifact.manifest.attention:
        notes = ("the attention plan stays behind: the folder attends densely",)
    return ExportPlan("transformers", tuple(items), files_bytes(artifact) + 65536, notes)


def write(artifact: Artifact, plan: ExportPlan, folder: Path, shard_bytes: int) -> Files:
    """Writes the folder through `save_pretrained` of the loaded model."""
    from nstf.integrations.transformers import write_encoded

    write_encoded(artifact, folder, shard_bytes)
    return listed(folder)
