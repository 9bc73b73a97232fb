"""What a release says of itself: one version, one licence, the same authors, and each extra explained and tried."""

import re

import paraxis as px
from tests.packaging._programs import PROGRAMS
from tests.packaging._project import EXTRAS, FOR_USERS, PROJECT, ROOT


def cited(key: str) -> str:
    """Return what ``CITATION.cff`` has under a key."""
    match = re.search(rf"^[ -]*{key}: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert match, key
    return match[1].strip('"')


def test_the_citation_says_what_the_project_says() -> None:
    assert cited("version") == px.__version__
    assert cited("license") == PROJECT["license"]
    assert [cited("name")] == [author["name"] for author in PROJECT["authors"]]
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^  - (?!name)(.*)$", text, re.MULTILINE) == PROJECT["keywords"]
    assert f"Copyright 2026 {cited('name')}" in (ROOT / "LICENSE").read_text("utf-8")


def test_the_change_log_ends_with_this_version() -> None:
    log = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## \[?(\d[^] ]*)", log, re.MULTILINE) or ["0.1.0"]  # before the first release
    assert released[0] == px.__version__


def test_each_extra_has_a_program_that_is_run_with_it() -> None:
    assert {*PROGRAMS} == {"bare", *EXTRAS}


def test_each_extra_for_users_is_on_the_page_about_installing() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(FOR_USERS)
