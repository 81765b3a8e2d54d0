"""A tokenizer of bytes with a chat template, for tests of chats."""

import json

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
"""Writes <s>ROLE:CONTENT</s> and a line break for each message."""
CLOSING = TEMPLATE.replace("</s>", "<s>")
"""Closes messages with another token than eos, as ChatML does with the tokenizers of base models."""
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}:{% endif %}{% if m['role'] == 'user' or loop.last %}"
    "{{ m['content'] }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
"""Leaves out earlier answers, as templates of models that think do with their thoughts."""
WITH_TOOLS = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + TEMPLATE
"""Writes the names of the functions that may be called, then the messages."""
BOS, EOS, SIZE = 256, 257, 258


def of_bytes():
    """A tokenizer of bytes, as the library ``tokenizers`` has it; 256 is <s>, 257 is </s>."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(["<s>", "</s>"])
    return found


def byte_tokenizer(folder, template=TEMPLATE):
    """Writes tokenizer.json and tokenizer_config.json of :func:`of_bytes` to a folder; returns the path of the
    former."""
    folder.mkdir(parents=True, exist_ok=True)
    of_bytes().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def said(*contents):
    """A chat in which user and assistant take turns."""
    return [{"role": ["user", "assistant"][i % 2], "content": each} for i, each in enumerate(contents)]
