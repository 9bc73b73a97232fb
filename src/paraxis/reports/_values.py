"""The costs of a compiled function, as values: nothing here knows where they are read from, or how they look."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from paraxis._calls import arguments
from paraxis.reports._communication import KINDS, Communication
from paraxis.reports._lines import Line

FindingKind = Literal[
    "too_large",
    "gather",
    "redundant",
    "padding",
    "idle",
    "replicated",
    "constant",
    "undonated",
    "relaid",
    "unused_donation",
    "unjoined",
    "uneven",
]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
        kind: such as ``"all_reduce"``.
        shape: of its result on one device, such as ``f32[8,32]``.
        bytes: what each device contributes or receives, whichever is larger, each time.
        times: how often the program runs it, loops multiplied.
        is_certain: whether ``times`` is known; if not, a loop without a known end counts as one turn.
        is_branch: whether it stands in a branch, which need not be taken; all branches count.
        axes: the mesh axes that it goes along, or a part of one; empty if they are not known.
        group_size: number of devices that take part together.
        line: the user's line that it comes from.
        verb: our function that is called there, such as ``px.reduce_mean``.
        others: the other lines, and the verbs in them, if the compiler has joined what several lines ask for.
        picks: whether it is a sum that brings together what an index picks from an array that lies in blocks: each
            device gives what is in its block, and zeros.
        is_backward: whether it belongs to a derivative's backward pass.
        is_written: whether the program asks for it, as by ``jax.lax.psum``; if not, the compiler has put it in.
        operand: the argument that it sends, if it sends one as it is, or that it picks from.
        widened: ``"bf16"`` or ``"f16"``: the program has this dtype, and the CPU's compiler sends float32 in its place,
            so that ``bytes`` are twice those of a GPU or TPU; ``None``: it is sent as it is.
    """

    kind: str
    shape: str
    bytes: int
    times: int = 1
    is_certain: bool = True
    axes: tuple[str, ...] = ()
    group_size: int = 0
    line: Line | None = None
    verb: str | None = None
    is_backward: bool = False
    is_written: bool = False
    operand: str | None = None
    widened: str | None = None
    is_branch: bool = False
    others: tuple[tuple[Line, str | None], ...] = ()
    picks: bool = False

    @property
    def total_bytes(self) -> int:
        """The bytes of all times together."""
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class LineWork:
    """The products that one line asks for.

    Attributes:
        line: the user's; ``None``: unknown.
        flops: floating-point operations of one device.
        share: the same if the devices shared the work equally and did nothing twice; ``None``: unknown.
    """

    line: Line | None
    flops: int
    share: float | None


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations in matrix products and convolutions, two for each multiplication.

    Attributes:
        flops: of one device, loops multiplied.
        share: of one device, if all shared the work equally and did nothing twice; ``None``: unknown.
        lines: the same by line, most first.
        is_certain: whether all loops' ends are known; if not, such a loop counts as one turn.
        uncounted: what other libraries compute, such as factorizations, of which nobody says how much it is.
        backward: the part of ``flops`` in derivatives' backward passes, with what they compute again for themselves.
    """

    flops: int
    share: float | None
    lines: tuple[LineWork, ...]
    is_certain: bool
    uncounted: tuple[str, ...]
    backward: int = 0

    @property
    def factor(self) -> float | None:
        """Return how often the work is done: 1 if nothing is done twice; ``None``: unknown."""
        return self.flops / self.share if self.share else None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: what is given.
        results: what is returned, the donated part included.
        temporaries: what is needed in between.
        donated: the part of the results that lies where arguments were.
        peak: the most at one time, as far as the compiler says.
        limit: what the device has; ``None``: unknown, as on CPU.
    """

    arguments: int
    results: int
    temporaries: int
    donated: int
    peak: int
    limit: int | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of a step's time on a machine that need not be here, at the machine's peaks.

    Left out: that anything overlaps, latencies of links and of starting operations, how far from the peak real kernels
    are, and that the machine's own compiler would choose others.

    Attributes:
        machine: its kind.
        source: where its numbers come from.
        products: seconds of operations that wait for matrix products.
        memory: seconds of operations that wait for memory.
        sending: seconds of collectives.
        peak: the most bytes on one device at one time, as compiled here.
        limit: bytes of one device's memory there.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> square = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
        >>> estimate = px.explain(jnp.matmul, on="h100")(square, square).estimate
        >>> f"{estimate.seconds * 1e3:.1f} ms", estimate.fits
        ('1.1 ms', True)
    """

    machine: str
    source: str
    products: float
    memory: float
    sending: float
    peak: int
    limit: float

    @property
    def seconds(self) -> float:
        """All of them, one after another."""
        return self.products + self.memory + self.sending

    @property
    def fits(self) -> bool:
        """Return whether a device's memory suffices."""
        return self.peak <= self.limit


