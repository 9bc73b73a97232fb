"""Elements that are read when they are needed: sources, elements of different length, cohorts, bad ones."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

LENGTHS = [4, 1, 7, 2, 7, 3, 0, 5]
rng = np.random.default_rng(0)
CLIENTS = [
    {
        "x": rng.normal(size=(n, 3)).astype("float32"),
        "y": rng.normal(size=n).astype("float32"),
        "rate": np.float32(n + 1),
    }
    for n in LENGTHS
]
W = jnp.array([0.9, -0.4, 0.3])


def client_loss(w, data):
    """The mean over the rows that are real, times a number of the client's own."""
    squares = jnp.where(data.mask, (data.x @ w - data.y) ** 2, 0.0)
    return data.rate * squares.sum() / jnp.maximum(data.count, 1)


@px.program(clients=len(CLIENTS))
def ragged_loss(w, data):
    return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(w), data)))


def by_hand(w: np.ndarray) -> float:
    each = [c["rate"] * np.square(c["x"] @ w - c["y"]).sum() / max(len(c["y"]), 1) for c in CLIENTS]
    return float(np.mean(each))


@pytest.mark.parametrize("num_shapes", [1, 2])
def test_elements_of_different_length_count_what_is_real(num_shapes):
    groups = px.Groups(CLIENTS, lengths=LENGTHS, num_shapes=num_shapes)
    value, gradient = px.Stream(at_once=1).run(jax.value_and_grad(ragged_loss), W, groups)
    np.testing.assert_allclose(value, by_hand(np.asarray(W)), rtol=1e-5)
    step = 1e-3 * np.eye(3)
    finite = [(by_hand(np.asarray(W) + d) - by_hand(np.asarray(W) - d)) / 2e-3 for d in step]
    np.testing.assert_allclose(gradient, finite, rtol=1e-3)
    np.testing.assert_allclose(ragged_loss(W, groups.arrays()), value, rtol=1e-5)


def test_results_of_elements_of_different_length_are_in_the_order_of_the_elements():
    clients = CLIENTS * 2
    groups = px.Groups(clients, lengths=LENGTHS * 2, num_shapes=2)
    axis = px.Axis("clients", len(clients))
    sums = px.Stream(at_once=1).run(lambda d: px.map_fn(lambda d: jnp.where(d.mask, d.y, 0).sum(), d, axis), groups)
    np.testing.assert_allclose(sums, [c["y"].sum() for c in clients], rtol=1e-5, atol=1e-6)
    with pytest.raises(px.LoweringError, match="elements of different length have different numbers"):
        px.Stream(at_once=1).run(lambda d: px.map_fn(lambda d: d.y, d, axis), groups)


def test_values_of_different_length_cannot_be_put_together():
    """Not even where one has length 1, which would be repeated."""
    groups = px.Groups([{"x": np.ones(n, "float32")} for n in [1] * 8 + [3] * 8], lengths=[1] * 8 + [3] * 8)
    with pytest.raises(
        px.LoweringError, match=r"different length have different numbers are reduced .*test_groups\.py"
    ):
        px.Stream(at_once=1).run(lambda d: px.reduce_sum(d.x, px.Axis("clients", 16)), groups)
    other = px.Groups([{"z": np.ones(n, "float32")} for n in range(1, 17)], lengths=range(1, 17))
    with pytest.raises(px.ShapeError, match="groups with lengths must have the same ones"):
        px.Stream(at_once=1).run(lambda d, e: px.reduce_sum(d.count + e.count, px.Axis("c", 16)), groups, other)


def own_step(c, row):
    return c + jnp.where(row[1], jax.lax.pmean(c * row[0], "clients"), 0.0), None


@pytest.mark.parametrize("by", [10, 1, -1, -2])
@pytest.mark.parametrize("wrong", range(5))
def test_an_element_with_other_rows_than_lengths_says_is_named(wrong, by):
    """Whichever it is: the shortest, the longest, one between them."""
    own = [3, 5, 2, 7, 4]
    lengths = [n + by * (i == wrong) for i, n in enumerate(own)]
    groups = px.Groups([{"x": np.ones((n, 3), "float32")} for n in own], lengths=lengths)
    axis = px.Axis("clients", 5)
    says = rf"^Groups: element {wrong} .*{own[wrong]}.* where lengths says {lengths[wrong]}\b.*lengths=\[len"
    with pytest.raises(px.ShapeError, match=says):
        px.Stream(at_once=1).run(lambda x: px.reduce_sum(x.count, axis), groups)


