"""`python -m collage_fx`: see `python -m collage_fx --help`."""

import sys

from collage_fx.inspection.scripts import main

if __name__ == "__main__":
    sys.exit(main())
