"""Surroundings of functions: what they read besides their arguments, what that is called, whether it has changed.

A compiled function goes on with what it read while it was traced. So that nobody gets an old answer in silence, the
places that its code names are looked at before each call: closures, globals, attributes, items, and what these hold.
"""

import array
import collections
import contextlib
import contextvars
import functools
import gc
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_AT_MOST = 500  # places that are looked at before each call, nearest first
_SMALL = 1 << 16  # bytes of a NumPy array that is compared; of a larger one nobody notices what is written into it
_LIBRARIES = (
    *(
        "chex",
        "drjax",
        "equinox",
        "flax",
        "grain",
        "haiku",
        "jax",
        "jaxlib",
        "jaxtyping",
        "matplotlib",
        "numpy",
        "optax",
    ),
    *("orbax", "pandas", "paraxis", "penzai", "polars", "pyarrow", "ray", "scipy", "sklearn", "tensorflow", "torch"),
)
_MISSING: Any = object()
_NUMBERS = (bool, int, float, complex, str, bytes)
_NOT_CALLED = (
    "__init__",
    "__new__",
    "__init_subclass__",
    "__class_getitem__",
    "__repr__",
    "__module__",
    "__dict__",
    "__doc__",
    "__weakref__",
    "__slots__",
    "__annotations__",
    "__static_attributes__",
    "__firstlineno__",
)
"""Attributes of a class that nothing reads which uses its objects."""
_BY_ANY_NAME = frozenset({"vars", "__dict__", "getattr", "asdict", "astuple", "fields"})
"""Names in code that may read attributes by names that are not in it."""


class Place(NamedTuple):
    """Something that is read.

    Args:
        name: what it is called, as a user would write it.
        value: what is there.
        holder, key: where it can be read again, a cell or a mapping; or what is itself changed, a list or an array.
            ``None`` if it cannot be another.
    """

    name: str
    value: Any
    holder: Any = None
    key: Any = None

    def now(self) -> Any:
        """Return what is there now; no code of users' runs."""
        if isinstance(self.holder, dict):
            return dict.get(self.holder, self.key, _MISSING)
        if isinstance(self.holder, types.CellType):
            return _content(self.holder)
        return self.holder.get(self.key, _MISSING)

    @property
    def which(self) -> tuple[int, Any]:
        """Return what tells this place from others, while its holder is there."""
        return id(self.holder.x if isinstance(self.holder, (_Slots, _Context, _Values)) else self.holder), self.key