LOOPS = {
    "for": lambda data, step, begin: jax.lax.fori_loop(0, data.mask.shape[0], step, begin),
    "while": lambda data, step, begin: jax.lax.while_loop(
        lambda c: c[0] < data.mask.shape[0], lambda c: (c[0] + 1, step(*c)), (0, begin)
    )[1],
    "rows": lambda data, step, begin: jax.lax.scan(own_step, begin, (data.y, data.mask))[0],
    "branch": lambda data, step, begin: jax.lax.fori_loop(
        0, 2, lambda i, c: jax.lax.cond(jnp.asarray(data.mask.shape[0]) > 4, step, lambda i, c: c, i, c), begin
    ),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_elements_that_meet_in_a_loop_take_as_many_turns(loop):
    axis = px.Axis("clients", 16)

    def of(data):
        def step(i, c):
            return c + jnp.where(data.mask[i], jax.lax.pmean(c * data.y[i], "clients"), 0.0)

        return loop(data, step, 1.0)

    def program(data):
        return px.map_fn(of, data, axis)

    two, one = (px.Groups(CLIENTS * 2, lengths=LENGTHS * 2, num_shapes=number) for number in (2, 1))
    with pytest.raises(px.LoweringError, match=r"different length take other turns in .*test_groups\.py.*num_shapes=1"):
        px.Stream(at_once=1).run(program, two)
    expected = jax.vmap(of, axis_name="clients")(one.arrays())
    np.testing.assert_allclose(px.Stream(at_once=1).run(program, one), expected, rtol=1e-5)


def test_a_run_over_elements_of_different_length_leaves_nothing_behind():
    groups = px.Groups(CLIENTS * 2, lengths=LENGTHS * 2, num_shapes=2)
    data = weakref.ref(groups)
    axis = px.Axis("clients", 16)
    px.Stream(at_once=1).run(lambda d: px.reduce_mean(d.count - px.reduce_mean(d.count, axis), axis), groups)
    del groups
    gc.collect()
    assert data() is None


def test_lengths_are_few_and_padding_is_little():
    lengths = np.random.default_rng(0).lognormal(3.5, 0.8, 3400).astype(int) + 1
    groups = px.Groups([{"x": np.zeros(n, np.float32)} for n in lengths], lengths=lengths)

    @px.program(clients=3400)
    def total(data):
        return px.reduce_sum(px.map_fn(lambda d: jnp.where(d.mask, d.x, 1.0).sum(), data))

    said = px.Stream(at_once=8).passes(total, groups)  # chunks of 64 on 8 devices
    assert len({length for _, length in said.chunks}) <= 12
    assert 1 <= said.padding <= 1.25


@pytest.mark.parametrize("most", [1, 2, 3, 30])
def test_the_lengths_chosen_are_the_best_there_are(most):
    """Eight elements of each length are a chunk on eight devices: its length, or a greater one that is chosen."""
    rng = np.random.default_rng(most)
    values = sorted(rng.choice(np.arange(1, 40), 10, replace=False).tolist())
    lengths = np.repeat(values, 8)
    groups = px.Groups([{"x": np.zeros(n)} for n in lengths], lengths=lengths, num_shapes=most)
    axis = px.Axis("clients", len(lengths))
    found = px.Stream(at_once=1).passes(lambda d: px.reduce_sum(d.mask.sum(1), axis), groups).chunks
    choices = itertools.combinations(values[:-1], min(most, len(values)) - 1)
    best = min(sum(min(c for c in (*chosen, values[-1]) if c >= n) for n in values) for chosen in choices)
    assert sum(length or 0 for _, length in found) == best
    assert len({length for _, length in found}) <= most


def test_a_padded_element_has_its_own_names():
    padded = px.Groups(CLIENTS, lengths=LENGTHS, num_shapes=1).arrays()
    assert padded.x.shape == (8, 7, 3)
    np.testing.assert_array_equal(padded.mask.sum(1), LENGTHS)
    np.testing.assert_array_equal(padded.count, LENGTHS)
    np.testing.assert_array_equal(padded["rate"], [n + 1 for n in LENGTHS])
    assert (padded.x[0, 4:] == CLIENTS[0]["x"][-1]).all()  # padding repeats a real row
    with pytest.raises(AttributeError, match="a padded element has no 'z'; it has rate, x, y, mask and count"):
        _ = padded.z


# --- sources -----------------------------------------------------------------------------------------------------


def test_files_of_a_folder(tmp_path):
    for number, client in enumerate(CLIENTS):
        np.savez(tmp_path / f"client-{number}.npz", x=client["x"], y=client["y"])
    groups = px.Groups.npz(tmp_path)
    assert groups.ids[:2] == ["client-0", "client-1"]
    assert groups.lengths is not None
    assert groups.lengths.tolist() == LENGTHS
    np.testing.assert_array_equal(groups[2]["x"], CLIENTS[2]["x"])
    (tmp_path / "client-5.npz").write_bytes(b"not an archive")
    with pytest.raises(px.DataError, match=r"client-5\.npz' cannot be read"):
        px.Groups.npz(tmp_path)
    left = px.Groups.npz(tmp_path, readable=True)
    assert len(left) == len(CLIENTS) - 1
    assert "client-5" not in left.ids
    for path, text in ((tmp_path / "none", "is not there"), (tmp_path / "client-0.npz", "is a file")):
        with pytest.raises(px.DataError, match=rf"folder must have \.npz files.*{text}; write px\.Groups\.npz"):
            px.Groups.npz(path)


def test_files_that_are_compressed_or_hold_a_number_beside_the_rows(tmp_path):
    for client in CLIENTS:
        np.savez_compressed(tmp_path / f"client-{len(client['y'])}{client['y'].sum():.3f}", **client)
    groups = px.Groups.npz(tmp_path)
    assert groups.lengths is not None
    assert sorted(groups.lengths.tolist()) == sorted(LENGTHS)
    padded = groups.arrays()
    np.testing.assert_array_equal(padded.rate, padded.count + 1)
    np.savez(tmp_path / "client-z", x=np.zeros(3), label=np.array(["cat"] * 3, object))
    with pytest.raises(
        px.DataError, match=r"client-z\.npz' cannot be read.*'label' holds Python objects.*readable=True"
    ):
        px.Groups.npz(tmp_path)


def test_a_memory_mapped_array_and_a_source_that_gives_many_at_once(tmp_path):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(20, 3)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    axis = px.Axis("rows", 20)
    asked = []

    class Many:
        def __len__(self):
            return 20

        def __getitem__(self, number):
            return x[number]

        def __getitems__(self, numbers):
            asked.append(len(numbers))
            return [x[number] for number in numbers]

    for groups in (px.Groups.of_arrays(np.load(tmp_path / "x.npy", mmap_mode="r")), px.Groups(Many())):
        result = px.Stream(at_once=1).run(lambda x: px.reduce_sum(x, axis), groups)
        np.testing.assert_allclose(result, x.sum(0), rtol=1e-5)
    assert asked == [8, 8, 4]


def test_a_source_of_grain():
    grain = pytest.importorskip("grain.python")
    source = grain.MapDataset.source(list(range(10))).map(lambda i: {"x": np.full(2, i, np.float32)})
    result = px.Stream(at_once=1).run(lambda d: px.reduce_sum(d["x"], px.Axis("rows", 10)), px.Groups(source))
    np.testing.assert_allclose(result, [45.0, 45.0])


# --- cohorts -----------------------------------------------------------------------------------------------------


def test_a_cohort_is_drawn_by_its_seed_alone():
    groups = px.Groups(CLIENTS, lengths=LENGTHS, ids=[f"c{n}" for n in range(8)], num_shapes=2)
    cohort = groups.sample(3, seed=(0, 5))
    assert cohort.ids == groups.sample(3, seed=(0, 5)).ids
    assert len(set(cohort.ids)) == len(cohort) == 3
    assert {tuple(groups.sample(3, seed=(0, r)).ids) for r in range(4)} != {tuple(cohort.ids)}
    assert [int(x) for x in px.Groups.of_arrays(np.arange(10)).sample(3, seed=(0, 1))] == [1, 5, 6]  # on any machine
    with pytest.raises(ValueError, match=r"count must be at most 8.*got 9"):
        groups.sample(9, seed=0)
    with pytest.raises(ValueError, match=r"seed must be a non-negative integer.*got -1"):
        groups.sample(2, seed=-1)


def test_cohorts_share_what_was_traced():
    traces = []

    @px.program(clients=3)
    def loss(w, data):
        traces.append(1)
        return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(w), data)))

    groups, run = px.Groups(CLIENTS, lengths=LENGTHS, num_shapes=1), px.Stream(at_once=1).jit(loss)
    for seed in range(3):
        cohort = groups.sample(3, seed=seed)
        expected = [
            c["rate"] * np.square(c["x"] @ np.asarray(W) - c["y"]).sum() / max(len(c["y"]), 1)
            for c in (CLIENTS[int(i)] for i in cohort.ids)
        ]
        np.testing.assert_allclose(run(W, cohort), np.mean(expected), rtol=1e-5)
    assert len(traces) == 1


