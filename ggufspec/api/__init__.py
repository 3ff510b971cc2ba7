"""From settings to a planned or loaded pair, for the commands and for Python."""
