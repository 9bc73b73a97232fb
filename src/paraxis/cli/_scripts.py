"""Other people's scripts, and examples, run as by Python."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_as_main(path: Path, rest: Sequence[str]) -> int:
    """Run a script with the arguments that follow its name, and return its exit status."""
    argv, sys.argv = sys.argv, [str(path), *rest]
    sys.path.insert(0, str(path.resolve().parent))  # and left there: what the script defined may import later
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = argv
    return 0
