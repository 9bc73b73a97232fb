"""``python -m paraxis`` is the command ``paraxis``."""

import sys

from paraxis.cli import main

if __name__ == "__main__":
    sys.exit(main())
