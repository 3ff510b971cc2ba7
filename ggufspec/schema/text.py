"""Formatting of texts, with visible control characters, and of sizes with units for users. Pure.

Every character is treated separately, so that the result does not depend on how a text was split into tokens. An escape
sequence loses its first character, whatever follows it and whenever that arrives, and its rest becomes plain text.

Sources: ECMA-48 for terminal controls (C0, DEL, C1); Unicode 16, section 23.2 and UAX #9 for characters that reorder.
"""

from __future__ import annotations

import math
import re

_PICTURES = 0x2400  # Unicode's control pictures, in the order of C0
_DELETE = "\u2421"
_ASCII = dict(zip("≈×…–−÷·•✗█▓▒░▪", "~x.--/.*x#=-:o", strict=True)) | {"±": "+/-", "≤": "<=", "≥": ">="}
HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufff9-\ufffb\ufffe\uffff]"
)


def visible(text: str) -> str:
    """Return ``text`` without characters that control a terminal; tabs and newlines are kept.

    C0 and DEL become their pictures (``␛`` for ESC), others their code point (``<U+009B>`` for CSI, ``<U+202E>`` for
    the right-to-left override), and lone surrogates ``�``. ``visible(a + b) == visible(a) + visible(b)``.
    """
    return HARMFUL.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return _DELETE
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else f"<U+{code:04X}>"


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks with similar ones, as a handler for ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


def of_file(size: float | None) -> str:
    """Format a file size in powers of 1000, as is usual for disks and downloads; return "" if it is unknown."""
    if size is None:
        return ""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def of_download(size: float) -> str:
    """Format a download size in units from B to TB, so that a small remainder is never shown as zero."""
    power = 0
    while size >= 999.95 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def of_memory(size: float | None, digits: int = 1) -> str:
    """Format a memory size in MiB, or from 1 GiB in GiB with ``digits`` decimals; return "" if it is unknown."""
    if size is None:
        return ""
    return f"{size / 2**30:.{digits}f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def memory_of(used: float, total: float) -> str:
    """Format used and total memory, such as ``1.7 of 12.0 GiB``."""
    return f"{of_memory(used).removesuffix(' GiB' if total >= 2**30 else ' MiB')} of {of_memory(total)}"


def gib(size: float) -> str:
    """Format a size as a number of GiB without the unit, for places that state it elsewhere."""
    return f"{size / 2**30:.1f}"


def counted(number: int, thing: str) -> str:
    """Format a count with its noun, such as ``1 token`` or ``2,048 tokens``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a duration, such as ``45 s``, ``3 min``, ``2 min 30 s`` or ``1 h 10 min``; 10 s steps from one minute."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds / 10) * 10, 60)
        return f"{minutes} min" + (f" {rest} s" if rest and minutes < 10 else "")
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")


def as_budget(seconds: float) -> str:
    """Format a duration as a ``--budget`` value, rounded up."""
    return f"{math.ceil(seconds)}s" if seconds <= 90 else f"{math.ceil(seconds / 60)}m"


def number(value: float) -> str:
    """Format a number with about three digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}" if abs(value) < 1e7 else f"{value:.3g}"
