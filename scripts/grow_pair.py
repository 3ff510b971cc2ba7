#!/usr/bin/env python3
"""Grow a small llama GGUF to a big shape without changing what it computes.

The expanded model gives the small one's text at the big shape's cost, so that speculation can be measured with real
acceptance and real speed where no big model can be downloaded. Grow the target, leave its draft as it is, or grow both.

    pip install -e '.[dev]'
    scripts/grow_pair.py profiles/demo/demo-target-F16.gguf big-Q4_0.gguf --shape 1b --type Q4_0
    scripts/grow_pair.py profiles/demo/demo-target-F16.gguf 70b.gguf --shape llama3-70b --type Q3_K_S --fill holes
    scripts/grow_pair.py profiles/demo/demo-target-F16.gguf odd-F16.gguf --width 512 --layers 12 --vocab 8192

How is told in ggufspec/models/expansion.py and lab/expansion.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ggufspec.errors import GgufspecError
from ggufspec.llamacpp.quantize import FILE_TYPES, check_type

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab import expansion  # noqa: E402

# Named by their size with 4096 tokens; what they leave out stays as it is in the source. Heads of 64 throughout, as the
# demo pair has: 3b and 8b have Llama's matrices and KV bytes with twice as many heads of half the size.
SIZES: dict[str, dict[str, Any]] = {
    "50m": {"width": 768, "layers": 8, "heads": 12, "kv_heads": 4, "ffn": 2048},
    "150m": {"width": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 3072},
    "0.3b": {"width": 1280, "layers": 16, "heads": 20, "kv_heads": 5, "ffn": 4096},
    "1b": {"width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192},  # Llama-3.2-1B
    "3b": {"width": 3072, "layers": 28, "heads": 48, "kv_heads": 16, "ffn": 8192},  # Llama-3.2-3B
    "8b": {"width": 4096, "layers": 32, "heads": 64, "kv_heads": 16, "ffn": 14336},  # Llama-3.1-8B
}
SHAPES = SIZES | {name: asdict(shape) for name, shape in expansion.SHAPES.items()}
NUMBERS = {
    "width": "width of the residual stream",
    "layers": "blocks",
    "heads": "query heads",
    "kv-heads": "key-value heads",
    "ffn": "width of the feed-forward",
    "vocab": "tokens; those beyond the source's are never chosen",
    "head-size": "size of a head",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Grow a small llama GGUF to a big shape without changing what it computes.",
        epilog="shapes:\n"
        + "\n".join(
            f"  {name:12} " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shape.items())
            for name, shape in SHAPES.items()
        )
        + "\n\nexample:\n"
        "  scripts/grow_pair.py profiles/demo/demo-target-F16.gguf big-Q4_0.gguf --shape 1b --type Q4_0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("small", type=Path, metavar="SMALL.gguf", help="a small llama model, such as the demo target")
    parser.add_argument("out", type=Path, metavar="OUT.gguf", help="the file to write; it appears when it is whole")
    parser.add_argument("--shape", choices=SHAPES, help="a shape by name; the options below change its numbers")
    shape = parser.add_argument_group("shape", "what neither --shape nor an option sets stays as it is in the source")
    for name, text in NUMBERS.items():
        shape.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--type", default="F16", metavar="TYPE", help=f"{', '.join(FILE_TYPES)} (default F16)")
    parser.add_argument(
        "--fill",
        choices=("holes", "blocks"),
        default="blocks",
        help="what stands in the extra blocks: random numbers (default), or holes, which take no disk",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Grow one model; returns the exit code."""
    arguments = parse(argv)
    began = time.monotonic()
    try:
        file_type = check_type(arguments.type)
        given = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in NUMBERS}
        chosen = SHAPES.get(arguments.shape, {}) | {name: value for name, value in given.items() if value is not None}
        shape = replace(expansion.shape_of(expansion.read_source(arguments.small)), **chosen)
        made = expansion.expand(expansion.Spec(arguments.small, shape, file_type, arguments.out, arguments.fill))
    except GgufspecError as error:
        print(f"grow_pair: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(
        f"{arguments.out}: {shape.parameters() / 1e6:,.0f} M parameters, {file_type}, "
        f"{made.needed.size_bytes / 1e6:,.0f} MB ({made.disk_bytes / 1e6:,.0f} on the disk), "
        f"{time.monotonic() - began:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
