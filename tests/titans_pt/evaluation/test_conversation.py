"""Conversations: what the model has read, message after message, and their state in a file."""

import builtins
import io
import json
import sys
from types import SimpleNamespace

import pytest

from tests.helpers.chats import BOS, CLOSING, EOS, SIZE, TEMPLATE, byte_tokenizer, said
from tests.helpers.untrained import untrained_run
from titans_pt import Titan, cli, evaluation
from titans_pt.data_pipeline.tokenizers import load_tokenizer
from titans_pt.data_pipeline.tokenizers.chat import chat_text
from titans_pt.errors import UserError
from titans_pt.evaluation import conversation
from titans_pt.evaluation.generation import Prompt
from titans_pt.streaming import Sampling

pytest.importorskip("transformers")

NO_SYSTEM = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}{% endfor %}"
NO_PAST = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}:{% endif %}"


@pytest.fixture
def chats(tmp_path):
    """chats(template): the folder of a run with random weights and a tokenizer of bytes."""

    def make(template=TEMPLATE):
        byte_tokenizer(tmp_path / "tokenizer", template)
        sizes = {"vocab_size": SIZE, "init_std": 0.5, "mixers": ["lmm"]}
        return untrained_run(tmp_path / "run", tmp_path / "tokenizer", **sizes)

    return make


def scripted(monkeypatch, tokenizer, *answers):
    """Answers, each with its last id, in place of what a model would choose."""
    ids = iter([i for text, last in answers for i in [*tokenizer.encode(text), last]])
    monkeypatch.setattr(Sampling, "chooser", lambda *_: lambda logits: next(ids))


@pytest.fixture
def read(monkeypatch):
    """Ids that each message made the model read."""
    found, whole = [], conversation.read_prompt

    def noted(model, ids, *more, **options):
        found.append(ids[0].tolist())
        return whole(model, ids, *more, **options)

    monkeypatch.setattr(conversation, "read_prompt", noted)
    return found


def test_the_model_reads_what_the_template_writes(chats, read, capsys):
    """Prompts and answers, one after the other, are the ids of the whole conversation."""
    run, questions = chats(), ["one", "two", "three"]
    answers = evaluation.chat(run, questions, max_new_tokens=5)
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    turns = [part for pair in zip(questions, answers, strict=True) for part in pair]
    text = chat_text(tokenizer, said(*turns))
    whole = [i for ids, answer in zip(read, answers, strict=True) for i in [*ids, *tokenizer.encode(answer)]]
    assert whole + [EOS, *tokenizer.encode("\n")] == tokenizer.encode_spelled(text)


def test_a_conversation_goes_on_from_a_file(chats, tmp_path):
    run, file = chats(), tmp_path / "talk.state"
    whole = evaluation.chat(run, ["one", "two", "three"], max_new_tokens=6)
    parts = [evaluation.chat(run, [question], max_new_tokens=6, save_to=file, state_file=file if i else None)
             for i, question in enumerate(["one", "two", "three"])]  # fmt: skip
    assert [answer for part in parts for answer in part] == whole


@pytest.mark.parametrize(("template", "closing"), [(TEMPLATE, EOS), (CLOSING, BOS)])
def test_an_answer_ends_where_the_template_closes_it(chats, read, monkeypatch, template, closing):
    run, answers = chats(template), [("yes", closing), ("no", EOS)]
    tokenizer = load_tokenizer(run / "tokenizer.json")
    scripted(monkeypatch, tokenizer, *answers)
    assert evaluation.chat(run, ["one", "two"]) == ["yes", "no"]
    assert tokenizer.decode(read[1]) == "\nuser:two\nassistant:" and read[1][0] == closing
    model = Titan.from_pretrained(run)
    scripted(monkeypatch, tokenizer, *answers)
    assert [model.chat("one"), model.chat("two", state=model.state)] == ["yes", "no"]
    scripted(monkeypatch, tokenizer, *answers)
    assert evaluation.generate_batch(run, [Prompt(tuple(said("one")))]) == ["yes"]


def test_an_exported_model_ends_its_answers_too(chats, tmp_path):
    from titans_pt import huggingface

    for template, expected in ((TEMPLATE, EOS), (CLOSING, [EOS, BOS]), (NO_SYSTEM, EOS), (None, EOS)):
        huggingface.export_run(chats(template), tmp_path / "hf")
        assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == expected


def test_a_system_message(chats, read):
    run = chats()
    evaluation.chat(run, ["one"], system="be brief", max_new_tokens=1)
    assert load_tokenizer(run / "tokenizer.json").decode(read[0]) == "system:be brief\nuser:one\nassistant:"


@pytest.mark.parametrize(("template", "options", "says"), [
    (None, {}, "has no chat template"),
    (NO_SYSTEM, {"system": "s"}, r"chat template refuses the messages \(none\); leave out the system message"),
    (NO_PAST, {}, "chat template leaves out earlier answers"),
])  # fmt: skip
def test_templates_that_cannot_serve_are_one_line(chats, template, options, says):
    with pytest.raises(UserError, match=says):
        evaluation.chat(chats(template), ["one", "two"], max_new_tokens=1, **options)


def test_messages_in_another_encoding_are_one_line(chats, monkeypatch, capsys):
    run = chats()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ncaf\xe9\ntwo\n"), encoding="utf-8"))
    assert cli.run(["chat", str(run)]) == 2
    told = "titans: error: standard input: not UTF-8 (invalid continuation byte); convert it"
    assert told in capsys.readouterr().err


def test_every_line_of_standard_input_is_a_message(chats, tmp_path, monkeypatch, capsys):
    run = chats()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  \ntwo\n"))
    words = ["chat", str(run), "--temperature", "0", "--max-new-tokens", "4", "--save-state", str(tmp_path / "s")]
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in evaluation.chat(run, ["one", "two"], max_new_tokens=4))
    assert "in 2 answers" in err and f"state: {tmp_path / 's'}" in err
    assert cli.run(["chat", str(run), "--system", "a", "--state", str(tmp_path / "s")]) == 2
    assert "--system begins a conversation" in capsys.readouterr().err


def test_a_terminal_is_asked_until_it_ends(chats, monkeypatch, capsys):
    run, lines = chats(), iter(["one", " ", "two"])
    words = ["chat", str(run), "--temperature", "0", "--max-new-tokens", "4"]

    def line(prompt):
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(builtins, "input", line)
    answers = evaluation.chat(run, ["one", "two"], max_new_tokens=4)
    capsys.readouterr()
    assert cli.run(words) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in [*answers, ""])


def test_chats_in_a_file_are_answered_side_by_side(chats, tmp_path, capsys):
    """Each as if alone; the assistant's last message is what is expected."""
    run = chats()
    rows = [{"messages": said("one", "1")}, {"messages": said("two", "2", "three")}, {"messages": said("four")}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["--prompts", str(tmp_path / "rows.jsonl"), "--temperature", "0", "--max-new-tokens", "5"]
    assert cli.run(["generate", str(run), *words]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == [said("one"), said("two", "2", "three"), said("four")]
    assert [line.get("expected") for line in lines] == ["1", None, None]
    alone = [evaluation.chat(run, [text], max_new_tokens=5)[0] for text in ("one", "four")]
    assert [lines[0]["text"], lines[2]["text"]] == alone
    chats(None)
    capsys.readouterr()
    assert cli.run(["generate", str(run), *words]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_draws_differ_from_message_to_message(chats):
    run = chats()
    first, again = (
        evaluation.chat(run, ["one", "one"], sampling=Sampling(5.0, seed=1), max_new_tokens=8) for _ in range(2)
    )
    assert first == again and first[0] != first[1]
