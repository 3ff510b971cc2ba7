"""Measured runs in child processes, and what they say about a pair."""
