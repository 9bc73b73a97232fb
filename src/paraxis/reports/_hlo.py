"""The text of a compiled program (XLA's HLO): its operations, how often each runs, and the lines they come from.

A program's text is a list of computations, callees before callers; each is a list of operations. One that stands in
the body of a loop runs as often as the loop does, if the compiler knows how often that is.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paraxis.reports import _meshes

KINDS: tuple[str, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
)

Frame = tuple[str, int, str]
"""A file, the number of a line in it, and the name of the function."""


@dataclasses.dataclass
class Computation:
    """A list of operations that the program calls by name.

    Attributes:
        name: unique in the program.
        is_entry: whether the program begins here.
        operations: in the order of the text.
        times: how often the program runs it, loops multiplied.
        is_certain: whether ``times`` is known; if not, a loop without a known end counts as one turn.
        is_branch: whether a branch calls it, which need not be taken.
        is_in_loop: whether a loop calls it.
        is_fused: whether it stands for one operation of its caller.
    """

    name: str
    is_entry: bool = False
    operations: "list[Operation]" = dataclasses.field(default_factory=list)
    times: int = 0
    is_certain: bool = True
    is_branch: bool = False
    is_in_loop: bool = False
    is_fused: bool = False


@dataclasses.dataclass
class Operation:
    """An operation of a program.

    Attributes:
        name: unique in the program.
        shape: of the result, as text; of an asynchronous pair, what the one that ends it gives.
        opcode: such as ``"dot"``; of an asynchronous pair, the one that starts it, without ``-start``.
        starts: whether it is the start of an asynchronous pair.
        text: the whole line.
        begin: where its operands begin in that.
        within: the computation that it stands in.
    """

    name: str
    shape: str
    opcode: str
    starts: bool
    text: str
    begin: int
    within: Computation = dataclasses.field(repr=False)

    @property
    def times(self) -> int:
        return self.within.times

    @property
    def kind(self) -> str | None:
        """The kind of collective that it is, one of :data:`KINDS`."""
        name = self.opcode.replace("-", "_").removeprefix("ragged_")
        return name if name in KINDS else None

    @property
    def path(self) -> str:
        """JAX's name of it, such as ``jit(f)/transpose(jvp())/reduce_sum``."""
        found = _PATH.search(self.text)
        return found[1] if found else ""

    @property
    def is_product(self) -> bool:
        """Return whether JAX's name of it is that of a matrix product."""
        return self.path.partition(";")[0].endswith("/dot_general")

    @property
    def is_backward(self) -> bool:
        """True of a derivative's backward pass, in which what a checkpoint did not keep is made again."""
        return "transpose(" in self.path

    @property
    def is_root(self) -> bool:
        """Return whether it is what its computation gives."""
        return self.text.lstrip().startswith("ROOT ")

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return _NAME.findall(self.text[self.begin : self.text.find(")", self.begin)])