# --- what is wrong is named ----------------------------------------------------------------------------------------


class Broken:
    def __len__(self):
        return 6

    def __getitem__(self, number):
        if number in (2, 4):
            raise OSError("no such sector")
        return np.full(3, number, np.float32)


def test_an_element_that_cannot_be_read_is_named_and_may_be_left_out():
    groups = px.Groups(Broken(), ids=list("abcdef"))
    with pytest.raises(
        px.DataError, match=r"element 'c' \(number 2\) cannot be read: OSError: no such sector.*readable"
    ):
        px.Stream(at_once=1).run(lambda x: px.reduce_sum(x, px.Axis("rows", 6)), groups)
    left = groups.readable()
    assert left.ids == ["a", "b", "d", "f"]
    result = px.Stream(at_once=1).run(lambda x: px.reduce_mean(x, px.Axis("rows", 4)), left)
    np.testing.assert_allclose(result, np.full(3, 9 / 4))


def test_elements_that_look_otherwise_are_named():
    odd = [np.zeros(3, np.float32)] * 4 + [np.zeros(2, np.float32)]
    with pytest.raises(
        px.ShapeError, match=r"element 4 \(number 4\) is float32\[2\], but the first is float32\[3\].*lengths="
    ):
        px.Stream(at_once=1).run(lambda x: px.reduce_sum(x, px.Axis("rows", 5)), px.Groups(odd))
    wrong = px.Groups([{"x": np.zeros(n)} for n in (2, 3, 5)], lengths=[2, 4, 5])
    with pytest.raises(px.ShapeError, match=r"element 1 \(number 1\) has 3 rows, where lengths says 4"):
        wrong.arrays()


