"""`nstf verify`: reads the whole file and checks every SHA-256 in it."""

import dataclasses

from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs


def verify(artifact: ArtifactPath, json: options.Json = False) -> None:
    """Check an artifact completely; exit code 5 when a single bit is wrong.

    Example: nstf verify model.nstf
    """
    options.check_file(artifact)
    from nstf.runtime.artifact import verify as verify_artifact

    result = verify_artifact(artifact)
    facts = dataclasses.asdict(result)
    if json:
        print_json({"path": str(artifact), "ok": True, **facts})
    else:
        print_pairs(
            f"{artifact}: every checksum matches", [(k.replace("_", " "), v) for k, v in facts.items()]
        )
