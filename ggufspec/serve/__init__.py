"""The pair behind an OpenAI-compatible HTTP endpoint."""
