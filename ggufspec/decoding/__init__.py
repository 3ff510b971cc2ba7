"""Drafting, verifying and sampling: pure over a small Model protocol."""
