"""Calls that are right, made wrong one argument at a time, and the judge of how they end."""

import contextlib
import dataclasses
import inspect
import os
import random
import re
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import paraxis
from paraxis import ParaxisError
from tests.wrong_calls._values import WRONG, Kind, judged

EVERY_DAY, AT_NIGHT = 10, 300  # wrong calls of a name
MOST_SECONDS = 60
SOURCE = str(Path(paraxis.__file__).parent)
USERS_OWN = str(Path(__file__).with_name("_functions.py"))  # an error that comes from there is the user's own


@dataclasses.dataclass(frozen=True)
class Call:
    """A public name, and a call of it that succeeds.

    Attributes:
        name: as users write it.
        fn: what is called.
        arguments: makes, anew for each call, the value and the kind of each argument. Those whose names begin with
            ``*`` are passed by position: ``*x`` to the parameter ``x``, and ``*args[0]`` as one of several.
        then: what is done with the result, to see a mistake that can be noticed only then.
        left_out: wrong values that it is not given.
        documented: others' errors that its docstring promises, or that Python's protocols ask for.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Callable[[], Mapping[str, tuple[Any, Kind]]]
    then: Callable[[Any], Any] = lambda result: result
    left_out: tuple[str, ...] = ()
    documented: tuple[type[Exception], ...] = ()

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One way to make a call wrong: its name, what it changes, and the words of which the error must have one."""

    label: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    named: tuple[str, ...]


def mistakes(call: Call, number: int) -> list[tuple[Mistake, ...]]:
    """So many ways to make a call wrong, the same each time: single ones first; at night two at a time as well."""
    arguments = call.arguments()
    draw = random.Random(zlib.crc32(call.name.encode()))
    single = list(_single(call, arguments))
    draw.shuffle(single)
    found: list[tuple[Mistake, ...]] = [(mistake,) for mistake in single[:number]]
    values = [mistake for mistake in single if mistake.label.count(" = ")]
    while len(found) < number and len(arguments) > 1:
        found.append(tuple(draw.sample(values, 2)))
    return found


def _single(call: Call, arguments: Mapping[str, tuple[Any, Kind]]) -> Iterator[Mistake]:
    for number, (name, (value, _)) in enumerate(arguments.items()):
        words = {
            name.lstrip("*"),
            name.lstrip("*").partition("[")[0],
            *([f"args[{number}]", "no argument"] * name.startswith("*")),
        }
        for label in (label for label in WRONG if label not in call.left_out):
            yield Mistake(f"{name} = {label}", _replaced(name, label), tuple(words))
            if isinstance(value, dict) and value:
                yield Mistake(f"an item of {name} = {label}", _item_replaced(name, label), (*words, list(value)[-1]))
    if _is_bounded(call.fn):
        for name in arguments:
            if not name.startswith("*"):
                wrong = f"{name}s"
                yield Mistake(f"{name} is spelt {wrong}", _renamed(name, wrong), (wrong, name))
        words = ("argument", "positional", f"args[{len(arguments)}]")
        yield Mistake("an argument too many", lambda given: {**given, "*too many": 5}, words)


def _is_bounded(fn: Callable[..., Any]) -> bool:
    """Whether the function says how many arguments it takes."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _replaced(name: str, label: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, name: WRONG[label]()}


def _item_replaced(name: str, label: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(given[name], dict) or not given[name]:  # another mistake came first
            return given
        item = list(given[name])[-1]
        return {**given, name: {**given[name], item: WRONG[label]()}}

    return change


def _renamed(name: str, wrong: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {wrong if key == name else key: value for key, value in given.items()}


# --- the judge --------------------------------------------------------------------------------------------------------


class Hung(BaseException):
    """A call took too long."""


def flaw(error: BaseException | None, accepted: bool, named: Sequence[str]) -> str | None:
    """What is wrong with how a call ended; ``None``: nothing.

    Args:
        error: what was raised; ``None``: the call succeeded.
        accepted: whether the values are of their arguments' kinds.
        named: words of which the error's text must have one.
    """
    if error is None:
        return None if accepted else "it was taken"
    if isinstance(error, Hung):
        return "it hangs"
    if not isinstance(error, Exception):
        return f"it ends in {type(error).__name__}"
    if _is_users_own(error):
        return None
    if not (isinstance(error, ParaxisError) or type(error) in (TypeError, ValueError)):
        return f"it ends in somebody else's {type(error).__module__}.{type(error).__name__}"
    if accepted:  # as good as right: what does not fit is said by whoever met it
        return None
    words = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not any(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", words) for word in named):
        return f"the error does not name {' or '.join(named)}"
    if not _EXPECTATION.search(words):
        return "the error does not say what was expected"
    return None


_EXPECTATION = re.compile(
    r"\b(must|expected|write|pass|bind|give|needs?|requires?|takes?|missing|is not|no|cannot|such as|starts with|say"
    r"|there are|unexpected keyword|multiple values)\b",
    re.IGNORECASE,
)


def _is_users_own(error: BaseException) -> bool:
    """Whether it was raised in, or below, a function of the user's."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == USERS_OWN:
            return True
        at = at.tb_next
    return False


