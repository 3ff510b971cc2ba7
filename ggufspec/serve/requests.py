"""OpenAI-style requests as pydantic models, converted to child-process requests.

Unknown fields are ignored, as OpenAI's clients expect; known but unsupported fields are refused. Sources: OpenAI's API
reference, and llama-server's extensions (``min_p``, ``repeat_penalty``, ``grammar``, …).
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from ggufspec.decoding.sampling import Sampling, random_seed
from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.llamacpp.chat_template import TemplateOptions

MOST_MESSAGES = 10_000
_MOST_STOPS = 16
_MOST_BIASES = 1000
_MOST_CHOICES = 16

Limit = Annotated[int, Field(ge=-1, le=2**31 - 1)]  # -1: no limit
Penalty = Annotated[float, Field(ge=-100, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Stop = Annotated[str, StringConstraints(max_length=1000)]


# JSON escapes of a backslash, of a surrogate pair, and of a lone surrogate
_HALF = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F]..")


def with_whole_characters(text: bytes) -> bytes:
    """Replace escapes of lone surrogates, which other parsers refuse, with the replacement character's escape."""
    return _HALF.sub(lambda escape: rb"\ufffd" if len(escape[0]) == 6 else escape[0], text)


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        return {key: one for key, one in given.items() if one is not None} if isinstance(given, dict) else given


class MessagePart(_Read):
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        return self.refusal if self.text is None else self.text


class CalledFunction(_Read):
    name: Name
    arguments: str = "{}"

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return json.dumps(given, ensure_ascii=False)
        if not isinstance(given, str):
            return given
        with contextlib.suppress(GgufspecError):
            if isinstance(untrusted.parse_json(given or "{}", "it"), dict):
                return with_whole_characters(given.encode("utf-8", "replace")).decode() or "{}"
        # Wrap a model's invalid JSON, because it stays in the conversation and templates would refuse every later turn
        return json.dumps({"arguments": given}, ensure_ascii=False)


class ToolCall(_Read):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Read):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[MessagePart] | None = None
    name: str | None = Field(None, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.said or "" for part in content)
        more = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        if not more.get("name", True):
            del more["name"]
        return {"role": self.role, "content": content, **more}


class ToolFunction(_Read):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Read):
    type: Literal["function"] = "function"
    function: ToolFunction


class ToolChoice(_Read):
    """Choice of a tool, or of none; OpenAI's two APIs put the name in different places."""

    type: Literal["function", "auto", "none", "required", "any"]
    function: ToolFunction | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _is_named(self) -> ToolChoice:
        if self.type == "function" and not self.function and not self.name:
            raise ValueError("function: the name is missing")
        return self


