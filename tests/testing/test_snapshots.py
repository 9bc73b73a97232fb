"""Records of compiled functions: a number that grows fails with both numbers and the line that it comes from."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import Snapshot

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.newest

ROWS = px.Axis("rows", 16)
X = jax.ShapeDtypeStruct((16, 4, 4), jnp.float32)
ROOT = Path(__file__).resolve().parents[2]


def largest(x):
    return px.reduce_max(px.map_fn(lambda x: x @ x, x, ROWS), ROWS)


def largest_and_smallest(x):
    y = px.map_fn(lambda x: x @ x @ x, x, ROWS)
    return px.reduce_max(y, ROWS), px.reduce_min(y, ROWS)  # two


def sum_and_mean(x):
    y = px.map_fn(jnp.sin, x, ROWS)
    total = px.reduce_sum(y, ROWS)  # sum
    return total, px.reduce_mean(y**2, ROWS)  # mean


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test_model.paraxis.txt"


def test_what_is_recorded_is_text_that_a_reviewer_can_read(path: Path) -> None:
    Snapshot(path, "test_b", update=True)(largest, X)
    snapshot = Snapshot(path, "test_a[1-x]", update=True)
    snapshot(jnp.sum, jnp.ones(8))
    snapshot(jnp.max, jnp.ones(8))
    text = path.read_text("utf-8")
    names = [line for line in text.splitlines() if line.startswith("[")]
    assert names == ["[test_a[1-x]]", "[test_a[1-x] (2)]", "[test_b]"]
    recorded = text.partition("[test_b]\n")[2].splitlines()
    assert recorded[:4] == [
        "devices: 8",
        "all_reduce along rows, bytes: 64",
        "all_reduce along rows, times: 1",
        "flops: 256",
    ]
    assert recorded[4] == "argument bytes: 128"
    assert Snapshot(path, "test_b")(largest, X).work.flops == 256
    Snapshot(path, "test_b", update=True)(largest, X)
    assert path.read_text("utf-8") == text


def test_what_grows_fails_with_numbers_and_lines_and_what_shrinks_does_not(path: Path) -> None:
    Snapshot(path, "test", update=True)(largest, X)
    here = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("  # two"))
    with pytest.raises(AssertionError) as error:
        Snapshot(path, "test")(largest_and_smallest, X)
    lines = str(error.value).splitlines()
    assert lines[0] == f"test is not as recorded in {path}:"
    assert "  all_reduce along rows, bytes: 64 → 128 (+100%)" in lines
    assert f"    {Path(__file__).name}:{here}   return px.reduce_max(y, ROWS), px.reduce_min(y, ROWS)  # two" in lines
    assert "  flops: 256 → 512 (+100%)" in lines
    assert lines[-1] == "if this is meant, run pytest --paraxis-update"
    Snapshot(path, "test")(largest_and_smallest, X, tolerance=3)
    with pytest.raises(AssertionError, match=r"\n    .* # sum\n    .* # mean\n"):
        Snapshot(path, "test")(sum_and_mean, X)
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    gather = jax.jit(lambda x: x, in_shardings=NamedSharding(mesh, P("rows")), out_shardings=NamedSharding(mesh, P()))
    with pytest.raises(AssertionError, match=r"all_gather along rows, bytes: 0 → 1,024 \(new\)"):
        Snapshot(path, "test")(gather, X, tolerance=100)


def test_what_cannot_be_compared_says_why(path: Path) -> None:
    with pytest.raises(AssertionError, match=r"test is not recorded in .*; run pytest --paraxis-update"):
        Snapshot(path, "test")(largest, X)
    Snapshot(path, "test", update=True)(largest, X)
    with pytest.raises(AssertionError, match="recorded on 8 devices, and now on 1"):
        Snapshot(path, "test")(jnp.sum, jnp.ones(3))
    for text in ("flops: 3\n", "[test]\nflops: many\n", "[test]\n3\n", b"[test]\n\xff"):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=r"line \d must be 'name: number'.*delete the file"):
            Snapshot(path, "test", update=True)(jnp.sum, jnp.ones(3))
        assert path.read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_the_fixture_records_beside_the_test_and_compares(pytester: pytest.Pytester) -> None:
    test = "import jax.numpy as jnp\ndef test_sum(paraxis_snapshot):\n    paraxis_snapshot({}, jnp.ones((4, 4)))\n"
    pytester.makepyfile(test_model=test.format("lambda x: x @ x"))
    options = ("-p", "pytest_paraxis", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*options).assert_outcomes(failed=1)
    pytester.runpytest_inprocess(*options, "--paraxis-update").assert_outcomes(passed=1)
    recorded = (pytester.path / "test_model.paraxis.txt").read_text()
    assert "[test_sum]\ndevices: 1\nflops: 128\n" in recorded
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=1)
    pytester.makepyfile(test_model=test.format("lambda x: x @ x @ x"))
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*flops: 128 → 256 (+100%)"])


def test_the_plugin_imports_nothing_before_it_is_used() -> None:
    code = "import sys, pytest_paraxis; print(sorted({'jax', 'numpy', 'paraxis'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout == "[]\n"
