"""Elements that are read when they are needed: sources, elements of different length, cohorts, bad ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

LENGTHS = [4, 1, 7, 2, 7, 3, 0, 5]
rng = np.random.default_rng(0)
CLIENTS = [
    {"x": rng.normal(size=(n, 3)).astype("f"), "y": rng.normal(size=n).astype("f"), "rate": np.float32(n)}
    for n in LENGTHS
]
W = jnp.array([0.9, -0.4, 0.3])


def client_loss(w, data):
    """The mean over the rows that are real, times a number of the client's own."""
    squares = jnp.where(data.mask, (data["x"] @ w - data["y"]) ** 2, 0.0)
    return data["rate"] * squares.sum() / jnp.maximum(data.count, 1)


@px.program(clients=len(CLIENTS))
def ragged_loss(w, data):
    return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(w), data)))


def by_hand(clients):
    return np.mean([c["rate"] * np.square(c["x"] @ W - c["y"]).sum() / max(len(c["y"]), 1) for c in clients])


def test_groups_of_different_lengths_count_what_is_real():
    """One of them has no rows. On the mesh, padded, the program gives the same."""
    groups = px.Groups(CLIENTS, lengths=LENGTHS)
    value, gradient = px.Stream(at_once=1).run(jax.value_and_grad(ragged_loss), W, groups)
    np.testing.assert_allclose(value, by_hand(CLIENTS), rtol=1e-5)
    for ours, on_mesh in zip((value, gradient), jax.value_and_grad(ragged_loss)(W, groups.arrays()), strict=True):
        np.testing.assert_allclose(ours, on_mesh, rtol=1e-5)


def test_groups_of_different_lengths_have_no_common_rows():
    axis, groups = px.Axis("clients", len(CLIENTS)), px.Groups(CLIENTS, lengths=LENGTHS)
    for wrong in (lambda d: px.map_fn(lambda d: d["y"], d, axis), lambda d: px.reduce_sum(d["y"], axis)):
        with pytest.raises(px.AxisError, match="elements of different length have different numbers"):
            px.Stream(at_once=1).run(wrong, groups)


@pytest.mark.parametrize("by", [10, 1, -1, -2])
@pytest.mark.parametrize("wrong", range(5))
def test_groups_name_an_element_with_other_rows_than_lengths_says(wrong, by):
    """Whichever it is: the shortest, the longest, one between them."""
    own = [3, 5, 2, 7, 4]
    lengths = [n + by * (i == wrong) for i, n in enumerate(own)]
    with pytest.raises(px.DataError, match=r"^Groups: element \d .*lengths says \d+"):
        px.Groups([{"x": np.ones((n, 3), "float32")} for n in own], lengths=lengths).arrays()


def test_groups_choose_the_best_lengths_there_are():
    """Eight elements of each length are a chunk on eight devices: its length, or a greater one that is chosen."""
    values = sorted(np.random.default_rng(3).choice(np.arange(1, 60), 14, replace=False).tolist())
    lengths = np.repeat(values, 8)
    groups = px.Groups([{"x": np.zeros(n)} for n in lengths], lengths=lengths)
    axis = px.Axis("clients", len(lengths))
    found = px.Stream(at_once=1).passes(lambda d: px.reduce_sum(d.mask.sum(1), axis), groups).chunks
    choices = itertools.combinations(values[:-1], 11)
    best = min(sum(min(c for c in (*chosen, values[-1]) if c >= n) for n in values) for chosen in choices)
    assert sum(length or 0 for _, (length,) in found) == best


def test_groups_pad_an_element_with_its_arrays_mask_and_count():
    """Arrays of the user's that are called mask and count as well."""
    elements = [{**c, "mask": c["y"] > 0, "count": np.float32(i)} for i, c in enumerate(CLIENTS)]
    padded = px.Groups(elements, lengths=LENGTHS).arrays()
    assert padded["x"].shape == (8, 7, 3)
    np.testing.assert_array_equal(padded.mask.sum(1), LENGTHS)
    np.testing.assert_array_equal(padded.count, LENGTHS)
    np.testing.assert_array_equal(padded["count"], range(8))
    np.testing.assert_array_equal(padded["rate"], LENGTHS)
    assert (padded["x"][0, 4:] == CLIENTS[0]["x"][-1]).all()  # padding repeats a real row
    with pytest.raises(AttributeError):
        _ = padded.x


