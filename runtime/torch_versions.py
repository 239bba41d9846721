"""Releases of torch that collage_fx was tested with, and what differs between them.

The one place that names them: the warning below, `make test-torch`, requirements.txt and README's
sentence are read from here or compared with it. Nothing is imported before it is needed, so that
the Makefile may run this file where there is no torch.
"""

import functools
import re
import sys
import traceback

TESTED = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""Versions from the oldest supported to the newest; compiled steps were tested with each."""


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as `2.13.0+cpu`; zeros if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def installed() -> tuple[int, int]:
    """Return the first two numbers of the version of torch in this process."""
    import torch

    return minor(torch.__version__)


def untested_warning(version: str) -> str:
    """Return a warning of a version of torch; nothing if one of that minor was tested."""
    tested = [minor(t) for t in TESTED]
    if minor(version) in tested:
        return ""
    rank = "newer" if minor(version) > tested[-1] else "older"
    if tested[0] < minor(version) < tested[-1]:
        rank = "between those"
    return (
        f"torch {version} was never tested with collage_fx, which relies on torch's compiler from "
        f"within; {', '.join(TESTED)} were, and this one is {rank}. Where a step fails or its "
        "states differ from the eager step's, install one of them"
    )


@functools.cache
def warn_if_untested() -> None:
    """Warn, once in a process, of a torch of which no release of the same minor was tested."""
    import torch

    from collage_fx.runtime.errors import warn

    if message := untested_warning(torch.__version__):
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
        names = [str(frame.f_globals.get("__name__")) for frame in frames]
        users = (i for i, n in enumerate(names, 1) if not n.startswith("collage_fx."))
        warn("untested-torch", message, stacklevel=next(users, 1))


def drops_roundings() -> bool:
    """Return True if Inductor drops a conversion to 16 bits and back: before 2.13.

    A pass over graphs leaves it out, and C++ kernels go on with the value from before it, whatever
    the lowering says.
    """
    return installed() < (2, 13)


if __name__ == "__main__":
    print(*TESTED)
