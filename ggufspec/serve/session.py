"""A pair that stays loaded and answers HTTP requests; the child's side of :class:`ggufspec.worker.Session`.

The parent's side is :mod:`ggufspec.serve.engine`. Events of a request, in this order:

- ``prompt`` {tokens, thinking}: the prompt has so many tokens, and ends within ``<think>`` or not;
- ``round`` {texts, tokens, sources, logprobs}: what one round emitted, of each token its text (which may be empty or
  end an earlier character), its id, who wrote it (a drafter's name, ``target`` or ``bonus``) and, where the request
  wants them, a :class:`TokenLogprob`, else ``logprobs`` is empty.

What a request cannot have is a UsageError. Where the prompt does not fit the context, the event ``refused``
{code: "context_length_exceeded"} comes before it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

from ggufspec import worker
from ggufspec.bench.trial import LoadedModel, loaded_models
from ggufspec.cache import cache_folder
from ggufspec.chat.prompt import Message, Prompter
from ggufspec.decoding.decoder import Emitted, SpeculativeDecoder, Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.serve.sequences import choose

_MOST_ANSWERS = 256  # whose tokens are remembered, so that a conversation's next prompt is what the cache holds


@dataclass(frozen=True, slots=True)
class Spec:
    """What to load."""

    target: Path  # path of the target's GGUF file
    draft: Path | None  # path of the draft's, or None
    options: DecoderOptions  # ``parallel`` conversations are kept
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers
    chat_template: str = ""  # Jinja; empty: the target's own


@dataclass(frozen=True, slots=True)
class Ready:
    """What was loaded."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]  # who drafts; none where speculation is off
    notes: tuple[str, ...]  # what a user should know of how it runs
    ctx_size: int  # tokens of context of each conversation
    parallel: int  # conversations that are kept
    chat_template: str  # Jinja; empty where there is none
    template_fault: str = ""  # why the template cannot be used


