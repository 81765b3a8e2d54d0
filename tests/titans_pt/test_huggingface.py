"""To Hugging Face and back: the same bits, the same ids, the same text."""

import pytest
import tokenizers
import torch

from tests.untrained import untrained_run
from titans_pt import cli
from titans_pt.models.mixers import MIXERS
from titans_pt.run import load_run
from titans_pt.streaming import greedy, prefill

transformers = pytest.importorskip("transformers")

from titans_pt import huggingface  # noqa: E402 - needs transformers

TEXTS = ["abc dea  fo\n\tnk", " leading", "</s> is text \u2581 and so is \u00e9\u4e2d", "", "a</s>b <s><|endoftext|>"]


def from_pretrained(folder):
    """In fresh memory: from_pretrained leaves weights in the mapped file, whose alignment moves sums' last bit."""
    hub = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for parameter in hub.parameters():
        parameter.data = parameter.data.clone()
    return hub


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A folder with a tokenizer.json of single bytes, of GPT-2's kind."""
    folder = tmp_path_factory.mktemp("byte-level")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.fixture(scope="module", params=["mac", "untied", "tokenizer.json"])
def folders(request, tmp_path_factory, prepared, byte_level):
    folder = tmp_path_factory.mktemp("hf")
    model = {"tie_embeddings": False, "mixers": ["mal"]} if request.param == "untied" else {}
    run = untrained_run(folder / "run", byte_level if request.param == "tokenizer.json" else prepared, **model)
    assert cli.run(["export", str(run), "--out", str(folder / "hf")]) == 0
    assert cli.run(["import", str(folder / "hf"), "--out", str(folder / "back")]) == 0
    return folder


def test_round_trip_is_bit_exact(folders):
    first, back = load_run(folders / "run"), load_run(folders / "back")
    hub = from_pretrained(folders / "hf")
    assert isinstance(hub, huggingface.TitansForCausalLM)
    for other in (back.model, hub.model):
        theirs = other.state_dict()
        for name, tensor in first.model.state_dict().items():
            assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name
    assert first.config == back.config and first.step == back.step
    ids = torch.arange(30)[None] * 7 % 256
    with torch.no_grad():
        assert torch.equal(hub(ids).logits, first.model(ids)[0])


def test_ids_and_texts_are_the_tokenizers_own(folders):
    own = load_run(folders / "run").tokenizer
    hub = transformers.AutoTokenizer.from_pretrained(folders / "hf")
    for text in TEXTS:
        ids = hub(text)["input_ids"]
        assert ids == own.encode(text)
        assert hub.decode(ids) == own.decode(ids)
    assert hub.eos_token_id == own.eos_id and len(hub) == own.vocab_size


def test_generate_carries_the_state(folders, monkeypatch):
    run = load_run(folders / "run")
    hub = from_pretrained(folders / "hf")
    prompt = torch.arange(25)[None] * 5 % 256
    expected = list(greedy(run.model, *prefill(run.model, prompt, 25), 12, {run.tokenizer.eos_id}))
    lengths, forward = [], hub.model.forward

    def watched(ids, *rest, **options):
        lengths.append(ids.shape[1])
        return forward(ids, *rest, **options)

    monkeypatch.setattr(hub.model, "forward", watched)
    out = hub.generate(prompt, max_new_tokens=12, do_sample=False)
    assert out[0, 25:].tolist()[: len(expected)] == expected
    assert lengths[0] == 25 and set(lengths[1:]) <= {1}
    # A saved state goes on where it ended.
    state = hub(prompt[:, :10]).state
    more = hub.generate(prompt[:, 10:], state=state, max_new_tokens=12, do_sample=False)
    assert more[0, 15:].tolist()[: len(expected)] == expected


def test_loss_and_masks(folders):
    hub = from_pretrained(folders / "hf")
    ids = torch.arange(20)[None]
    out = hub(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert out.loss.item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match="attention_mask"):
        hub(ids, attention_mask=torch.zeros_like(ids))


@pytest.mark.parametrize("mixer", MIXERS.built_in())
def test_every_mixer(mixer, tmp_path, prepared):
    run = untrained_run(tmp_path / "run", prepared, mixers=[mixer])
    huggingface.export_run(run, tmp_path / "hf")
    hub = from_pretrained(tmp_path / "hf")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(hub(ids).logits, load_run(run).model(ids)[0])


def test_says_what_is_wrong(folders, capsys):
    assert cli.run(["import", str(folders / "run"), "--out", str(folders / "x")]) == 2
    assert "name a folder that titans export wrote" in capsys.readouterr().err
    assert cli.run(["import", str(folders / "hf"), "--out", str(folders / "back")]) == 2
    assert "holds a run already" in capsys.readouterr().err
