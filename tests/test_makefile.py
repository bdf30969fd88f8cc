"""The Makefile: `make` builds again after an edit of any source of the extension."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_every_source_that_cmake_compiles_is_a_prerequisite_of_the_installation() -> None:
    globbed = re.search(
        r"file\(GLOB SOURCES CONFIGURE_DEPENDS ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert globbed is not None
    patterns = globbed[1].split()
    sources = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    headers = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "cpu").rglob("*.h")}
    assert any("/engine/" in name for name in sources) and headers
    # GNU make's database: no target is made.
    said = subprocess.run(
        ["make", "-pnq", "VENV=.venv", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    (stamp,) = re.findall(r"^\.venv/\.installed:(.*)", said, re.MULTILINE)
    assert (sources | headers) - set(stamp.split()) == set()
