"""The text of a compiled program (XLA's HLO): its operations, how often each runs, and the lines they come from.

A program's text is a list of computations, callees before callers; each is a list of operations. One that stands in
the body of a loop runs as often as the loop does, if the compiler knows how often that is.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator

from paraxis.reports import _meshes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")

Frame = tuple[str, int, str]  # a file, the number of a line in it, and the name of the function


@dataclasses.dataclass
class Computation:
    """A list of operations that the program calls by name."""

    name: str
    is_entry: bool = False
    operations: "list[Operation]" = dataclasses.field(default_factory=list)
    times: int = 0  # that the program runs it, loops multiplied
    is_certain: bool = True  # whether that is known; if not, a loop without a known end counts as one iteration
    is_branch: bool = False
    is_in_loop: bool = False
    is_fused: bool = False  # it stands for one operation of its caller


@dataclasses.dataclass
class Operation:
    name: str
    shape: str  # of an asynchronous pair, what the one that ends it gives
    opcode: str  # such as "dot"; of an asynchronous pair, the one that starts it, without "-start"
    text: str  # the whole line
    begin: int  # of its operands in that
    within: Computation = dataclasses.field(repr=False)

    @property
    def kind(self) -> str | None:
        name = self.opcode.replace("-", "_").removeprefix("ragged_")
        return name if name in KINDS else None

    @property
    def path(self) -> str:
        """JAX's name of it, such as ``jit(f)/transpose(jvp())/reduce_sum``."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return match[1] if match else ""

    @property
    def is_product(self) -> bool:
        return self.path.partition(";")[0].endswith("/dot_general")

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.text[self.begin : self.text.find(")", self.begin)])


