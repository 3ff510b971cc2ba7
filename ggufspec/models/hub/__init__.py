"""The hub of models: what it offers, and how it is fetched."""
