"""Fits that have no finite solution: along some direction, the loss falls for ever."""

import numpy as np

FAR = 9.0  # a prediction from here on costs a row next to nothing
_LARGEST = 3000  # unknowns whose eigenvectors are computed, for several classes
_NOTHING = 1e-9  # of the largest eigenvalue, or of the largest change of a prediction


def is_unbounded(X: np.ndarray, params: np.ndarray, pinned: np.ndarray, better: np.ndarray) -> bool:
    """Return whether the way that the coefficients took leads on for ever.

    It does, certainly, if the part of the coefficients that changes no prediction of a pinned row changes those of the
    others only for the better. A solver ends there when the loss that is left is as small as its tolerance.

    Args:
        X: ``(n, d)``.
        params: where the solver ended, ``(d,)``.
        pinned: the rows whose loss has a minimum at hand, ``(n,)`` booleans.
        better: 1 if a row's loss falls as its prediction grows, -1 if it rises, ``(n,)``.
    """
    if pinned.all():
        return False
    scale = np.abs(X).max(0)
    scale[scale == 0] = 1
    rows = X[pinned] / scale
    free, _ = _split(rows.T @ rows)
    direction = free @ (free.T @ (params * scale)) / scale
    change = better[~pinned] * (X[~pinned] @ direction)
    return _only_for_the_better(change, np.abs(X[~pinned] @ params).max())


def is_unbounded_for_classes(X: np.ndarray, params: np.ndarray, number: np.ndarray) -> bool:
    """Return whether it does for several classes: no row's own class may lose ground to another one.

    What a row and another class say is a row of its own: the difference of the two classes' predictions. Where such
    rows are pinned and span all that X spans, the two classes have one direction; then few unknowns are left.

    Args:
        X: ``(n, d)``.
        params: where the solver ended, ``(k, d)``.
        number: each row's class, ``(n,)``.
    """
    ahead = _ahead(X @ params.T, number)
    if ahead.min() > 0:
        return True  # they can be told apart without a mistake
    pinned = ahead < FAR
    scale = np.abs(X).max(0)
    scale[scale == 0] = 1
    rows = X / scale
    _, spanned = _split(rows.T @ rows)
    rows = rows @ spanned
    group = _alike(rows, number, pinned)
    num, size = group.max() + 1, rows.shape[1]
    member = (np.arange(num)[:, None] == group).astype(float)
    way = (member / member.sum(1, keepdims=True)) @ (params * scale) @ spanned
    gram = _gram_of_groups(rows, group[number], pinned @ member.T > 0)
    if gram.any():
        if num * size > _LARGEST:
            return False
        free, _ = _split(gram.transpose(0, 2, 1, 3).reshape(num * size, num * size))
        way = (free @ (free.T @ way.ravel())).reshape(num, size)
    free = np.isfinite(ahead) & ~pinned
    return bool(free.any()) and _only_for_the_better(_ahead(rows @ way[group].T, number)[free], ahead[free].max())


def _ahead(z: np.ndarray, number: np.ndarray) -> np.ndarray:
    """By how much each row's own class is ahead of each other one, ``(n, k)``; of itself, infinitely."""
    every = np.arange(len(z))
    found = z[every, number][:, None] - z
    found[every, number] = np.inf
    return found


def _alike(rows: np.ndarray, number: np.ndarray, pinned: np.ndarray) -> np.ndarray:
    """Classes with one direction have one number, ``(k,)``."""
    num = pinned.shape[1]
    group = np.arange(num)
    pairs = [(a, b) for a in range(num) for b in range(a)]
    between = {(a, b): ((number == a) & pinned[:, b]) | ((number == b) & pinned[:, a]) for a, b in pairs}
    for a, b in sorted(pairs, key=lambda pair: -between[pair].sum()):
        some = rows[between[a, b]]
        if group[a] != group[b] and len(some) >= rows.shape[1] and not _split(some.T @ some)[0].size:
            group[group == group[a]] = group[b]
    return np.unique(group, return_inverse=True)[1]


def _gram_of_groups(rows: np.ndarray, own: np.ndarray, pinned: np.ndarray) -> np.ndarray:
    """Return that of differences between a row's group and others pinned there, ``(num, num, size, size)``."""
    num, size = pinned.shape[1], rows.shape[1]
    gram = np.zeros((num, num, size, size))
    for a in range(num):
        for b in range(num):
            some = rows[(own == a) & pinned[:, b]]
            if a != b and len(some):
                square = some.T @ some
                gram[a, a] += square
                gram[b, b] += square
                gram[a, b] -= square
                gram[b, a] -= square
    return gram


def _split(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors that rows with this Gram matrix do not see, and those that they see."""
    values, vectors = np.linalg.eigh(gram)
    unseen = values <= _NOTHING * max(values[-1], np.finfo(float).tiny)
    return vectors[:, unseen], vectors[:, ~unseen]


def _only_for_the_better(change: np.ndarray, largest: float) -> bool:
    return bool(change.min() >= -_NOTHING * largest and change.max() > largest / 1e3)
