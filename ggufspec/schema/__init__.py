"""Versioned JSON documents, with one module for each command."""
