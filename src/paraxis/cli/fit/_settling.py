"""All complaints about a file at once, and one command line that settles them.

A complaint carries remedies, options that would have avoided it. One is put in and the file is looked at again, until
there is nothing left to complain of. So the command line that is printed is one that has been tried.

It ends: a remedy sets an option that no other remedy has set, adds a column or a word that was not there, or takes
away a name that the user gave.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Container
from typing import Any, TypeVar

from paraxis.cli._errors import CommandError, Remedy
from paraxis.cli.fit._options import CsvForm, FitOptions, PredictOptions

_Options = TypeVar("_Options", FitOptions, PredictOptions)
_Found = TypeVar("_Found")

_COMMANDS = {FitOptions: "fit", PredictOptions: "predict"}
_FILES = ("model", "data")  # have no option's name before them


def settled(options: _Options, attempt: Callable[[_Options], _Found]) -> _Found:
    """Return what the attempt returns for these options.

    Raises:
        CommandError: if it refuses them: all that there is to complain of, and the options that it does not refuse.
    """
    complaints: list[str] = []
    beyond: list[str] = []
    put_aside: dict[str, Any] = {}
    tried, by_remedy = options, set[str]()
    while True:
        try:
            found = attempt(tried)
        except CommandError as error:
            better = (_remedied(tried, remedy, by_remedy) for remedy in error.remedies)
            chosen = next((found for found in better if found is not None), None)
            if chosen is not None:
                complaints += error.args
                tried = chosen
                continue
            beyond += error.args
            without = _remedied(tried, error.aside, by_remedy)
            if without is None:
                break
            put_aside |= {name: getattr(tried, name) for name in error.aside}
            tried = without
            continue
        if not complaints and not beyond:
            return found
        break
    tried = dataclasses.replace(tried, **put_aside)
    if not beyond:
        count = {1: "it", 2: "both"}.get(len(complaints), f"all {len(complaints)}")
        raise CommandError(*complaints, command=(f"this settles {count}:", command_line(tried)))
    if tried == options:
        raise CommandError(*complaints, *beyond)
    last, mended = (
        ("last of these is", "it is") if len(beyond) == 1 else (f"last {len(beyond)} of these are", "they are")
    )
    words = f"the {last} beyond any option; once {mended} mended, this settles the others:"
    raise CommandError(*complaints, *beyond, command=(words, command_line(tried)))


def command_line(options: FitOptions | PredictOptions) -> str:
    """Return the line to write in a shell for these options; those that are as they are by themselves are left out."""
    return " ".join(["paraxis", _COMMANDS[type(options)], *map(shell_word, _arguments(options))])


def shell_word(word: str) -> str:
    """Return a word as a shell reads it; what is not printable as Bash and Zsh do."""
    if word.isprintable():
        return shlex.quote(word)
    spelt = re.sub(r"[\\']", r"\\\g<0>", word)
    return "$'" + "".join(mark if mark.isprintable() else _escaped(mark) for mark in spelt) + "'"


def _remedied(options: _Options, remedy: Remedy, by_remedy: set[str]) -> _Options | None:
    """Return the options with a remedy put in, unless that cannot be; notes which are set."""
    new: Any = options
    try:
        for name, change in remedy.items():
            form = hasattr(CsvForm, name)
            holder = new.csv if form else new
            if not hasattr(holder, name) or (not _is_edit(change) and name in by_remedy):
                return None
            value = _changed(getattr(holder, name), change)
            needed = {getattr(options, "target", None), getattr(options, "weights", None)}
            if name in ("ignore", "id") and needed.intersection(value) - needed.intersection(getattr(holder, name)):
                return None
            holder = dataclasses.replace(holder, **{name: value})
            new = dataclasses.replace(new, csv=holder) if form else holder
    except CommandError:  # it does not go with another option
        return None
    by_remedy |= {name for name, change in remedy.items() if not _is_edit(change)}
    return None if new == options else new


def _is_edit(change: Any) -> bool:
    return callable(change) or isinstance(change, (list, tuple))


def _changed(old: Any, change: Any) -> Any:
    if callable(change):
        return change(old)
    return (*old, *(item for item in change if item not in old)) if _is_edit(change) else change


def form_words(form: CsvForm, without: Container[str] = ()) -> str:
    """Return the options of a command line for a form, but some."""
    return " ".join(map(shell_word, _arguments(form, without=without)))


def _arguments(options: Any, usual: CsvForm | None = None, without: Container[str] = ()) -> list[str]:
    words: list[str] = []
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if field.name in without:
            continue
        if isinstance(value, CsvForm):
            words += _arguments(value, getattr(options, "as_fitted", None)) if field.name == "csv" else []
        elif field.name in _FILES:
            words.append(os.path.join(".", value) if str(value).startswith("-") else str(value))
        elif isinstance(value, bool):
            words += [name] if value else []
        elif value != (field.default if usual is None else getattr(usual, field.name)):
            several = isinstance(value, (list, tuple)) and field.name != "strengths"
            for item in value if several else [value]:
                words += _option(name, _text(item))
    return words


def _option(name: str, text: str) -> list[str]:
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return "tab" if value == "\t" else str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _escaped(mark: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(mark))
