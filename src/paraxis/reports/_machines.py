"""Machines by name: how fast one device computes, reads and sends, from its maker's data sheet."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._calls import arguments
from paraxis._host import threads

_T, _G = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of device, and how several are joined. Speeds are peaks: nothing runs faster, and most things slower.

    Attributes:
        kind: its name, such as ``"h100"``.
        flops: floating-point operations a second in matrix products, by dtype in XLA's names, such as ``"bf16"``;
            dtypes that are not there take the speed of ``"f32"``.
        memory: bytes of one device.
        bandwidth: bytes a second between its memory and its cores.
        link: bytes a second, in one direction, that it sends to those of its host, or of its pod.
        network: bytes a second, in one direction, that it sends to other hosts; as ``link`` within a pod.
        devices_per_host: how many are joined by ``link``.
        allocation: bytes a second at which the system gives new memory, for results and temporaries of 32 MiB and more,
            which a CPU's process hands back after each call. Elsewhere JAX keeps memory at hand, and it costs nothing.
        source: where the numbers come from.

    Raises:
        ValueError, TypeError: if an argument is something else.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> slow = px.reports.Machine("slow", {"f32": 1e9}, 2**30, 1e9, 1e8, 1e8)
        >>> report = px.explain(jnp.dot, on=slow)(*[jax.ShapeDtypeStruct((500, 500), jnp.float32)] * 2)
        >>> f"{report.estimate.seconds:.2f}"
        '0.25'
    """

    kind: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    network: float
    devices_per_host: int = 1
    source: str = ""
    allocation: float = math.inf

    def __post_init__(self) -> None:
        write = "px.reports.Machine('mine', {'f32': 67e12}, 80e9, 3350e9, 450e9, 50e9)"
        arguments.text("Machine", "kind", self.kind, write)
        if not isinstance(self.flops, Mapping) or "f32" not in self.flops:
            raise ValueError(
                f"Machine: flops must be a dict of speeds by dtype, with that of 'f32', got "
                f"{arguments.described(self.flops)}; write {write}"
            )
        for dtype, speed in self.flops.items():
            arguments.number("Machine", f"flops[{dtype!r}]", speed, above=0, write=write)
        for name in ("memory", "bandwidth", "link", "network", "allocation"):
            arguments.number("Machine", name, getattr(self, name), above=0, write=write)
        arguments.count("Machine", "devices_per_host", self.devices_per_host)
        if not isinstance(self.source, str):
            arguments.text("Machine", "source", self.source, "source='its data sheet'")

    @arguments.named()
    def speed(self, dtype: str) -> float:
        """Return the floating-point operations a second in products of a dtype, by XLA's name.

        Raises:
            TypeError: if that is no text.
        """
        arguments.text("Machine.speed", "dtype", dtype, "machine.speed('bf16')")
        return self.flops.get(dtype) or self.flops["f32"]

    @classmethod
    def here(cls) -> "Machine":
        """Return this machine's first device, measured by two programs of usual size, and by what new memory costs.

        The programs are a layer's products, forward and backward; and what waits for memory: a matrix times a vector,
        a vector times the matrix, and a sum of vectors. Their speed is what most programs reach, rather than the peak.
        Each is the fastest of many calls, in turns, which takes a second. A CPU's seconds are those that this process
        computes, shared by its cores, so that what else runs on the machine counts little. Links are taken to be as
        fast as memory, which they are on CPU.
        """
        device = jax.local_devices()[0]
        scale = 1 if device.platform == "cpu" else 8  # what is small for a faster device measures how it is called
        width, long = scale * 384, 2**24  # wider layers are faster, narrower ones slower
        square, rows = jnp.ones((width, width), jnp.float32), jnp.ones((scale * 1024, width), jnp.float32)
        tall = jnp.ones((scale * 2**15, 512), jnp.float32)
        short, other = (jnp.full((scale * 2**13, 512), value, jnp.float32) for value in (1, 2))

        def layer(x: jax.Array, w: jax.Array) -> Any:
            y, backward = jax.vjp(jnp.matmul, x, w)
            return y, backward(y)

        def moving(x: jax.Array, row: jax.Array, column: jax.Array, y: jax.Array, z: jax.Array) -> Any:
            return x @ row, column @ x, y + z

        is_cpu = device.platform == "cpu"
        clock = _cpu_seconds if is_cpu else time.perf_counter
        moves = jax.jit(moving), (tall, tall[0], tall[:, 0], short, other)
        product, moved = _best([(jax.jit(layer), (rows, square)), moves], clock)
        (fresh,) = _best([(jax.jit(lambda: jnp.zeros(long)), ())], clock)  # by itself: it takes memory from the others
        bandwidth = (2 * tall.nbytes + 3 * short.nbytes) / moved
        asked = fresh - 4 * long / bandwidth
        return cls(
            device.device_kind,
            {"f32": 6 * rows.size * width / product},
            (device.memory_stats() or {}).get("bytes_limit", math.inf),
            bandwidth,
            bandwidth,
            bandwidth,
            source="measured",
            allocation=4 * long / asked if is_cpu and asked > 0 else math.inf,
        )


