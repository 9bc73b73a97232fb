"""The notes of a run in its checkpoints: each field, as it must be to go on from there."""

from collections.abc import Mapping
from typing import Any

from paraxis._host import records

NAME = "fit"

_COUNT = records.integer(0)
_NUMBER = records.number(finite=False)
_SUMS = records.table_of(records.row(_NUMBER, _NUMBER))
_RECORD = records.row(_COUNT, _COUNT, records.table_of(_NUMBER))
_SHOWN = {
    "running": _SUMS,
    "window": _SUMS,
    "in_window": _COUNT,
    "points": records.list_of(records.row(_COUNT, _COUNT, _SUMS)),
    "stride": records.integer(1),
    "epochs": records.list_of(_RECORD),
    "evaluations": records.list_of(_RECORD),
}
_WATCHED = {
    "metric": records.text(),
    "mode": records.one_of("min", "max"),
    "best": records.either(records.nothing, _RECORD),
    "since": _COUNT,
}
_NOTE = records.fields(
    {
        "next": records.row(_COUNT, _COUNT, _COUNT, records.flag),
        "data": records.table_of(records.anything),
        "shown": records.fields(_SHOWN, more=True),
        "stop early": records.either(records.nothing, records.fields(_WATCHED, more=True)),
    },
    optional={
        "groups": records.either(records.nothing, _COUNT),
        "due": records.list_of(records.text()),
        "run": records.table_of(records.text()),
    },
    more=True,
)


def check(notes: Mapping[str, Any]) -> None:
    """Check the notes of a checkpoint, if a run wrote them.

    Raises:
        Wrong: naming the field that is not what it must be.
    """
    if NAME not in notes:
        return
    _NOTE(notes[NAME], NAME)
    watched = notes[NAME]["stop early"]
    if watched is not None and watched["best"] is not None and watched["metric"] not in watched["best"][2]:
        raise records.Wrong(f"{NAME}['stop early'] has no best {watched['metric']}")
