"""Logistic regression on handwritten digits: the rows on all devices, the answer that of one, and of scikit-learn.

A convex problem has one solution, so that there is something to compare with: coefficients, not only accuracies. Each
device reads its own rows; a step of L-BFGS sums one gradient over all of them.
"""

from paraxis.cli.demo.logreg._chapter import run

__all__ = ["run"]
