"""Arguments that are returned changed, as by a step: known by the paths, shapes and dtypes of their arrays."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paraxis.reports._values import Layout


@dataclasses.dataclass(frozen=True)
class State:
    """An argument, and what of the results has its arrays, with the same paths, shapes and dtypes.

    ``is_sure``: no other argument could be the one that is returned; ``is_tree``: it is more than one bare array.
    """

    name: str
    given: Sequence[Layout]
    made: Sequence[Layout]
    is_sure: bool
    is_tree: bool


def of(given: dict[str, list[Layout]], results: Sequence[Layout]) -> Iterator[State]:
    """Yield each argument that is returned changed: a part of the results is of one argument.

    Trees come before bare arrays, which fit in more places, and what is donated before what is not.
    """
    by_name = {array.name: array for array in results}
    trees = {name: tuple((array.name.removeprefix(name), *kind(array)) for array in given[name]) for name in given}
    alike = collections.Counter(trees.values())
    starts: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for array in results:
        starts.setdefault(kind(array), []).append(array.name)
    places = {tree: list(_places(by_name, starts.get(tree[0][1:], []), tree)) for tree in alike}
    is_sure = {tree: alike[tree] <= len(places[tree]) for tree in alike}
    taken: set[str] = set()
    for found in places.values():
        found.reverse()  # the first is the next to be taken

    def order(name: str) -> tuple[bool, bool]:
        return _is_bare(trees[name]), not any(array.is_donated for array in given[name])

    for name in sorted(given, key=order):
        tree = trees[name]
        while places[tree]:
            start = places[tree].pop()
            made = [start + path for path, *_ in tree]
            if taken.isdisjoint(made):
                taken.update(made)
                yield State(name, given[name], [by_name[path] for path in made], is_sure[tree], not _is_bare(tree))
                break


_Tree = tuple[tuple[str, tuple[int, ...], str], ...]
"""The paths, shapes and dtypes of an argument's arrays."""


def _is_bare(tree: _Tree) -> bool:
    return not tree[0][0]


def _places(results: Mapping[str, Layout], first: Sequence[str], tree: _Tree) -> Iterator[str]:
    """Yield where in the results there is a tree with these arrays; ``first``: results that may be its first one."""
    path, *_ = tree[0]
    for name in first:
        start = name.removesuffix(path)
        if name.endswith(path) and all(_is_of(results, start, *leaf) for leaf in tree):
            yield start


def _is_of(results: Mapping[str, Layout], start: str, path: str, shape: tuple[int, ...], dtype: str) -> bool:
    found = results.get(start + path)
    return found is not None and kind(found) == (shape, dtype)


def kind(array: Layout) -> tuple[tuple[int, ...], str]:
    """Return what arrays have in common that can lie in the same memory."""
    return array.shape, array.dtype
