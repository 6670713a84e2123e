"""A tokenizer for the tiny models: one token a printable ASCII character, and a chat template that can call tools."""

import string
from typing import Any

# Ids 0, 1, 2 are what the tiny configs call pad, bos and eos. Ids from 120 on stay free: multimodal configs use them.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<turn>", "</turn>", "<call>", "</call>", "<result>", "</result>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))

CHAT_TEMPLATE = """\
{%- if tools %}<turn>tools
{% for tool in tools %}{{ tool.function.name }} {% endfor %}</turn>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<turn>assistant
{% generation %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<call>{"name": "{{ call.function.name }}", "arguments": {{
 call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</call>
{%- endfor %}</turn>
{% endgeneration %}
{%- elif message.role == "tool" %}<turn>tool
<result>{{ message.content }}</result></turn>
{% else %}<turn>{{ message.role }}
{{ message.content }}</turn>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<turn>assistant
{% endif %}"""


def tiny_tokenizer() -> Any:
    """A transformers tokenizer with 106 ids; characters outside printable ASCII become <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert set(string.printable.strip()) < set(CHARACTERS)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="</turn>",  # as chat models do: the end of a turn ends a generation
        unk_token="<unk>",
        extra_special_tokens=["<turn>", "<call>", "</call>", "<result>", "</result>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
