"""Models to chat with: the pair that ships, with a chat template or with other bytes for its line ends."""

from __future__ import annotations

from pathlib import Path

import gguf

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAILING = "{{ messages[0]['content'].nothing() }}"
_LINE_END, _ESCAPE = "Ċ", "ě"  # how byte-level BPE writes 0x0a and 0x1b


def copy(source: Path, path: Path, *, template: str = "", escapes: bool = False) -> Path:
    """A copy of a GGUF file.

    Args:
        source: the file.
        path: the copy.
        template: its chat template.
        escapes: exchange line ends and escapes in its tokens: where the model means the one it writes the other.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        value, kind = field.contents(), field.types[0]
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if escapes and field.name == "tokenizer.ggml.tokens":
            value = [text.translate(str.maketrans(_LINE_END + _ESCAPE, _ESCAPE + _LINE_END)) for text in value]
        writer.add_key_value(field.name, value, kind, field.types[-1] if len(field.types) > 1 else None)
    if template:
        writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
