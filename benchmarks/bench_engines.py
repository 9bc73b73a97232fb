"""One program by four engines, Ray beside a map written by hand, and elements that keep Python busy.

Devices are those of the mesh and of `px.Stream`; the pool and the cluster have a process for each core instead.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

ROWS, COLUMNS, HIDDEN, CLASSES = 256, 128, 1024, 10
CLIENTS, CHUNK = 128, 8


def run(devices: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(1)
        np.save(Path(folder, "x.npy"), rng.normal(size=(CLIENTS, ROWS, COLUMNS)).astype("float32"))
        np.save(Path(folder, "y.npy"), rng.integers(0, CLASSES, (CLIENTS, ROWS)).astype("int32"))
        _four_ways(folder, devices, repeats)
        _by_hand(folder, repeats)
    _busy_readers(devices, repeats)


def params() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"a": (COLUMNS, HIDDEN), "b": (HIDDEN, CLASSES)}
    return {name: jnp.asarray(rng.normal(size=s).astype("float32") / s[0] ** 0.5) for name, s in shapes.items()}


def client_loss(p: Any, data: Any) -> jax.Array:
    logits = jax.nn.log_softmax(jnp.tanh(data["x"] @ p["a"]) @ p["b"])
    return -jnp.mean(jnp.take_along_axis(logits, data["y"][:, None], 1))


@px.program(clients=CLIENTS)
def loss(p: Any, data: Any) -> jax.Array:
    return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(p), data)))


def mapped(folder: str) -> dict[str, np.ndarray]:
    return {name: np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in ("x", "y")}


def medians(rivals: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return milliseconds of each, measured in turns after two first calls."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for call in rivals.values():
        for _ in range(2):
            jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in rivals.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(found) for name, found in times.items()}


def _four_ways(folder: str, devices: int, repeats: int) -> None:
    p, fn = params(), jax.value_and_grad(loss)
    placed, groups = jax.tree.map(jnp.asarray, mapped(folder)), px.Groups.of_arrays(mapped(folder))
    on_mesh = jax.jit(fn)
    steps = {
        f"px.Stream(at_once={CHUNK})": px.Stream(at_once=CHUNK).jit(fn),
        f"px.Pool(at_once={CHUNK})": px.Pool(at_once=CHUNK).jit(fn),
        f"px.Ray(at_once={CHUNK})": px.Ray(at_once=CHUNK).jit(fn),
    }
    streamed = {name: lambda step=step: step(p, groups) for name, step in steps.items()}
    found = medians({"the mesh": lambda: on_mesh(p, placed), **streamed}, repeats)
    print(f"\nvalue and gradient, {CLIENTS} clients of {ROWS} rows, {devices} devices          ms    over the mesh")
    for name, ms in found.items():
        print(f"  {name:60}{ms:8.0f}{ms / found['the mesh']:17.2f}", flush=True)


def _by_hand(folder: str, repeats: int) -> None:
    import ray

    def part(p: Any, lo: int, hi: int) -> Any:
        """Return sums over some clients, by a function that the process has compiled before."""
        compiled = globals().setdefault("_compiled", {})
        if "fn" not in compiled:
            each = jax.vmap(jax.value_and_grad(client_loss), (None, 0))
            compiled["fn"] = jax.jit(lambda p, data: jax.tree.map(lambda x: x.sum(0), each(p, data)))
        data = {name: x[lo:hi] for name, x in mapped(folder).items()}
        return jax.tree.map(np.asarray, compiled["fn"](p, data))

    options = {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PJRT_NPROC": "1"}}
    remote = ray.remote(num_cpus=1, runtime_env=options)(part)

    def by_hand() -> Any:
        put = ray.put(jax.tree.map(np.asarray, params()))
        parts = [remote.remote(put, lo, lo + CHUNK) for lo in range(0, CLIENTS, CHUNK)]
        return jax.tree.map(lambda x: x / CLIENTS, _tree([ray.get(one) for one in parts]))

    step, groups, p = px.Ray(at_once=CHUNK).jit(jax.value_and_grad(loss)), px.Groups.of_arrays(mapped(folder)), params()
    found = medians({"a map written with Ray": by_hand, "px.Ray": lambda: step(p, groups)}, repeats)
    each = found["a map written with Ray"] * (os.cpu_count() or 1) * CHUNK / CLIENTS
    print(f"\non a cluster of one machine, tasks of {each:.0f} ms                    ms    over the map by hand")
    for name, ms in found.items():
        print(f"  {name:54}{ms:8.0f}{ms / found['a map written with Ray']:24.2f}", flush=True)


def _tree(parts: Sequence[Any]) -> Any:
    while len(parts) > 1:
        parts = [
            jax.tree.map(np.add, *parts[k : k + 2]) if k + 1 < len(parts) else parts[k] for k in range(0, len(parts), 2)
        ]
    return parts[0]


class Parsed:
    """Elements that take Python some milliseconds each, as those of a text file do."""

    def __len__(self) -> int:
        return CLIENTS

    def __getitem__(self, number: int) -> Any:
        text = " ".join(str((number * 31 + k) % 97) for k in range(20_000))
        return np.asarray([float(word) for word in text.split()], "float32")


def _busy_readers(devices: int, repeats: int) -> None:
    def moments(x: Any) -> Any:
        return px.reduce_mean(x, "lines"), px.reduce_mean(px.map_fn(lambda x: x**2, (x,), "lines"), "lines")

    fn, groups = px.program(lines=CLIENTS)(moments), px.Groups(Parsed())
    steps = {"px.Stream": px.Stream(at_once=CHUNK).jit(fn), "px.Pool": px.Pool(at_once=CHUNK).jit(fn)}
    if __name__ == "__main__":  # what is defined in the program itself cannot be sent
        import bench_engines

        groups = px.Groups(bench_engines.Parsed())
    found = medians({name: lambda step=step: step(groups) for name, step in steps.items()}, repeats)
    print(f"\nelements that keep Python busy, {devices} devices              ms    over the stream")
    for name, ms in found.items():
        print(f"  {name:48}{ms:8.0f}{ms / found['px.Stream']:19.2f}", flush=True)


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(2,))
