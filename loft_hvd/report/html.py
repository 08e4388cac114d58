"""What every page of this package is made of: one file of HTML with its style inside."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from loft_hvd.codec import printable
from loft_hvd.report.svg import STYLE

__all__ = ["table", "whole_page"]

_NAMED = ' class="named"'
_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 820px; margin: 2em auto;
  padding: 0 1em; color: #222; background: #fff }}
h1 {{ font-size: 1.5em; line-height: 1.25 }} h2 {{ margin-top: 1.6em }}
table {{ border-collapse: collapse; width: 100%; margin: 1em 0 }}
th, td {{ text-align: right; padding: .15em .6em; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
.facts td:last-child, .facts th {{ text-align: left; font-weight: normal }}
.facts td {{ overflow-wrap: anywhere }} .facts th {{ color: #777; white-space: nowrap }}
.bad {{ background: #fde8e8; padding: .6em 1em; border-left: 4px solid #c33 }}
.none {{ color: #777 }} .named {{ background: #fde8e8 }}
pre {{ white-space: pre-wrap; font-size: 12px; background: #f6f6f6; padding: .8em }}
{STYLE}"""


def whole_page(body: str, *, title: str) -> str:
    """Return a page of one file, without scripts or links.

    So it can be mailed, and opens where there is no network.

    Args:
        body: HTML.
        title: plain text.
    """
    return printable(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n"
        "</body></html>\n"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, named: Collection[int] = ()
) -> str:
    """Return a table of plain texts; the rows whose places are ``named`` stand out."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr{_NAMED if place in named else ''}>"
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for place, row in enumerate(rows)
    )
    return f"<table><tr>{cells}</tr>{body}</table>"
