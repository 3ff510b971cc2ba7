"""Class of the command groups: the top level and ``profiles``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from ggufspec.errors import UsageError, did_you_mean

OTHER_NAMES = {  # word that people may type: the command that they mean
    "download": "pull",
    "generate": "run",
    "server": "serve",
    "ls": "list",
    "list": "models",
    "remove": "rm",
    "delete": "rm",
}


class CommandGroup(TyperGroup):
    """Commands by name; the error for an unknown name suggests the nearest."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        meant = OTHER_NAMES.get(cmd_name, "")
        return self.commands.get(cmd_name) or self.commands.get(meant) or self.commands.get(OTHER_NAMES.get(meant, ""))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            others = (other for other, meant in OTHER_NAMES.items() if meant in self.commands)
            hint = did_you_mean(name, self.commands, 2) or did_you_mean(name, others) or f"{ctx.command_path} --help"
            raise UsageError(f"there is no command {name!r}", hint)
        return super().resolve_command(ctx, args)
