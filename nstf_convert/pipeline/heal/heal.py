"""Healing: codes stay, all that is continuous is tuned.

Scales, norms, biases, tables and dense factors learn against the original's logits. Models that are no language models
learn against its outputs, and integer codes with them (`outputs.py`).

The student is the mix with its continuous values free, the loss mean KL(original || student) over tokens of the text the
statistics came from, and more of the same text where the dataset has it. Values are rounded to what the file can hold in
every step (the gradient passes straight through, Bengio et al. 2013), so that nothing is lost at the end. Block-wise
tuning of scales for quantised models: EfficientQAT (Chen et al. 2024); norms: Norm Tweaking (Li et al. 2023).

AdamW with a cosine decay over a number of steps that is set from the measured time of a step; the result depends on that
number only, and it is reported. Windows that choose mixes choose the best state here too, and healing is kept only when
they say that it helped.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nstf.kernels.formats import EncodedTensor
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.outputs import OutputRun
from nstf_convert.pipeline.heal.run import HealingRun, Settings
from nstf_convert.pipeline.mix import Loader, Measured
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session

__all__ = ["Healed", "Settings", "heal"]

log = logging.getLogger("nstf")


@dataclass(frozen=True)
class Healed:
    """encoded: the tuned tensors by name, of the same bytes as before; {} when healing did not help. facts: the report."""

    encoded: Mapping[str, EncodedTensor]
    before: Measured
    after: Measured
    facts: dict[str, Any]

    def loader(self, load: Loader) -> Loader:
        """`load` with the healed tensors in place of what they replace."""
        return lambda unit, recipe: self.encoded.get(unit.name) or load(unit, recipe)


def heal(
    session: Session,
    mix: Mapping[str, Recipe],
    minutes: float,
    load: Loader | None = None,
    before: Measured | None = None,
    steps: int | None = None,
    settings: Settings | None = None,
) -> Healed:
    """Tunes a mix for about `minutes`, or for exactly `steps` steps.

    load: gives the tensors as encoded. before: what the mix measures on the windows that choose. Interrupted runs go on
    from the work directory. Raises ValueError for a model that cannot be run.
    """
    if session.model is None or session.calibration is None:
        raise ValueError("healing needs a model that can be run")
    loader = load or mixes.encoder_loader(session)
    before = before or mixes.measure(session, mix, load=load)
    run: HealingRun
    if session.calibration.metadata["language"]:
        run = HealingRun(session, mix, loader, minutes, steps, settings or Settings(), before)
    else:
        run = OutputRun(session, mix, loader, minutes, steps, settings, before)
    run.learn()
    encoded = run.best_tensors()
    after = (
        mixes.measure(session, mix, load=Healed(encoded, before, before, {}).loader(loader))
        if encoded
        else before
    )
    kept = after.score < before.score
    facts = {
        **run.facts(), "kept": kept, "before": before.accuracy.to_json(), "after": after.accuracy.to_json(),
    }  # fmt: skip
    log.info("healing: %.6g to %.6g on the windows that choose", before.score, after.score)
    return Healed(encoded, before, after, facts) if kept else Healed({}, before, before, facts)
