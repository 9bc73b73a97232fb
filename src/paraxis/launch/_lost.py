"""Turns of a loop that outlive the processes they run in: each is repeated, or goes on, on those that live.

Every process has all elements, and placement never changes the answer: one that is lost takes nothing with it. JAX
tells who lives, by ``live_devices`` with ``jax_enable_recoverability``; it calls both experimental, and so is this.
"""

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, jax_api, placing
from paraxis._host import digests, processes
from paraxis.errors import DeviceError, StateError

HEARTBEAT = 6  # seconds without a sign of life after which a process is lost
_multihost = jax_api.multihost_utils
_WHO = "px.initialize(lost='continue')"
_TIMEOUT = "--xla_cpu_collective_timeout_seconds"  # without it, a device waits for ever for one that has an error
_ORDER, _RAISED = "paraxis/order/", "paraxis/raised/"  # keys of what processes tell each other


def enable() -> None:
    """Have JAX let this process live when another is lost. Call it before it joins the others."""
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it counts the calls of a process, from its first
    if _TIMEOUT not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {_TIMEOUT}=20".strip()
    processes.members = Members()


def leave() -> None:
    """Wait at the end of the program until all that live are there: they need process 0 until they have left it."""
    with contextlib.suppress(Exception), _multihost.live_devices(jax.devices()):
        pass
    if jax.process_index() == 0:
        time.sleep(2)


class Members:
    """The processes that live, as this one knows them, and the mesh of their devices."""

    def __init__(self) -> None:
        self._known: dict[Any, int] | None = None  # of each device, the incarnation of its process
        self._mesh, self._has_begun = None, False
        self._orders: dict[tuple[int, ...], dict[str, int]] = {}  # of devices, each set of incarnations; in process 0

    def turns(
        self, lower: int, upper: int, body: Callable[[int, Any], Any], init: Any
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield how many turns are done, and the state; see :meth:`paraxis.launch.Processes.fori_loop`."""
        if self._has_begun:
            raise StateError(
                f"{_WHO}: a job whose processes may be lost has one loop, as one that comes back begins with the "
                "first; write one body for both, def body(i, state): … if i < 100 else …"
            )
        self._has_begun, number, state = True, lower, init

        def turn(is_new: bool) -> tuple[int, Any]:
            start, before = _newest(number, state) if is_new else (number, state)
            if start >= upper:
                return start, before
            # A copy, as the body may consume it, and the turn be repeated.
            copy = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, before)
            after = body(start, copy)
            for path, x in jax.tree_util.tree_leaves_with_path(after):
                if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
                    raise StateError(
                        f"{_WHO}: body's state{jax.tree_util.keystr(path)} is divided among processes, so one that is "
                        "lost takes its part with it; return px.gather(x), or a mean or a sum"
                    )
            return start + 1, after

        while number < upper:
            number, state = self._together(turn)
            yield number, state

    def _together(self, turn: Callable[[bool], Any]) -> Any:
        """Return ``turn(is_new)``, called on the mesh of those that live, until none of them is lost meanwhile.

        ``is_new`` says that they are others than in the turn before. What one raises ends the turn in all.
        """
        while True:
            client, own_key = jax_api.coordination(), f"{_RAISED}{jax.process_index()}"
            try:
                with _multihost.live_devices(jax.devices()), _telling(client, own_key):
                    members = dict[Any, int](_multihost.live_devices.devices or {})
                    if is_new := members != self._known:
                        self._enter(members)
                    with jax.set_mesh(self._mesh):
                        result, failure = jax.block_until_ready(turn(is_new)), None
            except _multihost.ProcessFailureError as error:
                lost = sorted({device.process_index for device in error.failed_devices})
                sys.stderr.write(f"paraxis: lost process {', '.join(map(str, lost))}; the others repeat the turn\n")
                for number in {*lost, jax.process_index()}:
                    client.key_value_delete(f"{_RAISED}{number}")
                self._known = None
                continue
            except Exception as error:
                result, failure = None, error
            if not (raised := client.key_value_dir_get(_RAISED)) and failure is None:
                return result
            key, message = min(raised, key=lambda item: float(item[1].partition(" ")[0]), default=(own_key, ""))
            if failure is not None and key == own_key:
                raise failure
            time.sleep(1)  # JAX ends all with process 0, and one of them has more to tell
            number, text = key.rpartition("/")[2], message.partition(" ")[2]
            raise DeviceError(f"{_WHO}: process {number} cannot continue: {text}") from failure

    def _enter(self, members: dict[Any, int]) -> None:
        """Make a mesh of these devices, in an order which no other incarnations of them had.

        Between CPU devices, jaxlib (0.12) keeps connections by the devices' numbers in their order, a dead one's too.
        """
        devices, number = sorted(members, key=lambda device: device.id), 0
        if devices[0].platform == "cpu":
            client, key = jax_api.coordination(), _ORDER + digests.of_bytes(repr([*members.values()]).encode())
            if jax.process_index() == 0:
                known = self._orders.setdefault(tuple(device.id for device in devices), {})
                client.key_value_set(key, str(known.setdefault(key, len(known))), allow_overwrite=True)
            number = int(client.blocking_key_value_get(key, 60_000))
            if number >= math.factorial(len(devices)):
                raise DeviceError(
                    f"{_WHO}: {len(devices)} CPU devices have met {number} times, in each order that there is; "
                    "start all processes again, with more devices: paraxis launch --devices 2"
                )
        if self._mesh is not None:
            jax.clear_caches()  # of programs for other devices
        processes.living = next(itertools.islice(itertools.permutations(devices), number, None))
        self._known, self._mesh = members, placing.mesh_of(processes.living)


@contextlib.contextmanager
def _telling(client: Any, key: str) -> Iterator[None]:
    """Tell the others of an exception, and when; ``live_devices`` raises it here alone if no process was lost."""
    try:
        yield
    except Exception as error:
        client.key_value_set(key, f"{time.time()} {type(error).__name__}: {error}", allow_overwrite=True)
        raise


def _newest(number: int, state: Any) -> tuple[int, Any]:
    """Return the number of turns and the state, in NumPy, of the process that has come furthest.

    Communicates: what ``reports`` does, and an all-reduce of the state's bytes.
    """
    leaves, structure = jax.tree.flatten(state)
    hosts = [*map(digests.plain, leaves)]
    kind = np.dtype([(str(at), x.dtype, x.shape) for at, x in enumerate(hosts)])
    digest = digests.of_bytes(repr(kind).encode())
    reports = {process: report.split() for process, report in processes.reports(f"{number} {digest}").items()}
    if {other for _, other in reports.values()} != {digest}:
        raise StateError(f"{_WHO}: the state has other leaves, shapes or dtypes in one process than in another")
    owner = max(reports, key=lambda process: (int(reports[process][0]), -process))
    mine = np.frombuffer(b"".join(x.tobytes() for x in hosts), np.uint8)
    rows = np.zeros((jax.local_device_count(), mine.size), np.uint8)
    rows[0] = mine if owner == jax.process_index() else 0
    total = arrays.on_host(jnp.sum(arrays.of_processes(rows, processes.living or ()), 0, dtype=rows.dtype))
    newest = np.ndarray((), kind, total.tobytes())

    def received(at: int, leaf: Any) -> Any:
        x = newest[str(at)]
        return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(leaf)) if digests.is_key(leaf) else x

    return int(reports[owner][0]), structure.unflatten(map(received, range(len(leaves)), leaves))
