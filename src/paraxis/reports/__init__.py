"""What a compiled function sends, computes and holds: ``px.explain`` and the report that it gives."""

from paraxis.reports._communication import Communication as Communication, communication as communication, of_program
from paraxis.reports._explain import explain
from paraxis.reports._report import Report
from paraxis.reports._values import Collective, Finding, Layout, LineWork, Memory, Work

__all__ = ["Collective", "Finding", "Layout", "LineWork", "Memory", "Report", "Work", "explain", "of_program"]
