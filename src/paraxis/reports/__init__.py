"""What a compiled function sends, computes and holds, and where arrays lie: ``px.explain``, ``px.show``."""

from paraxis.reports._communication import Communication as Communication, communication as communication, of_program
from paraxis.reports._explain import explain
from paraxis.reports._leaves import Leaf
from paraxis.reports._report import Report
from paraxis.reports._show import Arrays, show
from paraxis.reports._values import Collective, Finding, Layout, LineWork, Memory, Work

__all__ = [
    "Arrays",
    "Collective",
    "Finding",
    "Layout",
    "Leaf",
    "LineWork",
    "Memory",
    "Report",
    "Work",
    "explain",
    "of_program",
    "show",
]
