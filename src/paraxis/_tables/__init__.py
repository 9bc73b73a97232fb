"""Rows on disk, with a target each, that are read when they are needed."""

from paraxis._tables._table import Table

__all__ = ["Table"]
