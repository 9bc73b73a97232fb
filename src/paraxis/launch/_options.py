"""The options of a launch."""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from paraxis._calls import arguments
from paraxis.errors import ProcessError

_PYTHON = (".py", ".pyw", ".pyc", ".pyz", ".zip")


@arguments.options()
@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a launch.

    Attributes:
        num_processes: number of processes, at least 1.
        target: a Python file, or the name of a module.
        arguments: arguments of the script or module.
        module: whether ``target`` is a module, as in ``python -m``.
        devices: number of devices of each process: simulated ones on a CPU, else that many of the machine's, in the
            order of the ranks; ``None``: as JAX finds them in the environment.
        restarts: how often all processes are started again after a failure, to resume from the script's checkpoint.
            Every failure counts, whatever progress was made in between, since a failure at the same step would
            otherwise repeat for ever.
        grace: seconds in which a process must save and exit after a signal, and in which the others must finish after
            one has.
        stuck_after: seconds without a step of a training loop after which a process counts as stuck, at least 600
            before its first step; 0: never.

    Raises:
        ProcessError: if an option is not valid, or there is no such file or module.

    Example:
        >>> from paraxis.launch import Options
        >>> Options(2, "timeit", module=True).restarts
        0
    """

    num_processes: int
    target: str
    arguments: Sequence[str] = ()
    module: bool = False
    devices: int | None = None
    restarts: int = 0
    grace: float = 30.0
    stuck_after: float = 1800.0

    def __post_init__(self) -> None:
        arguments.path("launch.Options", "target", self.target, ProcessError)
        if not isinstance(self.arguments, (tuple, list)) or not all(isinstance(x, str) for x in self.arguments):
            got = arguments.described(self.arguments)
            raise ProcessError(
                f"launch.Options: arguments must be a list of text, got {got}; write arguments=['--fast']"
            )
        arguments.flag("launch.Options", "module", self.module)
        self._count("num_processes", 1, "-n 2, or num_processes=2")
        if self.devices is not None:
            self._count("devices", 1, "--devices 1, or devices=1, or leave it out")
        self._count("restarts", 0, "--restarts 3, or restarts=3")
        self._seconds("grace", 0, "--grace 30, or grace=30")
        self._seconds("stuck_after", None, "--stuck-after 1800, or stuck_after=1800, or 0 for never")
        if self.module:
            self._require_module()
        else:
            self._require_script()

    def _count(self, name: str, least: int, write: str) -> None:
        value = getattr(self, name)
        arguments.count("launch.Options", name, value, least=least, write=write, error=ProcessError)

    def _seconds(self, name: str, above: float | None, write: str) -> None:
        value, least = getattr(self, name), -math.inf if above is not None else 0
        arguments.number(
            "launch.Options",
            name,
            value,
            least=least,
            above=above,
            finite=True,
            unit="seconds",
            write=write,
            error=ProcessError,
        )

    def _require_script(self) -> None:
        path, write = Path(self.target), f"write: paraxis launch -n {self.num_processes}"
        if path.is_dir() and not (path / "__main__.py").exists():
            raise ProcessError(f"{self.target} is a directory without __main__.py; {write} {path / 'train.py'}")
        if not path.exists() and path.name.rstrip(".0123456789") == "python":
            raise ProcessError(f"there is no file {self.target}; each rank runs Python anyway; {write} train.py")
        if not path.exists():
            there = f"{path}.py" if path.with_name(f"{path.name}.py").exists() else "train.py"
            raise ProcessError(f"there is no file {self.target}; {write} {there}")
        if not path.is_dir() and not _is_python(path):
            raise ProcessError(f"{self.target} is not a Python file; {write} train.py, or a module: -m package.module")

    def _require_module(self) -> None:
        # Of a.b only a is looked for: to find b, Python would run a here.
        parent = self.target.partition(".")[0]
        if not Path(parent).exists() and not Path(f"{parent}.py").exists() and not importlib.util.find_spec(parent):
            raise ProcessError(f"there is no module {self.target}; write: paraxis launch -n 2 -m package.module")


def _is_python(path: Path) -> bool:
    """Return whether Python can run it: by its name, or, as commands have none, by what is in it."""
    if path.suffix or not path.is_file():
        return path.suffix in _PYTHON
    try:
        compile(path.read_bytes(), path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True
