"""Chats as text and as ids: which of them are answers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.chats import BOS, CLOSING, EOS, FORGETFUL, TEMPLATE, WITH_TOOLS, byte_tokenizer, said
from titans_pt.data_pipeline.tokenizers import encode_pieces, load_tokenizer
from titans_pt.data_pipeline.tokenizers.chat import (
    answer_ends,
    chat_documents,
    chat_text,
    ids_to_answer,
    spelled_ids,
    tools_of,
)
from titans_pt.errors import UserError

pytest.importorskip("transformers")

CHAT = said("one", "two", "three", "four", "five")


@pytest.fixture
def tokenizer(tmp_path):
    def make(template=TEMPLATE, **options):
        return load_tokenizer(byte_tokenizer(tmp_path / "tokenizer", template), **options)

    return make


def test_a_chat_is_written_by_its_template(tokenizer):
    assert chat_text(tokenizer(), CHAT[:2]) == "<s>user:one</s>\n<s>assistant:two</s>\n"
    assert chat_text(tokenizer(), CHAT[:1], answer_next=True) == "<s>user:one</s>\n<s>assistant:"
    assert chat_text(tokenizer(), CHAT[:2], open_end=True) == "<s>user:one</s>\n<s>assistant:two"


def test_answers_are_what_the_template_adds_for_the_assistant(tokenizer):
    [pieces] = chat_documents(tokenizer(), CHAT)
    assert [text for text, is_answer in pieces if is_answer] == ["two</s>\n", "four</s>\n"]
    assert "".join(text for text, _ in pieces) == chat_text(tokenizer(), CHAT[:4])  # the last question has no answer
    [(first, last)] = chat_documents(tokenizer(), CHAT, last_only=True)
    assert first == ("".join(text for text, _ in pieces[:3]), False) and last == pieces[3]


def test_a_template_that_rewrites_earlier_answers_has_a_document_for_each(tokenizer):
    found = chat_documents(tokenizer(FORGETFUL), CHAT)
    assert found == [[("one</s>:", False), ("two</s>", True)], [("one</s>:</s>three</s>:", False), ("four</s>", True)]]
    assert chat_documents(tokenizer(FORGETFUL), CHAT, last_only=True) == found[1:]
    silent_at_first = FORGETFUL.replace("</s>{% endfor %}", "{% if loop.length > 2 %}</s>{% endif %}{% endfor %}")
    without = said("one", "", "three", "four")
    assert chat_documents(tokenizer(silent_at_first), without) == [
        [("one</s>:</s>three</s>:", False), ("four</s>", True)]
    ]


def test_chats_without_answers_are_refused(tokenizer):
    with pytest.raises(ValueError, match="no message of role assistant"):
        chat_documents(tokenizer(), CHAT[:1])
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="writes nothing for the assistant"):
        chat_documents(tokenizer(silent), CHAT)
    thinking = TEMPLATE.replace("<s>assistant:", "<s>assistant:<think>")
    with pytest.raises(ValueError, match="begins an answer with ...'<think>', which it then leaves out; take this out"):
        chat_documents(tokenizer(thinking), CHAT)


TOOLS = [{"name": "add", "default": None}, {"name": "sub"}]


def test_functions_that_may_be_called_are_given_to_the_template(tokenizer):
    calling = tokenizer(WITH_TOOLS)
    assert chat_text(calling, CHAT[:1], tools=TOOLS) == "[add][sub]<s>user:one</s>\n"
    [pieces] = chat_documents(calling, CHAT, tools=TOOLS)
    assert [text for text, is_answer in pieces if is_answer] == ["two</s>\n", "four</s>\n"]
    assert pieces[0] == ("[add][sub]<s>user:one</s>\n<s>assistant:", False)
    text = calling.decode(ids_to_answer(calling, CHAT[:1], TOOLS))
    assert text == "[add][sub]user:one\nassistant:"


def test_a_template_that_does_not_write_functions_is_refused(tokenizer):
    remedy = "does not write the functions of the column tools; describe them in the system message, and leave the"
    with pytest.raises(ValueError, match=remedy):
        chat_documents(tokenizer(), CHAT, tools=TOOLS)
    with pytest.raises(UserError, match=f"tokenizer .*{remedy}"):
        ids_to_answer(tokenizer(), CHAT[:1], TOOLS)


@pytest.mark.parametrize(("given", "found"), [
    (None, ()), ("", ()), ("[]", ()), ([], ()), ("null", ()), (TOOLS, tuple(TOOLS)),
    ('[{"name": "add"}]', ({"name": "add"},)),
])  # fmt: skip
def test_functions_are_a_list_or_the_text_of_one(given, found):
    assert tools_of(given) == found


def test_arrow_fills_functions_with_the_keys_of_others():
    assert tools_of(TOOLS, of_arrow=True) == ({"name": "add"}, {"name": "sub"})


@pytest.mark.parametrize("given", ["add", "[" * 100_000, {"name": "add"}, ["add"], '"add"'])
def test_anything_else_than_functions_is_refused(given):
    with pytest.raises(ValueError, match="holds (no list of functions|text that is no JSON)"):
        tools_of(given)


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    with pytest.raises(UserError, match="has no chat template .*; use the tokenizer.json of a chat model, or plain"):
        chat_text(tokenizer(None), CHAT)


@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_of_a_chat(tokenizer, add_bos):
    """The ids are those of the whole text, its answers from their first byte to their eos. A bos that both template and
    tokenizer put first is there once."""
    found = tokenizer(add_bos=add_bos)
    [pieces] = chat_documents(found, CHAT)
    ids, answers = encode_pieces(found, pieces, spelled=True)
    whole = [*found.begin, *ids]
    assert whole == found.encode_spelled("".join(text for text, _ in pieces)) and whole[0] == BOS
    assert whole.count(BOS) == whole.count(EOS) == 4
    places = zip(answers[::2], answers[1::2], strict=True)
    assert [whole[begin:end] for begin, end in places] == [[*found.encode(text), EOS] for text in ("two", "four")]
    assert spelled_ids(found, "</s>") == [EOS]


@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_of_a_prompt_and_its_completion(tokenizer, add_bos):
    """Control tokens are not spelled there, and the document's eos ends the answer."""
    found = tokenizer(add_bos=add_bos)
    ids, answers = encode_pieces(found, [("a</s>?", False), (" b", True)], spelled=False)
    whole = [*found.begin, *ids, EOS]
    assert whole.count(EOS) == 1 and found.decode(ids) == "a</s>? b"
    assert answers == [len(whole) - 3, len(whole)]


