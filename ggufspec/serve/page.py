"""The endpoint's web page: the pair, statistics of the last answers, and a box for trying a prompt.

:func:`html` is served at ``/`` without a key, with :data:`CSP` as the header ``Content-Security-Policy``: style and
script are inline, allowed by their hashes in the policy, and nothing is loaded from elsewhere. The script requests
``figures`` (:meth:`ggufspec.serve.metrics.Metrics.figures`), ``v1/chat/completions`` and ``v1/completions``, all
relative to the page, so that it also works under a proxy's path. After a 401 response it asks for the key, which it
keeps in memory only. A model's text is inserted as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from ggufspec import __version__
from ggufspec.schema.text import visible

if TYPE_CHECKING:
    from ggufspec.bench.trial import LoadedModel
    from ggufspec.serve.session import ChatReady

_TEMPLATES = Environment(
    loader=PackageLoader("ggufspec.serve"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _source(digested: str) -> str:
    """Return the hash-source (Content Security Policy Level 3) of an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(digested.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = (_TEMPLATES.get_template(name).render() for name in ("page.css", "page.js"))

CSP = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_source(_SCRIPT)}",
        f"style-src {_source(_STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def html(name: str, ready: ChatReady) -> str:
    """Return the web page for a pair with this name."""
    roles = (("Target", ready.target), ("Draft", ready.draft))
    facts = [(role, _model(model)) for role, model in roles if model is not None]
    facts.append(("Drafters", ", ".join(ready.drafters) or "none: speculation is off"))
    each = f" in each of {ready.parallel} conversations" if ready.parallel > 1 else ""
    facts.append(("Context", f"{ready.ctx_size:,} tokens{each}"))
    return _TEMPLATES.get_template("page.html").render(
        version=__version__,
        style=_STYLE,
        script=_SCRIPT,
        name=visible(name),
        facts=[(label, visible(text)) for label, text in facts],
        notes=[visible(note) for note in ready.notes],
        chat=bool(ready.chat_template),
    )


def _model(model: LoadedModel) -> str:
    on_gpu = f"{model.gpu_layers} of {model.layers + 1} layers on the GPU"  # including the output layer
    return f"{model.description}, {on_gpu if model.gpu_layers else 'on the CPU'}"
