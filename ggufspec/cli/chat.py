"""Command ``ggufspec chat``: talk with a pair that stays loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from ggufspec.api.options import sampling
from ggufspec.api.resolve import Resolved
from ggufspec.chat.actions import take
from ggufspec.chat.commands import Switches
from ggufspec.chat.console import Typing, silent_keys
from ggufspec.chat.markdown import THEME
from ggufspec.chat.remote import Remote, base_url
from ggufspec.chat.screen import Screen
from ggufspec.chat.session import Spec
from ggufspec.chat.talk import Talk
from ggufspec.cli import inputs, models, ui
from ggufspec.cli.parameters import Typed, command, option, takes
from ggufspec.cli.run import GROUPS, end, prepare_pair
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.sampling import random_seed
from ggufspec.errors import GgufspecError, StopError, UsageError
from ggufspec.files.cache import state_folder
from ggufspec.models.headers import read_headers
from ggufspec.models.profile import Pair, demo_pair
from ggufspec.schema.base import to_json
from ggufspec.settings.registry import drafts_with_file
from ggufspec.settings.table import Settings

USUAL_CONTEXT = 4096  # tokens, if the target was trained for as many; a conversation soon outgrows 2,048


@command(
    "ggufspec chat llama3.1-8b",
    "ggufspec chat -m TARGET.gguf -md DRAFT.gguf --system 'You are terse.' --tint",
    "ggufspec chat --url http://127.0.0.1:8080",
    "printf 'Hello\\n/target\\nHello\\n' | ggufspec chat -m TARGET.gguf --json",
    confirms=True,
)
def chat(
    *,
    load: Annotated[Path | None, option("--load FILE", "Resume a conversation that /save wrote.")] = None,
    markdown: Annotated[
        bool, option("--markdown/--no-markdown", "Render answers as Markdown. Needs a chat template.")
    ] = True,
    url: Annotated[str | None, option("--url URL", "Chat with a running OpenAI-compatible server.")] = None,
    api_key: Annotated[
        str | None,
        option("--api-key KEY", "API key of the server.", rare=True, envvar="GGUFSPEC_API_KEY", show_envvar=False),
    ] = None,
    served_model: Annotated[
        str | None, option("--served-model NAME", "Model to use. Not needed if the server has only one.", rare=True)
    ] = None,
    tint: Annotated[bool, option("--tint/--no-tint", "Colour tokens by which model wrote them.")] = False,
    given: Annotated[
        Settings,
        takes(
            *(*GROUPS, "system"),
            pair={"shown": "a list"},
            predict={"default": 512},
            ctx_size={"shown": f"the profile's, else {USUAL_CONTEXT}"},
            temp={"default": 0.8},
            seed={"default": -1},
        ),
    ],
    typed: Typed,
) -> int:
    """Talk with a pair. /help lists what can be switched while it is loaded: who answers, how far is drafted, and more.

    Without a pair or a model it lists those on this disk. Without a terminal every line of standard input is a message
    or a command. With --json the conversation is one document, as far as it came.
    """
    if url is None and served_model is None and models.is_missing(given):
        raise models.no_model("chat")
    said_first = inputs.system_prompt(given)
    interactive = not ui.flags().json and sys.stdin.isatty() and sys.stdout.isatty()
    lines = iter(()) if interactive else _lines()
    more = {"predict": given.value("predict"), "markdown": None if markdown else False, "system": said_first}
    screen = Screen(
        *(ui.out(THEME), ui.err(), _say, ui.busy),
        interactive=interactive,
        streams=not ui.flags().json,
        quiet=ui.flags().quiet,
    )
    if url is not None:
        _check_remote(url, typed)
        talk = _remote(url, api_key, served_model, given, screen, more)
    elif served_model is not None:
        raise UsageError("--served-model is of a server", "ggufspec chat --url URL --served-model NAME")
    else:
        talk = _local(given, screen, more | {"tint": tint})
    try:
        if load is not None:  # before the pair is loaded: a typo costs no wait
            talk.resume(load)
            if said_first:
                talk.settings = replace(talk.settings, system=said_first)
        offered = models.draft_line("chat", given, talk.target) if interactive and talk.target else ""
        talk.open()
        return _converse(talk, offered) if interactive else _go_through(talk, lines)
    finally:
        talk.close()


def _check_remote(url: str, typed: Typed) -> None:
    """Refuse command-line options that the server decides; those in environment variables are for other commands."""
    for row in takes(*GROUPS).rows():
        if row.name in typed and row.group != "sampling" and row.name != "predict":
            what = row.flag if row.flags else "PAIR"
            raise UsageError(f"both --url and {what} are given: the server has its pair", f"ggufspec chat --url {url}")


def _remote(
    url: str, key: str | None, model: str | None, given: Settings, screen: Screen, more: dict[str, Any]
) -> Talk:
    settings = Switches(has_draft=False, **_sampling(given), **more)
    server = Remote(base_url(url), key or "", model or "")
    return Talk(server, settings, screen, name=server.url, about={"url": server.url})


def _sampling(given: Settings) -> dict[str, Any]:
    """Return the sampling switches; with seed -1 each answer has a new seed, so that /retry gives another answer."""
    if given.seed != -1:
        return {"sampling": sampling(given)}
    return {"sampling": sampling(replace(given, seed=random_seed())), "redraws": True}


def _prepared(given: Settings) -> tuple[Pair, Resolved]:
    """Place the pair's layers with the given context, else the profile's, else one for a conversation."""
    if given.ctx_size is None:
        pair = inputs.pair(given, no_draft=bool(given.no_draft) or not drafts_with_file(given.drafter or "both"))
        if pair.settings.ctx_size is None:
            try:
                trained = read_headers([pair.target])[0].header.context_length
                return prepare_pair(replace(given, ctx_size=min(USUAL_CONTEXT, trained)))
            except StopError:
                raise
            except GgufspecError:  # the default context fits, or its error says what is wrong
                pass
    return prepare_pair(given)


def _local(given: Settings, screen: Screen, more: dict[str, Any]) -> Talk:
    chosen, resolved = _prepared(given)
    if chosen.target == demo_pair()[0]:
        screen.note("the demo pair is a toy of 10M parameters that continues Python code: it cannot chat")
    loaded = resolved.pair
    drafts = loaded.drafts(with_draft=chosen.draft is not None)
    settings = Switches(
        has_draft=chosen.draft is not None and loaded.needs_draft,
        head=loaded.head,
        draft_most=max(loaded.draft_max, ROWS - 1),  # the length that it is loaded for
        drafter=loaded.drafter if drafts else "none",
        draft_policy=loaded.draft_policy,
        draft_max=loaded.draft_max,
        accept=loaded.accept,
        **_sampling(given),
        **more,
    )
    if not drafts:  # so that /drafter can switch to the lookup
        loaded = replace(loaded, drafters=("lookup",))
    spec = Spec(chosen.target, chosen.draft, loaded, given.rpc or (), planned=resolved.target_s)
    return Talk(spec, settings, screen, name=models.called(chosen), about=chosen.describe(), verbose=ui.flags().verbose)


def _say(text: str) -> None:
    ui.err().say(text, style="dim")


def _converse(talk: Talk, offered: str) -> int:
    talk.greet(offered)
    typing = Typing(state_folder() / "chat_history", talk.status)
    while True:
        try:
            typed = typing.read()
            if not typed.strip():
                continue
            with silent_keys():
                if not take(talk, typed):
                    return 0
        except EOFError:
            return 0
        except KeyboardInterrupt:
            continue
        except GgufspecError as error:
            ui.failure(error.message, error.hint)


def _go_through(talk: Talk, lines: Iterator[str]) -> int:
    """Take every line as a message or a command until the first failure; the conversation so far is printed anyway."""
    interrupted, failure, loaded = False, None, talk.turns
    try:
        for line in lines:
            if not take(talk, line) or talk.stopped:
                break
        interrupted = talk.stopped
    except KeyboardInterrupt:
        interrupted = True
    except GgufspecError as error:
        if not ui.flags().json or talk.turns == loaded:
            raise
        failure = error
    if ui.flags().json:
        ui.data(to_json(talk.document(interrupted=interrupted, failure=failure)))
    if failure is not None:
        ui.failure(failure.message, failure.hint)
        return failure.exit_code
    return end(interrupted)


def _lines() -> Iterator[str]:
    """Return standard input's non-empty lines as they arrive; the first is read at once."""
    lines = _decoded()
    first = next(lines, None)
    if first is None:
        raise UsageError(
            "standard input is empty: there is nothing to answer",
            "start it in a terminal, or give it lines: echo Hello | ggufspec chat -m TARGET.gguf",
        )
    return chain([first], lines)


def _decoded() -> Iterator[str]:
    longest = inputs.MOST_TEXT_BYTES
    for number, line in enumerate(iter(lambda: sys.stdin.buffer.readline(longest + 1), b""), 1):
        if len(line) > longest:
            raise UsageError(f"line {number} of standard input has more text than any context holds", "shorter lines")
        text = inputs.utf8(line, f"line {number} of standard input")
        if text.strip():
            yield text.rstrip("\r\n")
