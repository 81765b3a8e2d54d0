"""Text from a prompt."""

import pytest
import torch

from tests.stand_ins import Recurrent, Scripted
from titans_pt import streaming
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
