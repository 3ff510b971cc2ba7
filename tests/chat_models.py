"""The bundled pair with a chat template: copies whose two last tokens are the template's own."""

from __future__ import annotations

from pathlib import Path

import gguf

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_template(source: Path, path: Path, template: str = CHATML) -> Path:
    """Write ``source`` to ``path`` with a chat template.

    Args:
        source: a model of the bundled pair.
        path: the file to write.
        template: its Jinja.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        value, kind = field.contents(), field.types[0]
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "tokenizer.ggml.tokens":
            value = [*value[:-2], START, END]
        if field.name == "tokenizer.ggml.token_type":
            value = [*value[:-2], gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        writer.add_key_value(field.name, value, kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
