"""How good predictions are, and how good they would be without a look at the columns. NumPy only."""

import numpy as np


def log_probabilities(z: np.ndarray) -> np.ndarray:
    """Of each class, ``(n, num_classes)``, for predictions ``(n, 1)`` of the second of two, or ``(n, k)`` of each."""
    if z.shape[1] == 1:
        z = np.concatenate([np.zeros_like(z), z], 1)
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def measured(objective: str, z: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Metrics by their names.

    Args:
        objective: ``logistic``, ``squared`` or ``poisson``.
        z: predictions of the linear model, ``(n, k)``.
        y: the numbers of classes, or values, ``(n,)``.
    """
    if objective == "logistic":
        logs = log_probabilities(z)
        return {
            "accuracy": float(np.mean(logs.argmax(1) == y)),
            "log loss": abs(float(logs[np.arange(len(y)), y].mean())),
        }
    if objective == "poisson":
        mean = np.exp(z[:, 0])
        surprise = np.where(y > 0, y * (np.log(np.where(y > 0, y, 1)) - z[:, 0]), 0)
        return {"mean deviance": 2 * float(np.mean(surprise - y + mean))}
    square = float(np.mean((y - z[:, 0]) ** 2))
    variance = float(np.var(y))
    return {"R²": 1 - square / variance if variance > 0 else float("nan"), "RMSE": float(np.sqrt(square))}


def trivial(objective: str, y: np.ndarray) -> np.ndarray:
    """Predictions ``(1, k)``, the same for each row: how often each class is, or the mean."""
    if objective == "logistic":
        return np.log(np.bincount(y) / len(y))[None] if y.max() > 1 else np.array([[_log_odds(y)]])
    return np.array([[np.log(y.mean()) if objective == "poisson" else y.mean()]])


def _log_odds(y: np.ndarray) -> float:
    return float(np.log(y.mean()) - np.log1p(-y.mean()))
