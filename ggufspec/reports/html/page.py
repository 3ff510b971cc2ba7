"""One self-contained page of results: HTML, style and plots in one file, no script, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggufspec import __version__
from ggufspec.reports.documents import parse

if TYPE_CHECKING:
    from ggufspec.reports.documents import Result
    from ggufspec.reports.html.figures import Figure


def render(documents: Sequence[dict[str, Any]]) -> str:
    """The page of any documents of bench, compare, tune, sweep and plan, as ``json.loads`` gives them.

    Raises:
        GgufspecError: a document is of no known schema, or the library that draws is not installed.
    """
    return page([parse(document, f"document {number}") for number, document in enumerate(documents, 1)])


def page(documents: Sequence[Result]) -> str:
    """A section for each machine, and one in it for each document; an error if what draws is not installed."""
    from ggufspec.reports.html import sections

    machines = sections.report(documents)
    title = machines[0].sections[0].title if len(documents) == 1 else "Speculative decoding: results"
    return filled("page.html", ("page.css",), machines=machines, count=len(documents), title=title, plot=_plot)


def filled(template: str, sheets: Sequence[str], **values: Any) -> str:
    """A page from a template: what is put into it is escaped, and a policy in it forbids all but its own style sheets.

    ``template`` and ``sheets`` are files of the templates; ``values`` are what it names, ``title`` among them.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("ggufspec.reports.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = "".join(templates.get_template(sheet).render() for sheet in sheets)
    return templates.get_template(template).render(
        version=__version__,
        style=style,
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        **values,
    )


def _plot(figure: Figure) -> str:
    from ggufspec.reports.html import charts

    return charts.draw(figure)
