"""Bytes for people."""

from __future__ import annotations


def of_file(size: float | None) -> str:
    """A file's, in powers of 1000 as disks and downloads are sold; empty where it is not known."""
    if size is None:
        return ""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def of_memory(size: float | None) -> str:
    """Of memory, in powers of 1024: GiB from 1 GiB on, MiB below; empty where it is not known."""
    if size is None:
        return ""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def gib(size: float) -> str:
    """A number of GiB, where the unit is said elsewhere."""
    return f"{size / 2**30:.1f}"