class Program:
    """A compiled program's operations, in the order of its text."""

    def __init__(self, text: str) -> None:
        devices = _PARTITIONS.search(text)
        self.num_devices = int(devices[1]) if devices else 1
        self._says_devices = devices is not None
        self._tables = _tables(text)
        self._computations = {computation.name: computation for computation in _computations(text)}
        self.operations = [operation for body in self._computations.values() for operation in body.operations]
        self._by_name = {operation.name: operation for operation in self.operations}
        self._loops = {part: op for op in self.operations if op.opcode == "while" for part in _callees(op.text)}
        self._count()

    @property
    def collectives(self) -> list[Operation]:
        """Return the collectives, each once: a TPU splits one over several fusions, and the first counts."""
        found: dict[Any, Operation] = {}
        for operation in self.operations:
            if operation.kind is not None and self.group_size(operation) != 1:
                channel = _CHANNEL.search(operation.text) if operation.within.is_fused else None
                found.setdefault(channel[1] if channel else operation.name, operation)
        return [*found.values()]

    def find(self, name: str) -> Operation | None:
        return self._by_name.get(name)

    def group_size(self, operation: Operation) -> int:
        """Return the number of devices that take part together; 0: the text does not say."""
        found = _meshes.groups(operation.text)
        return max(map(len, found)) if found else self.num_devices if self._says_devices else 0

    def groups(self, operation: Operation) -> _meshes.Groups:
        """Return the numbers of the devices that take part together."""
        return _meshes.groups(operation.text) or (tuple(range(self.num_devices)),)

    def sent_bytes(self, operation: Operation) -> int:
        """Return what a device gives to a collective or gets from it, whichever is larger; of several arrays, all."""
        scattered = self.group_size(operation) if operation.kind == "reduce_scatter" else 1
        return num_bytes(operation.shape) * scattered

    def frames(self, operation: Operation) -> list[Frame]:
        """Return the calls that an operation comes from, the innermost first; none if a pass has not kept them."""
        if by_table := _FRAME_ID.search(operation.text):
            return self._tables.chain(by_table[1])
        alone = _SOURCE.search(operation.text)
        return [(alone[1], int(alone[2]), "")] if alone else []

    def argument(self, operation: Operation) -> int | None:
        """Return the number of the program's argument that an operation takes first, perhaps only moved before."""
        found: Operation | None = operation
        while found is not None and (found is operation or self._moves(found)):
            found = self._by_name.get(next(iter(found.operands), ""))
        number = _PARAMETER.search(found.text) if found is not None and found.within.is_entry else None
        return int(number[1]) if number else None

    def _moves(self, operation: Operation) -> bool:
        """Return whether an operation gives its one operand's numbers, in another order or of another dtype."""
        called = [self._computations[name] for name in _callees(operation.text) if name in self._computations]
        inside = [op for computation in called for op in computation.operations]
        is_alone = operation.opcode == "fusion" and len(operation.operands) == 1
        return operation.opcode in _MOVES or (is_alone and all(op.opcode in ("parameter", *_MOVES) for op in inside))

    def _count(self) -> None:
        """Note how often each computation runs; of a piece of a program, each once."""
        computations = [*self._computations.values()]
        has_entry = any(computation.is_entry for computation in computations)
        for computation in computations:
            computation.times = int(computation.is_entry or not has_entry)
        for caller in reversed(computations if has_entry else ()):
            for operation in caller.operations:
                is_loop = operation.opcode == "while"
                turns = self._turns(operation) if is_loop else 1
                for callee in filter(None, map(self._computations.get, _callees(operation.text))):
                    callee.times += caller.times * (1 if turns is None else turns)
                    callee.is_certain &= caller.is_certain and turns is not None
                    callee.is_branch |= caller.is_branch or operation.opcode == "conditional"
                    callee.is_in_loop |= caller.is_in_loop or is_loop
                    callee.is_fused |= operation.opcode == "fusion"

    # Where the compiler does not say how often a loop runs, as a TPU's does not, a counter does: an element of the
    # loop's tuple that begins with a number, has another added in each turn, and is compared with a third.

    def _turns(self, loop: Operation) -> int | None:
        """Return how often a loop runs; ``None``: unknown."""
        if said := _TRIPS.search(loop.text):
            return int(said[1])
        test, body = self._root(loop, "condition"), self._root(loop, "body")
        if test is None or body is None or test.opcode != "compare" or "direction=LT" not in test.text:
            return None
        counter, end = map(self._source, test.operands)
        place = self._place(counter)
        added = self._source(body.operands[place]) if place is not None else None
        if place is None or added is None or added.opcode != "add":
            return None
        steps = [x for x in map(self._source, added.operands) if self._place(x) != place]
        begin, last, step = map(self._number, (self._given(loop, place), end, steps[0] if len(steps) == 1 else None))
        return None if begin is None or last is None or not step else max(-(-(last - begin) // step), 0)

    def _number(self, operation: Operation | None) -> int | None:
        """Return an operation's value, if it is an integer that stands in the program, perhaps outside of the loop."""
        if operation is None:
            return None
        if written := _CONSTANT.search(operation.text):
            return int(written[1])
        place = self._place(operation)
        if place is None:
            return None
        loop = self._loops[operation.within.name]
        body = self._root(loop, "body")
        is_kept = body is not None and self._place(self._source(body.operands[place])) == place
        return self._number(self._given(loop, place)) if is_kept else None

    def _place(self, operation: Operation | None) -> int | None:
        """Return which element of its loop's tuple an operation gives."""
        found = _INDEX.search(operation.text) if operation is not None else None
        if operation is None or found is None or operation.within.name not in self._loops:
            return None
        whole = self._by_name.get(operation.operands[0])
        return int(found[1]) if whole is not None and whole.opcode == "parameter" else None

    def _given(self, loop: Operation, place: int) -> Operation | None:
        """Return what an element of a loop's tuple begins with."""
        whole = self._source(loop.operands[0])
        return self._source(whole.operands[place]) if whole is not None and whole.opcode == "tuple" else None

    def _root(self, loop: Operation, part: str) -> Operation | None:
        """Return what a loop's condition or body gives."""
        found = re.search(rf"\b{part}=%?([\w.\-]+)", loop.text)
        computation = self._computations.get(found[1]) if found else None
        return next((op for op in computation.operations if op.is_root), None) if computation is not None else None

    def _source(self, name: str) -> Operation | None:
        """Return the operation of a name, or the one whose number it only hands on."""
        found = self._by_name.get(name)
        while found is not None and found.opcode in _MOVES:
            found = self._by_name.get(found.operands[0])
        return found


# --- operations --------------------------------------------------------------------------------------------------

_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+)\s+(?P<opcode>[a-z][\w\-]*?)(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_PATH = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_CONSTANT = re.compile(r" constant\((-?\d+)\)")
_INDEX = re.compile(r" get-tuple-element\(.*\bindex=(\d+)")
_MOVES = ("bitcast", "convert", "copy", "copy-done", "reshape", "transpose")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")


def _computations(text: str) -> list[Computation]:
    found = [Computation("")]  # a piece of a program need not say which computation it is of
    for line in text.splitlines():
        if not line.startswith(" ") and (heading := _COMPUTATION.match(line)):
            found.append(Computation(heading["name"], heading["entry"] is not None))
        elif match := _OPERATION.match(line):
            parts = match["name"], match["shape"], match["opcode"], match["start"] is not None
            found[-1].operations.append(Operation(*parts, line, match.end(), found[-1]))
    for computation in found:  # where a pair starts, its shape has the operands as well, nested in one of several ways
        done = (op for op in computation.operations if op.opcode.endswith("-done"))
        ends = {begin[1]: op.shape for op in done if (begin := _NAME.search(op.text, op.begin))}
        for operation in computation.operations:
            if operation.starts:
                operation.shape = ends.get(operation.name, operation.shape)
    return found


def _callees(text: str) -> Iterator[str]:
    """Yield the names of the computations that an operation runs."""
    if "=%" in text or "={%" in text:
        for called in _CALLED.findall(text):
            yield from (name.lstrip("%") for name in called.strip("{}").split(", "))


# --- sizes -------------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")


def num_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    return sum(_array_bytes(m["dtype"], m["dims"]) for m in _ARRAY.finditer(shape))


def dims(shape: str) -> tuple[int, ...]:
    """Return the dimensions of an array, of a tuple's first one."""
    found = _ARRAY.search(shape)
    return tuple(int(dim) for dim in found["dims"].split(",") if dim) if found else ()


def plain(shape: str) -> str:
    """Return the text of a shape without what it says about layouts."""
    parts = [m[0] for m in _ARRAY.finditer(shape)]
    return ", ".join(parts) if len(parts) < 4 else f"{parts[0]}, … ({len(parts)} arrays)"


def _array_bytes(dtype: str, dims: str) -> int:
    elements = math.prod(int(dim) for dim in dims.split(",") if dim)
    return elements * _bits(dtype) // 8


@functools.lru_cache
def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


# --- whence ------------------------------------------------------------------------------------------------------

_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_SECTION = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE)
_LOCATION = re.compile(r"file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_PARENT = re.compile(r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?")


@dataclasses.dataclass(frozen=True)
class _Tables:
    """The head of a program: frames by number, each with its place and its caller's number."""

    places: Mapping[str, Frame]
    callers: Mapping[str, str]

    def chain(self, number: str) -> list[Frame]:
        found: list[Frame] = []
        while number in self.places and len(found) < 200:
            found.append(self.places[number])
            number = self.callers[number]
        return found


def _tables(text: str) -> _Tables:
    sections = {name: dict(line.split(" ", 1) for line in lines.splitlines()) for name, lines in _SECTION.findall(text)}
    frames = sections.get("StackFrames", {})
    names = {part: sections.get(part, {}) for part in ("FileNames", "FunctionNames")}
    locations: dict[str, Frame] = {}
    for number, location in sections.get("FileLocations", {}).items():
        if found := _LOCATION.search(location):
            file, function = names["FileNames"].get(found[1], '""'), names["FunctionNames"].get(found[2], '""')
            locations[number] = (file.strip('"'), int(found[3]), function.strip('"'))
    pairs = {number: found for number, frame in frames.items() if (found := _PARENT.search(frame))}
    # A frame's caller stands before it. Where a number is a frame's own, all are one too high.
    shift = any(found[2] == number for number, found in pairs.items())
    callers = {number: str(int(found[2] or 0) - shift) for number, found in pairs.items()}
    return _Tables({n: locations[found[1]] for n, found in pairs.items() if found[1] in locations}, callers)
