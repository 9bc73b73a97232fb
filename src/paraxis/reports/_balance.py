"""Who waits for whom: how often the loops of each element turn, and how often those of a device have to."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paraxis._core import arrays, check, jax_api, lanes, placing, verbs
from paraxis._core.placing import Axis, Placement
from paraxis._core.pytrees import interleave, select
from paraxis._core.record import Map
from paraxis._host import files
from paraxis.errors import AxisError
from paraxis.reports._page import Page, Section

# What the busiest device computes by vmap over what it needs, from which lanes take less time, and CPUs one by one.
_PAYS, _WAITS = 3.0, 1.5
_UNEVEN = 1.2  # how much busier one device is, in blocks, if it pays to deal


@dataclasses.dataclass(frozen=True, repr=False)
class Balance(Page):
    """How many turns of innermost loops each element needs, and what devices do; made by :func:`paraxis.balance`.

    Attributes:
        turns: that each element needs, ``(size,)`` int64.
        waste: what all devices compute over what is needed, by ``"at_once=1"``, ``"vmap"``, ``"lanes"``, and
            ``"lanes, at_once=8"``, say, of other widths.
        most: likewise, the turns of the device that has most.
        devices: what the busiest device needs over the mean, in ``"blocks"`` and ``"cyclic"``.
        advice: what to write.
    """

    turns: np.ndarray
    waste: dict[str, float]
    most: dict[str, int]
    devices: dict[str, float]
    advice: str

    @property
    def _title(self) -> str:
        low, mean, high = self.turns.min(), self.turns.mean(), self.turns.max()
        return f"{len(self.turns):,} elements of {low:,} to {high:,} turns, {mean:,.1f} on average"

    def _sections(self) -> Iterator[Section]:
        rows = [[name, f"{self.most[name]:,}", f"{waste:.2f}"] for name, waste in self.waste.items()]
        busy = ", ".join(f"{ratio:.2f} in {layout}" for layout, ratio in self.devices.items())
        notes = [f"the busiest device needs, over the mean: {busy}", self.advice]
        yield Section("", rows, ("", "turns of a device", "computed over needed"), has_head=True, notes=notes)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the turns of each element to an image, such as ``"turns.png"``; a ModuleNotFoundError: no matplotlib."""
        with check.needed("Balance.plot", "train"):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        figure.add_subplot(xlabel="element", ylabel="turns").bar(range(len(self.turns)), self.turns, width=1.0)
        with files.replaced(Path(path).expanduser()) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)


