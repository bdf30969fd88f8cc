"""Devices by name, tried before anything is loaded."""

import torch

from nstf.errors import UsageError


def usable(device: str | torch.device, kinds: tuple[str, ...] = ()) -> torch.device:
    """The device, on which a number was put. Raises RuntimeError with the reason in one line.

    kinds: types it may be of; () for any.
    """
    try:
        found = torch.device(device)
        if kinds and found.type not in kinds:
            raise RuntimeError(f"choose {' or '.join(kinds)} (ROCm is called cuda)")
        torch.empty(1, device=found)
    except Exception as error:  # torch raises many kinds: for large numbers, other types, missing modules
        reason = (str(error).splitlines() or ["there is none"])[0]
        raise RuntimeError(reason.rstrip(".")) from error
    return found


def stated_device(device: str | torch.device) -> torch.device:
    """A device that this machine has. Raises UsageError."""
    try:
        return usable(device)
    except RuntimeError as error:
        raise UsageError(f"device {str(device)[:40]!r}: {error}; device='cpu' runs everywhere") from error
