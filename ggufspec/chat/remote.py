"""Client of a running server with OpenAI's ``/v1/chat/completions``, such as ``ggufspec serve``.

:class:`Remote` replaces :class:`ggufspec.child.Session` and has the same requests and replies
(:mod:`ggufspec.chat.session`). One of two importers of ``httpx2``; the other is for the hub.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ggufspec import __version__
from ggufspec.bench.trial import LoadedModel
from ggufspec.chat import session
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.models.hub.client import proxies_explained
from ggufspec.prompting.conversation import plain_text
from ggufspec.schema.text import visible
from ggufspec.settings import table

if TYPE_CHECKING:
    import httpx2

Event = dict[str, Any]

_CONNECT_S, _LIST_S = 10.0, 30.0  # timeouts; answers have none, because the prompt is read first
_MOST_LINE_BYTES, _MOST_BODY_BYTES = 16 << 20, 4 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
# The server's finish reasons, and our stop reasons.
_STOPS = {"stop": "end", "length": "length", "content_filter": "stop", "tool_calls": "stop"}
_BASE_HINT = "--url has the base URL of an OpenAI-compatible server: http://127.0.0.1:8080/v1"


class _RefusedError(GgufspecError):
    """Request that the server does not accept as it is."""


class _StopReading(KeyboardInterrupt):
    """Ctrl-C while waiting for a server; a KeyboardInterrupt, so that libraries clean up after it."""


def base_url(url: str) -> str:
    """Complete a base URL that a user may shorten: ``host:port`` is ``http://host:port/v1``.

    Raises:
        UsageError: it is not a URL.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or not full.isprintable() or " " in full:
        raise UsageError(f"{url!r} is not the URL of a server", _BASE_HINT)
    path = parts.path.rstrip("/")
    for known in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(known)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