class Surroundings:
    """Everything that functions read, as it was when this was made.

    Args:
        functions: where to begin.
        ignored: places that are not looked at, by what tells them from others.
        objects: whose own attributes are noticed otherwise; what their methods read is looked at.
        is_object: whether something that they hold is another such object.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        ignored: Mapping[Any, Any] = types.MappingProxyType({}),
        objects: Sequence[Any] = (),
        is_object: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._places: list[Place] = []
        self._lists: list[tuple[Place, tuple[Any, ...]]] = []
        self._arrays: list[tuple[Place, bytes]] = []
        self._ignored, self._is_object = ignored, is_object
        self._names = frozenset[str]()
        names: frozenset[str] | None = None
        while names != self._names:  # code that is found by more names has more of them
            names = self._names
            self._places, self._lists, self._arrays = [], [], []
            self._look(
                [*((Place("f", fn), False) for fn in functions), *((Place(_named(x), x), True) for x in objects)]
            )

    def changed(self) -> list[Place]:
        """Return the places where something else is now."""
        found = [
            place
            for place in self._places
            if (now := place.now()) is not place.value and not _is_same(now, place.value)
        ]
        found += [p for p, then in self._lists if not _holds(p.holder, then)]
        found += [p for p, then in self._arrays if _bytes_of(p.holder) != then]
        return found

    def _look(self, places: list[tuple[Place, bool]]) -> None:
        queue, of_nnx = collections.deque(places), collections.deque[tuple[Place, bool]]()
        seen: dict[int, Any] = {}  # kept, so that no other object takes its id
        for later in (of_nnx, None):  # of which a net has so many that others would have no place
            most, most_seen = len(self._places) + _AT_MOST, len(seen) + 4 * _AT_MOST
            while queue and len(self._places) < most and len(seen) < most_seen:
                place, is_apart = queue.popleft()
                if later is not None and (_is_nnx_variable(place.value) or _is_nnx_module(place.value)):
                    later.append((place, is_apart))
                    continue
                with contextlib.suppress(Exception):  # objects of others may do anything when they are looked at
                    queue.extend(self._look_at(place, seen, is_apart=is_apart))
            queue = of_nnx

    def _look_at(self, place: Place, seen: dict[int, Any], *, is_apart: bool) -> list[tuple[Place, bool]]:
        """Keep what can be another later, and return what this one holds."""
        x = place.value
        is_number = type(x) in _NUMBERS or x is None or x is _MISSING
        is_fixed = place.holder is None or (isinstance(x, (types.ModuleType, type)) and not _may_change(x))
        if not (is_fixed or is_apart or place.which in self._ignored):
            self._places.append(place)
        if is_number or id(x) in seen:
            return []
        seen[id(x)] = x
        self._names |= names_in(x)
        is_apart = is_apart and (isinstance(x, (list, tuple, dict)) or self._is_object(x))
        itself = Place(place.name, x, x)
        if itself.which not in self._ignored and not is_apart:
            if _num_bytes(x) <= _SMALL:
                self._arrays.append((itself, _bytes_of(x)))
            if isinstance(x, (list, dict, set, collections.deque)) and len(x) <= _AT_MOST:
                self._lists.append((itself, tuple(x)))
            if _is_nnx_module(x):
                self._lists.append((Place(place.name, x, _Values(x)), tuple(_Values(x))))
        is_code = isinstance(x, types.FunctionType)
        held = parts(place.name, x, self._names)
        if is_apart:  # what a variable of theirs holds is noticed otherwise
            held = (part for part in held if not _is_nnx_variable(part.value))
        return [(part, is_apart and not is_code and _code_of(part.value) is None) for part in held]


def _named(x: Any) -> str:
    return type(x).__name__


def _code_of(x: Any) -> Any:
    """Return the function that an attribute of a class runs; ``None`` if it does not run."""
    for kind, name in ((property, "fget"), (functools.cached_property, "func"), (staticmethod, "__func__")):
        x = getattr(x, name) if isinstance(x, kind) else x
    x = x.__func__ if isinstance(x, (classmethod, types.MethodType)) else x
    return x if isinstance(x, types.FunctionType) else None


class Reads:
    """Everything that functions read, as it was before and after they were traced.

    A place that they write themselves meanwhile is not looked at again.

    Args:
        functions, objects, is_object: as for :class:`Surroundings`.
    """

    def __init__(
        self, functions: Sequence[Any], objects: Sequence[Any] = (), is_object: Callable[[Any], bool] = lambda _: True
    ) -> None:
        self._functions, self._objects = functions, (objects, is_object)
        self._ignored: dict[Any, Any] = {}  # with the holder, so that no other object takes its id
        self._seen: Surroundings | None = None

    def begin(self) -> None:
        """Look at everything, before the functions are traced."""
        self._seen = Surroundings(self._functions, self._ignored, *self._objects)

    def end(self) -> None:
        """Look again, after they were traced and called: what has changed since was written by them."""
        self._ignored |= {place.which: place.holder for place in self.changed()}
        self.begin()

    def changed(self) -> list[Place]:
        """Return the places where something else is now."""
        return [] if self._seen is None else self._seen.changed()


def classes_in(x: Any) -> list[type]:
    """Return the classes of users of which a model is made, whose methods read what they read."""
    queue, seen, found = collections.deque([x]), {id(None): None}, dict[type, None]()
    while queue and len(seen) < 4 * _AT_MOST:
        x = queue.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if not is_library(type(x).__module__):
            found[type(x)] = None
        held = vars(x) if hasattr(x, "__dict__") and _may_change(x) else x
        if isinstance(held, (dict, list, tuple)):
            queue.extend(held.values() if isinstance(held, dict) else held)
    return list(found)


def parts(name: str, x: Any, used: frozenset[str], *, every: bool = False) -> Iterator[Place]:
    """Yield what a thing holds, and where.

    Args:
        name: what it is called.
        x: anything. Of code, what it reads by name; of modules and objects, the attributes in ``used``.
        used: names in the code that led there.
        every: whether to yield all attributes of objects, besides.
    """
    if isinstance(x, types.FunctionType):
        yield from _of_function(x)
    elif isinstance(x, functools.partial):
        yield from (Place(f"{name}.args[{i}]", arg) for i, arg in enumerate(x.args))
        yield from (Place(f"{name}.keywords[{key!r}]", y, x.keywords, key) for key, y in x.keywords.items())
        yield Place(f"{name}.func", x.func)
    elif isinstance(x, types.MethodType):
        yield Place("self", x.__self__)
        yield Place(name, x.__func__)
    elif isinstance(x, (property, functools.cached_property, staticmethod, classmethod)):
        yield Place(name, _code_of(x))
    elif isinstance(x, (list, tuple, collections.deque)):
        yield from (Place(f"{name}[{i}]", item) for i, item in enumerate(itertools.islice(x, _AT_MOST)))
    elif isinstance(x, dict):
        first = itertools.islice(dict.items(x), None if every else _AT_MOST)
        yield from (Place(f"{name}[{key!r}]", y, x if isinstance(key, _NUMBERS) else None, key) for key, y in first)
    elif isinstance(x, types.MappingProxyType):
        yield from (Place(name, held) for held in gc.get_referents(x))
    elif isinstance(x, contextvars.ContextVar):
        yield Place(f"{name}.get()", x.get(_MISSING), _Context(x))
    elif isinstance(x, weakref.ref):
        yield Place(f"{name}()", x())
    elif _is_nnx_variable(x):
        variable = _Variable(x)
        yield Place(f"{name}.value", variable.get("_raw_value", _MISSING), variable, "_raw_value")
        if not is_library(type(x).__module__):
            yield from _attributes(name, x, used, every=every)
    elif _is_nnx_module(x):
        yield from (Place(f"{name}.{key}", y) for key, y in vars(x).items() if _may_hold(y))
    elif _may_change(x):
        yield from _attributes(name, x, used, every=every)
    elif "__wrapped__" in (own := _dict_of(x)):  # a program, jax.custom_jvp with its rule, another wrapped function
        yield from (Place(name, own[key]) for key in ("__wrapped__", "jvp", "fwd", "bwd") if key in own)


def names_in(x: Any) -> frozenset[str]:
    """Return the names in a function's or a method's code; none for anything else."""
    x = x.__func__ if isinstance(x, types.MethodType) else x
    return names_of(x.__code__) if isinstance(x, types.FunctionType) else frozenset()


@functools.cache
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names in code, and in code within; and texts that may be names, as they are and after ``=``."""
    texts = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    inner = (names_of(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return frozenset({*code.co_names, *texts, *(f"={text}" for text in texts)}).union(*inner)


def of_globals(code: types.CodeType, values: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the globals that code may use, by the names in it, and modules that it may import."""
    for name in sorted(names_of(code)):
        holder = values if name in values else sys.modules
        if name in holder:
            yield Place(name, holder[name], holder, name)


def _of_function(fn: types.FunctionType) -> Iterator[Place]:
    defaults = fn.__defaults__ or ()
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    own = not is_library(fn.__module__)
    yield from map(Place, positional[len(positional) - len(defaults) :], defaults)
    named = fn.__kwdefaults__ or {}
    yield from (Place(name, value, named if own else None, name) for name, value in named.items())
    if own and defaults:
        yield Place(f"{fn.__name__}.__defaults__", defaults, _Slots(fn), "__defaults__")
    if own:
        yield from (Place(f"{fn.__name__}.{key}", x, fn.__dict__, key) for key, x in fn.__dict__.items())
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield Place(name, _content(cell), cell if own else None)
    if own:
        yield from of_globals(fn.__code__, fn.__globals__)


def _attributes(name: str, x: Any, used: frozenset[str], *, every: bool) -> Iterator[Place]:
    own = _dict_of(x)
    is_named = isinstance(x, (types.ModuleType, type))
    if isinstance(x, types.ModuleType):
        yield from (Place(f"{name}.{key}", own[key], own, key) for key in used if key in own)
        return
    classes = [kind for kind in (x if isinstance(x, type) else type(x)).__mro__ if not is_library(kind.__module__)]
    slots = {slot for kind in classes for slot in _slots(kind)}
    of_classes = {key for kind in classes for key in vars(kind) if key not in _NOT_CALLED}
    # Of Python's own classes, such as UserDict, nobody sees by which names methods read attributes.
    every = every or (isinstance(own, dict) and not is_named and not (classes and used.isdisjoint(_BY_ANY_NAME)))
    asked = {*own, *slots, *of_classes} if every else {key for key in of_classes if key.startswith("__")}
    for key in sorted({*used, *asked}):
        if key in slots:
            yield Place(f"{name}.{key}", _Slots(x).get(key, _MISSING), _Slots(x), key)
        elif not is_named and key in own:
            yield Place(f"{name}.{key}", own[key], own, key)
        elif isinstance(own, dict) and not is_named and (key in of_classes or f"={key}" in used) and key[:2] != "__":
            yield Place(f"{name}.{key}", _MISSING, own, key)  # it may get one of its own
        for owner in (vars(kind) for kind in classes if key in vars(kind) and key not in slots):
            yield Place(f"{name}.{key}", owner[key], owner, key)


def _dict_of(x: Any) -> Any:
    """Return the attributes of an object that are its own; no code of users' runs."""
    if isinstance(x, type):
        return vars(x)
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:  # it has slots
        return {}


class _Slots:
    """The attributes of an object without a dict, as a mapping."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def get(self, key: str, default: Any) -> Any:
        kind = next((kind for kind in type(self.x).__mro__ if key in vars(kind)), None)
        try:
            return default if kind is None else vars(kind)[key].__get__(self.x)  # no code of users'
        except AttributeError:  # nothing is there
            return default


class _Variable(_Slots):
    """The value of a variable of NNX, as a mapping. A net has hundreds, read at each call: how, is looked for once."""

    def __init__(self, x: Any) -> None:
        super().__init__(x)
        self._read = type(x)._raw_value.__get__

    def get(self, key: str, default: Any) -> Any:
        return self._read(self.x)


class _Values:
    """The attributes of an object, as a list."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(vars(self.x))

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self.x).values())


class _Context:
    """The value of a context variable, as a mapping."""

    def __init__(self, x: contextvars.ContextVar[Any]) -> None:
        self.x = x

    def get(self, _: Any, default: Any) -> Any:
        return self.x.get(default)


def _num_bytes(x: Any) -> float:
    """Return how many bytes can be compared; infinitely many of what has none."""
    if isinstance(x, (bytearray, array.array)):
        return memoryview(x).nbytes
    return x.nbytes if isinstance(x, np.ndarray) and x.dtype != object else np.inf


def _bytes_of(x: Any) -> bytes:
    return x.tobytes() if isinstance(x, np.ndarray) else bytes(memoryview(x))


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    yield from [slots] if isinstance(slots, str) else slots


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _MISSING


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module, by its name, is part of Python or of a well-known library, whose globals stay."""
    package = (module or "builtins").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


def _may_change(x: Any) -> bool:
    """Return whether attributes may be others later: not those of libraries, but of a plain ``argparse.Namespace``."""
    if isinstance(x, (types.ModuleType, type)):
        return not is_library(x.__name__ if isinstance(x, types.ModuleType) else x.__module__)
    return type(x).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(x, (*_NUMBERS, type(None)))


def _is_nnx_variable(x: Any) -> bool:
    return _is_of_nnx(x, "Variable")


def _is_nnx_module(x: Any) -> bool:
    """Return whether an object is one of NNX's own layers or containers, of a class that no user has written."""
    return is_library(type(x).__module__) and _is_of_nnx(x, "Pytree")


def _is_of_nnx(x: Any, name: str) -> bool:
    """Return whether it is of one of NNX's base classes, which are known by name here: Flax need not be there."""
    kinds = type(x).__mro__
    return any(kind.__name__ == name and kind.__module__.startswith("flax.nnx.") for kind in kinds)


def _may_hold(x: Any) -> bool:
    """Return whether an attribute of a module of NNX's may hold what can change, or is code of users'."""
    if isinstance(x, types.FunctionType):
        return not is_library(x.__module__)
    of_nnx = _is_nnx_variable(x) or _is_nnx_module(x)
    return of_nnx or isinstance(x, (list, tuple, dict)) or _may_change(x)


def _holds(x: Any, then: tuple[Any, ...]) -> bool:
    """Return whether a list has these items, or a dict these keys; values of dicts have places of their own."""
    return len(x) == len(then) and all(map(operator.is_, dict.keys(x) if isinstance(x, dict) else x, then))


def _is_same(now: Any, then: Any) -> bool:
    """Return whether two values are equal numbers or texts, of one type."""
    if type(now) is not type(then):
        return False
    if type(now) is tuple:
        return len(now) == len(then) and all(a is b or _is_same(a, b) for a, b in zip(now, then, strict=True))
    return type(now) in _NUMBERS and (now == then or now != now) and repr(now) == repr(then)
