"""Self-contained page of results, with HTML, style and plots in one file and no scripts or external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggufspec import __version__
from ggufspec.reports.documents import parse_document

if TYPE_CHECKING:
    from ggufspec.reports.documents import ResultDocument
    from ggufspec.reports.html.figures import Figure


def render(documents: Sequence[dict[str, Any]]) -> str:
    """Return the page for bench, compare, tune, sweep and plan documents, given as ``json.loads`` returns them.

    Raises:
        GgufspecError: a document has no known schema, or vl-convert is not installed.
    """
    return page([parse_document(document, f"document {number}") for number, document in enumerate(documents, 1)])


def page(documents: Sequence[ResultDocument]) -> str:
    """Return the page, with a section per document, grouped by machine; raise GgufspecError without vl-convert."""
    from ggufspec.reports.html import sections

    machines = sections.report_section(documents)
    title = machines[0].sections[0].title if len(documents) == 1 else "Speculative decoding: results"
    return filled("page.html", ("page.css",), machines=machines, count=len(documents), title=title, plot=_plot)


def filled(template: str, sheets: Sequence[str], **values: Any) -> str:
    """Return a page from a template; values are escaped, and the page's security policy permits only these sheets.

    ``template`` and ``sheets`` are file names of templates; ``values`` are its variables, which include ``title``.
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