ROWS = {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.float32)}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (
            {"x": ROWS["x"], "t": ROWS["y"]},
            r"is .*\['t'\] float32\[4\].*, but the first is .*\['y'\] float32\[4\].*names",
        ),
        (
            {"x": ROWS["x"][:, :2], "y": ROWS["y"]},
            r"is \['x'\] float32\[4, 2\], but the first is \['x'\] float32\[4, 3\];",
        ),
        (
            {"x": ROWS["x"], "y": np.zeros(4, np.int32)},
            r"is \['y'\] int32\[4\], but .*'y'\] float32\[4\]; give .* dtype",
        ),
        ({"x": ROWS["x"]}, r"is \['x'\] float32\[4, 3\], but .*'y'"),
        (
            {"x": [[0.0] * 3] * 4, "y": ROWS["y"]},
            r"is \['x'\]\[0\]\[0\] float32\[\].*…, but .*of a list of numbers np\.asarray",
        ),
        (None, "is no array, but"),
    ],
)
def test_an_element_that_looks_otherwise_is_told_by_what_differs(odd, text, ragged):
    """Of whatever length: also where it is the shortest or longest, and where NumPy would have put them together."""
    longer = {"x": np.zeros((5, 3), np.float32), "y": np.zeros(5, np.float32)}
    shorter = {k: v[:2] for k, v in ROWS.items()}
    for rest in ([longer], [longer, shorter]) if ragged else ([],):
        clients = [ROWS, ROWS, odd, *rest]
        lengths = [4, 4, 4, *(len(x["y"]) for x in rest)] if ragged else None
        with pytest.raises(px.ShapeError, match=rf"element 2 \(number 2\) {text}"):
            px.Groups(clients, lengths=lengths).arrays()


