"""Snapshots of what a compiled function sends, computes and holds, in a text file beside a test; none may grow."""

import collections
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from paraxis._calls import arguments
from paraxis._host import files
from paraxis.reports import Report, explain

Facts = Mapping[str, int]
"""Counts by name; per device."""

_HEADER = "# What compiled functions send, compute and hold, per device. Written by pytest --paraxis-update.\n"
_UPDATE = "pytest --paraxis-update"


class Snapshot:
    """A record of compiled functions that fails when one grows; the fixture ``paraxis_snapshot`` is one for each test.

    Call it with a function and its arguments, as :func:`paraxis.explain`. With ``pytest --paraxis-update``, it writes
    how often and how many bytes the function sends, its floating-point operations and its memory. Without, it compares.
    Commit the file: a change of what a function sends is then a change of a line, for a reviewer to see.

    Args:
        path: of the file. It is made if it is not there; other tests' records in it stay.
        name: of the test. A second call in the same test is recorded under ``name (2)``, and so on.
        update: whether to write instead of to compare.

    Raises:
        ValueError: if the file is no such record.

    Example:
        >>> import jax.numpy as jnp, pathlib, paraxis as px, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "test_model.paraxis.txt")
        ...     _ = px.testing.Snapshot(path, "test_sum", update=True)(jnp.sum, jnp.ones(8))
        ...     _ = px.testing.Snapshot(path, "test_sum")(jnp.sum, jnp.ones(8))
        ...     print("argument bytes: 32" in path.read_text())
        True
    """

    @arguments.named()
    def __init__(self, path: str | os.PathLike[str], name: str, *, update: bool = False) -> None:
        arguments.path("Snapshot", "path", path, write="path='test_model.paraxis.txt'")
        arguments.text("Snapshot", "name", name, "name='test_step'")
        arguments.flag("Snapshot", "update", update)
        if "\n" in name:
            raise ValueError(f"Snapshot: name must be on one line, got {name!r}; write name='test_step'")
        self._path = Path(path)
        self._name = name
        self._update = update
        self._calls = 0

    @arguments.named(jax.ShapeDtypeStruct)
    def __call__(self, fn: Callable[..., Any], *args: Any, tolerance: float = 0.0) -> Report:
        """Compare a function with its record, or record it.

        Args:
            fn: as in :func:`paraxis.explain`. It is compiled, but not run.
            *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
            tolerance: the part by which a number may grow: 0.05 for 5 %. Versions of JAX differ a little in memory.

        Returns:
            The report.

        Raises:
            AssertionError: if something has grown, with the numbers and lines; if the function was recorded on another
                number of devices; or if there is no record.
        """
        arguments.function("snapshot", "fn", fn, "snapshot(lambda x: …, x)")
        arguments.number("snapshot", "tolerance", tolerance, least=0, write="tolerance=0.05")
        report = explain(fn)(*args)
        self._calls += 1
        name = self._name if self._calls == 1 else f"{self._name} ({self._calls})"
        if self._update:
            self._write(name, counted(report))
            return report
        recorded = _read(self._path).get(name)
        if recorded is None:
            raise AssertionError(f"{name} is not recorded in {self._path}; run {_UPDATE}, and commit the file")
        if flaw := _difference(report, recorded, tolerance):
            raise AssertionError(f"{name} is not as recorded in {self._path}:\n{flaw}\nif this is meant, run {_UPDATE}")
        return report

    def _write(self, name: str, facts: Facts) -> None:
        with _alone(self._path):
            records = _read(self._path)
            records[name] = facts
            text = "\n".join(f"[{key}]\n{_lines(records[key])}" for key in sorted(records))
            with files.replaced(self._path) as file:
                file.write(f"{_HEADER}\n{text}".encode())


def counted(report: Report) -> Facts:
    """Return what is recorded of a report."""
    sent: collections.Counter[str] = collections.Counter()
    for c in report.collectives:
        sent[f"{_kind(c)}, times"] += c.times
        sent[f"{_kind(c)}, bytes"] += c.total_bytes
    memory = report.memory
    held = {"argument": memory.arguments, "result": memory.results, "temporary": memory.temporaries}
    bytes_held = {f"{what} bytes": size for what, size in held.items()}
    return {"devices": report.num_devices, **dict(sorted(sent.items())), "flops": report.work.flops, **bytes_held}


def _kind(collective: Any) -> str:
    along = f"along {', '.join(collective.axes)}" if collective.axes else f"of {collective.group_size} devices"
    return f"{collective.kind} {along}"


def _difference(report: Report, recorded: Facts, tolerance: float) -> str:
    """Return what has grown, a line each, with the lines of the source that send more."""
    now = counted(report)
    if now["devices"] != recorded.get("devices"):
        return f"  recorded on {recorded.get('devices', 0)} devices, and now on {now['devices']}"
    found = []
    for name, number in now.items():
        before = recorded.get(name, 0)
        if number > before * (1 + tolerance):
            found.append(f"  {name}: {before:,} → {number:,} ({_growth(before, number)})")
            if name.endswith(", bytes"):
                sending = (c for c in report.collectives if name == f"{_kind(c)}, bytes")
                found += [f"    {line}   {line.code}" for c in sending for line in (c.line, *dict(c.others)) if line]
    return "\n".join(dict.fromkeys(found))


def _growth(before: int, now: int) -> str:
    if not before:
        return "new"
    return f"+{now / before - 1:.0%}" if now < 10 * before else f"{now / before:,.0f} times"


# --- the file --------------------------------------------------------------------------------------------------------


def _lines(facts: Facts) -> str:
    return "".join(f"{name}: {number:,}\n" for name, number in facts.items())


def _read(path: Path) -> dict[str, Facts]:
    """Return all records of a file; none if it is not there.

    Raises:
        ValueError: if it is no such file.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        lines = ["?"]
    records: dict[str, dict[str, int]] = {}
    for line_number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        name, colon, number = line.rpartition(": ")
        if line.startswith("[") and line.endswith("]"):
            records[line[1:-1]] = {}
        elif records and colon and number.replace(",", "").isdecimal():
            records[next(reversed(records))][name] = int(number.replace(",", ""))
        else:
            raise ValueError(
                f"{path}: line {line_number} must be 'name: number', got {arguments.described(line)}; delete the file, "
                f"and run {_UPDATE}"
            )
    return dict(records)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for other processes, as those of pytest-xdist, that write into the same directory's records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