class JsonSchema(_Read):
    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(_Read):
    """Format of the answer. The schema may be in ``json_schema`` or next to ``type``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Prediction(_Read):
    """Text that most of the answer is expected to repeat."""

    type: Literal["content"]
    content: str | list[MessagePart]

    @field_validator("content", mode="after")
    @classmethod
    def _is_text(cls, given: str | list[MessagePart]) -> str:
        if isinstance(given, str):
            return given
        if other := next((part for part in given if part.type != "text" or part.text is None), None):
            raise ValueError(f"a part of type {other.type!r} is not supported: a prediction must be text")
        return "".join(part.text or "" for part in given)


class StreamOptions(_Read):
    include_usage: bool = False


class _Answered(_Read):
    """Fields that chat and text completions share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    max_tokens: Limit | None = None
    n_predict: Limit | None = None  # llama-server's name for max_tokens
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: Share | None = None
    top_k: Limit | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: Limit | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)  # -1: random
    stop: Stop | list[Stop] | None = None
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    logit_bias: dict[Annotated[int, Field(ge=0)], Penalty] = Field(default_factory=dict, max_length=_MOST_BIASES)
    user: str | None = None
    grammar: str = ""
    json_schema: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    ignore_eos: bool = False
    cache_prompt: bool = True
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if isinstance(given, list) and len(given) > _MOST_STOPS:
            raise ValueError(f"at most {_MOST_STOPS} texts are allowed")
        return given

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, given: Any) -> Any:
        """Also accept llama-server's list of pairs, and false for "never"."""
        try:
            return {id_: -100 if bias is False else bias for id_, bias in dict(given).items()}
        except (TypeError, ValueError):
            return given

    @model_validator(mode="after")
    def _can_be_had(self) -> _Answered:
        if self.n > 1 and self.stream:
            raise ValueError("n: a stream can have only one answer")
        if self.max_tokens is None:
            self.max_tokens = self.n_predict
        if self.max_tokens == 0:
            raise ValueError("max_tokens: must be at least 1; -1 is as many as the context holds")
        wanted = self.response_format
        if wanted and wanted.type == "json_schema" and self._schema is None:
            raise ValueError("response_format.json_schema: the schema is missing")
        if self.grammar and self._schema is not None:
            raise ValueError("grammar: an answer can follow a grammar or a JSON schema, not both")
        return self

    @property
    def _schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return self.json_schema
        inner = wanted.json_schema.schema_ if wanted.json_schema else None
        found = next((one for one in (inner, wanted.schema_, self.json_schema) if one is not None), None)
        return {} if found is None and wanted.type == "json_object" else found

    @property
    def schema_text(self) -> str:
        """JSON schema of the answer; empty if the request has none. A schema without keywords allows any object."""
        found = self._schema
        return "" if found is None else json.dumps(found or {"type": "object"}, ensure_ascii=False)

    @property
    def common(self) -> dict[str, Any]:
        """Fields of the request to the child that chat and text completions share."""
        return {
            "sampling": self.sampling(),
            "max_tokens": max(0, self.max_tokens or 0),
            "stop": self.stops,
            "bias": self.logit_bias,
            "ends": not self.ignore_eos,
            "cache": self.cache_prompt,
            "progress": self.return_progress,
            "timings": self.timings_per_token,
            "prediction": str(self.prediction.content) if self.prediction else "",
        }

    @property
    def stops(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(filter(None, given))

    def sampling(self) -> Sampling:
        """Return the sampling options: by default OpenAI's temperature, llama.cpp's truncation and a random seed."""
        own: dict[str, Any] = {"temperature": 1.0}
        own |= self.model_dump(include=Sampling.__dataclass_fields__.keys() - {"seed"}, exclude_none=True)
        if self.top_k == -1:
            own["top_k"] = 0
        if self.top_p == 0:  # only the most likely token
            own |= {"top_k": 1, "top_p": 1.0}
        if self.repeat_last_n is None and {"presence_penalty", "frequency_penalty"} & own.keys():
            own["repeat_last_n"] = -1  # OpenAI's penalties cover the whole text
        return Sampling(seed=random_seed() if self.seed in (None, -1) else self.seed % 2**64, **own)


class CompletionBody(_Answered):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _prompt_is_one(self) -> CompletionBody:
        if isinstance(self.prompt, list) and (
            not self.prompt or (not isinstance(self.prompt[0], int) and len(self.prompt) > 1)
        ):
            raise ValueError("prompt: only one prompt per request is supported")
        if self.suffix:
            raise ValueError("suffix: not supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: log-probabilities of a prompt are not supported")
        if self.best_of not in (None, 1):
            raise ValueError("best_of: only one answer per request is supported")
        return self

    def text(self) -> str | tuple[int, ...]:
        """Return the prompt as text or token ids."""
        given: Any = self.prompt
        if isinstance(given, list) and not isinstance(given[0], int):
            (given,) = given
        return given if isinstance(given, str) else tuple(given)


class ChatBody(_Answered):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: Limit | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required", "any"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = Field(None, max_length=32)
    functions: Any = None
    function_call: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _belongs_together(self) -> ChatBody:
        for number, message in enumerate(self.messages):
            for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.said is None:
                    where = f"messages[{number}].content[{index}]"
                    raise ValueError(f"{where}: a part of type {part.type!r} is not supported: only text is")
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: requires logprobs: true")
        must, name = self._choice
        if must and not self.tools:
            raise ValueError("tool_choice: the request has no tools")
        if name and name not in {tool.function.name for tool in self.tools or ()}:
            raise ValueError(f"tool_choice: there is no tool {name!r}")
        if self.grammar and self._offered:
            raise ValueError("grammar: cannot be combined with tools")
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old):
                raise ValueError(f"{old}: not supported; send {new}")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: add_generation_prompt would begin a new message instead")
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise ValueError("continue_final_message: the last message is not an assistant's text")
        if self._goes_on and [one.role for one in self.messages[-2:]] == ["assistant", "assistant"]:
            raise ValueError("messages: the last two are the assistant's; an answer can continue only one")
        return self

    def plain_messages(self) -> tuple[dict[str, Any], ...]:
        """Return the messages in the form that chat templates expect; see :meth:`ChatMessage.plain`."""
        return tuple(message.plain() for message in self.messages)

    @property
    def _choice(self) -> tuple[bool, str]:
        """Pair (True if a tool must be called, its name if a specific one is required)."""
        if isinstance(self.tool_choice, ToolChoice):
            function = self.tool_choice.function
            name = self.tool_choice.name or (function.name if function else "")
            return self.tool_choice.type in ("function", "required", "any"), name
        return self.tool_choice in ("required", "any"), ""

    @property
    def _goes_on(self) -> bool:
        """True if the answer continues the last message."""
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls and self.add_generation_prompt is not True

    @property
    def _offered(self) -> list[Tool]:
        off = self.tool_choice.type if isinstance(self.tool_choice, ToolChoice) else self.tool_choice
        return [] if off == "none" else self.tools or []

    @property
    def wishes(self) -> TemplateOptions:
        """Template options for this request."""
        must, name = self._choice
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return TemplateOptions(
            tools=tuple(tool.model_dump(exclude_none=True) for tool in self._offered),
            must_call=must,
            function=name,
            parallel=self.parallel_tool_calls,
            json_schema=self.schema_text,
            begins=self.add_generation_prompt is not False,
            goes_on=self._goes_on,
            options=effort | self.chat_template_kwargs,
        )


class TokenizeBody(_Read):
    """``POST /tokenize``, as in llama-server."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(_Read):
    """``POST /detokenize``, as in llama-server."""

    tokens: list[int]