@dataclass(frozen=True, slots=True)
class Request:
    """What to answer, and how: the ``messages`` of a chat, or a ``prompt`` to continue."""

    messages: tuple[dict[str, Any], ...] = ()  # as the chat template takes them: role, content, tool_calls, …
    tools: tuple[dict[str, Any], ...] = ()  # as the chat template takes them
    template_options: dict[str, Any] = field(default_factory=dict)  # further variables: enable_thinking, …
    opening: str = ""  # text, special tokens too, that the answer begins with: of a tool call that must be made
    prompt: str | tuple[int, ...] = ""  # of a completion
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0  # of the answer at most; 0: as many as the context holds
    stop: tuple[str, ...] = ()
    grammar: str = ""  # GBNF that the answer follows
    special: bool = False  # control tokens are part of the texts (the template's format of tool calls has some)
    logprobs: int | None = None  # likeliest tokens to list beside each; None: no log-probabilities at all


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability by the target's own distribution, untempered, and the likeliest tokens'."""

    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # (id, text, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Reply:
    """How the answer ended."""

    statistics: Statistics  # ``stop_reason``: end, stop, length, context, grammar, or empty where it was stopped
    cached: int  # tokens of the prompt that were in the cache
    sequence: int  # which of the kept conversations it was
    target_only_s: float | None  # what the tokens of ``decode_s`` would have taken target-only, as far as is known
    speculation: bool  # whether drafting was on at the end: it backs off where it does not pay
    accepted_by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)  # (drafted, accepted) of each
    notes: tuple[str, ...] = ()  # each once in a session


@contextmanager
def opened(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Iterator[Loaded]:  # noqa: ARG001
    """Load the pair in this process, and free it in the end.

    Raises:
        GgufspecError: what the user can mend.
    """
    for endpoint in spec.rpc:
        devices.add_rpc_worker(endpoint)
    with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:
        yield Loaded(decoder, spec.chat_template)


class Loaded:
    """A pair that answers requests; ``ready`` is what was loaded.

    Args:
        decoder: the pair.
        chat_template: Jinja in place of the target's own; empty for that.
    """

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str) -> None:
        self._decoder = decoder
        self._source = chat_template or decoder.target.chat_template
        self._noted: set[str] = set()
        self._answers: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # tokens of answers, by their text
        self._used = [0] * decoder.options.parallel  # the request that each conversation was last used for
        self._requests = 0
        self._fault: ModelError | None = None  # of the chat template
        self._day = date.today()
        self._prompter = self._new_prompter()
        target, draft = loaded_models(decoder)
        self.ready = Ready(
            target=target,
            draft=draft,
            drafters=decoder.drafters,
            notes=self._new(decoder.notes),
            ctx_size=decoder.options.ctx_size,
            parallel=decoder.options.parallel,
            chat_template=self._source if self._source.strip() else "",
            template_fault=self._fault.message if self._fault else "",
        )

    def _new_prompter(self) -> Prompter:
        model, template = self._decoder.target, None
        if self._source.strip():
            bos, eos = model.token_texts
            try:
                template = ChatTemplate(self._source, datetime.now(), bos=bos, eos=eos)
            except ModelError as error:
                self._fault = error
        return Prompter(model, template)

    def answer(self, request: Request, emit: worker.Emit, stopping: threading.Event) -> Reply:
        """Answer one request, with the events that the module names.

        Raises:
            UsageError: the prompt does not fit the context, or is none; a grammar cannot be used.
            ModelError: the chat template fails.
        """
        decoder, ctx_size = self._decoder, self.ready.ctx_size
        prompt = self._prompt(request)
        if len(prompt) >= ctx_size:
            emit({"event": "refused", "code": "context_length_exceeded"})
            larger = -(-(len(prompt) + min(request.max_tokens or 512, 4096)) // 256) * 256
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, and the context holds {ctx_size:,}, at least one of them for "
                "the answer",
                f"shorten it, or start the server with -c {larger}",
            )
        end = b"".join(decoder.target.piece(token, special=True) for token in prompt[-8:])
        thinking = end.rstrip().endswith(b"<think>")
        emit({"event": "prompt", "tokens": len(prompt), "thinking": thinking})
        held, prompts = zip(*map(decoder.held, range(self.ready.parallel)), strict=True)
        choice = choose(held, prompts, self._used, prompt)
        self._requests += 1
        self._used[choice.sequence] = self._requests
        decoder.use(choice.sequence, choice.copy)
        text, tokens = [], []
        emitting = _Rounds(decoder, emit)
        for emitted in decoder.generate(
            prompt,
            max_tokens=request.max_tokens or ctx_size,
            sampling=request.sampling,
            stop=request.stop,
            grammar=request.grammar,
            cache_prompt=True,
            stopping=stopping.is_set,
            special=request.special,
            logprobs=request.logprobs,
        ):
            text.append(emitted.text)
            tokens.append(emitted.token)
            emitting.add(emitted)
            if stopping.is_set():
                break
        emitting.flush()
        self._remember("".join(text), tuple(tokens))
        statistics, alone_s = decoder.statistics, decoder.target_only_s
        assert statistics is not None
        return Reply(
            statistics=statistics,
            cached=statistics.prompt_tokens - statistics.prompt_read,
            sequence=choice.sequence,
            target_only_s=None if alone_s is None else alone_s * statistics.decoded,
            speculation=bool(decoder.drafters) and not decoder.is_backing_off,
            accepted_by_drafter=_by_drafter(decoder),
            notes=self._new([*self._prompter.notes, *decoder.notes]),
        )

    def _prompt(self, request: Request) -> list[int]:
        """The tokens of what is to be continued."""
        model = self._decoder.target
        if not request.messages:
            prompt = request.prompt
            ids = model.tokenize(prompt, special=True) if isinstance(prompt, str) else list(prompt)
            if wrong := [one for one in ids if not 0 <= one < model.vocab_size]:
                raise UsageError(f"token {wrong[0]} is not one of the model's {model.vocab_size:,}", "send text")
            if not ids:
                raise UsageError("the prompt is empty", "send at least one character")
            return ids
        if not self.ready.chat_template:
            raise UsageError(f"{model.path.name} has no chat template", "start the server with --chat-template FILE")
        if self._fault:
            raise self._fault
        if date.today() != self._day:  # which a template may tell
            self._day, self._prompter = date.today(), self._new_prompter()
        ids = self._prompter.of_messages(
            [self._message(one) for one in request.messages], tools=request.tools, options=request.template_options
        )
        return ids + model.tokenize(request.opening, special=True, start=False) if request.opening else ids

    def _message(self, message: dict[str, Any]) -> Message:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        role = message["role"]
        if role == "developer" and role not in self._source:  # the newer name, which most templates do not know
            role = "system"
        content = message.get("content") or ""
        tokens = self._answers.get(content, ()) if role == "assistant" and content else ()
        return Message(role, content, tokens, more)

    def _remember(self, text: str, tokens: tuple[int, ...]) -> None:
        self._answers[text] = tokens
        self._answers.move_to_end(text)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)

    def _new(self, notes: list[str]) -> tuple[str, ...]:
        """Those that are new in this session."""
        new = tuple(note for note in dict.fromkeys(notes) if note not in self._noted)
        self._noted.update(new)
        return new


class _Rounds:
    """Emits an answer's tokens, those of a round in one event."""

    def __init__(self, decoder: SpeculativeDecoder, emit: worker.Emit) -> None:
        self._decoder, self._emit = decoder, emit
        self._waiting: list[Emitted] = []

    def add(self, emitted: Emitted) -> None:
        """One more token; the round's last one sends them."""
        self._waiting.append(emitted)
        rounds = self._decoder.rounds
        if not rounds or len(self._waiting) >= len(rounds[-1].emitted):
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._emit(
            {
                "event": "round",
                "texts": [one.text for one in waiting],
                "tokens": [one.token for one in waiting],
                "sources": [one.source for one in waiting],
                "logprobs": [self._logprob(one) for one in waiting if one.logprob is not None],
            }
        )

    def _logprob(self, emitted: Emitted) -> dict[str, Any]:
        assert emitted.logprob is not None
        likeliest = ((id_, self._spell(id_), value) for id_, value in emitted.logprob.likeliest)
        return asdict(TokenLogprob(self._spell(emitted.token), emitted.logprob.own, tuple(likeliest)))

    def _spell(self, token: int) -> str:
        return self._decoder.target.piece(token, special=True).decode("utf-8", "replace")


def _by_drafter(decoder: SpeculativeDecoder) -> dict[str, tuple[int, int]]:
    """Tokens that each drafter of the last answer drafted, and those of them that were accepted."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for one in decoder.rounds:
        drafted.update(one.drafters)
        accepted.update(one.drafters[: one.accepted])
    return {name: (drafted[name], accepted[name]) for name in drafted}
