"""Answers in token files: marked by titans prepare, from rows with a prompt and its completion or with a chat."""

import json

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.data_pipeline.small_corpus import make_texts
from tests.helpers.chats import FORGETFUL, SIZE, TEMPLATE, WITH_TOOLS, byte_tokenizer, said
from titans_pt.config import Config
from titans_pt.data_pipeline import TokenFiles
from titans_pt.data_pipeline.answers import Answers, best_fit
from titans_pt.data_pipeline.inspection import inspect_data
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.errors import UserError

PAIRS = [{"prompt": f"{i} plus {i}?", "completion": f" {2 * i}"} for i in range(40)]
CHATS = [{"messages": said(f"{i}?", f"{i}!", *(["more", f"and {i}"] if i % 2 else []))} for i in range(40)]


@pytest.fixture
def given_rows(tmp_path):
    """given_rows(rows, **source): a config whose sources are these rows, as .jsonl."""

    def make(*each, **data):
        sources = []
        for n, (rows, source) in enumerate(each):
            path = tmp_path / f"rows{n}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources.append({"kind": "files", "path": str(path)} | source)
        tokenizer = {"path": str(byte_tokenizer(tmp_path / "tokenizer"))}
        given = {"dir": str(tmp_path / "data"), "sources": sources, "tokenizer": tokenizer,
                 "validation_fraction": 0.2, "seq_len": 64}  # fmt: skip
        return Config.model_validate({"data": given | data, "model": {"vocab_size": SIZE}})

    return make


def told(config):
    """Text of every document of the training and validation streams -> texts of its answers, eos as $."""
    files, found = TokenFiles.open(config), {}
    for stream in (*files.train, files.validation):
        answers = Answers(stream)
        for j in range(len(stream.document_starts)):
            ids = stream.document(j)
            text = ["$" if i == files.tokenizer.eos_id else files.tokenizer.decode([int(i)]) for i in ids]
            found["".join(text)] = ["".join(text[a:b]) for a, b in answers.of(j, len(ids))]
    return found


def test_the_completion_is_the_answer(given_rows):
    config = given_rows((PAIRS, {"format": "prompt-completion"}))
    prepare(config, workers=2)
    assert told(config) == {f"{i} plus {i}? {2 * i}$": [f" {2 * i}$"] for i in range(40)}


def test_the_assistants_messages_are_the_answers(given_rows):
    pytest.importorskip("transformers")
    config = given_rows((CHATS, {"format": "messages"}))
    prepare(config)
    found = told(config)
    assert found["user:3?$\nassistant:3!$\nuser:more$\nassistant:and 3$\n$"] == ["3!$", "and 3$"]
    assert found["user:2?$\nassistant:2!$\n$"] == ["2!$"] and len(found) == 40
    last = given_rows((CHATS, {"format": "messages", "answers": "last"}))
    with pytest.raises(UserError, match=r"data.sources: made with .*; set it back"):
        TokenFiles.open(last)
    prepare(last, force=True)
    assert told(last)["user:3?$\nassistant:3!$\nuser:more$\nassistant:and 3$\n$"] == ["and 3$"]


def test_a_template_that_rewrites_earlier_answers_has_a_document_for_each(given_rows, tmp_path):
    """The documents of a chat are in one split: the second repeats most of the first."""
    pytest.importorskip("transformers")
    config = given_rows((CHATS, {"format": "messages"}))
    byte_tokenizer(tmp_path / "tokenizer", FORGETFUL)
    prepare(config)
    found = told(config)
    assert found["3?$:3!$$"] == ["3!$"] and found["3?$:$more$:and 3$$"] == ["and 3$"] and len(found) == 60
    rows = parquet.read_table(TokenFiles.open(config).validation.list_of_documents)["row"].to_pylist()
    lines = (tmp_path / "rows0.jsonl").read_text().splitlines(keepends=True)
    begins = np.cumsum([0, *map(len, lines)]).tolist()
    assert rows and all(rows.count(row) == 1 + begins.index(row) % 2 for row in rows)


def test_answers_of_other_documents_are_refused(given_rows):
    config = given_rows((PAIRS, {"format": "prompt-completion"}))
    prepare(config)
    stream = TokenFiles.open(config).train[0]
    table = parquet.read_table(path := stream.list_of_documents)
    parquet.write_table(table.slice(1), path)
    count = len(table)
    with pytest.raises(UserError, match=f"{path}: has {count - 1} documents, its .idx {count}; run: titans prepare"):
        Answers(stream)


