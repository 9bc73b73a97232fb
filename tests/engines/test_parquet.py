"""Clients as the rows of Parquet files that have one value in a column."""

import pickle

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import paraxis as px

rng = np.random.default_rng(0)
USERS = np.repeat(["ann", "bob", "cy", "di", "eve"], [3, 5, 2, 6, 4])
X = rng.normal(size=(20, 3)).astype("float32")
Y = rng.normal(size=20).astype("float32")


def write(folder, order) -> None:
    """Two files of small row groups; who stands in both, has rows in both."""
    table = pa.table({"user": USERS[order], "x": list(X[order]), "y": Y[order]})
    pq.write_table(table.slice(0, 11), folder / "part-0.parquet", row_group_size=4)
    pq.write_table(table.slice(11), folder / "part-1.parquet", row_group_size=4)


@pytest.mark.parametrize("order", [np.arange(20), rng.permutation(20)], ids=["sorted", "in any order"])
def test_the_rows_of_each_user_are_an_element(tmp_path, order):
    write(tmp_path, order)
    groups = px.Groups.parquet(tmp_path, by="user")
    assert sorted(groups.ids) == sorted(set(USERS))
    assert groups.lengths is not None
    for name, length, element in zip(groups.ids, groups.lengths, groups, strict=True):
        own = order[USERS[order] == name]
        assert length == len(own)
        np.testing.assert_array_equal(element["x"], X[own])
        np.testing.assert_array_equal(element["y"], Y[own])

    @px.program(clients=5)
    def loss(w, data):
        def of(w, data):
            return jnp.where(data.mask, (data.x @ w - data.y) ** 2, 0.0).sum() / data.count

        return px.reduce_mean(px.map_fn(of, (px.broadcast(w), data)))

    errors = (X.sum(1) - Y) ** 2
    expected = np.mean([errors[name == USERS].mean() for name in set(USERS)])
    np.testing.assert_allclose(px.Stream(at_once=1).run(loss, jnp.ones(3), groups), expected, rtol=1e-5)


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(px.DataError, match=r"folder must have \.parquet files, got none in"):
        px.Groups.parquet(tmp_path, by="user")
    write(tmp_path, np.arange(20))
    with pytest.raises(px.DataError, match=r"by must be a column of .*, which has user, x, y; got 'usr'"):
        px.Groups.parquet(tmp_path, by="usr")
    (tmp_path / "part-1.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(px.DataError, match=r"part-1\.parquet' cannot be read: Arrow"):
        px.Groups.parquet(tmp_path, by="user")


def test_text_is_no_number(tmp_path):
    pq.write_table(pa.table({"user": ["a", "b"], "x": ["one", "two"]}), tmp_path / "a.parquet")
    with pytest.raises(px.DataError, match=r"element 'a' \(number 0\) cannot be used: \['x'\] holds objects"):
        px.Groups.parquet(tmp_path, by="user")[0]


@pytest.mark.parametrize("users", [[1.0, 2.0, None], [1.0, 2.0, float("nan")], ["ann", None, "bob"]])
def test_rows_of_nobody_are_refused(tmp_path, users):
    pq.write_table(pa.table({"user": users, "y": [1.0, 2.0, 3.0]}), tmp_path / "part.parquet")
    with pytest.raises(px.errors.DataError, match=r"column 'user' of .*part\.parquet' has gaps; write a file without"):
        px.Groups.parquet(tmp_path, by="user")


def test_files_that_are_written_anew_during_a_run_are_named(tmp_path):
    """Where each user's rows lie was noted when the groups were made; in the new files, others may lie there."""
    write(tmp_path, np.arange(20))
    groups = px.Groups.parquet(tmp_path, by="user").sample(4, seed=0)
    write(tmp_path, np.arange(20)[::-1])
    with pytest.raises(
        px.DataError, match=r"cannot be read.*part-\d\.parquet' has changed since it was looked at first"
    ):
        px.Stream(at_once=1).run(lambda data: px.reduce_sum(data.count, px.Axis("users", 4)), groups)


@pytest.mark.parametrize("change", [lambda path: write(path.parent, np.arange(3)), lambda path: path.unlink()])
def test_files_that_have_fewer_rows_now_or_are_gone_are_named(tmp_path, change):
    write(tmp_path, np.arange(20))
    groups = px.Groups.parquet(tmp_path, by="user")
    change(tmp_path / "part-1.parquet")
    with pytest.raises(px.DataError, match=r"part-1\.parquet' (has changed|is gone) since it was looked at first"):
        groups[len(groups) - 1]


def test_another_process_reads_the_rows_of_its_users(tmp_path):
    write(tmp_path, np.arange(20))
    groups = px.Groups.parquet(tmp_path, by="user")
    again = pickle.loads(pickle.dumps(groups))
    assert again.ids == groups.ids
    for ours, theirs in zip(groups, again, strict=True):
        np.testing.assert_array_equal(ours["x"], theirs["x"])
