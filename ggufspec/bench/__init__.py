"""Measurements of models in child processes, and their evaluation."""
