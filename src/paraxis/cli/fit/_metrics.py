"""How good predictions are, and how good they would be without a look at the columns. NumPy only."""

import numpy as np


def log_probabilities(z: np.ndarray) -> np.ndarray:
    """Of each class, ``(n, num_classes)``, for predictions ``(n, 1)`` of the second of two, or ``(n, k)`` of each."""
    if z.shape[1] == 1:
        z = np.concatenate([np.zeros_like(z), z], 1)
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def measured(objective: str, z: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> dict[str, float]:
    """Metrics by their names.

    Args:
        objective: ``logistic``, ``squared`` or ``poisson``.
        z: predictions of the linear model, ``(n, k)``.
        y: the numbers of classes, or values, ``(n,)``.
        weight: how much each row counts, ``(n,)``; ``None``: the same.
    """
    if weight is not None and not weight.any():
        weight = None
    if objective == "logistic":
        logs = log_probabilities(z)
        return {
            "accuracy": float(np.average(logs.argmax(1) == y, weights=weight)),
            "log loss": abs(float(np.average(logs[np.arange(len(y)), y], weights=weight))),
        }
    if objective == "poisson":
        mean = np.exp(z[:, 0])
        surprise = np.where(y > 0, y * (np.log(np.where(y > 0, y, 1)) - z[:, 0]), 0)
        return {"mean deviance": 2 * float(np.average(surprise - y + mean, weights=weight))}
    square = float(np.average((y - z[:, 0]) ** 2, weights=weight))
    variance = float(np.average((y - np.average(y, weights=weight)) ** 2, weights=weight))
    return {"R²": 1 - square / variance if variance > 0 else float("nan"), "RMSE": float(np.sqrt(square))}


def trivial(objective: str, y: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Predictions ``(1, k)``, the same for each row: how often each class is, or the mean."""
    if objective == "logistic":
        shares = np.bincount(y, weight) / (len(y) if weight is None else weight.sum())
        with np.errstate(divide="ignore"):
            logs = np.log(shares)
        return logs[None] if len(logs) > 2 else np.array([[logs[1] - logs[0]]])
    mean = np.average(y, weights=weight)
    return np.array([[np.log(mean) if objective == "poisson" else mean]])
