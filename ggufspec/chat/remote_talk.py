"""A chat with a running server: what it decides, commands do not change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ggufspec.chat import commands as chat_commands
from ggufspec.chat import session
from ggufspec.chat.commands import Command, Switches
from ggufspec.chat.remote import Remote
from ggufspec.chat.talk import Screen, Talk
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.reports.table import pairs

_SERVERS = {  # what the server decides
    *("speculative", "target", "draft", "compare", "cache", "debug", "tint"),
    *(name for name, row in chat_commands.ROWS.items() if row.group == "drafting"),
}


class RemoteTalk(Talk):
    """A conversation with a server.

    Args:
        server: which one.
        settings: how it begins.
        screen: where it is shown.
    """

    opening = ("connecting to", "the server answered")

    def __init__(self, server: Remote, settings: Switches, screen: Screen) -> None:
        nothing = session.Spec(Path(), None, DecoderOptions())
        super().__init__(nothing, settings, screen, name=server.url, about={"url": server.url}, opened_by=server)
        self._server = server

    def open(self) -> None:
        """Reach the server, and learn its model.

        Raises:
            GgufspecError: it cannot be reached.
            StopError: Ctrl-C.
        """
        super().open()
        self.name = self._server.model
        self.about = {"url": self._server.url, "model": self._server.model}

    def greet(self) -> None:
        """Name the server, and the way in and out."""
        self.screen.note(f"{self.name} at {self._server.url}. /help lists commands, Ctrl-D leaves.")
        self.screen.gap()

    def _run(self, commands: tuple[Command, ...]) -> bool:
        if (name := commands[0].name) in _SERVERS:
            raise UsageError(
                f"/{name} is not possible: the server decides that",
                "load the pair here for it: ggufspec chat PAIR; /settings shows what can be changed",
            )
        return super()._run(commands)

    def _settings(self, _: str) -> None:
        names = [name for name in chat_commands.SHOWN if name not in _SERVERS]
        rows = [(f"/{name}", chat_commands.shown(self.settings, name)) for name in names]
        rows.append(("context", f"{self._used:,} tokens"))
        self.screen.show(pairs([*rows, ("model", self.name), ("server", self._server.url)]))

    def status(self) -> list[tuple[str, bool]]:
        """The toolbar's words, and whether each is a warning."""
        words = [self.name, f"{self._used:,} tokens", chat_commands.sampled(self.settings)]
        words += ["penalties"] * self.settings.sampling.penalises + ["chat off"] * (not self.settings.chat)
        return [(word, False) for word in words]

    def _settings_now(self) -> dict[str, Any]:
        now = self.settings
        return {**asdict(now.sampling), "max_tokens": now.predict, "chat": now.chat}
