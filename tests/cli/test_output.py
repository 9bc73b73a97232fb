"""No public face: the demo would have to train before each of its files is written.

They are there whole or not at all.
"""

from pathlib import Path

import pytest

from paraxis.cli.demo._output import whole_file


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "plot.png"
    target.write_text("old")
    with whole_file(target) as path:
        path.write_text("new")
        assert target.read_text() == "old"
        assert path.suffix == ".png"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "plot.png"
    target.write_text("old")

    def half_written() -> None:
        with whole_file(target) as path:
            path.write_text("half")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        half_written()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
