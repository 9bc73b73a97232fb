"""What a report consists of."""

import dataclasses
from typing import Literal

from paraxis.reports._lines import Line

FindingKind = Literal[
    "too_large", "gather", "redundant", "condition", "padding", "waiting", "replicated", "constant", "undonated"
]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
        kind: such as ``"all_reduce"``.
        shape: of its result on one device, such as ``f32[8,32]``.
        bytes: what each device contributes or receives, whichever is larger, each time.
        times: how often the program runs it, loops multiplied.
        is_certain: whether ``times`` is known; if not, a loop without a known end counts as one iteration.
        is_branch: whether it stands in a branch, which need not be taken; all branches count.
        axes: the mesh axes that it goes along, or a part of one; empty if they are not known.
        group_size: number of devices that take part together.
        line: the user's line that it comes from; ``None``: the compiler has not kept it.
        verb: our function that is called there, such as ``px.reduce_mean``.
        is_backward: whether it belongs to a derivative's backward pass.
        is_written: whether the program asks for it, as by ``jax.lax.psum``; if not, the compiler has put it in.
        is_ring: whether it is a step of a ring beside a matrix product, by which compilers for TPUs gather or sum.
        is_condition: whether it combines the devices' conditions of a loop, in each iteration.
        operand: the argument that it sends, if it sends one as it is.
    """

    kind: str
    shape: str
    bytes: int
    times: int = 1
    is_certain: bool = True
    is_branch: bool = False
    axes: tuple[str, ...] = ()
    group_size: int = 0
    line: Line | None = None
    verb: str | None = None
    is_backward: bool = False
    is_written: bool = False
    is_ring: bool = False
    is_condition: bool = False
    operand: str | None = None

    @property
    def total_bytes(self) -> int:
        """The bytes of all times together."""
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class Communication:
    """The collectives in one compiled program, and what they send in all turns of its loops.

    Attributes:
        count: of each kind in the program, with an entry for every kind; one inside a loop counts once, and so does one
            over several arrays.
        times: how often those run, loops multiplied; a loop without a known end counts as one iteration.
        bytes: of what each device contributes or receives, whichever is larger, in all those times.
        is_certain: whether it is known how often each runs.
    """

    count: dict[str, int]
    times: dict[str, int]
    bytes: dict[str, int]
    is_certain: bool = True

    @property
    def total_count(self) -> int:
        return sum(self.count.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        parts = [self._text(kind) for kind, count in self.count.items() if count]
        open_ = "" if self.is_certain else "; a loop without a known end counts as one iteration"
        return (", ".join(parts) or "no communication") + open_

    def _text(self, kind: str) -> str:
        count, times = self.count[kind], self.times[kind]
        return f"{count} {kind} ({f'{times:,} times, ' if times > count else ''}{self.bytes[kind]:,} bytes)"


@dataclasses.dataclass(frozen=True)
class LineWork:
    """The products that one line asks for.

    Attributes:
        line: the user's; ``None``: unknown.
        flops: floating-point operations of one device; 0: the compiled program has none that can be told.
        share: the same if the devices shared the work equally and did nothing twice; ``None``: unknown.
    """

    line: Line | None
    flops: int
    share: float | None

    @property
    def factor(self) -> float | None:
        """Return how often the work is done: 1 if nothing is done twice; ``None``: unknown, or not counted."""
        return self.flops / self.share if self.flops and self.share else None


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations in matrix products and convolutions: two for each multiplication of real numbers.

    One of complex numbers has eight, and in a convolution, which JAX makes of three real ones, six.

    Attributes:
        flops: of one device, loops multiplied.
        share: of one device, if all shared the work equally and did nothing twice; ``None``: unknown.
        lines: the same by line, most first.
        is_certain: whether all loops' ends are known; if not, such a loop counts as one iteration.
        uncounted: what other libraries compute, such as factorizations, of which nobody says how much it is.
        elementwise: operations on single numbers of one device, such as a sine or an addition, loops multiplied.
    """

    flops: int
    share: float | None
    lines: tuple[LineWork, ...]
    is_certain: bool
    uncounted: tuple[str, ...]
    elementwise: int

    factor = LineWork.factor


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of memory that one device reads and writes, loops multiplied: of each operation or fusion, in and out.

    Attributes:
        bytes: of all operations.
        lines: the same by line, most first; ``None`` in the place of a line that is unknown.
    """

    bytes: int
    lines: tuple[tuple[Line | None, int], ...]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device: a bound. What is there at one time is less where buffers are used twice.

    Attributes:
        arguments: of the arguments, as they lie there: a TPU pads the last two dimensions to its tiles, of 8 × 128
            numbers of 32 bits.
        results: of the results, the donated part included.
        temporaries: of values in between.
        donated: the part of the results that lies where arguments were.
        peak: the most at one time.
        limit: what the device has; ``None``: unknown, as on CPU.
        is_of_a_call: whether this is the program that a call runs. On CPU, it is compiled without calls of a library
            whose memory the compiler leaves out; the one that runs may need less.
    """

    arguments: int
    results: int
    temporaries: int
    donated: int
    peak: int
    limit: int | None
    is_of_a_call: bool = True


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Attributes:
        kind: which of the things that are looked for.
        text: what was found.
        write: what to write instead.
        weight: the part of the work, memory or communication that it costs, from 0 to 1; the worst comes first.
        line: where; ``None``: on no line, or an unknown one.
    """

    kind: FindingKind
    text: str
    write: str
    weight: float
    line: Line | None = None

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.text}{where}; {self.write}"
