"""Conversion of a conversation to the tokens of a prompt."""
