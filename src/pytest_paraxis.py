"""The pytest plugin of Paraxis: the fixture ``paraxis_snapshot``. It imports nothing else before a test asks for it."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paraxis.testing import Snapshot


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    parser.getgroup("paraxis").addoption(
        "--paraxis-update",
        action="store_true",
        help="write what the fixture paraxis_snapshot is called with into its files, instead of comparing",
    )


@pytest.fixture
def paraxis_snapshot(request: pytest.FixtureRequest) -> "Snapshot":
    """Compare what a compiled function sends, computes and holds with a text file beside the test."""
    from paraxis.testing import Snapshot

    path = request.path.with_name(f"{request.path.stem}.paraxis.txt")
    name = request.node.nodeid.partition("::")[2]
    return Snapshot(path, name, update=bool(request.config.getoption("--paraxis-update")))