def balance(fn: Callable[..., Any], args: Any, axis: Axis, *, widths: Sequence[int] | None = None) -> Balance:
    """Run each element, and tell how often its loops turn, and how often elements wait for each other.

    Counted are turns of the innermost loops that elements leave at different times. They run on one device, in the
    groups that would share one. That compiles the elements once for ``vmap``, and once for each of ``widths``.

    Args:
        fn: function of one element, as of :func:`map_fn`.
        args: its arguments, likewise: pytrees of arrays ``(size, ...)``.
        axis: the axis. Its ``layout`` says which elements share a device; ``at_once`` is not used.
        widths: numbers of lanes; by default all of a device's elements, a quarter and a sixteenth.

    Raises:
        AxisError: if there is no loop that elements leave at different times, or they exchange values or have effects.
        DataError: if a leaf does not start with the size of the axis.
        ValueError: if a width is not an integer of at least 1.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> count = lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)
        >>> report = px.balance(count, jnp.array([1, 2, 9, 4]), px.Axis("runs", 4, mesh=jax.make_mesh((1,), ("runs",))))
        >>> report.turns, report.waste["vmap"]
        (array([1, 2, 9, 4]), 2.25)
    """
    placement = placing.place(dataclasses.replace(axis, at_once=None))
    local, numbers = placement.num_local, np.arange(placement.num_padded)
    m, program, operands = _program(fn, args, axis, local)
    groups = {"blocks": numbers.reshape(-1, local), "cyclic": numbers.reshape(local, -1).T}
    group = groups[axis.layout]
    real = group < axis.size
    rows = [x[np.minimum(group, axis.size - 1)] for x in select(operands, m.shared, False)]

    def counted(width: int, in_step: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the turns of each device's lanes ``(num_devices, width)``, and how many there were."""

        def of_device(parts: Any) -> tuple[jax.Array, jax.Array]:
            inputs = interleave(m.shared, select(operands, m.shared), parts[1:])
            state = lanes.Machine(m, program, inputs, width, parts[0], in_step=in_step).run()
            return state.turns, state.all_turns

        return jax.device_get(jax.jit(lambda parts: jax.lax.map(of_device, parts))([real, *rows]))

    turns, (by_element, by_vmap) = np.zeros(placement.num_padded, np.int64), counted(local, in_step=True)
    turns[group] = by_element * real
    needed = {name: turns[numbers].sum(1) for name, numbers in groups.items()}
    lowerings = {"at_once=1": (1, needed[axis.layout]), "vmap": (local, by_vmap)}
    chosen = {min(check.count("balance", "widths", width), local) for width in widths or ()}
    for width in sorted(chosen or {local, -(-local // 4), -(-local // 16)}, reverse=True):
        lowerings["lanes" if width == local else f"lanes, at_once={width}"] = width, counted(width)[1]
    total = max(turns.sum(), 1)
    waste = {name: float(width * count.sum(dtype=np.int64) / total) for name, (width, count) in lowerings.items()}
    most = {name: int(count.max()) for name, (_, count) in lowerings.items()}
    devices = {name: float(count.max() / max(count.mean(), 1e-9)) for name, count in needed.items()}
    at_best = turns.sum() / len(group) * min(devices.values())  # of the busiest device
    advice = _advice(axis, waste, devices, local * most["vmap"] / max(at_best, 1))
    return Balance(turns[: axis.size], waste, most, devices, advice)


def _program(fn: Callable[..., Any], args: Any, axis: Axis, num_local: int) -> tuple[Map, Any, list[Any]]:
    """Return the map of a device's elements, its program, and the operands of all elements."""
    maps, axis = list[tuple[Map, Any]](), dataclasses.replace(axis, at_once=None, layout="blocks")

    def apply(eqn: Any, *operands: Any) -> Sequence[Any]:
        if eqn.primitive.name != "px_map":
            return jax_api.bind(eqn, *operands)
        maps.append((Map.of(eqn.params), operands))
        return eqn.outvars

    with placing.alone():
        traced, _ = jax_api.trace(lambda: verbs.map_fn(fn, args, axis, lowering="lanes"), [], {})
        jax_api.evaluate(traced, opens=lambda _: False, apply=apply)
        [(m, operands)] = maps
        m = m._replace(placement=Placement(dataclasses.replace(axis, size=num_local), None, ()))
        m, program = lanes.prepare(m, dict(m.axis_env))
    if program is None:
        raise AxisError(f"balance: elements of axis {axis.name!r} leave all loops together, so none waits for another")
    return m, program, [jax.device_put(arrays.local_copy(x), jax.local_devices()[0]) for x in operands]


def _advice(axis: Axis, waste: dict[str, float], devices: dict[str, float], gain: float) -> str:
    """Return what to write; ``gain``: what the busiest device computes by vmap over what it needs at best."""
    also = "; on CPU, try at_once=1 too" if gain > _WAITS else ""
    if gain < _PAYS:
        return f"elements wait little: leave the lowering out, px.Axis({axis.name!r}, {axis.size}){also}"
    widths = [name for name in waste if name.startswith("lanes") and name != "lanes, at_once=1"]
    best = next(name for name in widths if waste[name] < 1.1 * min(map(waste.__getitem__, widths)))  # the widest
    options = best.removeprefix("lanes") + ', layout="cyclic"' * (devices["blocks"] > _UNEVEN * devices["cyclic"])
    return f'write px.map_fn(…, px.Axis({axis.name!r}, {axis.size}{options}), lowering="lanes"){also}'
