"""No public face: what writes files does more besides. A file is there whole, or as it was."""

import os
import threading
from pathlib import Path

import pytest

from paraxis._host import files

pytestmark = pytest.mark.floor


@pytest.mark.parametrize("error", [None, OSError("no space left"), KeyboardInterrupt("stop")], ids=str)
@pytest.mark.parametrize("old", [b"old", None])
def test_a_file_is_there_whole_or_as_it_was(error: BaseException | None, old: bytes | None, tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    target.parent.mkdir()
    if old:
        target.write_bytes(old)

    def save() -> None:
        with files.replaced(target) as file:
            file.write(b"new")
            assert (target.read_bytes() if target.exists() else None) == old
            if error is not None:
                raise error

    if error is None:
        save()
        (plain := tmp_path / "plain").touch()
        assert target.stat().st_mode == plain.stat().st_mode  # what the umask allows
    else:
        with pytest.raises(type(error), match=str(error)):
            save()
    expected = {"file": b"new"} if error is None else {"file": old} if old else {}
    assert {path.name: path.read_bytes() for path in target.parent.iterdir()} == expected


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    read = list[bytes]()
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with files.replaced(pipe) as file:
        file.write(b"new")
    reader.join()
    assert read == [b"new"]
    assert pipe.is_fifo()
    assert [*tmp_path.iterdir()] == [pipe]
