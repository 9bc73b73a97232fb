"""The text of a compiled program (XLA's HLO), read: which operations it has, how often each runs, and whence it comes.

A program's text is a list of computations, callees before callers; each is a list of operations. One that stands in
the body of a loop runs as often as the loop does, if the compiler knows how often that is.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

KINDS: tuple[str, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
)

Groups = tuple[tuple[int, ...], ...]
Frame = tuple[str, int, str]
"""A file, the number of a line in it, and the name of the function."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a program.

    Attributes:
        name: unique in the program.
        shape: of the result, as text; of an asynchronous pair, what the one that ends it gives.
        opcode: such as ``"dot"``; of an asynchronous pair, the one that starts it, without ``-start``.
        starts: whether it is the start of an asynchronous pair.
        text: the whole line.
        begin: where its operands begin in that.
        computation: number of the one that it stands in.
        times: how often the program runs it, loops multiplied.
        is_certain: whether ``times`` is known; if not, a loop without a known end counts as one turn.
        is_branch: whether it stands in a branch, which need not be taken.
    """

    name: str
    shape: str
    opcode: str
    starts: bool
    text: str
    begin: int
    computation: int
    times: int = 1
    is_certain: bool = True
    is_branch: bool = False

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
    def is_backward(self) -> bool:
        """True of a derivative's backward pass, in which what a checkpoint did not keep is made again."""
        return "transpose(" in self.path

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return _NAME.findall(self.text[self.begin : self.text.find(")", self.begin)])


