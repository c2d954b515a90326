"""Write the sample's two files from WMT14's newstest2014, French and English.

curl -fsSL http://statmt.org/wmt14/test-full.tgz | tar xz
python examples/wmt14/preprocess.py --source test-full --verify --out data/wmt14
"""

import argparse
import hashlib
import os
import pathlib
import sys

from dtransformer.datasets import read_sgm_pairs
from dtransformer.errors import InputError

ENGLISH = "newstest2014-fren-ref.en.sgm"
FRENCH = "newstest2014-fren-ref.fr.sgm"
SHA256 = {
    ENGLISH: "c73727c954e92396eb3eed1b2730804a77130c1c3a8bc6a3f5646766fc92a8eb",
    FRENCH: "c57025c8a338c642fe3ad0206ddc75d258a5584e1d470b75f37af2fb666d7e93",
}
OUTPUTS = "wmt14.en_fr.txt", "wmt14.fr_en.txt"


def prepare(
    source: str | os.PathLike, destination: str | os.PathLike, overwrite: bool = False
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the sample's two files from WMT14's.

    A tab inside a sentence becomes a space.

    Args:
        source: a folder that holds the two newstest2014 files.
        destination: the folder to write `wmt14.en_fr.txt` (english TAB french) and
            `wmt14.fr_en.txt` (french TAB english) to.
        overwrite: whether files that are there with other content are replaced.

    Returns:
        The two paths.

    Raises:
        InputError: a file is missing, or the two do not match; names the first line that does not.
            Or one of the two is there with other content.
    """
    paths = [pathlib.Path(source) / name for name in (ENGLISH, FRENCH)]
    pairs = read_sgm_pairs(*paths)
    if not pairs:
        raise InputError(
            f"{paths[0]} and {paths[1]} hold no segment: expected lines that begin with '<seg id'"
        )
    pairs = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs]
    paths = [pathlib.Path(destination) / name for name in OUTPUTS]
    for path, order in zip(paths, (1, -1)):
        text = "".join("\t".join(pair[::order]) + "\n" for pair in pairs)
        if path.exists() and not overwrite and path.read_text("utf-8") != text:
            raise InputError(f"{path} is there with other content: give --overwrite")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return tuple(paths)


def verify(folder: str | os.PathLike) -> None:
    """Check that a folder holds the two official files.

    Raises:
        InputError: a file is missing or has another SHA-256.
    """
    for name, expected in SHA256.items():
        path = pathlib.Path(folder) / name
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            raise InputError(
                f"{path} has SHA-256 {digest}, expected {expected}: the download is damaged, or the "
                "file was changed; download it again"
            )


def main() -> None:
    """Prepare what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="a folder with the two .sgm files")
    parser.add_argument("--verify", action="store_true", help="compare them with their checksums")
    parser.add_argument("--out", default="data/wmt14")
    parser.add_argument("--overwrite", action="store_true", help="replace files of other content")
    args = parser.parse_args()
    try:
        if args.verify:
            verify(args.source)
        for path in prepare(args.source, args.out, args.overwrite):
            print(path)
    except (InputError, OSError) as error:
        sys.exit(f"preprocess.py: {error}")


if __name__ == "__main__":
    main()
