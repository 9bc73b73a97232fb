"""Functions measured in turns: what each call took, with everything else kept out of it.

The first call of a function is apart, since it compiles. It is given copies of its arrays, which shows whether it
donates or changes them; a function that does is given copies in each call, which are made before the clock starts.
"""

import contextlib
import dataclasses
import gc
import inspect
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis.reports import _explain, _jitted

MOST_ROUNDS = 200
LEAST_SAMPLE = 1e-3
"""Seconds that a sample takes at least: of a faster function, several calls are one sample."""
_MOST_CALLS = 1000


@dataclasses.dataclass
class Entrant:
    """A function, with its arguments and what is known of its calls.

    Attributes:
        name: as the caller has it.
        fn: what is called.
        args: with what.
        first: seconds of the first call.
        later: seconds of the second call.
        seconds: of a call, in each round.
        result: of the first call, while it is needed.
        uses_up: whether it donates or changes its arguments.
        memory: bytes at most that a call needs beside its arguments; ``None``: nobody knows.
        wait: waits until a result is there; ``None``: it is when the function returns.
        threads: with how many PyTorch computes, if it returns PyTorch's arrays.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    first: float = 0.0
    later: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    result: Any = None
    uses_up: bool = False
    memory: int | None = None
    wait: Callable[[Any], Any] | None = None
    threads: int | None = None

    def start(self) -> None:
        """Call it for the first time, and for the second."""
        given = _copied(self.args)
        before = time.perf_counter()
        self.result = self._first_call(given)
        self.first = time.perf_counter() - before
        self.uses_up = _are_changed(given, self.args)
        if any(map(_is_torchs, jax.tree.leaves(self.result))):
            self.threads = sys.modules["torch"].get_num_threads()
        del given
        self.later = self._sample(1)

    def take_turn(self) -> None:
        """Add one sample."""
        calls = 1 if self.uses_up else min(max(int(LEAST_SAMPLE / max(self.later, 1e-9)), 1), _MOST_CALLS)
        self.seconds.append(self._sample(calls))

    def look_at_memory(self) -> None:
        """Find out what a call needs, if that can be told: of compiled functions, and of those of NumPy's arrays."""
        fn, args, kwargs = _jitted.found(self.fn, self.args, {})
        if _jitted.is_one(fn):
            lowered = fn.lower(*args, **kwargs)
            lowered = getattr(lowered, "lowered", lowered)
            used = _explain.memory(lowered, lowered.compile())
            self.memory = used.peak - used.arguments
        elif all(map(_is_numpys, jax.tree.leaves((self.args, self.result), is_leaf=pytrees.is_nnx))):
            self.memory = _traced_bytes(lambda: self.fn(*_copied(self.args)), self.args)

    def _first_call(self, args: tuple[Any, ...]) -> Any:
        with self._named():
            result = self.fn(*args)
        if inspect.isgenerator(result) or inspect.isawaitable(result) or inspect.isasyncgen(result):
            raise TypeError(
                f"compare: {self.name!r} of fns returned {arguments.described(result)}, which does its work when it is "
                "read; write a function that returns arrays, such as lambda *args: list(fn(*args))"
            )
        self.wait = _what_waits(result)
        if self.wait is not None:
            with self._named():
                self.wait(result)
        return result

    def _sample(self, calls: int) -> float:
        given = _copied(self.args) if self.uses_up else self.args
        fn, wait = self.fn, self.wait
        with self._named():
            before = time.perf_counter()
            for _ in range(calls):
                result = fn(*given)
                if wait is not None:
                    wait(result)
            return (time.perf_counter() - before) / calls

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by {self.name!r}, one of the functions given to px.compare")
            raise


def run(entrants: Sequence[Entrant], seconds: float) -> None:
    """Take turns as long as there is time for another round, in another order each; at least one."""
    order, draw = list(entrants), random.Random(0)
    start = time.perf_counter()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # or the garbage of one is collected in the time of another
    try:
        for _ in range(MOST_ROUNDS):
            begun = time.perf_counter()
            draw.shuffle(order)
            for entrant in order:
                entrant.take_turn()
            now = time.perf_counter()
            if now - start + (now - begun) > seconds:
                break
    finally:
        if was_enabled:
            gc.enable()


def _what_waits(result: Any) -> Callable[[Any], Any] | None:
    """Return what waits until a result like this is there; nothing if there is nothing to wait for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return lambda result: (jax.block_until_ready(result), torch.cuda.synchronize())
    if isinstance(result, jax.Array):
        return lambda result: result.block_until_ready()
    has_some = any(hasattr(leaf, "block_until_ready") for leaf in jax.tree.leaves(result))
    return jax.block_until_ready if has_some else None


def _is_torchs(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_numpys(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic, bool, int, float, complex))


def as_numpy(x: Any) -> np.ndarray:
    """Return the values of an array of NumPy's, JAX's or PyTorch's, in a dtype that NumPy computes with."""
    x = x[...] if isinstance(x, jax.Ref) else x
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    if hasattr(x, "detach"):
        tensor: Any = x  # PyTorch's
        tensor = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg()
        try:
            return np.asarray(tensor)
        except TypeError:  # of a dtype that NumPy does not know, such as bfloat16
            return np.asarray(tensor.float())
    found = np.asarray(x)
    return found if found.dtype.kind in "biufcOSU" else found.astype(np.float32)


def _copied(args: Any) -> Any:
    """Return the arguments with arrays of their own, which are there."""

    def one(x: Any) -> Any:
        if isinstance(x, (jax.Array, np.ndarray)):
            return x.copy()
        if isinstance(x, jax.Ref):
            return jax.new_ref(x[...])
        return x.detach().clone().requires_grad_(x.requires_grad) if _is_torchs(x) else x

    return jax.block_until_ready(jax.tree.map(one, args, is_leaf=pytrees.is_nnx))


def _are_changed(given: Any, args: Any) -> bool:
    """Return whether arrays were donated to a call, or NumPy's or PyTorch's written to."""

    def one(x: Any, was: Any) -> bool:
        if isinstance(x, jax.Array):
            return x.is_deleted()
        if isinstance(x, (np.ndarray, jax.Ref)) or _is_torchs(x):
            return x.dtype != object and as_numpy(x).tobytes() != as_numpy(was).tobytes()
        return False

    leaves = (jax.tree.leaves(tree, is_leaf=pytrees.is_nnx) for tree in (given, args))
    return any(one(x, was) for x, was in zip(*leaves, strict=True))


def _traced_bytes(call: Callable[[], Any], args: Any) -> int:
    """Return the most bytes at one time that Python and NumPy allocate in a call with copies of these arguments."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    copies = sum(x.nbytes for x in jax.tree.leaves(args) if isinstance(x, np.ndarray))
    return max(peak - before - copies, 0)
