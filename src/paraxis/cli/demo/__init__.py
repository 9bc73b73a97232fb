"""``paraxis demo``: one chapter for each kind of work."""

from paraxis.cli.demo._chapters import CHAPTERS, chapters_named, ready, show_chapters
from paraxis.cli.demo._options import Options

__all__ = ["CHAPTERS", "Options", "chapters_named", "ready", "show_chapters"]
