"""Class of command groups: the top one, and ``profiles``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from ggufspec.errors import UsageError, nearest

OTHER_NAMES = {  # words that people type: the command that they mean
    "download": "pull",
    "generate": "run",
    "server": "serve",
    "ls": "list",
    "list": "models",
    "remove": "rm",
    "delete": "rm",
}


class Group(TyperGroup):
    """Commands by name; the error for an unknown name suggests the nearest."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        meant = OTHER_NAMES.get(cmd_name, "")
        return self.commands.get(cmd_name) or self.commands.get(meant) or self.commands.get(OTHER_NAMES.get(meant, ""))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            others = (other for other, meant in OTHER_NAMES.items() if meant in self.commands)
            hint = nearest(name, self.commands, 2) or nearest(name, others) or f"{ctx.command_path} --help"
            raise UsageError(f"there is no command {name!r}", hint)
        return super().resolve_command(ctx, args)
