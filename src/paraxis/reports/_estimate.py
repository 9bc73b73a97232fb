"""An estimate of a step's time on a machine that is not here: a roofline over the compiled program.

Each operation takes as long as its products or its bytes do, whichever is longer, at the machine's peaks; collectives
take as long as their bytes do on the slowest link that they cross, in rings; all follow one another. What only converts
numbers is left out, and float32 that is sent for bfloat16 counts as that: the CPU's compiler does both where a CPU does
not know a dtype. (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.)
"""

import collections
import re
from collections.abc import Iterator, Sequence

from paraxis.reports import _text, _work
from paraxis.reports._machines import Machine
from paraxis.reports._values import Estimate, Layout, Memory

_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id",
    "replica-id", "while", "conditional", "call", "optimization-barrier",
)  # fmt: skip
"""Operations that move nothing themselves."""
_RUN = re.compile(r"(?:body|condition|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_CALL = re.compile(r"to_apply=%?([\w.\-]+)")
_FUSED = re.compile(r"calls=%?([\w.\-]+)")
_DTYPE = re.compile(r"([a-z]+\d*\w*)\[")
_HANDED_BACK = 32 * 2**20
"""Bytes from which on the C library gives memory back to the system when it is freed (glibc's M_MMAP_THRESHOLD)."""
_TRAFFIC = {"all_reduce": 2.0}
"""The number of times a ring sends a collective's bytes, but for the device's own share; others: once."""


def of(program: _text.Program, machine: Machine, memory: Memory, results: Sequence[Layout]) -> Estimate:
    """Return the seconds of a program on a machine, and of giving it the memory that it does not have yet."""
    inside: dict[str, list[_text.Operation]] = collections.defaultdict(list)
    for operation in program.operations:
        inside[program.computation_of(operation)].append(operation)
    products = sending = 0.0
    made = [array.bytes_per_device for array in results if array.bytes_per_device >= _HANDED_BACK]
    fresh = max(sum(made) - memory.donated, 0) + memory.temporaries * (memory.temporaries >= _HANDED_BACK)
    bytes_ = fresh / machine.allocation
    for operation in _run(program, inside):
        if operation.kind is not None:
            sending += operation.times * _sending(program, operation, machine)
        elif not (operation.opcode in _FREE or operation.opcode.endswith("-done") or program.converts(operation)):
            fused = inside.get(found[1], []) if (found := _FUSED.search(operation.text)) else []
            computing = sum(_computing(program, op, operation, machine) for op in [operation, *fused])
            moving = _moved(program, operation, fused) / machine.bandwidth
            if computing > moving:
                products += operation.times * computing
            else:
                bytes_ += operation.times * moving
    return Estimate(machine.kind, machine.source, products, bytes_, sending, memory.peak, machine.memory)


def _run(program: _text.Program, inside: dict[str, list[_text.Operation]]) -> Iterator[_text.Operation]:
    """Yield the operations that a device runs one after another: not those inside of others."""
    waiting, seen = [program.computation_of(program.operations[-1])], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for operation in inside.get(name, ()):
            yield operation
            for called in _RUN.findall(operation.text):
                waiting += [part.lstrip("%") for part in called.strip("{}").split(", ")]
            if operation.opcode == "call" and (called := _CALL.search(operation.text)):
                waiting.append(called[1])


def _computing(program: _text.Program, product: _text.Operation, caller: _text.Operation, machine: Machine) -> float:
    """Return the seconds of a product, which may stand inside of its caller, at the speed of what it is given."""
    flops = _work.flops(program, product)
    if not flops:
        return 0.0
    given, outside = program.find(product.operands[0]), caller is product
    while given is not None:
        number = _text.number_of_parameter(given)
        if number is not None and not outside and number < len(caller.operands):
            given, outside = program.find(caller.operands[number]), True
        elif program.converts(given):  # as CPUs do with what they cannot multiply
            given = program.find(given.operands[0])
        else:
            break
    dtype = _DTYPE.search((given or product).shape)
    return flops / machine.speed(dtype[1] if dtype else "f32")


def _moved(program: _text.Program, operation: _text.Operation, fused: list[_text.Operation]) -> float:
    """Return the bytes that an operation reads and writes: of what it takes a slice of, the slice."""
    if operation.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _text.num_bytes(operation.shape)
    written = _text.num_bytes(operation.shape)
    given = [program.find(name) for name in operation.operands]
    read = [0 if found is None else _text.num_bytes(found.shape) for found in given]
    if operation.opcode == "dynamic-update-slice":
        return 2 * (read[1] if len(read) > 1 else written)
    users: dict[str, list[_text.Operation]] = collections.defaultdict(list)
    for op in fused:
        for name in op.operands:
            users[name].append(op)
    for parameter in fused:
        number = _text.number_of_parameter(parameter)
        if number is None or number >= len(read):
            continue
        using = users[parameter.name]
        if using and all(op.opcode in ("dynamic-slice", "gather", "slice") for op in using):
            read[number] = sum(_text.num_bytes(op.shape) for op in using)
        elif using and all(op.opcode == "dynamic-update-slice" and op.operands[0] == parameter.name for op in using):
            read[number] = 0  # it is changed in place
            updates = [program.find(op.operands[1]) for op in using]
            written = sum(0 if found is None else _text.num_bytes(found.shape) for found in updates)
    return written + sum(read)


def _sending(program: _text.Program, operation: _text.Operation, machine: Machine) -> float:
    size = _text.sent_bytes(program, operation) / (2 if program.widened(operation) in machine.flops else 1)
    is_permutation = operation.kind == "collective_permute"
    groups = program.groups(operation)
    per_host = machine.devices_per_host
    if is_permutation:
        crosses = any(a // per_host != b // per_host for a, b in groups)
        return size / (machine.network if crosses else machine.link)
    group = max(groups, key=len)
    hosts = collections.Counter(device // per_host for device in group)
    speed = machine.link
    if len(hosts) > 1:  # each of a host's devices has a way out of its own
        rails = min(hosts.values())
        speed = min(machine.network * rails, machine.link) if rails > 1 else machine.network
    traffic = _TRAFFIC.get(operation.kind or "", 1.0) * (len(group) - 1) / len(group)
    return size * traffic / speed
