"""The examples that people copy: the docstring of SpeculativeDecoder and the README's Python."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from ggufspec.decoding import decoder

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_docstring_of_the_decoder():
    result = doctest.testmod(decoder)
    assert result.attempted >= 4
    assert result.failed == 0


def test_the_python_of_the_readme(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert "accepted" in capsys.readouterr().out
