"""Real GGUF files that differ from others in a few things."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf


def add_field(writer: gguf.GGUFWriter, field: Any, value: Any) -> None:
    """Write a field of another file with this value."""
    kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
    writer.add_key_value(field.name, value, kind, of)


def write(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rewritten(
    source: Path,
    path: Path,
    *,
    value: Callable[[str, Any], Any] = lambda _, value: value,
    data: Callable[[str, Any], Any] = lambda _, data: data,
    template: str = "",
    alignment: int = 0,
    size_label: str = "",
    add: Mapping[str, bool | str] = MappingProxyType({}),
    drop: Container[str] = (),
) -> Path:
    """Write the model of ``source`` to ``path``, changed.

    Args:
        source: a GGUF file without a chat template.
        path: the file to write.
        value: gives a field's value from its name and the value before.
        data: gives a tensor's data from its name and the data before.
        template: a chat template to add.
        alignment: of its tensors, if not the usual 32 bytes.
        size_label: to add.
        add: flags and texts to add, or to set, whatever the type before.
        drop: names of fields to leave out.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for field in reader.fields.values():
        if field.name in add or field.name in drop:
            continue
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            add_field(writer, field, value(field.name, field.contents()))
    for name, given in add.items():
        (writer.add_string if isinstance(given, str) else writer.add_bool)(name, given)
    if size_label:
        writer.add_size_label(size_label)
    if template:
        writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, data(tensor.name, tensor.data), raw_dtype=tensor.tensor_type)
    write(writer)
    return path


def split(source: Path, folder: Path, parts: int) -> list[Path]:
    """Write the model of ``source`` as ``parts`` files, as llama-gguf-split does; the first one has all metadata."""
    reader = gguf.GGUFReader(source)
    step = -(-len(reader.tensors) // parts)
    paths = [folder / f"{source.stem}-{i + 1:05}-of-{parts:05}.gguf" for i in range(parts)]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
        for field in reader.fields.values() if not i else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                add_field(writer, field, field.contents())
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i * step : (i + 1) * step]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        write(writer)
    return paths
