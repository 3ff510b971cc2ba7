"""Real GGUF files that differ from others in a few things."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf


def rewritten(
    source: Path,
    path: Path,
    *,
    value: Callable[[str, Any], Any] = lambda _, value: value,
    data: Callable[[str, Any], Any] = lambda _, data: data,
    template: str = "",
    alignment: int = 0,
    size_label: str = "",
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
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, value(field.name, field.contents()), kind, of)
    if size_label:
        writer.add_size_label(size_label)
    if template:
        writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, data(tensor.name, tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
