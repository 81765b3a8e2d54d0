"""Text from a prompt."""

import io

import pytest
import torch

from tests.stand_ins import Recurrent, Scripted
from titans_pt import cli, evaluation, streaming
from titans_pt.data_pipeline.tokenizers import StreamDecoder
from titans_pt.errors import UserError
from titans_pt.evaluation import generation


class Decoder:
    """As data_pipeline.StreamDecoder for the tokens that are characters."""

    def __init__(self, tokenizer, continues):
        assert continues

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
    text = generation.generate("anywhere", "The grass is", max_new_tokens=40, temperature=1.0, seed=3)
    assert capsys.readouterr().out == text + "\n"
    assert text == generation.generate("anywhere", "The grass is", max_new_tokens=40, temperature=1.0, seed=3)
    start = streaming.prefill(run.model, torch.tensor([sentencepiece.encode("The grass is")]), 100)
    ids = list(streaming.sample(run.model, *start, 40, {sentencepiece.eos_id}, 1.0, seed=3))
    decoder = StreamDecoder(sentencepiece, continues=True)
    assert text == "".join(map(decoder.push, ids)) + decoder.finish()


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"prompt": ""}],
)
def test_generate_says_what_is_wrong(run, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        generation.generate("anywhere", **{"prompt": "a", **wrong})


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the command hands on."""
    found = []
    monkeypatch.setattr(evaluation, "generate", lambda run, prompt, *rest, **more: found.append(prompt))
    return found


def test_a_prompt_from_a_file_or_standard_input(prompts, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes("\ufeffgr\u00fcn\n".encode())
    assert cli.run(["generate", "run", "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("r\u00f6d\n".encode()), encoding="ascii"))
    assert cli.run(["generate", "run", "--prompt-file", "-"]) == 0
    assert prompts == ["gr\u00fcn\n", "r\u00f6d\n"]


@pytest.mark.parametrize(("words", "message"), [
    ("--prompt-file {folder}/none", "none: No such file or directory; name a file that can be read"),
    ("--prompt-file {folder}", "Is a directory"),
    ("--prompt-file {folder}/latin", "--prompt-file: {folder}/latin: not UTF-8 at byte 2; convert it"),
    ("--prompt-file {folder}/latin --prompt a", "--prompt and --prompt-file exclude each other"),
    ("", "Nothing to continue: give --prompt, --prompt-file or --state"),
])  # fmt: skip
def test_prompts_that_cannot_be_read(prompts, words, message, tmp_path, capsys):
    (tmp_path / "latin").write_bytes("gr\u00fcn".encode("latin-1"))
    assert cli.run(["generate", "run", *words.format(folder=tmp_path).split()]) == 2
    err = capsys.readouterr().err
    assert message.format(folder=tmp_path) in err and err.count("\n") == 1 and not prompts
