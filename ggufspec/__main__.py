"""Entry point of ``python -m ggufspec``."""

from ggufspec.cli.app import entry

entry()
