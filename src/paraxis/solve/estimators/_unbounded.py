"""Fits that have no finite solution: along some direction, the loss falls for ever."""

import numpy as np

FAR = 9.0  # a prediction from here on costs a row next to nothing
_NOTHING = 1e-9  # of the largest eigenvalue, or of the largest change of a prediction


def is_unbounded(X: np.ndarray, params: np.ndarray, pinned: np.ndarray, better: np.ndarray) -> bool:
    """Whether the way that the coefficients took leads on for ever.

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
    values, vectors = np.linalg.eigh(rows.T @ rows)
    free = vectors[:, values <= _NOTHING * max(values[-1], np.finfo(float).tiny)]
    direction = free @ (free.T @ (params * scale)) / scale
    change = better[~pinned] * (X[~pinned] @ direction)
    largest = np.abs(X[~pinned] @ params).max()
    return bool(change.min() >= -_NOTHING * largest and change.max() > largest / 1e3)
