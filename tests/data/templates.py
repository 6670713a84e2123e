"""Chat templates in the manners of the field, written for these tests; every one is a way in which templates differ."""

HEAD = "{{ '<|im_start|>' + message.role + '\\n' }}"

# the plain manner: one block a message, calls as JSON, objects expected
CHATML = (
    "{% for message in messages %}" + HEAD + "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# writes a heading for tools that are given, even for none of them
TOOLS_AHEAD = "{% if tools is not none %}tools: {{ tools | length }}\n{% endif %}" + CHATML

# begins with a BOS of its own
WITH_BOS = "{{ bos_token }}" + CHATML

# reasoning is shown only after the last question, and tool results that follow each other share one user block
REASONING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>{{ message.content }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}" + HEAD + "{% if message.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# questions and answers must take turns, and a system message alone is refused
STRICT = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no question') }}{% endif %}" + CHATML
)

# joins arguments to text, so that objects raise
TEXT_ARGUMENTS = CHATML.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")

# forgets calls when there is content
DROPS_CALLS = (
    "{% for message in messages %}"
    + HEAD
    + "{% if message.content %}{{ message.content }}{% elif message.tool_calls %}"
    "<tool_call>{{ message.tool_calls[0].function.name }}</tool_call>{% endif %}<|im_end|>\n{% endfor %}"
)

# an end that only the last message gets: no prefix of the whole text
CLOSES_AT_THE_END = CHATML.replace(
    "<|im_end|>\n{% endfor %}", "{% if not loop.last %}|{% endif %}{% endfor %}<|im_end|>"
)

# nothing rendered alone is a beginning of the longer text: the number of messages comes first
COUNTS_AHEAD = "{{ messages | length }} messages\n" + CHATML

MANNERS = {
    "chatml": CHATML,
    "tools ahead": TOOLS_AHEAD,
    "with bos": WITH_BOS,
    "reasoning": REASONING,
    "strict": STRICT,
    "text arguments": TEXT_ARGUMENTS,
    "closes at the end": CLOSES_AT_THE_END,
    "counts ahead": COUNTS_AHEAD,
}