class Program:
    """A compiled program's operations, in the order of its text."""

    def __init__(self, text: str) -> None:
        devices = _PARTITIONS.search(text)
        self.num_devices = int(devices[1]) if devices else 1
        self.has_devices = devices is not None
        self.aliased = frozenset(int(number) for number in _ALIAS.findall(text.partition("\n")[0]))
        self._tables = _tables(text)
        computations, has_entry = _operations(text)
        self._names = [computation.name for computation in computations]
        self._opcodes = {c.name: [operation.opcode for operation in c.operations] for c in computations}
        self.operations = _counted(computations, has_entry)
        self._by_name = {operation.name: operation for operation in self.operations}
        numbers = {computation.name: number for number, computation in enumerate(computations)}
        self._callers = {
            numbers[callee]: op for op in self.operations for callee in _callees(op.text) if callee in numbers
        }

    @property
    def collectives(self) -> list[Operation]:
        """Those operations that exchange something."""
        return [op for op in self.operations if op.kind is not None and self.group_size(op) != 1]

    def find(self, name: str) -> Operation | None:
        return self._by_name.get(name)

    def computation_of(self, operation: Operation) -> str:
        """Return the name of the computation that an operation stands in."""
        return self._names[operation.computation]

    def group_size(self, operation: Operation) -> int:
        """Return the number of devices that take part together; 0: the text does not say."""
        found = groups(operation.text)
        return max(map(len, found)) if found else self.num_devices if self.has_devices else 0

    def groups(self, operation: Operation) -> Groups:
        """Return the numbers of the devices that take part together."""
        return groups(operation.text) or (tuple(range(self.num_devices)),)

    def reduces_by(self, operation: Operation) -> str:
        """Return the name of the operation by which a reduction combines two values."""
        found = _TO_APPLY.search(operation.text)
        return self._opcodes[found[1]][-1] if found and self._opcodes.get(found[1]) else ""

    def frames(self, operation: Operation) -> list[Frame]:
        """Return the calls that an operation comes from, the innermost first; none if a pass has not kept them."""
        text = operation.text
        if by_table := _FRAME_ID.search(text):
            return self._tables.chain(by_table[1])
        alone = _SOURCE.search(text)
        return [(alone[1], int(alone[2]), "")] if alone else []

    def is_backward(self, operation: Operation) -> bool:
        """Say whether an operation is of a backward pass; of one without a name, whether what it gives or takes is."""
        moved = None if "/" in operation.path else self.named(operation)
        if moved is not None and moved.opcode in _MOVES and moved.is_backward:
            return True
        waiting, seen = [operation], {operation.name}
        while waiting and len(seen) < 10 * _NEAR:
            found = waiting.pop(0)
            if "/" in found.path:
                if found.is_backward:
                    return True
                continue
            caller = self._callers.get(found.computation)
            number = number_of_parameter(found) if caller is not None and caller.opcode == "fusion" else None
            names = found.operands if caller is None or number is None else caller.operands[number : number + 1]
            fresh = [name for name in names if name not in seen and name in self._by_name]
            seen.update(fresh)
            waiting += [self._by_name[name] for name in fresh]
        return False

    def frames_near(self, operation: Operation) -> Iterator[list[Frame]]:
        """Yield the frames of an operation, and of some near it, the likeliest to have asked for it first.

        What is gathered is gathered for who uses it; anything else comes from what it is made of.
        """
        ways = (self._before, self._after) if operation.kind != "all_gather" else (self._after, self._before)
        for found in itertools.chain.from_iterable(itertools.islice(way(operation), _NEAR) for way in ways):
            if frames := self.frames(found):
                yield frames

    def frames_near_parts(self, operation: Operation, *, of_operands: bool) -> Iterator[Iterator[list[Frame]]]:
        """Yield the same for each array of a collective that the compiler has joined from several.

        What takes a result out of the joined one has the frames of the collective that there was before.

        Args:
            operation: a collective.
            of_operands: whether an array may come from where it is computed, if nothing takes its result out.
        """
        names = operation.operands
        taken = self._taken(operation) if len(names) > 1 else {}
        for number, name in enumerate(names if len(names) > 1 else ()):
            result, given = taken.get(number), self._by_name.get(name)
            ways = [self._after(result) if operation.kind == "all_gather" else iter([result])] if result else []
            ways += [self._before(given)] if given is not None and of_operands else []
            found = itertools.chain.from_iterable(itertools.islice(way, _NEAR) for way in ways)
            yield filter(None, map(self.frames, found))

    def _taken(self, operation: Operation) -> dict[int, Operation]:
        """Return what takes each of several results out, by their number."""
        users = self._users.get(operation.name, [])
        if len(users) == 1 and self._by_name[users[0]].opcode.endswith("-done"):
            users = self._users.get(users[0], [])
        found = ((_RESULT.search(self._by_name[name].text), self._by_name[name]) for name in users)
        return {int(number[1]): user for number, user in found if number}

    def _before(self, operation: Operation) -> Iterator[Operation]:
        """Yield an operation and those that it comes from, breadth first."""

        def behind(found: Operation) -> list[str]:
            if found.opcode == "parameter" and found.computation in self._callers:  # as in a fusion
                return [self._callers[found.computation].name]
            return found.operands

        return self._walk(operation, behind)

    def _after(self, operation: Operation) -> Iterator[Operation]:
        """Yield an operation and those that use it, breadth first."""
        return self._walk(operation, lambda found: self._users.get(found.name, []))

    def _walk(self, operation: Operation, following: Callable[[Operation], list[str]]) -> Iterator[Operation]:
        queue, seen = [operation], {operation.name}
        while queue:
            yield (first := queue.pop(0))
            fresh = [name for name in following(first) if name not in seen and name in self._by_name]
            seen.update(fresh)
            queue += [self._by_name[name] for name in fresh]

    @functools.cached_property
    def _users(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for operation in self.operations:
            for name in operation.operands:
                found.setdefault(name, []).append(operation.name)
        return found

    def named(self, operation: Operation) -> Operation | None:
        """Return the operation itself if it has JAX's name, or the first that its result goes to and that has one."""
        for _ in range(_NEAR):
            if operation.path and operation.opcode not in ("fusion", "parameter"):
                return operation
            user = next((self._by_name[name] for name in self._users.get(operation.name, ())), None)
            if user is None and operation.computation not in self._callers:
                return None
            operation = self._callers[operation.computation] if user is None else self._entered(user, operation)
        return None

    def _entered(self, user: Operation, given: Operation) -> Operation:
        """Return the parameter of a fusion as which it takes what it is given; any other operation as it is."""
        if user.opcode != "fusion":
            return user
        number = user.operands.index(given.name)
        inside = self._inside.get(next(_callees(user.text), ""), ())
        return next((found for found in inside if number_of_parameter(found) == number), user)

    def argument_of(self, operation: Operation) -> int | None:
        """Return the number of the argument that the first operand is, perhaps moved, renamed or converted."""
        for _ in range(8):
            names = operation.operands
            found = self._by_name.get(names[0]) if names else None
            if found is None:
                return None
            caller = self._callers.get(found.computation)
            if found.opcode == "parameter" and caller is not None and caller.opcode == "fusion":
                found = self._by_name.get(caller.operands[number_of_parameter(found) or 0])
                if found is None:
                    return None
            if found.opcode == "parameter":
                return number_of_parameter(found) if found.computation == self.operations[-1].computation else None
            if not self._moves(found):
                return None
            operation = found
        return None

    def sum_alone(self, operation: Operation) -> tuple[Operation, Operation] | None:
        """Return two results of a joined all-reduce of which nobody needs anything but their sum, if there are such."""
        taken = self._taken(operation) if operation.kind == "all_reduce" else {}
        ends: dict[str, Operation] = {}
        for result in taken.values():
            add = self._only_user(result)
            if add is not None and add.opcode == "fusion":
                inside = self._entered(add, result)
                add = self._only_user(inside) if inside is not add else None
            if add is None or add.opcode != "add":
                continue
            if add.name in ends:
                return ends[add.name], result
            ends[add.name] = result
        return None

    def summed_before(self, operation: Operation) -> Operation | None:
        """Return the sum along other axes that a program asks for, and of which it asks for nothing but this sum."""
        names = operation.operands
        before = self._by_name.get(names[0]) if len(names) == 1 else None
        if before is None or before.kind != "all_reduce" or self._only_user(before) is not operation:
            return None
        are_asked = all(x.path.rpartition("/")[2].startswith("psum") and not x.is_backward for x in (operation, before))
        is_other = all(
            len({*first} & {*group}) < 2 for first in self.groups(before)[:1] for group in self.groups(operation)
        )
        return before if are_asked and is_other and self.reduces_by(before) == "add" else None

    def _only_user(self, operation: Operation) -> Operation | None:
        users = self._users.get(operation.name, [])
        return self._by_name[users[0]] if len(users) == 1 else None

    def picked(self, operation: Operation) -> Operation | None:
        """Return the picking by an index whose results, each device's own, an all-reduce adds up; ``None``: none does.

        The compiler makes both of one operation of JAX.
        """
        if operation.kind != "all_reduce" or not operation.path.endswith("/gather"):
            return None
        near = itertools.islice(self._before(operation), 1, 4)
        inside = itertools.chain.from_iterable(self._with_inside(found) for found in near)
        return next((found for found in inside if found.opcode == "gather"), None)

    def _with_inside(self, operation: Operation) -> Sequence[Operation]:
        """Return an operation, or those of a fusion."""
        return self._inside.get(next(_callees(operation.text), ""), []) if operation.opcode == "fusion" else [operation]

    def _moves(self, operation: Operation) -> bool:
        """Return whether an operation gives the numbers of its one operand, in another order or of another dtype."""
        if operation.opcode != "fusion":
            return operation.opcode in _MOVES
        inside = {name for callee in _callees(operation.text) for name in self._opcodes.get(callee, ())}
        return len(operation.operands) == 1 and inside <= {*_MOVES, "parameter"}

    def converts(self, operation: Operation) -> bool:
        """Return whether an operation gives the numbers of its one operand in another dtype."""
        found = self._by_name.get(operation.operands[0]) if operation.operands else None
        is_other = found is not None and found.shape.partition("[")[0] != operation.shape.partition("[")[0]
        return is_other and self._moves(operation)

    def widened(self, operation: Operation) -> str | None:
        """Return the dtype in which a program has what a collective of float32 gives, such as ``bf16``, if it has one.

        Where a CPU does not compute with a dtype, its compiler sends float32, and converts what comes of it.
        """
        found: set[str] = set()
        waiting = list(self._users.get(operation.name, []))
        while waiting:
            user = self._by_name[waiting.pop()]
            if user.opcode in _PASSES_ON or user.opcode.endswith("-done"):
                waiting += self._users.get(user.name, [])
                continue
            converting = list(self._converting(user))
            if not converting or any(inside.path.endswith(_WRITTEN_CONVERT) for _, inside in converting):
                return None
            found |= {dtype for dtype, _ in converting}
        return found.pop() if len(found) == 1 and operation.shape.lstrip("(").startswith("f32[") else None

    def _converting(self, user: Operation) -> Iterator[tuple[str, Operation]]:
        """Yield the conversions to fewer bits that an operation is, or has in it, with their dtypes."""
        for found in self._with_inside(user):
            dtype = found.shape.partition("[")[0]
            if found.opcode == "convert" and dtype in ("bf16", "f16"):
                yield dtype, found

    @functools.cached_property
    def _inside(self) -> dict[str, list[Operation]]:
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(self.computation_of(operation), []).append(operation)
        return found

    def depends(self, operation: Operation, on: Operation) -> bool:
        """Return whether an operation needs another's result, in the same computation."""
        return any(found is on for found in itertools.islice(self._before(operation), 1, None))


_MOVES = ("bitcast", "convert", "copy", "reshape", "transpose")
_PASSES_ON = ("bitcast", "copy", "get-tuple-element", "reshape", "transpose", "tuple")
_WRITTEN_CONVERT = "convert_element_type"
"""JAX's name of a conversion that a program asks for."""
_NEAR = 24
"""The number of operations that are searched for the line of one without."""

# --- operations --------------------------------------------------------------------------------------------------

_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+)\s+(?P<opcode>[a-z][\w\-]*?)(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TO_APPLY = re.compile(r"to_apply=%?([\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_PATH = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_RESULT = re.compile(r" get-tuple-element\(.*\), index=(\d+)")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{\}")


@dataclasses.dataclass(frozen=True)
class _Computation:
    name: str
    operations: list[Operation]
    is_entry: bool


def _operations(text: str) -> tuple[list[_Computation], bool]:
    """Return the computations, and whether one of them is said to be where the program begins."""
    found = [_Computation("", [], False)]  # a piece of a program need not say which computation it is of
    for line in text.splitlines():
        if not line.startswith(" ") and (heading := _COMPUTATION.match(line)):
            found.append(_Computation(heading["name"], [], heading["entry"] is not None))
        elif match := _OPERATION.match(line):
            said = match["name"], match["shape"], match["opcode"], match["start"] is not None
            found[-1].operations.append(Operation(*said, line, match.end(), len(found) - 1))
    for computation in found:  # where a pair starts, its shape has the operands as well, nested in one of several ways
        done = (op for op in computation.operations if op.opcode.endswith("-done"))
        ends = {begin[1]: op.shape for op in done if (begin := _NAME.search(op.text, op.begin))}
        computation.operations[:] = [
            dataclasses.replace(op, shape=ends.get(op.name, op.shape)) if op.starts else op
            for op in computation.operations
        ]
    return found, any(computation.is_entry for computation in found)


def _counted(computations: list[_Computation], has_entry: bool) -> list[Operation]:
    """Return all operations with how often each runs: callees stand before their callers."""
    times = {c.name: 1 if c.is_entry or not has_entry else 0 for c in computations}
    certain = {c.name: True for c in computations}
    branches = {c.name: False for c in computations}
    counted: list[list[Operation]] = []
    for computation in reversed(computations):
        runs, is_certain = times[computation.name], certain[computation.name]
        is_branch = branches[computation.name]
        count = functools.partial(dataclasses.replace, times=runs, is_certain=is_certain, is_branch=is_branch)
        counted.append([count(operation) for operation in computation.operations])
        if not has_entry:
            continue
        for operation in computation.operations:
            trips = 1
            if operation.opcode == "while":
                known = _TRIPS.search(operation.text)
                trips, known_here = (int(known[1]), True) if known else (1, False)
            else:
                known_here = True
            for callee in _callees(operation.text):
                if callee in times:
                    times[callee] += runs * trips
                    certain[callee] &= is_certain and known_here
                    branches[callee] |= is_branch or operation.opcode == "conditional"
    return [operation for part in reversed(counted) for operation in part]


def _callees(text: str) -> Iterator[str]:
    """Yield the names of the computations that an operation runs."""
    if "=%" in text or "={%" in text:
        for called in _CALLED.findall(text):
            yield from (name.lstrip("%") for name in called.strip("{}").split(", "))


# --- sizes -------------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")


def number_of_parameter(operation: Operation) -> int | None:
    """Return which of its computation's parameters an operation is, if it is one."""
    number = _PARAMETER.search(operation.text) if operation.opcode == "parameter" else None
    return int(number[1]) if number else None


def num_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    return sum(_array_bytes(m["dtype"], m["dims"]) for m in _ARRAY.finditer(shape))


def sent_bytes(program: Program, operation: Operation) -> int:
    """Return what a device gives to a collective or gets from it, whichever is larger; of several arrays, all."""
    scattered = program.group_size(operation) if operation.kind == "reduce_scatter" else 1
    return num_bytes(operation.shape) * scattered


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


# --- who takes part ----------------------------------------------------------------------------------------------

# Written in one of four ways: every group in full, {{0,1},{2,3}}; as rows of a range that is reshaped and transposed,
# [2,2]<=[2,2]T(1,0); by axes of a mesh, mesh['d'=4,'m'=2] {'m'}, where 'd':(1)2 is a part of an axis; or as pairs.
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_RESHAPED = re.compile(r"replica_groups=\[(\d+),(\d+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_BY_AXES = re.compile(r"replica_groups=mesh(?P<mesh>[^{]*)\{(?P<axes>[^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{\d+,\d+\}(?:,\{\d+,\d+\})*)\}")


def groups(text: str) -> Groups:
    """Return the numbers of the devices that take part together, as an operation's text says it; ``()``: all."""
    if reshaped := _RESHAPED.search(text):
        count, size, source, order = int(reshaped[1]), int(reshaped[2]), reshaped[3], reshaped[4]
        ids = _arranged(_ints(source) if source else [count * size], _ints(order) if order else None)
        return tuple(tuple(ids[i * size : (i + 1) * size]) for i in range(count))
    if listed := _LISTED.search(text):
        return tuple(tuple(_ints(group)) for group in listed[1].strip("{}").split("},{"))
    if by_axes := _BY_AXES.search(text):
        return _along(by_axes["mesh"], by_axes["axes"])
    if pairs := _PAIRS.search(text):
        return tuple(tuple(_ints(pair)) for pair in pairs[1].strip("{}").split("},{"))
    return ()


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _arranged(sizes: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """Return the numbers from 0 on, reshaped to ``sizes``, transposed, and flat again."""
    order = range(len(sizes)) if order is None else order
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    places = itertools.product(*(range(sizes[axis]) for axis in order))
    return [sum(i * strides[axis] for i, axis in zip(place, order, strict=True)) for place in places]


def _along(mesh: str, axes: str) -> Groups:
    """Return the groups along axes of a mesh, or along parts of them."""
    sizes: dict[str, int] = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    cuts: dict[str, tuple[int, int]] = {}
    for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes):
        cuts[name] = (int(before), int(part)) if part else (1, sizes[name])
    finer: list[tuple[int, bool]] = []
    for name, size in sizes.items():
        before, part = cuts.get(name, (1, 1))
        finer += [(before, False), (part, name in cuts), (size // (before * part), False)]
    shape = [size for size, _ in finer]
    order = [i for i, (_, along) in enumerate(finer) if not along] + [i for i, (_, along) in enumerate(finer) if along]
    ids = _arranged(shape, order)
    if permuted := re.search(r"device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh):
        devices = _arranged(_ints(permuted[1]), _ints(permuted[2]) if permuted[2] else None)
        ids = [devices[i] for i in ids]
    size = math.prod(size for size, along in finer if along)
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))


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
