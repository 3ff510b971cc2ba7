"""The page of an endpoint: the pair, figures of the last answers, and a box to try a prompt in.

:func:`html` is served at ``/`` without a key, with :data:`CSP` as the header ``Content-Security-Policy``: style and
script are in the page, named in the policy by their hashes, and nothing is loaded from elsewhere. The script requests
``figures`` (:meth:`ggufspec.serve.metrics.Metrics.figures`), ``v1/chat/completions`` and ``v1/completions``, all
relative to the page, so that it also works behind a proxy's path. If an answer is 401, it asks for the key, and keeps
it in memory only. Text from a model is set as text, never as HTML.
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
    from ggufspec.serve.session import Ready

_TEMPLATES = Environment(
    loader=PackageLoader("ggufspec.serve"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _source(digested: str) -> str:
    """Return a policy's name for a style or a script: Content Security Policy Level 3, hash-source."""
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


def html(name: str, ready: Ready) -> str:
    """Return the page of a pair, with this name."""
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
