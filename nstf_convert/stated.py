"""What a manifest says about its file in `plan` and `report`: words for people, which may be a stranger's.

Nothing of a model is made from it, so what is no finite number is left out, as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: object) -> float | int | None:
    """A number that a float can hold, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def expected_loss(plan: Mapping[str, Any], name: str) -> float | None:
    """What the plan expected a tensor to add to the loss."""
    losses = plan.get("expected_loss")
    found = finite(losses.get(name)) if isinstance(losses, Mapping) else None
    return None if found is None else float(found)


def role(plan: Mapping[str, Any], name: str) -> str | None:
    """What the plan says a tensor is for."""
    roles = plan.get("roles")
    found = roles.get(name) if isinstance(roles, Mapping) else None
    return found if isinstance(found, str) else None


def accuracy(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The measured figures of the file against its source, numbers or None each; None where nothing was measured."""
    found = report.get("accuracy")
    final = found.get("final") if isinstance(found, Mapping) else None
    if not isinstance(final, Mapping):
        return None
    return {name: value for name, value in final.items() if value is None or finite(value) is not None}