def _cpu_seconds() -> float:
    """Return the seconds that this process has computed, on all of its cores at once."""
    return time.process_time() / threads.num_cores()


def _best(calls: Sequence[tuple[Any, Any]], clock: Callable[[], float]) -> list[float]:
    """Return the least seconds of each call, in turns: what disturbs one makes it slower only."""
    found = [math.inf] * len(calls)
    for _ in range(20):
        for number, (fn, args) in enumerate(calls):
            start = clock()
            jax.block_until_ready(fn(*args))
            found[number] = min(found[number], clock() - start)
    return found


def _gpu(
    kind: str, half: float, tf32: float, single: float, gigabytes: float, bandwidth: float, **rest: Any
) -> Machine:
    # JAX multiplies float32 in TF32 on GPU unless asked for more.
    flops = {"bf16": half * _T, "f16": half * _T, "f32": tf32 * _T, "f64": single * _T / 2}
    links = {name: rest.pop(name) * _G for name in ("link", "network")}
    # A card of "80 GB" has 80 GiB.
    return Machine(kind, flops, gigabytes * 2**30, bandwidth * _G, **links, devices_per_host=8, **rest)


def _tpu(kind: str, half: float, gigabytes: float, bandwidth: float, both_ways: float, source: str) -> Machine:
    # JAX multiplies float32 in one pass of bfloat16 on TPU unless asked for more. All of a pod are joined by links.
    flops = {"bf16": half * _T, "f32": half * _T}
    # Their bandwidth is given for both directions, and memory of chips is counted in GiB, whatever it is called.
    return Machine(kind, flops, gigabytes * 2**30, bandwidth * _G, both_ways / 2 * _G, both_ways / 2 * _G, 4, source)


MACHINES: dict[str, Machine] = {
    machine.kind: machine
    for machine in (
        _gpu("v100", 125, 15.7, 15.7, 32, 900, link=150, network=12.5, source="NVIDIA V100 data sheet (SXM2, 32 GB)"),
        _gpu("a100", 312, 156, 19.5, 80, 2039, link=300, network=25, source="NVIDIA A100 data sheet (SXM, 80 GB)"),
        _gpu("h100", 989, 494, 67, 80, 3350, link=450, network=50, source="NVIDIA H100 data sheet (SXM), dense"),
        _gpu("h200", 989, 494, 67, 141, 4800, link=450, network=50, source="NVIDIA H200 data sheet (SXM), dense"),
        _gpu("b200", 2250, 1100, 80, 180, 8000, link=900, network=50, source="NVIDIA HGX B200, dense"),
        _tpu("v4", 275, 32, 1228, 540, "Google Cloud, TPU v4; links from the all-reduce bandwidth of a pod"),
        _tpu("v5e", 197, 16, 819, 400, "Google Cloud, TPU v5e"),
        _tpu("v5p", 459, 95, 2765, 1200, "Google Cloud, TPU v5p"),
        _tpu("v6e", 918, 32, 1638, 800, "Google Cloud, TPU v6e"),
    )
}

_SPELT = re.compile(r"(?P<kind>[a-z]\w*)(?::(?P<first>\d+)(?:x(?P<hosts>\d+))?)?")


def named(on: Any) -> tuple[Machine, int | None]:
    """Return a machine by its words, and the number of devices, if these say one.

    ``"h100:8"`` is eight devices, and ``"h100:8x16"`` sixteen hosts of eight.

    Raises:
        ValueError: if there is none of that name.
    """
    if isinstance(on, Machine):
        return on, None
    match = _SPELT.fullmatch(on.lower()) if isinstance(on, str) else None
    machine = MACHINES.get(match["kind"]) if match else None
    if match is None or machine is None or match["first"] in ("0",) or match["hosts"] in ("0",):
        raise ValueError(
            f"explain: on must be a machine and how many devices of it, got {arguments.described(on)}; write "
            f"on='h100:8x16' for 16 hosts of 8; the kinds are {', '.join(MACHINES)}, and px.reports.Machine(…) "
            f"makes others"
        )
    if match["first"] is None:
        return machine, None
    first, hosts = int(match["first"]), int(match["hosts"] or 1)
    per_host = first if match["hosts"] else machine.devices_per_host
    return dataclasses.replace(machine, devices_per_host=per_host), first * hosts