@dataclasses.dataclass(frozen=True)
class Layout:
    """An argument or result on its devices.

    Attributes:
        name: such as ``w['a']``.
        shape: of all of it.
        dtype: by name.
        split: for each dimension, into how many blocks it is cut.
        blocks: for each block, in the order of the dimensions, the numbers of the devices that hold it.
        bytes: of all of it.
        bytes_per_device: of what one device holds.
        is_donated: whether its memory is given away.
        spec: of its ``NamedSharding``, such as ``P('d', None)``; empty if it has another sharding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    bytes: int
    bytes_per_device: int
    is_donated: bool = False
    spec: str = ""

    @property
    def copies(self) -> int:
        """Return the number of devices that hold the same."""
        return max(map(len, self.blocks), default=1)

    def __str__(self) -> str:
        cut = " × ".join(
            f"{size}/{parts}" if parts > 1 else f"{size}" for size, parts in zip(self.shape, self.split, strict=True)
        )
        also = f", on {self.copies} devices each" if self.copies > 1 else ""
        return f"{cut or 'scalar'}{also}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Attributes:
        kind: which of the things that are looked for.
        text: what was found.
        line: where.
        write: what to write instead.
        weight: the part of the work, memory or communication that it costs, from 0 to 1; the worst comes first.
    """

    kind: FindingKind
    text: str
    line: Line | None
    write: str
    weight: float

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.text}{where}; {self.write}"


@dataclasses.dataclass(frozen=True, repr=False)
class Contents:
    """All that a report tells.

    Attributes:
        name: of the function.
        num_devices: on which it runs.
        collectives: what it sends, most bytes first.
        work: what it computes.
        memory: what one device holds.
        arguments: how each lies.
        results: likewise.
        callbacks: the lines that call Python while it runs.
        seconds: what tracing and lowering took, and what compiling took.
        findings: what could be better, worst first.
        estimate: what it would take on the machine that was asked for; ``None``: on none.
        unchecked: what nobody can look for here, each with the reason.
        asked: how many devices were asked for; 0: those that are here.
    """

    name: str
    num_devices: int
    collectives: tuple[Collective, ...]
    work: Work
    memory: Memory
    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    callbacks: tuple[Line | None, ...]
    seconds: tuple[float, float]
    findings: tuple[Finding, ...] = ()
    estimate: Estimate | None = None
    unchecked: tuple[str, ...] = ()
    asked: int = 0

    @property
    def communication(self) -> Communication:
        """The number and bytes of each kind of collective; one in a loop counts once."""
        count, size = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        for collective in self.collectives:
            count[collective.kind] += 1
            size[collective.kind] += collective.bytes
        return Communication(count, size)

    @property
    def total_bytes(self) -> int:
        """The bytes of all collectives, loops multiplied, in all branches."""
        return sum(collective.total_bytes for collective in self.collectives)

    @property
    def is_certain(self) -> bool:
        """Return whether it is known how often each collective runs; an unknown end of a loop counts as one turn."""
        return all(collective.is_certain for collective in self.collectives)

    @property
    def fits(self) -> bool | None:
        """Return whether a device's memory suffices, there or here; ``None``: nobody knows how much it is."""
        if self.estimate is not None:
            return self.estimate.fits
        return None if self.memory.limit is None else self.memory.peak <= self.memory.limit

    def found(self, kind: FindingKind) -> Sequence[Finding]:
        """Return the findings of one kind, worst first.

        Raises:
            ValueError: if there is no such kind.
        """
        arguments.one_of("found", "kind", kind, get_args(FindingKind))
        return [finding for finding in self.findings if finding.kind == kind]
