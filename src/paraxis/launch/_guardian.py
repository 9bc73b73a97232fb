"""A process that ends what ranks have started if the launcher is killed, which then cannot do it itself."""

import contextlib
import subprocess
import sys

# Its input ends with the launcher, however that went; an empty line before means that nothing is left.
_PROGRAM = """
import os, signal, sys
groups = sys.stdin.read().split("\\n")[:-1]
for group in groups if "" not in groups else ():
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""


class Guardian:
    """Waits for the end of this process, in a process group of its own, which no Ctrl-C reaches."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
            bufsize=0,
        )

    def guard(self, group: int) -> None:
        """Have it kill this process group, too."""
        self._write(f"{group}\n")

    def dismiss(self) -> None:
        """End it: all groups have ended."""
        self._write("\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.stdin.write(text.encode())
