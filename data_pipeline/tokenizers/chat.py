"""Chats as text, by a tokenizer's chat template."""

import json
import os
from collections.abc import Sequence
from typing import Any

from titans_pt.config.data import TOOLS
from titans_pt.data_pipeline.text import replace_surrogates
from titans_pt.data_pipeline.tokenizers.base import Tokenizer
from titans_pt.errors import UserError
from titans_pt.tools.extras import needed

Message = dict[str, Any]
"""A message of a chat: role, content, and whatever else the template reads."""
Tool = dict[str, Any]
"""A function that the model may call, as JSON schema: {"type": "function", "function": {"name": ..., ...}}."""
Piece = tuple[str, bool]
"""A stretch of a document's text, and whether it is an answer."""
_ANSWER = "an earlier answer"
"""Stands for an earlier answer where the text of the next message alone is wanted."""


def messages_of(given: object, of_arrow: bool = False) -> tuple[Message, ...]:
    """The messages of a row, without keys that have no value.

    Args:
        of_arrow: whether the row comes from a table of Arrow, where an object has every key of any row's object. Keys
            without a value are then left out inside messages too, such as arguments of other functions.

    Raises:
        ValueError: not a list of messages.
    """
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise ValueError("holds no list of messages, which are objects with role and content")
    messages = tuple({key: _valued(value) if of_arrow else value for key, value in message.items() if value is not None}
                     for message in given)  # fmt: skip
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content", ""), str):
            raise ValueError(f"message {number}: its role or its content is not text")
    return messages


def tools_of(given: object, of_arrow: bool = False) -> tuple[Tool, ...]:
    """The functions that a row describes beside its chat, as a list or as JSON text of a list. None without any.

    Args:
        of_arrow: see :func:`messages_of`.

    Raises:
        ValueError: something else.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given or "null")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"holds text that is no JSON ({error})") from None
    if not given:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ValueError("holds no list of functions, which are objects")
    return tuple(_valued(tool) if of_arrow else tool for tool in given)


def _valued(value: Any) -> Any:
    """A value without keys that have no value."""
    if isinstance(value, dict):
        return {key: _valued(each) for key, each in value.items() if each is not None}
    return [_valued(each) for each in value] if isinstance(value, list) else value


def chat_text(
    tokenizer: Tokenizer, messages: Sequence[Message], answer_next: bool = False, open_end: bool = False,
    tools: Sequence[Tool] = (),
) -> str:  # fmt: skip
    """Text of a chat as transformers' tokenizers write it. Control tokens are spelled in it
    (:meth:`Tokenizer.encode_spelled`).

    Args:
        answer_next: whether the beginning of an answer follows the last message.
        open_end: end with the last message's content, without what closes it.
        tools: functions that the model may call.

    Raises:
        UserError: the tokenizer has no chat template, or transformers is not installed.
        ValueError: the template does not write the tools.
        jinja2.TemplateError: the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"tokenizer {tokenizer.path}: has no chat template (chat_template.jinja or tokenizer_config.json next to "
            "it); use the tokenizer.json of a chat model, or plain text (titans generate, format: text)"
        )
    with needed("a chat"):
        from transformers.utils.chat_template_utils import render_jinja_template
    ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = {name: tokenizer.names[i] for name, i in ends.items() if i >= 0}

    def written(tools: list[Tool] | None) -> str:
        texts, _ = render_jinja_template(
            [list(messages)], tools, chat_template=tokenizer.chat_template, add_generation_prompt=answer_next,
            continue_final_message=open_end, **names,
        )  # fmt: skip
        return replace_surrogates(texts[0])

    text = written(list(tools) or None)
    if tools and text == written(None):
        raise ValueError(f"the chat template does not write the functions of the column {TOOLS}; describe them in the "
                         "system message, and leave the column out")  # fmt: skip
    return text


