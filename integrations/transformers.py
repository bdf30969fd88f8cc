"""What `from_pretrained` of transformers does with the path of an `.nstf` file, once this module is imported.

transformers takes a path that is no folder for a repository's name and asks the network for it, for half a minute.
It has no hook for other kinds of files and no entry point, so the few methods that take a path are wrapped here: an
`.nstf` path is refused at once with the call that loads it. Anything else goes to transformers unchanged.
"""

import os
from functools import wraps
from pathlib import Path
from typing import Any

import transformers

from nstf.errors import UsageError

_LOADERS = {
    "AutoTokenizer": "load_tokenizer",
    "AutoProcessor": "load_tokenizer",
    "AutoConfig": "load",
    "PreTrainedModel": "load",
}


def refuse_artifact(source: object, loader: str) -> None:
    """Raises UsageError when `source` is the path of an .nstf file. loader: the function of nstf.runtime that reads it."""
    if not isinstance(source, str | os.PathLike):
        return
    path = os.fspath(source)
    if not isinstance(path, str) or not path.lower().endswith(".nstf") or Path(path).is_dir():
        return
    missing = not Path(path).is_file()
    # A repository may be called so, and is left to transformers.
    if not missing or path.count("/") != 1 or path.startswith((".", "~", "/")):
        said = " (and there is no such file)" if missing else ""
        raise UsageError(
            f"{path} is an .nstf file{said}, which from_pretrained does not read: use nstf.runtime.{loader}({path!r}), "
            f"or write a folder for from_pretrained with: nstf export {path} -o folder"
        )


def _guard(owner: Any, loader: str) -> None:
    original = owner.from_pretrained.__func__
    if getattr(original, "nstf_guarded", False):
        return

    @wraps(original)
    def from_pretrained(cls: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        refuse_artifact(kwargs.get("pretrained_model_name_or_path", source), loader)
        given = (source, *args) if source is not None or args else ()
        return original(cls, *given, **kwargs)

    from_pretrained.nstf_guarded = True  # type: ignore[attr-defined]
    owner.from_pretrained = classmethod(from_pretrained)


def _install() -> None:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    _guard(_BaseAutoModelClass, "load")
    for name, loader in _LOADERS.items():
        _guard(getattr(transformers, name), loader)


_install()
