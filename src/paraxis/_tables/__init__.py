"""Rows on disk, with a target each, that are read when they are needed."""

from paraxis._tables._blocks import Blocks
from paraxis._tables._csv import Piece, has_codes, num_lines, pieces
from paraxis._tables._files import Unchanged, in_blocks, kind_at, no_header, row_names, table_of
from paraxis._tables._table import Table

__all__ = [
    "Blocks",
    "Piece",
    "Table",
    "Unchanged",
    "has_codes",
    "in_blocks",
    "kind_at",
    "no_header",
    "num_lines",
    "pieces",
    "row_names",
    "table_of",
]