def test_that_another_element_is_longer_is_not_told_as_what_differs():
    clients = [{k: v[:2] for k, v in ROWS.items()}, {"x": ROWS["x"], "y": np.zeros(4, np.int32)}]
    with pytest.raises(
        px.ShapeError, match=r"is \['y'\] int32\[4\], but the first is \['y'\] float32\[2\]; give all the"
    ):
        px.Groups(clients, lengths=[2, 4]).arrays()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: px.Groups([]), "source has no elements"),
        (lambda: px.Groups({"x": 1}), "source must have a length and give elements by number, got"),
        (lambda: px.Groups([1, 2], lengths=[1]), r"lengths must be 2 integers, 0 or more"),
        (lambda: px.Groups([1, 2], lengths=[1, -1]), r"lengths must be 2 integers, 0 or more"),
        (lambda: px.Groups([1, 2], ids=["a"]), "ids must be one for each of 2 elements, got 1"),
        (
            lambda: px.Groups.of_arrays({"a": np.zeros(3), "b": np.zeros(2)}),
            "tree must have arrays of equally many rows",
        ),
        (lambda: px.Groups([1, 2], num_shapes=0), "num_shapes must be"),
        (lambda: px.Groups(["a", "b"])[0], r"element 0 .* cannot be used: holds text \(<U1\) where numbers are needed"),
        (
            lambda: px.Groups([{"x": 1.0, "label": "cat"}], ids=["c0"])[0],
            r"element 'c0' .*\['label'\] holds text \(<U3\) .*np\.unique",
        ),
        (
            lambda: px.Groups([{"x": {1, 2}}]).readable(),
            r"none of 1 elements can be read\. Groups: element 0 .*objects",
        ),
    ],
)
def test_bad_groups(make, text):
    with pytest.raises((px.DataError, ValueError), match=text):
        make()


def test_elements_may_have_another_byte_order():
    """As files of some instruments have it."""
    x = np.arange(24.0).reshape(8, 3)
    there = px.Groups.of_arrays(x.astype(x.dtype.newbyteorder())), px.Groups([row.astype(">i2") for row in x])

    @px.program(rows=8)
    def squares(x):
        return px.reduce_sum(px.map_fn(lambda x: jnp.sum(x**2), x))

    for groups in there:
        np.testing.assert_allclose(px.Stream(at_once=3).run(squares, groups), (x**2).sum())


def test_files_that_change_during_a_run_are_named(tmp_path):
    """A run of several passes would put together what was in them before and after."""
    for name in "abc":
        np.savez(tmp_path / name, x=np.ones(3))
    groups = px.Groups.npz(tmp_path)

    def change(one):
        if (one.pass_number, one.done) == (1, 3):
            np.savez(tmp_path / "b", x=np.zeros(3))

    axis = px.Axis("clients", 3)

    def spread(data):
        return px.reduce_mean((data["x"] - px.reduce_mean(data["x"], axis)) ** 2, axis)

    with pytest.raises(
        px.DataError, match=r"'b' \(number 1\) cannot be read: .*b\.npz' has changed since it was looked"
    ):
        px.Stream(at_once=1, verbose=change).run(spread, groups)


def test_a_file_that_is_not_where_its_link_says_is_named(tmp_path):
    np.savez(tmp_path / "a", x=np.ones(3))
    (tmp_path / "b.npz").symlink_to(tmp_path / "nowhere")
    with pytest.raises(px.DataError, match=r"b\.npz' cannot be read: .*readable=True"):
        px.Groups.npz(tmp_path)
    assert px.Groups.npz(tmp_path, readable=True).ids == ["a"]


@pytest.mark.parametrize("change", [list.append, lambda source, _: source.pop()], ids=["grows", "shrinks"])
def test_a_source_that_grows_is_read_as_it_was_and_one_that_shrinks_is_named(change):
    source = [np.full(2, float(i)) for i in range(9)]
    groups = px.Groups(source)
    change(source, np.full(2, 100.0))
    stream, axis = px.Stream(at_once=1), px.Axis("clients", 9)
    if len(source) > 9:
        np.testing.assert_allclose(stream.run(lambda x: px.reduce_sum(x, axis), groups), [36.0, 36.0])
        return
    with pytest.raises(
        px.DataError, match=r"element 8 \(number 8\) cannot be read: IndexError: list index out of range"
    ):
        stream.run(lambda x: px.reduce_sum(x, axis), groups)
