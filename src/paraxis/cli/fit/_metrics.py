"""Scores of predictions, beside those of predictions made without the columns. NumPy only."""

import numpy as np


def log_probabilities(z: np.ndarray) -> np.ndarray:
    """Return those of each class, ``(n, num_classes)``, from ``(n, 1)``, of the second of two, or ``(n, k)``."""
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
    found = Measures(objective)
    found.add(z, y, weight if weight is None or weight.any() else None)
    return found.metrics


class Measures:
    """Metrics of rows that come in parts.

    Args:
        objective: as for :func:`measured`.
    """

    def __init__(self, objective: str) -> None:
        self._objective = objective
        self._sums: dict[str, float] = {}
        self._mean = self._spread = 0.0  # of the targets, for R²: as parts are put together in _columns
        self.total = 0.0
        self.num_rows = 0

    def add(self, z: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> None:
        """Count rows in, as for :func:`measured`."""
        own = len(y) if weight is None else float(np.sum(weight))
        self.num_rows += len(y)
        if own:
            for name, values in self._of_rows(z, y).items():
                total = np.sum(values if weight is None else values * weight)
                self._sums[name] = self._sums.get(name, 0.0) + float(total)
            if self._objective == "squared":
                mean = float(np.average(y, weights=weight))
                squares = (y - mean) ** 2
                away, share = mean - self._mean, own / (self.total + own)
                self._spread += float(np.sum(squares if weight is None else squares * weight))
                self._spread += away**2 * self.total * share
                self._mean += away * share
            self.total += own

    def _of_rows(self, z: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
        """Return what is averaged."""
        if self._objective == "logistic":
            logs = log_probabilities(z)
            return {"accuracy": logs.argmax(1) == y, "log loss": logs[np.arange(len(y)), y]}
        if self._objective == "poisson":
            surprise = np.where(y > 0, y * (np.log(np.where(y > 0, y, 1)) - z[:, 0]), 0)
            return {"mean deviance": surprise - y + np.exp(z[:, 0])}
        return {"square": (y - z[:, 0]) ** 2}

    @property
    def metrics(self) -> dict[str, float]:
        """By their names."""
        found = {name: value / self.total for name, value in self._sums.items()}
        if self._objective == "logistic":
            return {"accuracy": found["accuracy"], "log loss": abs(found["log loss"])}
        if self._objective == "poisson":
            return {"mean deviance": 2 * found["mean deviance"]}
        square, variance = found["square"], self._spread / self.total
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
