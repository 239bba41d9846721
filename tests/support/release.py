"""Check that the sdist and the wheel of `make release` have the repository's files, and no other.

    python tests/support/release.py dist

It prints how the release is tagged, and tags nothing.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|collage_fx(-[^/]*)?\.(egg|dist)-info/.*")
"""Pattern of the files that building adds."""


def repository() -> dict[str, bytes]:
    """Return the files that git knows, by their paths."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    return {name: (ROOT / name).read_bytes() for name in listed.splitlines()}


def installed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return those that a wheel has, by where they are installed."""
    packages = {n: d for n, d in files.items() if n.startswith("collage_fx/")}
    inside = {n: d for n, d in files.items() if n.startswith(("passes/", "runtime/"))}
    return packages | {f"collage_fx/{n}": d for n, d in inside.items()}


def of_sdist(path: Path) -> dict[str, bytes]:
    """Return the files of an sdist, without the folder that all are in."""
    with tarfile.open(path) as archive:
        files = [m for m in archive.getmembers() if m.isfile()]
        return {m.name.partition("/")[2]: archive.extractfile(m).read() for m in files}  # type: ignore[union-attr]


def of_wheel(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def differences(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    """Return a line for each file that is missing, differs, or should not be there."""
    more = {name for name in found if name not in wanted and not GENERATED.fullmatch(name)}
    differ = {name for name in wanted if name in found and found[name] != wanted[name]}
    return [
        *(f"{name} is missing" for name in sorted(wanted.keys() - found.keys())),
        *(f"{name} differs" for name in sorted(differ)),
        *(f"{name} is not of the repository, or not to be installed" for name in sorted(more)),
    ]


def newest_version(changelog: str) -> str:
    """Return the version that the first heading of a section of the changes names."""
    return re.findall(r"^## (\S+)", changelog, re.M)[0]


def main() -> None:
    """Compare what is built with the repository."""
    dist = Path(sys.argv[1])
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    files = repository()
    version = sdist.name.removeprefix("collage_fx-").removesuffix(".tar.gz")
    wrong = [f"{sdist.name}: {line}" for line in differences(of_sdist(sdist), files)]
    wrong += [f"{wheel.name}: {line}" for line in differences(of_wheel(wheel), installed(files))]
    if newest_version((ROOT / "CHANGELOG.md").read_text()) != version:
        wrong.append(f"CHANGELOG.md does not begin with {version}")
    if wrong:
        sys.exit("make release: " + "\n".join(wrong))
    print(f"{sdist.name}: {len(files)} files of the repository")
    print(f"{wheel.name}: {len(installed(files))} files of the repository")
    print(f"to tag this commit: git tag -a v{version} -m 'collage_fx {version}'")


if __name__ == "__main__":
    main()