def test_no_token_spans_the_end_of_a_prompt(tmp_path, texts):
    """A trained tokenizer joins letters across the border of prompt and completion; the model that answers has read the
    prompt's own ids."""
    from titans_pt.data_pipeline.tokenizers import train_tokenizer

    found = train_tokenizer(texts, tmp_path / "small.model", 320, 10**6)
    assert b" segment" in found.pieces
    for prompt, completion in [("one seg", "ment ends"), ("the memory", " learns"), ("", "memory"), ("what?", "it")]:
        ids, (begin, end) = encode_pieces(found, [(prompt, False), (completion, True)], spelled=False)
        assert ids[:begin] == list(found.encode(prompt)) and end == len(ids) + 1
        assert found.decode(ids) == prompt + completion


def test_a_template_that_writes_only_other_chats_names_no_end(tokenizer):
    refusing = "{% if messages|length == 2 %}{{ raise_exception('three messages') }}{% endif %}" + CLOSING
    assert answer_ends(tokenizer(refusing)) == [EOS] and answer_ends(tokenizer(CLOSING)) == [EOS, BOS]


def test_a_chat_in_one_thread_leaves_texts_of_others_alone(tokenizer):
    found, text = tokenizer(), "a</s>" * 2000
    expected = found.encode(text)
    assert EOS not in expected
    with ThreadPoolExecutor(1) as pool:
        spelled = pool.submit(lambda: [found.encode_spelled(text) for _ in range(50)])
        assert all(found.encode(text) == expected for _ in range(50))
        assert all(ids.count(EOS) == 2000 for ids in spelled.result())
