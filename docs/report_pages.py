"""Reports as a page of the site shows them: its code is run when the site is built.

``<!-- shown: report -->`` stands where the value of an expression is to be seen, as a notebook shows it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.pages import Page

_PIECE = re.compile(
    r"^```python\n(?!>>> )(?P<code>.*?)^```$|^<!-- shown: (?P<shown>[^\n]+) -->$", re.MULTILINE | re.DOTALL
)
_SHOWN = re.compile(r"^<!-- shown: .+ -->$", re.MULTILINE)
_RUN = """
import contextlib, json, linecache, sys
path, pieces = json.load(sys.stdin)
values, shown = {"__name__": "__main__"}, []
linecache.checkcache = lambda *_: None
lines = open(path).read().splitlines(keepends=True)
linecache.cache["reports.md"] = (1, None, lines, "reports.md")
with contextlib.redirect_stdout(sys.stderr):
    for line, code, expression in pieces:
        if code is not None:
            exec(compile("\\n" * line + code, "reports.md", "exec"), values)
        else:
            shown.append(eval(expression, values)._repr_html_())
json.dump(shown, sys.stdout)
"""


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Put what is shown in the place of each comment that asks for it.

    Raises:
        subprocess.CalledProcessError: if a block fails.
    """
    if not _SHOWN.search(markdown):
        return markdown
    path = Path(str(page.file.abs_src_path))
    found = iter(shown(path))
    return _SHOWN.sub(lambda _: f'<div class="px-output">{next(found)}</div>', markdown)


def shown(path: Path) -> list[str]:
    """Run a page's code on eight simulated devices, up to the last value that is shown; return each as HTML."""
    text = path.read_text("utf-8")
    pieces = [(text.count("\n", 0, max(m.start("code"), 0)), m["code"], m["shown"]) for m in _PIECE.finditer(text)]
    last = max(number for number, (_, _, expression) in enumerate(pieces) if expression)
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    ran = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps([str(path), pieces[: last + 1]]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | flags,
    )
    return json.loads(ran.stdout)
