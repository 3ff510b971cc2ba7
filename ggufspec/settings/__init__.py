"""The table of options, and the registries of drafters and acceptance rules."""