def test_near_duplicates_are_whole_chats(given_rows, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("rensa")
    draw = np.random.default_rng(0)
    texts = [" ".join(map(str, draw.integers(0, 1000, 300))) for _ in range(40)]
    chats = [{"messages": said(text + end, "yes", "and?", "no")} for text in texts for end in ("", "!")]
    config = given_rows((chats, {"format": "messages"}), near_duplicates=0.8)
    byte_tokenizer(tmp_path / "tokenizer", FORGETFUL)
    assert prepare(config)["dropped"]["near_duplicate"] == 80
    found = told(config)
    assert len(found) == 80 and all(f"{text}$:{answer}$$" in found for text in texts for answer in ("yes", "$and?$:no"))


def test_another_chat_template_makes_other_token_files(given_rows, tmp_path, capsys):
    """The checksum of tokenizer.json does not cover the template, which stands in a file next to it."""
    pytest.importorskip("transformers")
    chats, pairs = given_rows((CHATS, {"format": "messages"})), (PAIRS, {"format": "prompt-completion"})
    prepare(chats)
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text(TEMPLATE)
    prepare(chats)
    assert "up to date" in capsys.readouterr().err
    template.write_text(FORGETFUL)
    with pytest.raises(UserError, match=r"\(data.tokenizer.path: its chat template has changed\); .* --force"):
        prepare(chats)
    prepare(chats, force=True)
    assert "3?$:3!$$" in told(chats)
    prepare(without := given_rows(pairs), force=True)
    template.write_text(TEMPLATE)
    prepare(without)
    assert "up to date" in capsys.readouterr().err


def test_columns_have_any_names_and_parquet_is_read(given_rows, tmp_path):
    rows = [{"q": row["prompt"], "a": row["completion"], "chat": None} for row in PAIRS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    source = {"format": "prompt-completion", "prompt_column": "q", "completion_column": "a"}
    config = given_rows(([], source | {"path": str(tmp_path / "pairs.parquet")}))
    prepare(config)
    assert len(told(config)) == 40
    chats = [{"chat": [message | ({"name": "N"} if i else {}) for i, message in enumerate(row["messages"])]}
             for row in CHATS]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "chats.parquet")
    pytest.importorskip("transformers")
    source = {"format": "messages", "messages_column": "chat", "path": str(tmp_path / "chats.parquet")}
    config = given_rows(([], source))
    prepare(config, force=True)
    assert told(config)["user:2?$\nassistant:2!$\n$"] == ["2!$"]


@pytest.mark.parametrize("kind", ["jsonl", "text of JSON", "parquet"])
def test_functions_beside_a_chat_are_written_by_its_template(given_rows, tmp_path, kind):
    """Arrow fills each function with the keys of all others."""
    pytest.importorskip("transformers")
    tools = [[{"name": f"f{i}", **({"strict": True} if i == 3 else {})}] if i else None for i in range(40)]
    given = [json.dumps(each) for each in tools] if kind == "text of JSON" else tools
    rows = [chat | {"tools": each} for chat, each in zip(CHATS, given, strict=True)]
    template = WITH_TOOLS.replace("t['name']", "t | tojson")
    source = {"format": "messages"}
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
        source["path"] = str(tmp_path / "chats.parquet")
    config = given_rows((rows, source))
    byte_tokenizer(tmp_path / "tokenizer", template)
    prepare(config)
    found = told(config)
    assert found['[{"name": "f2"}]user:2?$\nassistant:2!$\n$'] == ["2!$"]
    assert any(text.startswith('[{"name": "f3", "strict": true}]user:3?$') for text in found)
    assert found["user:0?$\nassistant:0!$\n$"] == ["0!$"] and len(found) == 40


CALLS = [
    {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "call": {"name": name, "arguments": given}}]}
    for name, given in [("add", {"a": 1, "b": 2}), ("sing", {"song": None}), ("draw", {"of": [{"x": 1}, {"y": 2}]})]
]
CALLING = TEMPLATE.replace("m['content']", "m['content'] or m['call'] | tojson")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_call_has_its_own_arguments_alone(given_rows, tmp_path, kind):
    """A table's objects have the keys of all rows, without a value where a row has none."""
    pytest.importorskip("transformers")
    path = tmp_path / f"calls.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(CALLS), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in CALLS))
    config = given_rows(([], {"format": "messages", "path": str(path)}))
    byte_tokenizer(tmp_path / "tokenizer", CALLING)
    prepare(config)
    song = '"song": null' if kind == "jsonl" else ""  # a table cannot tell a null from a key that is not there
    assert sorted(answer for (answer,) in told(config).values()) == [
        '{"name": "add", "arguments": {"a": 1, "b": 2}}$',
        '{"name": "draw", "arguments": {"of": [{"x": 1}, {"y": 2}]}}$',
        f'{{"name": "sing", "arguments": {{{song}}}}}$',
    ]


def test_a_lone_surrogate_inside_a_call(given_rows, tmp_path):
    pytest.importorskip("transformers")
    call = {"role": "assistant", "call": {"\ud800": "\udfff"}}
    config = given_rows(([*CHATS, {"messages": [*said("go"), call]}], {"format": "messages"}))
    byte_tokenizer(tmp_path / "tokenizer", CALLING)
    prepare(config)
    mark = "\ufffd".encode().decode("ascii", "replace")  # a token for each of its bytes
    assert [f'{{"{mark}": "{mark}"}}$'] in told(config).values()


