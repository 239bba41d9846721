"""`python -m collage_fx`: see `python -m collage_fx --help`."""

import argparse
import sys
from collections.abc import Sequence

from collage_fx import __version__
from collage_fx.convert import script as conversion
from collage_fx.diagnosis import script
from collage_fx.errors import CollageError
from collage_fx.inspection import scripts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m collage_fx", description="Compensated optimizer steps in bf16 and fp16."
    )
    parser.add_argument("--version", action="version", version=f"collage_fx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    script.add_command(commands)
    scripts.add_command(commands)
    conversion.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except CollageError as error:
        print(f"collage_fx: {error}", file=sys.stderr)
        return int(options.failed)
    return status


if __name__ == "__main__":
    sys.exit(main())