def test_groups_take_a_memory_mapped_array_and_a_source_that_gives_many_at_once(tmp_path):
    x = np.random.default_rng(2).normal(size=(20, 3)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    axis = px.Axis("rows", 20)
    asked = []

    class Many(list):
        def __getitems__(self, numbers):
            asked.append(len(numbers))
            return [x[number] for number in numbers]

    for groups in (px.Groups.of_arrays(np.load(tmp_path / "x.npy", mmap_mode="r")), px.Groups(Many(x))):
        result = px.Stream(at_once=1).run(lambda x: px.reduce_sum(x, axis), groups)
        np.testing.assert_allclose(result, x.sum(0), rtol=1e-5)
    assert sorted(asked) == [4, 8, 8]


def test_groups_draw_a_cohort_by_its_seed_alone():
    groups = px.Groups.of_arrays(np.arange(8))
    draw = lambda *seed: [int(x) for x in groups.sample(3, seed=seed)]  # noqa: E731
    assert draw(0, 5) == draw(0, 5)
    assert len(set(draw(0, 5))) == 3
    assert len({tuple(draw(0, r)) for r in range(4)}) > 1
    assert sorted(int(x) for x in groups.sample(3, seed=1).sample(3, seed=0)) == sorted(draw(1))
    assert [int(x) for x in px.Groups.of_arrays(np.arange(10)).sample(3, seed=(0, 1))] == [1, 5, 6]  # on any machine
    with pytest.raises(ValueError, match=r"count must be an integer of at least 1 and of at most 8.*got 9"):
        groups.sample(9, seed=0)


def test_groups_of_cohorts_share_what_was_traced():
    """All of a size are padded to the lengths that are best for the whole source."""
    traces = []

    @px.program(clients=3)
    def loss(w, data):
        traces.append(data["x"].shape)
        return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(w), data)))

    groups, run = px.Groups(CLIENTS, lengths=LENGTHS), px.Stream(at_once=1).jit(loss)
    for seed in range(6):
        cohort = groups.sample(3, seed=seed)
        np.testing.assert_allclose(run(W, cohort), by_hand(cohort), rtol=1e-5)
    assert len(set(traces)) == len(traces)


ROWS = {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.float32)}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "odd", [{"x": ROWS["x"], "t": ROWS["y"]}, {**ROWS, "x": ROWS["x"][:, :2]}, {**ROWS, "y": np.zeros(4, int)}, None]
)
def test_groups_name_an_element_that_looks_otherwise(odd, ragged):
    clients = [ROWS, ROWS, odd, {k: v[:2] for k, v in ROWS.items()}][: 3 + ragged]
    with pytest.raises(px.DataError, match=r"element 2 is (?!.*64).*, and not \['x'\] float32\[4, 3\]"):
        px.Groups(clients, lengths=[4, 4, 4, 2] if ragged else None).arrays()


class Endless:  # NumPy, which looks for an IndexError, would read it for ever
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> float:
        assert number < 9
        return float(number)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: px.Groups([1, 2], lengths=[1]), r"cannot reshape array of size 1 into shape \(2,\)"),
        (lambda: px.Groups([1, 2], lengths=[1.5, 2]), "'float' object cannot be interpreted as an integer"),
        (lambda: px.Groups.of_arrays({"a": np.zeros(3), "b": np.zeros(2)}), "arrays of equally many rows"),
        (lambda: px.Stream(at_once=1).map(jnp.sin, Endless()), r"got \(\); write px.Groups\(source\)"),
        (lambda: px.pmap(jnp.sin)(Endless()), "valid JAX type"),
        (lambda: px.map_fn(jnp.sin, Endless(), px.Axis("x", 2)), "valid JAX type|Cannot interpret value"),
        (lambda: px.Groups([{"x": np.array([2**40])}])[0], r"element 0\['x'\] holds 1099511627776"),
        (lambda: px.Stream(at_once=0), r"at_once must be .*got 0"),
        (lambda: px.Stream(), "give at_once or memory, not both"),
        (lambda: px.Stream(at_once=1, memory="2GB"), "give at_once or memory, not both"),
        (lambda: px.Stream(memory="much"), r"text such as '2GB', got 'much'"),
        (lambda: px.Stream(memory="1GB", map=map), "with map at_once"),
    ],
)
def test_groups_refuse_bad_arguments(make, text):
    with pytest.raises((px.DataError, ValueError, TypeError), match=text):
        make()
