"""Tests, and the models, servers and processes that they share."""
