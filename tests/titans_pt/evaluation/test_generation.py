"""Text from a prompt."""

import io
import json

import pytest
import torch

from tests.helpers.chats import WITH_TOOLS, byte_tokenizer, said
from tests.helpers.mixers import small_model
from tests.helpers.stand_ins import Recurrent, Scripted
from titans_pt import cli, evaluation, streaming
from titans_pt.data_pipeline.tokenizers import StreamDecoder, load_tokenizer
from titans_pt.errors import UserError
from titans_pt.evaluation import generation
from titans_pt.streaming import Sampling


class Decoder:
    """Counterpart of data_pipeline.StreamDecoder for a tokenizer of characters."""

    def __init__(self, tokenizer, continues, unfinished):
        assert continues and not unfinished

    push = staticmethod(chr)

    def finish(self):
        return ""


def test_generate_prints_text_and_rate_and_ends_at_eos(run, monkeypatch, capsys):
    run.model = Scripted(lambda text: "ing\0"[len(text) - 4] if len(text) < 8 else "?")
    monkeypatch.setattr(generation, "StreamDecoder", Decoder)
    assert generation.generate("anywhere", "walk", max_new_tokens=50) == "ing"
    out, err = capsys.readouterr()
    assert out == "ing\n"
    assert "step 7" in err and "4 prompt tokens" in err and "3 new tokens" in err and "tokens/s" in err


