"""Planning and loading of pairs from settings, for the commands and for Python."""
