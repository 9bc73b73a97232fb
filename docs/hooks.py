"""What the docstrings' references, ``:func:`scatter```, become on the API page: links."""

import re
from typing import Any

_REFERENCE = re.compile(r":(?:func|class|data):<code>(?:paraxis\.)?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Replace references in a rendered page; those to what has no entry become plain code."""

    def link(match: re.Match[str]) -> str:
        anchor = f"paraxis.{match[1]}"
        code = f"<code>{match[1]}</code>"
        return f'<a href="#{anchor}">{code}</a>' if f'id="{anchor}"' in html else code

    return _REFERENCE.sub(link, html)