def test_generate_streams_what_decode_gives(run, sentencepiece, capsys):
    torch.manual_seed(1)
    run.tokenizer, run.model = sentencepiece, Recurrent(sentencepiece.vocab_size).eval()
    text = generation.generate("anywhere", "The grass is", max_new_tokens=40, sampling=Sampling(1.0, seed=3))
    assert capsys.readouterr().out == text + "\n"
    assert text == generation.generate("anywhere", "The grass is", max_new_tokens=40, sampling=Sampling(1.0, seed=3))
    start = streaming.prefill(run.model, torch.tensor([sentencepiece.encode("The grass is")]), 100)
    ids = list(streaming.continuation(run.model, *start, 40, {sentencepiece.eos_id}, Sampling(1.0, seed=3).chooser()))
    decoder = StreamDecoder(sentencepiece, continues=True)
    assert text == "".join(map(decoder.push, ids)) + decoder.finish()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": 2**63}],
)
def test_generate_says_what_is_wrong(run, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        generation.generate("anywhere", "a", sampling=Sampling(**wrong))


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"prompt": ""}])
def test_generate_needs_a_prompt_and_a_number_of_tokens(run, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        generation.generate("anywhere", **{"prompt": "a", **wrong})


def test_many_prompts_are_each_continued_as_if_alone(sentencepiece, run, capsys):
    run.tokenizer, run.model = sentencepiece, small_model(["lmm"], vocab_size=sentencepiece.vocab_size, init_std=0.5)
    asked = ["The grass is", "A", "The grass is green and so am I", "Grass"]
    texts = generation.generate_batch("anywhere", asked, max_new_tokens=12, batch=3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == asked and [line["text"] for line in lines] == texts
    assert [line["prompt_tokens"] for line in lines] == [len(sentencepiece.encode(prompt)) for prompt in asked]
    assert texts == [generation.generate("anywhere", prompt, max_new_tokens=12) for prompt in asked]
    # A prompt without text is the beginning of a document.
    assert generation.generate_batch("anywhere", ["A", ""], 12, batch=1)[1] == new_text(run, [sentencepiece.eos_id], 12)
    drawn = generation.generate_batch("anywhere", asked, 12, Sampling(1.0, seed=5), batch=4)
    assert drawn == [
        generation.generate("anywhere", prompt, 12, Sampling(1.0, seed=5 + i)) for i, prompt in enumerate(asked)
    ]


def test_rows_are_prompts_with_their_expected_texts(sentencepiece, run, tmp_path, capsys):
    run.tokenizer, run.model = sentencepiece, small_model(["lmm"], vocab_size=sentencepiece.vocab_size, init_std=0.5)
    (right,) = generation.generate_batch("anywhere", ["The\ngrass"], max_new_tokens=4)
    rows = [{"prompt": "The\ngrass", "completion": f" {right}\n"}, {"prompt": "A", "completion": "b"}, {"prompt": "A"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    capsys.readouterr()
    found = generation.generate_batch("anywhere", generation.read_prompts(str(tmp_path / "rows.jsonl")), 4)
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == found and found[0] == right
    assert [line.get("expected") for line in lines] == [f" {right}\n", "b", None]
    assert "\n1 of 2 texts are as expected" in err


@pytest.mark.parametrize("name", ["rows.jsonl", "ROWS.NDJSON", "rows.json"])
def test_rows_of_json_by_every_name_that_titans_prepare_reads(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    assert generation.read_prompts(str(tmp_path / name)) == [generation.Prompt("a", "b")]


def test_a_prompt_may_describe_functions(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": said("a", "b"), "tools": [{"name": "add"}]}))
    [prompt] = generation.read_prompts(str(tmp_path / "rows.jsonl"))
    tokenizer = load_tokenizer(byte_tokenizer(tmp_path / "tokenizer", WITH_TOOLS))
    assert tokenizer.decode(prompt.ids(tokenizer)) == "[add]user:a\nassistant:" and prompt.expected == "b"


@pytest.mark.parametrize(("row", "says"), [
    ({"prompt": None}, "its prompt or its completion is not text"),
    ({"prompt": [{"role": "user", "content": "a"}]}, "its prompt or its completion is not text"),
    ({"prompt": "a", "completion": 4}, "its prompt or its completion is not text"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "message 0: its role or its content is not text"),
    ({"messages": said("a"), "tools": ["add"]}, "holds no list of functions"),
    ({"messages": []}, "no list of messages"),
    ([], "no object"),
])  # fmt: skip
def test_rows_that_training_would_refuse_are_no_prompts(tmp_path, row, says):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' + json.dumps(row))
    with pytest.raises(UserError, match=rf"^--prompts: {path} line 2: .*{says}"):
        generation.read_prompts(str(path))


def new_text(run, ids, count, state=None):
    """Text that a model writes after ``ids``, greedily, one token at a time."""
    new = list(streaming.greedy(run.model, *streaming.prefill(run.model, torch.tensor([ids]), 100, state), count))
    decoder = StreamDecoder(run.tokenizer, continues=True)
    return "".join(map(decoder.push, new)) + decoder.finish()


def test_bos_comes_once_where_a_document_begins(sentencepiece, run, tmp_path, monkeypatch):
    run.tokenizer = load_tokenizer(sentencepiece.path, add_bos=True)
    run.model = small_model(["lmm"], vocab_size=sentencepiece.vocab_size, init_std=0.5)
    read, read_prompt = [], generation.read_prompt

    def watched(model, ids, *more, **named):
        read.extend(ids.tolist())
        return read_prompt(model, ids, *more, **named)

    monkeypatch.setattr(generation, "read_prompt", watched)
    bos, first, then = sentencepiece.bos_id, sentencepiece.encode("The grass"), sentencepiece.encode(" is green")
    state = tmp_path / "state"
    text = generation.generate("anywhere", "The grass", 6, save_to=state)
    assert text == new_text(run, [bos, *first], 6)
    new = list(streaming.greedy(run.model, *streaming.prefill(run.model, torch.tensor([[bos, *first]]), 100), 6))
    after = run.model(torch.tensor([[bos, *first, *new]]))[1]
    assert generation.generate("anywhere", " is green", 6, state_file=state) == new_text(run, then, 6, after)
    assert generation.generate_batch("anywhere", ["The grass", ""], 6, batch=1) == [text, new_text(run, [bos], 6)]
    assert read == [[bos, *first], then, [bos, *first], [bos]]


def test_a_character_that_is_cut_comes_whole_with_the_next_text(sentencepiece, run, tmp_path, monkeypatch, capsys):
    run.tokenizer = sentencepiece
    run.model = small_model(["lmm"], vocab_size=sentencepiece.vocab_size, init_std=0.5)
    ids, state = sentencepiece.encode("a\u4e2db"), tmp_path / "state"
    cut = 1 + next(n for n, i in enumerate(ids) if sentencepiece.pieces[i] == b"\xe4")  # \u4e2d is e4 b8 ad
    written = []

    def scripted(model, logits, state, count, *more, read_last):
        yield from ids[len(written) : len(written) + count]
        return logits, state

    def text(count, prompt="", **more):
        monkeypatch.setattr(generation, "continuation", scripted)
        found = generation.generate("anywhere", prompt, count, **more)
        assert capsys.readouterr().out == found + "\n"
        written.extend(ids[len(written) : len(written) + count])
        return found

    first = text(cut, "The grass", save_to=state)
    second = text(1, state_file=state, save_to=state)
    assert (first + second).lstrip() == "a" and not second
    rest = text(len(ids), state_file=state, save_to=state)
    assert (first + rest).lstrip() == "a\u4e2db"
    written.clear()
    assert text(cut, "The grass").lstrip() == "a\ufffd"  # nothing follows
    written.clear()
    text(cut, "The grass", save_to=state)
    assert text(len(ids), " is", state_file=state) == "\ufffd\ufffdb"  # the prompt came between


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the command passes on."""
    found = []
    monkeypatch.setattr(evaluation, "generate", lambda run, prompt, *rest, **more: found.append(prompt))
    return found


def test_a_prompt_from_a_file_or_standard_input(prompts, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes("\ufeffgr\u00fcn\n".encode())
    assert cli.run(["generate", "run", "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("r\u00f6d\n".encode()), encoding="ascii"))
    assert cli.run(["generate", "run", "--prompt-file", "-"]) == 0
    (tmp_path / "windows.txt").write_bytes(b"a\r\n\r\nb\r\n\r\n")
    assert cli.run(["generate", "run", "--prompt-file", str(tmp_path / "windows.txt")]) == 0
    # The line end that an editor adds is not part of the prompt; an empty last line is.
    assert prompts == ["gr\u00fcn", "r\u00f6d", "a\r\n\r\nb\r\n"]


def test_a_prompt_on_each_line_of_a_file(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(evaluation, "generate_batch", lambda *given: found.append(given))
    text = "gr\u00fcn\n\nred\r\na\u2028b\x0cc\x85d\x0be\x1cf\rg\n \n"
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    assert cli.run(["generate", "run", "--prompts", str(tmp_path / "prompts.txt"), "--batch", "2"]) == 0
    lines = [generation.Prompt(line) for line in ("gr\u00fcn", "", "red", "a\u2028b\x0cc\x85d\x0be\x1cf\rg", " ")]
    assert found == [("run", lines, 100, Sampling(0.8, top_p=0.95), None, 2, ())]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_line_of_json_for_each_prompt(encoding, sentencepiece, run, monkeypatch):
    run.tokenizer, run.model = sentencepiece, small_model(["lmm"], vocab_size=sentencepiece.vocab_size)
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    asked = ["a\u2028b\u2029c\x85d\x0ce", "", "\u4e2d\u00e9\U0001f600"]
    generation.generate_batch("anywhere", asked, 2)
    lines = written.getvalue().decode(encoding).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == asked
    assert ("\u4e2d" in lines[2]) == (encoding == "utf-8")


@pytest.mark.parametrize(("words", "message"), [
    ("--prompt-file {folder}/none", "none: No such file or directory; name a file that can be read"),
    ("--prompt-file {folder}", "Is a directory"),
    ("--prompt-file {folder}/latin", "--prompt-file: {folder}/latin: not UTF-8 at byte 2; convert it"),
    ("--prompt-file {folder}/latin --prompt a", "--prompt and --prompt-file exclude each other"),
    ("", "Nothing to continue: give --prompt, --prompt-file, --prompts or --state"),
    ("man!", "Given 'man!': give it as --prompt 'man!'; settings are KEY=VALUE"),
    ("--prompts {folder}/blank", "blank holds no text; give a prompt on each line"),
    ("--prompts {folder}/rows.jsonl", "--prompts: {folder}/rows.jsonl line 2: no row with prompt, or with messages"),
    ("--prompts {folder}/utf-16", "--prompts: {folder}/utf-16: UTF-16, not UTF-8; convert it"),
    ("--prompt a --batch 2", "--batch divides the prompts of --prompts; give those, or leave it out"),
    ("--prompts {folder}/latin --prompt a", "--prompt and --prompts exclude each other"),
    ("--prompts {folder}/blank --save-state s", "A state has one text: --prompts excludes --state and --save-state"),
])  # fmt: skip
def test_prompts_that_cannot_be_read(prompts, words, message, tmp_path, capsys):
    (tmp_path / "latin").write_bytes("gr\u00fcn".encode("latin-1"))
    (tmp_path / "blank").write_text("\n\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"messages": "b"}\n')
    (tmp_path / "utf-16").write_bytes("gr\u00fcn".encode("utf-16"))
    assert cli.run(["generate", "run", *words.format(folder=tmp_path).split()]) == 2
    err = capsys.readouterr().err
    assert message.format(folder=tmp_path) in err and err.count("\n") == 1 and not prompts