def test_chats_need_no_sample_of_training_length(given_rows, capsys):
    prepare(given_rows((PAIRS[:10], {"format": "prompt-completion"}), seq_len=4096))
    assert "titans train will refuse it" not in capsys.readouterr().err


def test_plain_text_beside_answers_is_all_answer(given_rows):
    texts = make_texts(20)
    plain = [{"text": text} for text in texts]
    config = given_rows((PAIRS, {"format": "prompt-completion"}), (plain, {}))
    prepare(config)
    found = told(config)
    assert all(found[f"{text}$"] == [f"{text}$"] for text in texts) and found["4 plus 4? 8$"] == [" 8$"]


def test_the_files_are_the_same_for_any_number_of_processes(given_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("titans_pt.data_pipeline.sources.PART_BYTES", 400)
    config = given_rows((PAIRS, {"format": "prompt-completion"}))
    found = []
    for workers in (1, 3):
        prepare(config, force=True, workers=workers)
        found.append([(tmp_path / "data" / name).read_bytes() for name in ("train.bin", "train.documents.parquet")])
    assert found[0] == found[1]


@pytest.mark.parametrize(("source", "row", "says"), [
    ({"format": "prompt-completion"}, {"prompt": "a"},
     r"has no column as completion_column='completion' says \(prompt\); set completion_column to the one"),
    ({"format": "prompt-completion"}, {"prompt": ["a"], "completion": "b"},
     "column 'prompt': holds a list, not text; set prompt_column to the one that holds the prompt"),
    ({"format": "messages"}, {"messages": "a"}, "column 'messages': holds no list of messages"),
    ({"format": "messages"}, {"messages": [{"role": "user", "content": ["a"]}]}, "message 0: its role or its content"),
    ({"format": "messages"}, {"messages": said("a", "b"), "tools": [{"name": "add"}]},
     "cannot be written .the chat template does not write the functions of the column tools; describe them in the sys"),
    ({"format": "messages"}, {"messages": said("a", "b"), "tools": ["add"]},
     "rows0.jsonl:4, column 'tools': holds no list of functions, which are objects; repair the row, or remove the col"),
    ({"format": "messages"}, {"messages": said("a")},
     r"cannot be written \(no message of role assistant\); repair .* or write the prompts .*format=prompt-completion"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused_or_skipped(given_rows, source, row, says):
    pytest.importorskip("transformers")
    good = PAIRS if source["format"] == "prompt-completion" else CHATS
    with pytest.raises(UserError, match=says):
        prepare(given_rows(([*good[:3], row, *good[3:]], source)))
    config = given_rows(([*good, row], source), bad_input="skip")
    assert prepare(config)["dropped"]["rejected"] == 1
    assert len(told(config)) == 40


def test_an_answer_without_a_visible_character_is_dropped(given_rows):
    config = given_rows(([*PAIRS, {"prompt": "b", "completion": " "}], {"format": "prompt-completion"}))
    assert prepare(config)["dropped"]["empty"] == 1


def test_inspection_counts_answers(given_rows, capsys):
    config = given_rows((PAIRS, {"format": "prompt-completion"}))
    prepare(config)
    inspect_data(config, documents=1)
    out = capsys.readouterr().out
    assert "answers marked in" in out and "0 of 0" not in out


def test_token_files_of_plain_text_mark_no_answers(given_rows):
    config = given_rows(([{"text": text} for text in make_texts(40)], {}))
    prepare(config)
    with pytest.raises(UserError, match="mark no answers; set data.sources.N.format to prompt-completion or messages"):
        Answers(TokenFiles.open(config).train[0])


def test_a_damaged_list_is_one_line(given_rows, tmp_path):
    config = given_rows((PAIRS, {"format": "prompt-completion"}))
    prepare(config)
    (tmp_path / "data" / "train.documents.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="train.documents.parquet: damaged .*; run: titans prepare CONFIG --force"):
        Answers(TokenFiles.open(config).train[0])


def test_settings_of_another_format_are_refused():
    for source, says in [
        ({"format": "messages", "text_column": "t"}, "text_column: given 't' with format='messages'"),
        ({"answers": "last"}, "answers: given 'last' with format='text'"),
        (
            {"format": "messages"},
            "sources.0.format: given 'messages', which a chat template writes; set data.tokenizer.path",
        ),
        ({"kind": "indexed", "format": "messages"}, "format: given 'messages' with kind='indexed'"),
    ]:
        with pytest.raises(ValueError, match=says):
            Config.model_validate({"data": {"sources": [{"kind": "files", "path": "a"} | source]}})


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=200))
def test_best_fit(lengths):
    """Every item is in one row, no row is overfull, and no two rows would fit into one."""
    rows = best_fit(np.array(lengths, dtype=np.int64), 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled, default=0) <= 50
    assert len(filled) < 2 or sum(sorted(filled)[:2]) > 50
