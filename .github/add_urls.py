"""Adds [project.urls] to a pyproject.toml: python add_urls.py pyproject.toml https://host/owner/name

The repository does not know its own address; the workflow that publishes it does.
"""

import sys
from pathlib import Path

PAGES = {
    "Homepage": "",
    "Source": "",
    "Documentation": "/blob/main/docs/guide.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


def add_urls(text: str, repository: str) -> str:
    """The text with the table of addresses at its end. Raises SystemExit when there is one already."""
    if "[project.urls]" in text:
        raise SystemExit("pyproject.toml has [project.urls] already")
    lines = [f'{name} = "{repository.rstrip("/")}{page}"' for name, page in PAGES.items()]
    return "\n".join([text.rstrip(), "", "[project.urls]", *lines, ""])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(add_urls(file.read_text("utf-8"), sys.argv[2]), "utf-8")
