"""Saved results, which are JSON documents from any machine, validated once and converted to dataclasses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.schema.base import SpeculativeRun
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.compare import CompareDocument
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.sweep import SweepDocument
from ggufspec.schema.text import visible
from ggufspec.schema.tune import TuneDocument
from ggufspec.settings.table import OLD_NAMES, renamed

ResultDocument: TypeAlias = BenchDocument | CompareDocument | PlanDocument | SweepDocument | TuneDocument

KNOWN: dict[str, type[ResultDocument]] = {
    "ggufspec/bench@1": BenchDocument,
    "ggufspec/compare@1": CompareDocument,
    "ggufspec/plan@1": PlanDocument,
    "ggufspec/sweep@1": SweepDocument,
    "ggufspec/tune@1": TuneDocument,
}
BUNDLE = "ggufspec/report@1"  # schema of ``ggufspec report --json``, which bundles documents by file name
_HINT = "ggufspec report RESULT.json, the --json output of " + ", ".join(sorted(name[9:-2] for name in KNOWN))


def read_document(path: Path) -> dict[str, ResultDocument]:
    """Return the document in a file, or all documents in a ``report --json`` bundle, by name.

    Raises:
        GgufspecError: the file is missing, is not complete JSON, or has no document that a report can show.
    """
    body = untrusted.read_json(path, hint=_HINT)
    results = body.get("results") if isinstance(body, dict) and body.get("schema") == BUNDLE else None
    if not isinstance(results, dict):
        return {str(path): parse_document(body, str(path))}
    if not results:
        raise GgufspecError(f"{path} contains no results", _HINT)
    names = {f"{_printable(name)} in {path}": each for name, each in results.items()}
    return {name: parse_document(each, name) for name, each in names.items()}


def parse_document(body: object, name: str = "a result") -> ResultDocument:
    """Return the document in parsed JSON; ``name`` is its name in error messages.

    Raises:
        GgufspecError: the schema is missing or unknown, or the document does not conform to it.
    """
    from pydantic import ValidationError

    from ggufspec.schema import codec

    body = renamed(_printable(body))
    schema = body.get("schema") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(schema, str):
        raise GgufspecError(f"{name} is not a ggufspec result: it has no schema", _HINT)
    if isinstance(option := body.get("option"), str):  # a sweep may store its option under an old name
        body |= {"option": OLD_NAMES.get(option, option)}
    if schema not in KNOWN:
        raise GgufspecError(f"{name} {_unknown(schema)}", _HINT)
    try:
        for run in _speculative(body):  # otherwise, an invalid one would be accepted as a target-only run
            codec.load(SpeculativeRun, run)
        found: ResultDocument = codec.load(KNOWN[schema], body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("MeasuredRun", "SpeculativeRun"))
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise GgufspecError(
            f"{name} is not a valid {schema}: {where}: {message}", "create it again, or leave it out"
        ) from None
    return found


def _printable(value: Any) -> Any:
    """Return ``value`` without control characters, which terminals obey and names from strangers may contain."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return value


def _speculative(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if "acceptance_rate" in value:
            yield value
        for each in value.values():
            yield from _speculative(each)
    elif isinstance(value, list):
        for each in value:
            yield from _speculative(each)


def _unknown(schema: str) -> str:
    same = next((known for known in KNOWN if known.rpartition("@")[0] == schema.rpartition("@")[0]), None)
    if same:
        return f"has the schema {schema}, but this ggufspec reads {same}: it was made by another version"
    if schema == "ggufspec/error@1":
        return "is an error message (ggufspec/error@1), with no results to report"
    return f"has the schema {schema}; a report can show {', '.join(sorted(KNOWN))}"
