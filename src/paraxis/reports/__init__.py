"""Reports of what compiled functions send, compute and hold, where arrays lie, what models contain, what is faster."""

from paraxis.reports._balance import Balance, balance
from paraxis.reports._compare import Comparison, Timing, assert_alike as assert_alike, compare
from paraxis.reports._explain import explain
from paraxis.reports._layout import Layout
from paraxis.reports._report import Report
from paraxis.reports._show import Arrays, Leaf, show
from paraxis.reports._tabulate import ModuleRow, ModuleTable, tabulate
from paraxis.reports._values import Collective, Communication as Communication, Finding, LineWork, Memory, Traffic, Work

__all__ = [
    "Arrays",
    "Balance",
    "Collective",
    "Comparison",
    "Finding",
    "Layout",
    "Leaf",
    "LineWork",
    "Memory",
    "ModuleRow",
    "ModuleTable",
    "Report",
    "Timing",
    "Traffic",
    "Work",
    "balance",
    "compare",
    "explain",
    "show",
    "tabulate",
]