def chat_documents(
    tokenizer: Tokenizer, messages: Sequence[Message], last_only: bool = False, tools: Sequence[Tool] = ()
) -> list[list[Piece]]:
    """Text of a chat up to its last answer, as documents in pieces: an answer is what the template adds for a message
    of role assistant behind the beginning of an answer.

    A chat is one document, unless the template writes earlier messages in another way once others follow (Qwen3's
    leaves out their thoughts). Then an answer begins another document, with everything before it as a model reads it
    there.

    Args:
        last_only: make one piece of everything before the last answer.
        tools: functions that the model may call.

    Raises:
        ValueError: there is no answer, or the template writes none, or not behind the beginning of an answer, or it
            does not write the tools.
        UserError, jinja2.TemplateError: as :func:`chat_text`.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no message of role assistant")
    documents: list[list[Piece]] = [[]]
    done = ""
    for i in answers[-1:] if last_only else answers:
        before = chat_text(tokenizer, messages[:i], answer_next=True, tools=tools)
        after = chat_text(tokenizer, messages[: i + 1], tools=tools)
        if not after.startswith(before):
            alike = len(os.path.commonprefix([before, after]))
            raise ValueError(f"the chat template begins an answer with ...{before[alike:]!r}, which it then leaves "
                             "out; take this out of the template (docs/finetuning.md)")  # fmt: skip
        if not before.startswith(done):
            documents.append([])
            done = ""
        documents[-1] += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    trained = [document for document in documents if any(text for text, is_answer in document if is_answer)]
    if not trained:
        raise ValueError("the chat template writes nothing for the assistant")
    return trained


def message_ids(tokenizer: Tokenizer, message: str, system: str | None = None, first: bool = True) -> list[int]:
    """Ids that a model reads before it answers a user's message.

    Args:
        system: system message before the first message; None: the template's own, if it has one.
        first: whether the message begins the conversation. Else the ids begin with the end of the last answer's turn,
            before which generation stops.

    Raises:
        UserError: as :func:`chat_text`; the template refuses the messages, or leaves out earlier answers.
    """
    if first:
        before = [] if system is None else [{"role": "system", "content": system}]
        return ids_to_answer(tokenizer, [*before, {"role": "user", "content": message}])
    turns = [("user", "a question"), ("assistant", _ANSWER), ("user", message)]
    text = _to_answer(tokenizer, [{"role": role, "content": content} for role, content in turns])
    _, found, after = text.partition(_ANSWER)
    if not found:
        raise UserError(f"tokenizer {tokenizer.path}: its chat template leaves out earlier answers; begin a new "
                        "conversation with each message")  # fmt: skip
    return spelled_ids(tokenizer, after)


def ids_to_answer(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    """Ids of a chat, which begins a document, up to the beginning of the next answer.

    Raises:
        UserError: as :func:`chat_text`; the template refuses the messages, or does not write the tools.
    """
    return [*tokenizer.begin, *spelled_ids(tokenizer, _to_answer(tokenizer, messages, tools))]


def answer_ends(tokenizer: Tokenizer) -> list[int]:
    """Ids before which an answer ends: eos, and the control token with which the chat template closes an answer, such
    as <|im_end|> of a model whose documents end with <|endoftext|>. Without a template: eos."""
    ends, asked = [tokenizer.eos_id], {"role": "user", "content": "a question"}
    if tokenizer.chat_template is None:
        return ends
    from jinja2 import TemplateError  # comes with torch, which only chats need here

    try:
        text = chat_text(tokenizer, [asked, {"role": "assistant", "content": _ANSWER}])
    except TemplateError:  # it writes only other chats
        return ends
    _, found, after = text.rpartition(_ANSWER)
    closing = spelled_ids(tokenizer, after)[:1] if found else []
    return ends + [i for i in closing if i not in ends and not tokenizer.pieces[i]]


def _to_answer(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    from jinja2 import TemplateError  # comes with torch, which only chats need here

    try:
        return chat_text(tokenizer, messages, answer_next=True, tools=tools)
    except TemplateError as error:
        raise UserError(f"tokenizer {tokenizer.path}: its chat template refuses the messages ({error}); leave out the "
                        "system message if there is one") from None  # fmt: skip
    except ValueError as error:
        raise UserError(f"tokenizer {tokenizer.path}: {error}") from None


def spelled_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """``tokenizer.encode_spelled`` without the ids with which a document begins (``Tokenizer.begin``): a template may
    write them too."""
    ids, begin = tokenizer.encode_spelled(text), list(tokenizer.begin)
    return ids[len(begin) :] if ids[: len(begin)] == begin else ids
