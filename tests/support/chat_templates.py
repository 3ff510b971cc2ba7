"""Chat templates for tests: of a family that calls tools and thinks, and of kinds that refuse."""

from __future__ import annotations

from typing import Any

HERMES = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
A call is
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = HERMES.replace(
    """{{ message.content or "" }}""",
    """{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or "" }}""",
).replace(
    """assistant
{% endif %}""",
    """assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}""",
)

OPENED = THINKING[: THINKING.rindex("assistant\n")] + "assistant\n<think>\n{% endif %}"  # by the prompt
# Calls without marks, as Llama 3's
BARE = HERMES.replace("\n<tool_call>", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's API has it; all properties are required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"To {name}", "parameters": parameters}}


WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer", "minimum": 1, "maximum": 9})
NOTE = tool("note", text={"type": "string", "maxLength": 20})