class Program:
    """A compiled program's operations, in the order of its text."""

    def __init__(self, text: str) -> None:
        devices = re.search(r"(?:num_partitions|replica_count)=(\d+)", text)
        self.num_devices = int(devices[1]) if devices else 1
        self._places, self._callers = _stacks(text)
        self._computations = {computation.name: computation for computation in _computations(text)}
        self.operations = [operation for body in self._computations.values() for operation in body.operations]
        self.by_name = {operation.name: operation for operation in self.operations}
        self._called_by = {name: op for op in self.operations for name in _callees(op.text)}
        self._count()

    @property
    def collectives(self) -> list[Operation]:
        """Return the collectives, each once: a TPU splits one over several fusions, and the first counts."""
        collectives: dict[str, Operation] = {}
        for operation in self.operations:
            if operation.kind is not None and operation.within.times and self.group_size(operation) > 1:
                channel = re.search(r"channel_id=(\d+)", operation.text) if operation.within.is_fused else None
                collectives.setdefault(channel[1] if channel else operation.name, operation)
        return [*collectives.values()]

    def group_size(self, operation: Operation) -> int:
        return max(map(len, self.groups(operation)))

    def groups(self, operation: Operation) -> _meshes.Groups:
        return _meshes.groups(operation.text) or (tuple(range(self.num_devices)),)

    def sent_bytes(self, operation: Operation) -> int:
        """Return what a device gives to a collective or gets from it, whichever is larger; of several arrays, all."""
        return num_bytes(operation.shape) * (self.group_size(operation) if operation.kind == "reduce_scatter" else 1)

    def frames(self, operation: Operation) -> list[Frame]:
        """Return the calls that an operation comes from, the innermost first; none if a pass has not kept them."""
        frames, match = list[Frame](), re.search(r"stack_frame_id=(\d+)", operation.text)
        number = match[1] if match else ""
        while number in self._places:
            frames.append(self._places[number])
            number = self._callers[number]
        return frames

    def argument(self, operation: Operation) -> int | None:
        """Return the number of the program's argument that an operation takes first, perhaps only moved before."""
        source = self._source(operation.operands[0]) if operation.operands else operation
        return self._number_of(source) if source.within.is_entry and source.opcode == "parameter" else None

    def fused(self, fusion: Operation) -> list[Operation]:
        """Return the operations that a fusion stands for."""
        return [x for name in _callees(fusion.text) for x in self._computations[name].operations]

    def _number_of(self, parameter: Operation) -> int:
        return int(parameter.text[parameter.begin : parameter.text.index(")", parameter.begin)])

    def factors(self, total: Operation) -> Operation | None:
        """Return the multiplication whose numbers a sum adds, perhaps in steps that are fusions of their own."""
        source: Operation | None = self.by_name.get(total.operands[0])
        while source is not None and source.opcode in ("parameter", "fusion", "reduce", "reduce-window", *_MOVES):
            caller = self._called_by.get(source.within.name)
            if source.opcode == "fusion":
                source = self._root(source, "calls")
            elif source.opcode != "parameter":
                source = self.by_name.get(source.operands[0])
            else:
                source = self.by_name.get(caller.operands[self._number_of(source)]) if caller is not None else None
        return source if source is not None and source.opcode == "multiply" else None

    def _source(self, name: str) -> Operation:
        """Return the operation of a name, or the one whose numbers it only moves, or gives in another dtype."""
        source = self.by_name[name]
        while self._moves(source):
            source = self.by_name[source.operands[0]]
        return source

    def _moves(self, operation: Operation) -> bool:
        if operation.opcode == "fusion" and len(operation.operands) == 1:
            return all(op.opcode in ("parameter", *_MOVES) for op in self.fused(operation))
        return operation.opcode in _MOVES

    def _count(self) -> None:
        for caller in reversed(self._computations.values()):
            caller.times += caller.is_entry
            for operation in caller.operations:
                is_loop = operation.opcode == "while"
                trips = self._trips(operation) if is_loop else 1
                callees = () if operation.opcode in _COMBINE else _callees(operation.text)
                for callee in filter(None, map(self._computations.get, callees)):
                    callee.times += caller.times * (1 if trips is None else trips)
                    callee.is_certain &= caller.is_certain and trips is not None
                    callee.is_branch |= caller.is_branch or operation.opcode == "conditional"
                    callee.is_in_loop |= caller.is_in_loop or is_loop
                    callee.is_fused |= operation.opcode == "fusion"

    # Where the compiler does not say how often a loop runs, as a TPU's does not, a counter does: an element of the
    # loop's tuple that begins with a number, has another added in each iteration, and is compared with a third.

    def _trips(self, loop: Operation) -> int | None:
        known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.text)
        with contextlib.suppress(LookupError, ValueError):
            return int(known[1]) if known else self._counted(loop)
        return None

    def _counted(self, loop: Operation) -> int:
        """Return what a loop's counter says; a ``LookupError`` or ``ValueError``: it has none."""
        test = self._root(loop, "condition")
        counter, end = map(self._source, test.operands)
        place = self._place(counter)
        added = self._source(self._root(loop, "body").operands[place])
        parts = map(self._source, added.operands)
        (by,) = (x for x in parts if not (_INDEX.search(x.text) and self._place(x) == place))
        begin, last, step = map(self._number, (self._initial(loop, place), end, by))
        if test.opcode != "compare" or "direction=LT" not in test.text or added.opcode != "add" or step < 1:
            raise LookupError
        return max(-(-(last - begin) // step), 0)

    def _number(self, operation: Operation) -> int:
        """Return an operation's value, if it is an integer that stands in the program, perhaps outside of the loop."""
        if written := re.search(r" constant\((-?\d+)\)", operation.text):
            return int(written[1])
        place, loop = self._place(operation), self._called_by[operation.within.name]
        if self._place(self._source(self._root(loop, "body").operands[place])) != place:
            raise LookupError  # another in each iteration
        return self._number(self._initial(loop, place))

    def _place(self, operation: Operation) -> int:
        """Return which element of its loop's tuple an operation gives."""
        match = _INDEX.search(operation.text)
        if match is None or self.by_name[operation.operands[0]].opcode != "parameter":
            raise LookupError
        return int(match[1])

    def _initial(self, loop: Operation, place: int) -> Operation:
        """Return what an element of a loop's tuple begins with."""
        whole = self._source(loop.operands[0])
        if whole.opcode != "tuple":
            raise LookupError
        return self._source(whole.operands[place])

    def _root(self, loop: Operation, part: str) -> Operation:
        """Return what a loop's condition or body gives."""
        match = re.search(rf"\b{part}=%?([\w.\-]+)", loop.text)
        operations = self._computations[match[1] if match else ""].operations
        return [op for op in operations if op.text.lstrip().startswith("ROOT ")][0]  # noqa: RUF015  # a LookupError


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
_INDEX = re.compile(r" get-tuple-element\(.*\bindex=(\d+)")
_COMBINE = (  # two numbers by a computation of their own
    *("all-reduce", "map", "reduce", "reduce-scatter", "reduce-window", "scatter", "select-and-scatter", "sort"),
)
_MOVES = ("bitcast", "convert", "copy", "copy-done", "reshape", "transpose")


def _computations(text: str) -> list[Computation]:
    computations = [Computation("")]
    starts: dict[str, Operation] = {}
    for line in text.splitlines():
        if not line.startswith(" ") and (heading := _COMPUTATION.match(line)):
            computations.append(Computation(heading["name"], heading["entry"] is not None))
        elif match := _OPERATION.match(line):
            operation = Operation(match["name"], match["shape"], match["opcode"], line, match.end(), computations[-1])
            computations[-1].operations.append(operation)
            if match["start"]:
                starts[operation.name] = operation
            elif operation.opcode.endswith("-done") and (name := _NAME.search(line, match.end())) and name[1] in starts:
                # Where a pair starts, its shape has the operands as well, nested in one of several ways.
                starts[name[1]].shape = operation.shape
    return computations


def _callees(text: str) -> Iterator[str]:
    if "=%" in text or "={%" in text:
        for called in _CALLED.findall(text):
            yield from (name.lstrip("%") for name in called.strip("{}").split(", "))


# --- sizes -------------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")


def num_bytes(shape: str) -> int:
    arrays = ((math.prod(int(dim) for dim in m["dims"].split(",") if dim), m["dtype"]) for m in _ARRAY.finditer(shape))
    return sum(elements * _bits(dtype) // 8 for elements, dtype in arrays)


def dims(shape: str) -> tuple[int, ...]:
    """Return the dimensions of an array, of a tuple's first one."""
    match = _ARRAY.search(shape)
    return tuple(int(dim) for dim in match["dims"].split(",") if dim) if match else ()


def plain(shape: str) -> str:
    """Return the text of a shape without what it says about layouts."""
    parts = [m[0] for m in _ARRAY.finditer(shape)]
    return ", ".join(parts) if len(parts) < 4 else f"{parts[0]}, … ({len(parts)} arrays)"


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8 * (dtype == "pred")


# --- whence ------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE)
_PARENT = re.compile(r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?")


def _stacks(text: str) -> tuple[dict[str, Frame], dict[str, str]]:
    """Return the frames in the head of a program by their numbers, and each one's caller's number."""
    sections = {name: dict(line.split(" ", 1) for line in lines.splitlines()) for name, lines in _SECTION.findall(text)}
    files, functions = (
        {n: x.strip('"') for n, x in sections.get(name, {}).items()} for name in ("FileNames", "FunctionNames")
    )
    locations: dict[str, Frame] = {
        number: (files.get(ids[1], ""), int(ids[3]), functions.get(ids[2], ""))
        for number, location in sections.get("FileLocations", {}).items()
        if (ids := re.search(r"file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", location))
    }
    frames = sections.get("StackFrames", {}).items()
    pairs = {number: ids for number, frame in frames if (ids := _PARENT.search(frame))}
    # A frame's caller stands before it. Where a number is a frame's own, all are one too high.
    shift = any(ids[2] == number for number, ids in pairs.items())
    callers = {number: str(int(ids[2] or 0) - shift) for number, ids in pairs.items()}
    return {n: locations[ids[1]] for n, ids in pairs.items() if ids[1] in locations}, callers
