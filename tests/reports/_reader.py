"""A reader of compiled programs that shares nothing with the package's: it takes instructions apart by their brackets.

It walks from the entry down, computation by computation, as often as each is run.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

_BITS = {"pred": 8, "bf16": 16, "c64": 64}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def arrays(shape: str) -> Iterator[tuple[str, list[int]]]:
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        yield dtype, [int(n) for n in dims.split(",") if n]


def size(shape: str) -> int:
    return sum(math.prod(dims) * (_BITS.get(dtype) or int(dtype[1:])) // 8 for dtype, dims in arrays(shape))


def parts(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def closed(text: str, start: int) -> int:
    """Return where the bracket that opens at a place closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if not depth:
            return place
    raise ValueError(text)


class Read:
    """``sent``: how many collectives there are of each kind, bytes and times; ``flops``: those of products."""

    def __init__(self, text: str) -> None:
        self.sent: collections.Counter[tuple[str, int, int]] = collections.Counter()
        self.flops = 0
        self._bodies: dict[str, list[dict[str, Any]]] = {}
        self._shapes: dict[str, str] = {}
        self._ends: dict[str, Any] = {}  # start of an asynchronous pair → shape of what its end gives
        entry = body = ""
        for line in text.splitlines():
            if line.endswith("{") and " -> " in line and not line.startswith(" "):
                body = line.removeprefix("ENTRY ").lstrip("%").partition(" ")[0]
                entry, self._bodies[body] = (body if line.startswith("ENTRY") else entry), []
            elif line.startswith("  ") and " = " in line:
                self._bodies[body].append(self._instruction(re.sub(r"/\*.*?\*/", "", line)))
        self._walk(entry, 1)

    def _instruction(self, line: str) -> dict[str, Any]:
        name, right = line.strip().removeprefix("ROOT ").split(" = ", 1)
        end = closed(right, 0) + 1 if right.startswith("(") else right.index(" ")
        shape, rest = right[:end], right[end:].strip()
        opens = rest.index("(")
        closes = closed(rest, opens)
        name, given = name.lstrip("%"), [part.split()[-1].lstrip("%") for part in parts(rest[opens + 1 : closes])]
        self._shapes[name] = shape
        if rest[:opens].endswith("-done"):
            self._ends[given[0]] = shape
        return {
            "line": line,
            "name": name,
            "shape": shape,
            "op": rest[:opens],
            "given": given,
            "has": dict(part.split("=", 1) for part in parts(rest[closes + 1 :]) if "=" in part),
        }

    def _walk(self, body: str, times: int) -> None:
        for found in self._bodies[body]:
            op, has = found["op"], found["has"]
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', found["line"]) if op == "while" else None
            if op in ("while", "conditional", "fusion", "call"):
                names = [has.get(key, "") for key in ("body", "condition", "calls", "to_apply", "branch_computations")]
                names += [has.get(f"{truth}_computation", "") for truth in ("true", "false")]
                for name in parts(", ".join(names).replace("{", "").replace("}", "")):
                    self._walk(name.lstrip("%"), times * (int(turns[1]) if turns else 1))
            elif op.removesuffix("-start") in COLLECTIVES and self._is_sent(found):
                given = sum(size(self._shapes[name]) for name in found["given"])
                most = max(given, size(self._ends.get(found["name"], found["shape"])))
                self.sent[op.removesuffix("-start").replace("-", "_"), most, times] += 1
            elif op in ("dot", "convolution"):
                self.flops += times * self._flops(found)
            elif op == "multiply" and re.search(r'op_name="[^";]*/dot_general["; ]|^(?!.*op_name)', found["line"]):
                number = math.prod(next(arrays(found["shape"]))[1])
                self.flops += times * 2 * number * (number > 1)  # of vectors; one number is a place

    def _is_sent(self, found: dict[str, Any]) -> bool:
        """Return whether there are two devices in a group."""
        groups = found["line"].partition("replica_groups=")[2]
        if groups.startswith("{{"):
            return "," in groups[: groups.index("}")]
        if groups.startswith("["):
            return int(groups[1 : groups.index("]")].split(",")[-1]) > 1
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups))
        along = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups[groups.find(" {") :].partition("}")[0])
        return not along or any(int(part or sizes[name]) > 1 for name, part in along)

    def _flops(self, found: dict[str, Any]) -> int:
        ((_, result),) = arrays(found["shape"])
        (_, left), (_, right) = (next(arrays(self._shapes[name])) for name in found["given"][:2])
        if found["op"] == "dot":
            return (
                2
                * math.prod(result)
                * math.prod(left[int(n)] for n in parts(found["has"]["lhs_contracting_dims"][1:-1]))
            )
        given, kernel, made = re.split("_|->", found["has"]["dim_labels"])
        says = dict(part.split("=") for part in found["has"]["window"].strip("{}").split())
        each = {name: text.split("x") for name, text in says.items()}
        count = 2 * result[made.index("b")] * result[made.index("f")] * right[kernel.index("i")]
        for d in sorted(filter(str.isdigit, given)):
            step, apart, spread = (
                int(each[way][int(d)]) if way in each else 1 for way in ("stride", "lhs_dilate", "rhs_dilate")
            )
            before = int(each["pad"][int(d)].partition("_")[0]) if "pad" in each else 0
            there = {before + place * apart for place in range(left[given.index(d)])}
            taps, places = range(right[kernel.index(d)]), range(result[made.index(d)])
            count *= sum(place * step + tap * spread in there for tap in taps for place in places)
        return count
