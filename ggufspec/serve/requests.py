"""OpenAI's requests as pydantic reads them, and what they ask of the child.

Unknown fields are ignored, as OpenAI's clients expect; what is known and cannot be had is refused.
Source: the API reference of OpenAI, and llama-server's extensions (``min_p``, ``repeat_penalty``, ``grammar``, …).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ggufspec.decoding.sampling import Sampling, random_seed
from ggufspec.errors import UsageError

MOST_MESSAGES = 10_000
_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 16

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class Part(_Read):
    """A part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(_Read):
    """What an assistant called."""

    name: Name
    arguments: str = "{}"


class ToolCall(_Read):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Read):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it.

        Raises:
            UsageError: it has a part other than text.
        """
        content = self.content or ""
        if not isinstance(content, str):
            for part in content:
                if part.text is None:
                    raise UsageError(f"a part of type {part.type!r} cannot be read: only text can", "send text")
            content = "".join(part.text or "" for part in content)
        more = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        return {"role": self.role, "content": content, **more}


class Function(_Read):
    """What may be called."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Read):
    """A tool that is offered."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(_Read):
    """The one that must be called."""

    name: Name


class NamedTool(_Read):
    """The one that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(_Read):
    """The schema of ``response_format``."""

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(_Read):
    """What the answer is."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StreamOptions(_Read):
    """Of a stream."""

    include_usage: bool = False


class _Answered(_Read):
    """What chats and completions have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_MOST_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=_MOST_TOKENS)
    seed: int | None = Field(None, ge=-1, lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    grammar: str = ""

    @model_validator(mode="after")
    def _can_be_had(self) -> _Answered:
        if self.n not in (None, 1):
            raise ValueError("n: one answer a request is given, no more")
        if self.logit_bias:
            raise ValueError("logit_bias: it is not supported")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> Sampling:
        """How tokens are chosen; OpenAI's default temperature, llama.cpp's truncations, a random seed unless given."""
        own: dict[str, Any] = {"temperature": 1.0 if self.temperature is None else self.temperature}
        for name in Sampling.__dataclass_fields__.keys() - {"temperature", "seed"}:
            if (value := getattr(self, name)) is not None:
                own[name] = value
        if self.repeat_last_n is None and {"presence_penalty", "frequency_penalty"} & own.keys():
            own["repeat_last_n"] = -1  # OpenAI's look at the whole text
        return Sampling(seed=random_seed() if self.seed in (None, -1) else self.seed, **own)


class Completion(_Answered):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _prompt_is_one(self) -> Completion:
        if isinstance(self.prompt, list) and (
            not self.prompt or (isinstance(self.prompt[0], str) and len(self.prompt) > 1)
        ):
            raise ValueError("prompt: one prompt a request is answered")
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise ValueError(f"{name}: it is not supported")
        if self.best_of not in (None, 1):
            raise ValueError("best_of: one answer a request is given, no more")
        return self

    def text(self) -> str | tuple[int, ...]:
        """The prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return first if isinstance(first, str) else tuple(int(one) for one in self.prompt)


class Chat(_Answered):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = Field(None, max_length=32)

    @model_validator(mode="after")
    def _belongs_together(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: it needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice: there are no tools")
        if self.response_format and self.response_format.type == "json_schema" and not self.response_format.json_schema:
            raise ValueError("response_format.json_schema: the schema is missing")
        return self

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """The tools, as a chat template takes them."""
        if self.tool_choice == "none" or not self.tools:
            return ()
        return tuple(tool.model_dump(exclude_none=True) for tool in self.tools)

    @property
    def must_call(self) -> tuple[bool, str | None]:
        """Whether a tool must be called, and which if it is one."""
        if isinstance(self.tool_choice, NamedTool):
            return True, self.tool_choice.function.name
        return self.tool_choice == "required", None

    @property
    def schema_text(self) -> str:
        """The JSON schema that the answer follows; empty for none."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return ""
        return json.dumps(wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"})

    @property
    def template_options(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs


def plain_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """All of them as a chat template takes them."""
    return tuple(message.plain() for message in messages)
