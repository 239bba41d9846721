"""Run a command on the emulated CUDA device: see the package."""

import os
import sys

from cuda_emulator.build import environment, missing


def main() -> None:
    """Replace this process by the command; `python` in it is the Python that this is."""
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: python -m cuda_emulator COMMAND [ARGUMENT ...]")
    if reason := missing():
        sys.exit(f"cuda_emulator: {reason}")
    if command[0] == "python":
        command[0] = sys.executable
    os.execvpe(command[0], command, environment(os.environ))


if __name__ == "__main__":
    main()
