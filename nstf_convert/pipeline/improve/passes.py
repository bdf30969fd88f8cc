"""The pass over the layers that the options ask for."""

from collections.abc import Callable, Mapping

from nstf_convert.pipeline.improve.front_to_back import encode_in_prefix
from nstf_convert.pipeline.improve.in_pass import InPass
from nstf_convert.pipeline.improve.original_inputs import encode_for_originals
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session


def stage_of(session: Session) -> str:
    """What the pass is called."""
    return "encode front to back" if session.options.front_to_back else "encode"


def encode_in_pass(
    session: Session, mix: Mapping[str, Recipe], progress: Callable[[Unit], None], share: float = 1.0
) -> InPass:
    """A mix encoded front to back where the options ask for that, else for the inputs of the original model. share: of the
    weights that the pass covers, only the first ones; `results` then has no others of these."""
    encode = encode_in_prefix if session.options.front_to_back else encode_for_originals
    return encode(session, mix, progress, share)