def print_of(x: Any) -> Any:
    """What can be compared of a value: arrays by their bits, modules and other objects by their attributes."""
    if isinstance(x, Tracer):
        return "a tracer"
    if isinstance(x, jax.Array):
        if x.is_deleted():
            return "deleted"
        return print_of(np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x))
    if isinstance(x, np.ndarray):
        return repr(x) if x.dtype == object else (x.shape, str(x.dtype), x.tobytes())
    if isinstance(x, (tuple, list)):
        return [print_of(item) for item in x]
    if isinstance(x, Mapping):
        return {name: print_of(item) for name, item in x.items()}
    if hasattr(x, "_paraxis_watched"):
        return print_of(x._paraxis_watched())
    if type(x).__module__.startswith(("flax", "tests.wrong_calls")) and hasattr(x, "__dict__"):
        from flax import nnx

        if isinstance(x, nnx.Module | nnx.Optimizer):
            return print_of(nnx.to_pure_dict(nnx.state(x)))
    return None


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        del number, frame
        raise Hung(f"no end after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(call: Call, given: Mapping[str, Any]) -> Any:
    """The call with these values."""
    by_position = [value for name, value in given.items() if name.startswith("*")]
    by_name = {name: value for name, value in given.items() if not name.startswith("*")}
    return call.then(call.fn(*by_position, **by_name))


def judge(call: Call, made: tuple[Mistake, ...], folder: Path) -> str | None:
    """Make a call wrong, and say what is wrong with how it ends and what it leaves; ``None``: nothing."""
    arguments = call.arguments()
    right = {name: value for name, (value, _) in arguments.items()}
    given = right
    for mistake in made:
        given = mistake.change(given)
    before = print_of(right), files_below(folder), dict(os.environ)
    error: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and NumPy warn of some of the values; how the call ends is the question
        accepted = set(given) == set(right) and all(
            given[name] is right[name] or judged(kind, given[name]) for name, (_, kind) in arguments.items()
        )
        try:
            with in_time(MOST_SECONDS):
                run(call, given)
        except (Exception, Hung, SystemExit) as raised:
            error = raised
    words = [word for mistake in made for word in mistake.named]
    words += [str(x) for x in given.values() if isinstance(x, (str, Path)) and str(x)]  # a path says which itself
    is_promised = isinstance(error, call.documented)
    found = None if is_promised else flaw(error, accepted, words)
    if found is not None:
        return f"{found}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}" if error else found
    after = print_of(right), files_below(folder), dict(os.environ)
    if error is not None and before != after:
        parts = zip(("an argument", "a file", "the environment"), before, after, strict=True)
        what = next(part for part, was, is_now in parts if was != is_now)
        return f"it leaves {what} changed: {type(error).__name__}: {error}"
    return None


def flaws(call: Call, number: int, folder: Path) -> dict[str, str]:
    """Of so many wrong calls, those that end badly; and whether the right one still succeeds after them."""
    run(call, {name: value for name, (value, _) in call.arguments().items()})
    found: dict[str, str] = {}
    for made in mistakes(call, number):
        label = f"{call.name}({', '.join(mistake.label for mistake in made)})"
        wrong = judge(call, made, folder)
        if wrong is not None:
            found[label] = wrong
    run(call, {name: value for name, (value, _) in call.arguments().items()})
    return found
