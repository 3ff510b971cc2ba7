"""Command ``ggufspec chat``: chat with a pair that stays loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from ggufspec.api.options import sampling
from ggufspec.api.resolve import ResolvedOptions
from ggufspec.chat.actions import take
from ggufspec.chat.commands import ChatSwitches
from ggufspec.chat.console import UserInput, silent_keys
from ggufspec.chat.markdown import THEME
from ggufspec.chat.screen import ChatScreen
from ggufspec.chat.session import ChatJob
from ggufspec.chat.talk import Talk
from ggufspec.cli import inputs, models, ui
from ggufspec.cli.parameters import command, command_option, takes
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

USUAL_CONTEXT = 4096  # default, unless the target was trained with less; conversations soon outgrow 2,048


@command(
    "ggufspec chat llama3.1-8b",
    "ggufspec chat -m TARGET.gguf -md DRAFT.gguf --system 'Be terse.' --tint",
    "printf 'Hi\\n/target\\nHi\\n' | ggufspec chat -m TARGET.gguf --json",
    confirms=True,
)
def chat(
    *,
    load: Annotated[Path | None, command_option("--load FILE", "Resume a conversation that /save wrote.")] = None,
    markdown: Annotated[
        bool,
        command_option("--markdown/--no-markdown", "Render answers as Markdown. Needs a chat template.", rare=True),
    ] = True,
    tint: Annotated[bool, command_option("--tint/--no-tint", "Colour tokens by the model that wrote them.")] = False,
    given: Annotated[
        Settings,
        takes(
            *(*GROUPS, "system"),
            pair={"shown": "a list"},
            predict={"default": 512},
            ctx_size={"shown": f"profile's, else {USUAL_CONTEXT}"},
            temp={"default": 0.8},
            seed={"default": -1},
            rare=("seed",),
        ),
    ],
) -> int:
    """Chat with a pair. /help lists what can be changed during the chat: which model answers, draft length, and more.

    Without a pair or a model, it lists those on this disk. Without a terminal, every line of standard input is a
    message or a command. With --json, the conversation is one document; after a failure it holds the turns so far.
    """
    if models.is_missing(given):
        raise models.no_model_error("chat")
    said_first = inputs.system_prompt(given)
    interactive = not ui.flags().json and sys.stdin.isatty() and sys.stdout.isatty()
    lines = iter(()) if interactive else _lines()
    more = {"predict": given.value("predict"), "markdown": None if markdown else False, "system": said_first}
    screen = ChatScreen(
        *(ui.out(THEME), ui.err(), _say, ui.busy),
        interactive=interactive,
        streams=not ui.flags().json,
        quiet=ui.flags().quiet,
    )
    talk = _local(given, screen, more | {"tint": tint})
    try:
        if load is not None:  # before the pair is loaded, so that typos fail at once
            talk.resume(load)
            if said_first:
                talk.settings = replace(talk.settings, system=said_first)
        offered = models.draft_line("chat", given, talk.target) if interactive else ""
        talk.open()
        return _converse(talk, offered) if interactive else _go_through(talk, lines)
    finally:
        talk.close()


def _sampling(given: Settings) -> dict[str, Any]:
    """Return the sampling switches; with seed -1 each answer draws a new seed, so that /retry gives another answer."""
    if given.seed != -1:
        return {"sampling": sampling(given)}
    return {"sampling": sampling(replace(given, seed=random_seed())), "redraws": True}


def _prepared(given: Settings) -> tuple[Pair, ResolvedOptions]:
    """Place the pair's layers for the given context size, else the profile's, else :data:`USUAL_CONTEXT`."""
    if given.ctx_size is None:
        pair = inputs.pair(given, no_draft=bool(given.no_draft) or not drafts_with_file(given.drafter or "both"))
        if pair.settings.ctx_size is None:
            try:
                trained = read_headers([pair.target])[0].header.context_length
                return prepare_pair(replace(given, ctx_size=min(USUAL_CONTEXT, trained)))
            except StopError:
                raise
            except GgufspecError:  # the default context may still fit; if it does not, that error is clearer
                pass
    return prepare_pair(given)


def _local(given: Settings, screen: ChatScreen, more: dict[str, Any]) -> Talk:
    chosen, resolved = _prepared(given)
    if chosen.target == demo_pair()[0]:
        screen.note("the demo pair is a 10M-parameter toy that only continues Python code; it cannot chat")
    loaded = resolved.pair
    drafts = loaded.drafts(with_draft=chosen.draft is not None)
    settings = ChatSwitches(
        has_draft=chosen.draft is not None and loaded.needs_draft,
        head=loaded.head,
        draft_most=max(loaded.draft_max, ROWS - 1),  # maximum draft length after loading
        drafter=loaded.drafter if drafts else "none",
        draft_policy=loaded.draft_policy,
        draft_max=loaded.draft_max,
        accept=loaded.accept,
        **_sampling(given),
        **more,
    )
    if not drafts:  # load lookup, so that /drafter can switch to it
        loaded = replace(loaded, drafters=("lookup",))
    spec = ChatJob(chosen.target, chosen.draft, loaded, given.rpc or (), planned=resolved.target_s)
    return Talk(spec, settings, screen, name=models.called(chosen), about=chosen.describe(), verbose=ui.flags().verbose)


def _say(text: str) -> None:
    ui.err().say(text, style="dim")


def _converse(talk: Talk, offered: str) -> int:
    talk.greet(offered)
    typing = UserInput(state_folder() / "chat_history", talk.status)
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
    """Process each line as a message or a command until one fails; with ``--json``, then print the conversation."""
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
            "run it in a terminal, or pipe lines to it: echo Hello | ggufspec chat -m TARGET.gguf",
        )
    return chain([first], lines)


def _decoded() -> Iterator[str]:
    longest = inputs.MOST_TEXT_BYTES
    for number, line in enumerate(iter(lambda: sys.stdin.buffer.readline(longest + 1), b""), 1):
        if len(line) > longest:
            raise UsageError(f"line {number} of standard input has more text than any context holds", "split the line")
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # byte order mark
        text = inputs.utf8(line, f"line {number} of standard input")
        if text.strip():
            yield text.rstrip("\r\n")
