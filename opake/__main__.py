"""``python -m opake``."""

import sys

from opake._cli import main

if __name__ == "__main__":
    sys.exit(main())
