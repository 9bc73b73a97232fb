"""From the command's arguments to a report: the devices first, then the user's module, then its function."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.cli._errors import CommandError
from paraxis.errors import DeviceError
from paraxis.reports import Collective, Report, explain, units
from paraxis.testing import simulate_devices

_SHAPE = re.compile(r"(?P<dtype>[A-Za-z]\w*)\[(?P<dims>[\d,\s]*)\]")
_HEAD = ("devices", "computes", "an equal share", "sends", "holds", "findings")


def run_explain(
    target: str,
    *,
    shapes: str | None = None,
    arguments: str | None = None,
    devices: Sequence[int] = (),
    html: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print the report on ``module:function``, or ``file.py:function``; on several numbers of devices, a table.

    Returns:
        The exit status, 0.

    Raises:
        CommandError: if there is no such function, or its arguments are malformed.
    """
    if shapes is not None and arguments is not None:
        raise CommandError("--shapes and --arguments both say what the function is given; write one of them")
    structs = [] if shapes is None else structs_of(shapes)
    if len(devices) > 1:
        if html is not None or as_json:
            raise CommandError("--html and --json are of one report; write --devices once")
        options = {"--shapes": shapes, "--arguments": arguments}
        given = [word for option, value in options.items() if value for word in (option, value)]
        rows = [_HEAD, *(_row(target, given, number) for number in devices)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        return 0
    if devices:
        try:
            simulate_devices(devices[0])
        except DeviceError as error:
            raise CommandError(f"--devices {devices[0]}: {error}") from None
    report = _report(target, structs, arguments)
    print(json.dumps(_numbers(report)) if as_json else report)
    if html is not None:
        try:
            report.save(html)
        except (OSError, ValueError) as error:
            raise CommandError(f"--html {html}: {getattr(error, 'strerror', None) or error}") from None
    return 0


def _report(target: str, structs: Sequence[Any], arguments: str | None) -> Report:
    module, name = _module_of(target)
    fn = _function(module, name, target)
    given: Any = structs if arguments is None else _function(module, arguments, f"--arguments {arguments}")()
    given = given if isinstance(given, (tuple, list)) else (given,)
    with contextlib.suppress(ValueError):  # of what has no signature
        signature = inspect.signature(fn)
        try:
            signature.bind(*given)
        except TypeError:
            how = "--shapes or --arguments" if not given else "--shapes" if arguments is None else "--arguments"
            raise CommandError(f"{name} takes {signature}, and is given {len(given)} by {how}") from None
    return explain(fn)(*given)


def _numbers(report: Report) -> dict[str, Any]:
    """Return what a table and other programs want to know."""
    return {
        "devices": report.num_devices,
        "flops": report.work.flops,
        "flops_of_equal_share": report.work.share,
        "flops_are_exact": report.work.is_certain,
        "sent_bytes": report.total_bytes,
        "sent_bytes_are_exact": report.is_certain,
        "collectives": {kind: n for kind, n in report.communication.count.items() if n},
        "sends": [_sent(collective) for collective in report.collectives],
        "peak_bytes": report.memory.peak,
        "fits": report.fits,
        "argument_bytes": report.memory.arguments,
        "result_bytes": report.memory.results,
        "temporary_bytes": report.memory.temporaries,
        "findings": [str(finding) for finding in report.findings],
        "not_looked_for": list(report.unchecked),
    }


def _sent(collective: Collective) -> dict[str, Any]:
    """Return what the text of a report says of a collective."""
    line = collective.line
    return {
        "kind": collective.kind,
        "shape": collective.shape,
        "bytes": collective.bytes,
        "times": collective.times,
        "times_are_exact": collective.is_certain,
        "in_branch": collective.is_branch,
        "axes": list(collective.axes),
        "devices": collective.group_size,
        "file": None if line is None else line.file,
        "line": None if line is None else line.number,
        "verb": collective.verb,
        "written": collective.is_written,
        "backward": collective.is_backward,
    }


def _row(target: str, given: Sequence[str], devices: int) -> list[str]:
    """Return the cells of so many devices, from a process of its own, where JAX has not started yet."""
    command = [sys.executable, "-P", "-m", "paraxis", "explain", target, *given, "--devices", str(devices), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
    if done.returncode:
        raise CommandError(f"on {devices} devices, the function could not be explained; see above")
    found = json.loads(done.stdout.splitlines()[-1])
    computes, sends, share = found["flops"], found["sent_bytes"], found["flops_of_equal_share"]
    return [
        f"{devices:,}",
        units.amount(computes) + ("" if found["flops_are_exact"] else " per open turn"),
        "unknown" if share is None else units.amount(share),
        units.size(sends) + ("" if found["sent_bytes_are_exact"] else " per open turn"),
        units.size(found["peak_bytes"]),
        str(len(found["findings"])),
    ]


def structs_of(text: str) -> Sequence[jax.ShapeDtypeStruct]:
    """Return arrays without values for words such as ``float32[64,10]``.

    Raises:
        CommandError: if a word is none.
    """
    found = []
    for match in _SHAPE.finditer(text):
        dims = tuple(int(dim) for dim in match["dims"].split(",") if dim.strip())
        try:
            dtype = jnp.dtype(match["dtype"])
        except TypeError:
            raise CommandError(f"--shapes: {match['dtype']} is no dtype; write float32[64,10]") from None
        if math.prod(dims) >= 2**63:
            raise CommandError(f"--shapes: {match[0]} is larger than any array")
        found.append(jax.ShapeDtypeStruct(dims, dtype))
    rest = _SHAPE.sub("", text).replace(",", " ").split()
    if rest or not found:
        raise CommandError(f"--shapes: {(rest or ['nothing'])[0]} is no array; write '--shapes float32[64,10] int32[]'")
    return found


def _module_of(target: str) -> tuple[ModuleType, str]:
    """Return the user's module, imported, and the rest of the words that name its function."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise CommandError(f"{target} names no function; write: paraxis explain model.py:step, or package.model:step")
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place), name
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # of what the module itself imports
            raise CommandError(
                f"there is no module {place} here; write a file: paraxis explain model.py:{name}"
            ) from None
    path = Path(place).resolve()
    if not path.is_file():
        raise CommandError(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))
    called = f"explained_{path.stem}" if path.stem in sys.modules else path.stem  # as random.py
    spec = importlib.util.spec_from_file_location(called, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module
    spec.loader.exec_module(module)
    return module, name


def _function(module: ModuleType, name: str, given: str) -> Any:
    """Return a function by the words that name it in its module, such as ``Model.step``."""
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            place = Path(module.__file__).name if module.__file__ else module.__name__
            raise CommandError(f"{given}: there is no {name} in {place}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{given}: {name} is a {type(found).__name__}, and must be a function")
    return found
