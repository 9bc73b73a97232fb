"""What the docstrings' references, ``:func:`scatter```, become on the API page: links."""

import re
from typing import Any

_REFERENCE = re.compile(r":(?:func|class|data|meth|mod):<code>(?:paraxis\.|px\.)?([\w.]+)</code>")
_PLACES = (
    "paraxis",
    "paraxis.ensembles",
    "paraxis.Ensemble",
    "paraxis.solve",
    "paraxis.solve.objective",
    "paraxis.solve.prox",
    "paraxis.train",
    "paraxis.TrainState",
    "paraxis.launch",
)


def on_page_content(html: str, **_: Any) -> str:
    """Replace references in a rendered page; those to what has no entry become plain code."""

    def link(match: re.Match[str]) -> str:
        code = f"<code>{match[1]}</code>"
        anchors = (f"{place}.{match[1]}" for place in _PLACES)
        anchor = next((anchor for anchor in anchors if f'id="{anchor}"' in html), None)
        return code if anchor is None else f'<a href="#{anchor}">{code}</a>'

    return _REFERENCE.sub(link, html)
