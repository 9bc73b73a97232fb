"""``paraxis explain``: the devices first, then the user's module, then its function, explained for its arguments."""

import dataclasses
import importlib
import importlib.util
import json
import math
import operator
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._html import columns
from paraxis.cli._errors import CommandError
from paraxis.reports import explain, units
from paraxis.testing import simulate_devices

_SHAPE = re.compile(r"([A-Za-z]\w*)\[([\d,\s]*)\]")
_HEAD = ("devices", "computes", "an equal share", "sends", "holds", "findings")


def run_explain(
    target: str,
    *,
    shapes: str | None,
    arguments: str | None,
    devices: Sequence[int],
    on: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the report on ``module:function``, or ``file.py:function``; on several numbers of devices, a table.

    For a topology, as many devices are simulated as it has chips, so that the file's meshes can be made.
    """
    if len(devices) > 1:
        if html is not None or as_json or on is not None:
            raise CommandError("--html, --json and --on are of one report; write --devices once")
        options = {"--shapes": shapes, "--arguments": arguments}
        passed_on = [word for option, value in options.items() if value for word in (option, value)]
        print(*columns([_HEAD, *(_row(target, passed_on, number) for number in devices)], str.rjust), sep="\n")
        return
    if devices or on is not None:
        simulate_devices(*devices or [math.prod(map(int, re.findall(r"\d+", (on or "").partition(":")[2])))])
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise CommandError(f"{target} names no function; write: paraxis explain model.py:step, or package.model:step")
    module = _module(place)
    fn = operator.attrgetter(name)(module)  # such as Model.step
    examples: Any = _structs(shapes or "") if arguments is None else operator.attrgetter(arguments)(module)()
    report = explain(fn, on=on)(*(examples if isinstance(examples, (tuple, list)) else (examples,)))
    totals = {"total_bytes": report.total_bytes, "is_certain": report.is_certain, "fits": report.fits}
    numbers = {**dataclasses.asdict(report), **totals, "summary": report.summary()}
    print(json.dumps(numbers) if as_json else report)
    if html is not None:
        report.save(html)


def _row(target: str, options: Sequence[str], devices: int) -> list[str]:
    """Return the cells of so many devices, from a process of its own, where JAX has not started yet."""
    command = [sys.executable, "-P", "-m", "paraxis", "explain", target, *options, "--devices", str(devices), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
    if done.returncode:
        raise CommandError(f"on {devices} devices, the function could not be explained; see above")
    summary = json.loads(done.stdout.splitlines()[-1])
    work, each = summary["work"], " per iteration"
    return [
        f"{devices:,}",
        units.amount(work["flops"]) + each * (not work["is_certain"]),
        "unknown" if work["share"] is None else units.amount(work["share"]),
        units.size(summary["total_bytes"]) + each * (not summary["is_certain"]),
        units.size(summary["memory"]["peak"]),
        str(len(summary["findings"])),
    ]


def _structs(text: str) -> Sequence[jax.ShapeDtypeStruct]:
    """Return arrays without values for words such as ``float32[64,10]``."""
    if rest := _SHAPE.sub("", text).replace(",", " ").split():
        raise CommandError(f"--shapes: {rest[0]} is no array; write '--shapes float32[64,10] int32[]'")
    return [
        jax.ShapeDtypeStruct([int(dim) for dim in dims.split(",") if dim.strip()], jnp.dtype(dtype))
        for dtype, dims in _SHAPE.findall(text)
    ]


def _module(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    sys.path.insert(0, str(path.parent))
    name = f"explained_{path.stem}" if path.stem in sys.modules else path.stem  # as random.py
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