class Remote:
    """Connection to a server. A signal handler may call :meth:`stop`; all else belongs to one thread.

    Args:
        url: base URL from :func:`base_url`.
        key: API key; empty for none.
        model: name of the model, which :meth:`open` finds if empty.
    """

    def __init__(self, url: str, key: str = "", model: str = "") -> None:
        self.url, self.model = url, model
        self._key = key
        self._renamed: dict[str, str] = {}  # the server's names of request fields; empty: it does not take the field
        self._client: httpx2.Client | None = None
        self._stopping = self._waits = False

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def open(self, *_: object) -> session.Ready:
        """Connect to the server and find its model.

        Raises:
            GgufspecError: nothing answers there, it is not such a server, wants another key, or has several models.
        """
        import httpx2

        self.close()
        own = urlsplit(self.url).hostname in _LOOPBACK  # no proxy can reach it
        headers = {"User-Agent": f"ggufspec/{__version__}"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise UsageError("the API key has characters that no header takes", "give it again: --api-key KEY")
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = httpx2.Timeout(_LIST_S, connect=_CONNECT_S)
        with proxies_explained():
            client = httpx2.Client(headers=headers, timeout=timeout, trust_env=not own)
        try:
            with self._explained(), client.stream("GET", f"{self.url}/models") as response:
                self._check(response)
                found = self._names(_whole(response))
            self.model = self._chosen(found)
        except BaseException:
            client.close()
            raise
        self._client = client
        loaded = LoadedModel(self.model, 0, 0, 0)
        return session.Ready(loaded, None, (), (), ctx_size=0, parallel=1, chat_template="the server's own")

    def ask(self, request: session.Request, _: object = None, *, on_event: Callable[[Event], None]) -> session.Reply:
        """Ask, and pass on events: ``token``, and ``reasoning`` {text} of a model that thinks first.

        A field that the server does not take is left out from then on, and noted.

        Raises:
            GgufspecError: there is no answer, or it broke off.
        """
        self._stopping = self._waits = False
        path, body = _body(request, self.model)
        answer = _Answer(time.perf_counter())
        try:
            while not answer.began:
                try:
                    self._send(path, body, answer, on_event)
                except _RefusedError as error:
                    answer.notes += self._learned(error, body)
        except KeyboardInterrupt:
            return answer.reply(stopped=True)
        finally:
            self._waits = False
        return answer.reply(stopped=False)

    def _learned(self, error: _RefusedError, body: Mapping[str, Any]) -> tuple[str, ...]:
        """Stop sending the optional fields that a refusal names, and return notes; raise other refusals again."""
        optional = body.keys() - {"model", "stream", "messages", "prompt"} - self._renamed.keys()
        named = sorted(name for name in optional if re.search(rf"\b{name}\b", error.message))
        if not named or not _NOT_TAKEN.search(error.message):
            raise error
        newer = _NEWER if "max_tokens" in named and _NEWER in error.message else ""
        self._renamed |= {name: newer if name == "max_tokens" else "" for name in named}
        left_out = [name for name in named if not self._renamed[name]]
        return tuple(f"the server does not take {name}: it was left out" for name in left_out)

    def _send(self, path: str, body: Mapping[str, Any], answer: _Answer, on_event: Callable[[Event], None]) -> None:
        import httpx2

        assert self._client is not None
        patience = httpx2.Timeout(None, connect=_CONNECT_S)
        taken = {name: value for key, value in body.items() if (name := self._renamed.get(key, key))}
        self._waits = True
        if self._stopping:
            raise _StopReading
        asked = self._client.stream("POST", f"{self.url}{path}", json=taken, timeout=patience)
        with self._explained(), asked as response:
            self._check(response)
            for value in _values(response):
                self._waits = False
                for event in answer.take(value):
                    on_event(event)
                self._waits = True
                if self._stopping:
                    raise _StopReading
        if not answer.began:
            raise GgufspecError(f"{self.url} answers with something that is not a stream of events", _BASE_HINT)
        if not answer.is_whole:
            raise GgufspecError("the answer broke off: the connection was closed", "look at its log; /retry asks again")

    def stop(self) -> None:
        """End the answer with what has arrived; the closed connection makes the server stop."""
        self._stopping = True
        if self._waits:
            self._waits = False
            raise _StopReading

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    # ---- the server's responses ------------------------------------------------------------------------------------

    def _names(self, text: str) -> list[str]:
        try:
            body = untrusted.parse_json(text, self.url)
            return [str(one["id"]) for one in body["data"]]
        except (GgufspecError, TypeError, KeyError):
            raise GgufspecError(f"{self.url}/models does not answer with a list of models", _BASE_HINT) from None

    def _chosen(self, names: list[str]) -> str:
        if self.model:
            if names and self.model not in names:
                raise UsageError(f"{self.url} has no model {self.model!r}", f"it has {_list(names)}")
            return self.model
        if len(names) > 1:
            raise UsageError(f"{self.url} has {len(names)} models", f"--served-model {names[0]}, or {_list(names[1:])}")
        if not names:
            raise GgufspecError(f"{self.url} has no model", "load one there, or name it: --served-model NAME")
        return names[0]

    def _check(self, response: httpx2.Response) -> None:
        """Raise a GgufspecError unless the status is 200."""
        status = response.status_code
        if status == 200:
            return
        text = _whole(response)
        said, hint = _said(text)
        if status in (401, 403):
            what = "does not take this API key" if self._key else "asks for an API key"
            raise GgufspecError(f"{self.url} {what}", "--api-key KEY, or GGUFSPEC_API_KEY")
        if status == 404 and not said:
            raise GgufspecError(f"{response.url} is not there (404)", _BASE_HINT)
        if status in (429, 503):
            why = f": {said}" if said else ""
            raise GgufspecError(f"{self.url} is busy or not ready{why}", hint or "say it again in a moment")
        if 300 <= status < 400:
            to = visible(response.headers.get("location", "another place"))
            raise GgufspecError(f"{self.url} moves to {to}", "give that as --url, if it is yours")
        kind = _RefusedError if status in (400, 422) else GgufspecError
        line = text.strip().partition("\n")[0]
        if kind is _RefusedError and not line.startswith(("<", "{", "[")):
            said = said or visible(line[:300])
        raise kind(said or f"{self.url} answers with status {status}", hint or _HINTS.get(status, ""))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            start = "start it (ggufspec serve PAIR), or check host and port"
            raise GgufspecError(f"nothing answers at {self.url}: {error}", start) from None
        except httpx2.TimeoutException:
            raise GgufspecError(f"{self.url} does not answer in time", "look at its log") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
            raise GgufspecError(f"the connection to {self.url} broke: {error}", "look at its log; /retry") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise GgufspecError(f"{self.url} cannot be asked: {error}", _BASE_HINT) from None


_NEWER = "max_completion_tokens"  # OpenAI's newer name of max_tokens
_SETTINGS = "/settings shows what was asked for"
_HINTS = {400: _SETTINGS, 422: _SETTINGS, 500: "look at the server's log"}
_NOT_TAKEN = re.compile(
    "extra|unexpected|unknown|unrecogni|unsupported|not (supported|permitted|allowed)", re.IGNORECASE
)


def _list(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")


def _said(text: str) -> tuple[str, str]:
    """Return (message, hint) of an error in OpenAI's, vLLM's or FastAPI's form; empty for none."""
    try:
        body = untrusted.parse_json(text, "the error")
    except GgufspecError:
        return "", ""
    error = _at(body, "error") or body
    if isinstance(error, str):
        return error, ""
    hint = _at(error, "hint") or ""
    if _at(error, "code") == "context_length_exceeded":
        hint = hint or "/undo and /clear make the conversation shorter"
    said = _at(error, "message") or _at(error, "detail") or ""
    said = _at(said, "detail") or said  # Mistral's
    if isinstance(said, list):
        said = "; ".join(f"{_path(_at(one, 'loc'))}: {_at(one, 'msg') or ''}" for one in said)
    return visible(str(said)), str(hint)


def _whole(response: httpx2.Response) -> str:
    """Return the body, cut off beyond ``_MOST_BODY_BYTES``."""
    taken = bytearray()
    for part in response.iter_bytes():
        taken += part
        if len(taken) > _MOST_BODY_BYTES:
            break
    return taken.decode("utf-8", "replace")


def _values(response: httpx2.Response) -> Iterator[Mapping[str, Any] | None]:
    """Yield the server's events up to ``[DONE]``, which is None.

    Source: HTML Living Standard, 9.2.6, of which these servers use one field: ``data:``, one line per event.
    """
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise GgufspecError("the server sends a line without an end", _BASE_HINT)
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                yield None
                return
            value = untrusted.parse_json(data.decode("utf-8", "replace"), "an event of the server")
            if isinstance(value, Mapping):
                yield value


def _body(request: session.Request, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON of a question.

    Fields that only llama.cpp's servers know are sent only if not the default, because other servers refuse them.
    """
    sampling, usual = request.sampling, Sampling()
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    more = [name for name in table.names(group="sampling") if name not in ("temp", *body)]
    body |= {name: getattr(sampling, name) for name in more if getattr(sampling, name) != getattr(usual, name)}
    messages = request.conversation.messages()
    if request.chat:
        return "/chat/completions", body | {"messages": [one.plain() for one in messages]}
    return "/completions", body | {"prompt": plain_text(messages)}


class _Answer:
    """Answer as it arrives, requested at ``start_s``."""

    def __init__(self, start_s: float) -> None:
        self.began = False  # True if anything has arrived
        self.is_whole = False  # True if its end has arrived
        self.notes: tuple[str, ...] = ()
        self._start_s = start_s
        self._first_s: float | None = None  # arrival time of the first text
        self._text: list[str] = []
        self._finish = ""
        self._counts: dict[str, Mapping[str, Any]] = {}  # OpenAI's "usage", and "timings" of llama-server

    def take(self, value: Mapping[str, Any] | None) -> Iterator[Event]:
        """Yield the events of a chunk, or of None, the end; raise a GgufspecError if the chunk is an error."""
        self.began = True
        if value is None:
            self.is_whole = True
            return
        if "error" in value:
            said = value["error"]
            message = said.get("message") if isinstance(said, Mapping) else said
            raise GgufspecError(f"the answer broke off: {message}", "look at the server's log; /retry asks again")
        self._counts |= {name: value[name] for name in ("usage", "timings") if _at(value, name)}
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            thought = _at(choice, "delta", "reasoning_content") or _at(choice, "delta", "reasoning")
            text = _at(choice, "delta", "content") or _at(choice, "text")
            if self._first_s is None and (thought or text):
                self._first_s = time.perf_counter()
            if isinstance(thought, str) and thought:
                yield {"event": "reasoning", "text": thought}
            if isinstance(text, str) and text:
                self._text.append(text)
                yield {"event": "token", "text": text, "source": "target"}
            self._finish = str(_at(choice, "finish_reason") or self._finish)
            self.is_whole = self.is_whole or bool(self._finish)

    def reply(self, *, stopped: bool) -> session.Reply:
        return session.Reply(
            text="".join(self._text),
            statistics=self._statistics(),
            notes=self.notes,
            stopped=stopped and not self._finish,
        )

    def _statistics(self) -> Statistics | None:
        """Return statistics from the server's figures, otherwise from arrival times; None without token counts."""
        tokens = self._count("usage", "completion_tokens")
        if "usage" not in self._counts or (not tokens and self._first_s is not None):
            return None
        prompt = self._count("usage", "prompt_tokens")
        details = ("usage", "completion_tokens_details")
        accepted = self._count(*details, "accepted_prediction_tokens") or self._count("timings", "draft_n_accepted")
        drafted = self._count("timings", "draft_n")
        if _at(self._counts, *details):
            drafted = accepted + self._count(*details, "rejected_prediction_tokens")
        first_s, own_s = None, 0.0
        if self._first_s is not None:
            first_s, own_s = self._first_s - self._start_s, time.perf_counter() - self._first_s
        return Statistics(
            prompt_tokens=prompt,
            prompt_s=self._number("timings", "prompt_ms") / 1000,
            prompt_read=max(0, prompt - self._count("usage", "prompt_tokens_details", "cached_tokens")),
            tokens=tokens,
            decode_s=self._number("timings", "predicted_ms") / 1000 or own_s,
            rounds=self._count("usage", "speculation", "rounds"),  # from ggufspec serve
            drafted=drafted,
            accepted=accepted,
            drafted_by_position=(),
            accepted_by_position=(),
            draft_s=0.0,
            verify_s=0.0,
            stop_reason=_STOPS.get(self._finish, self._finish),
            time_to_first_token_s=first_s,
        )

    def _number(self, *path: str) -> float:
        value = _at(self._counts, *path)
        return value if isinstance(value, int | float) and value >= 0 else 0

    def _count(self, *path: str) -> int:
        return int(self._number(*path))


def _path(parts: object) -> str:
    return ".".join(map(str, parts)) if isinstance(parts, list) else ""


def _at(value: Any, *path: str) -> Any:
    """Return the value at a path in untrusted JSON; None if the path does not exist."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
