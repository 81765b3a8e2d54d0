"""A converted model as a Hugging Face folder: padded prompts, and continued states."""

import pytest
import torch

from tests.helpers.untrained import untrained_run

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from titans_pt import cli, huggingface  # noqa: E402
from titans_pt.data_pipeline import StreamDecoder  # noqa: E402
from titans_pt.runs import checkpoints  # noqa: E402
from titans_pt.runs.conversion import convert_run  # noqa: E402
from titans_pt.runs.loaded import load_run  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepared):
    """A folder with a converted ``run``, its memories changed as by training, and its export ``hf``."""
    folder = tmp_path_factory.mktemp("converted")
    source = untrained_run(folder / "source", prepared, mixers=["attention"], n_layers=3, d_model=32, n_heads=4,
                           init_std=0.3, attention={"kv_heads": 2})  # fmt: skip
    run = convert_run(source, folder / "start", "titans", 5, 2, [1])
    path = checkpoints.find(run / "checkpoints")
    state, weights = checkpoints.read_state(path), checkpoints.read_weights(path)
    share = weights["blocks.1.mixer.memory_share.weight"]
    weights["blocks.1.mixer.memory_share.weight"] = 0.1 * torch.randn(share.shape, generator=torch.manual_seed(0))
    checkpoints.save(run / "checkpoints", weights, {}, state)
    run.rename(folder / "run")
    huggingface.export_run(folder / "run", folder / "hf")
    return folder


@pytest.fixture
def hub(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "hf", trust_remote_code=True)


@torch.no_grad()
def test_it_computes_what_the_run_does_and_is_made_of_its_own_files(folder, hub):
    ids = torch.randint(3, 280, (1, 30), generator=torch.manual_seed(1))
    model = load_run(folder / "run").model
    torch.testing.assert_close(hub(ids).logits, model(ids)[0])
    assert not torch.allclose(model(ids)[0], load_run(folder / "source").model(ids)[0], atol=0.01)
    carried = [path for path in (folder / "hf").glob("*.py") if "class MAB(" in path.read_text()]
    assert len(carried) == 1


@torch.no_grad()
def test_liza_is_exported_with_its_mix(folder, tmp_path):
    run = convert_run(folder / "source", tmp_path / "run", "liza", 5, 2, [1], ["model.liza.mix_warmup=0"])
    huggingface.export_run(run, tmp_path / "hf")
    ids = torch.randint(3, 280, (1, 30), generator=torch.manual_seed(1))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)(ids).logits
    torch.testing.assert_close(found, load_run(run).model(ids)[0])


@torch.no_grad()
def test_padding_on_the_left_and_states_change_nothing(folder, hub):
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf", trust_remote_code=True)
    long, short = "kabc defg hij klm nop abc de f ghi", "abc def"
    batch = tokenizer([long, short], return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, 0] == 0
    both = hub.generate(**batch, max_new_tokens=12, do_sample=False)
    alone = tokenizer([short], return_tensors="pt")["input_ids"]
    one = hub.generate(alone, max_new_tokens=12, do_sample=False)
    assert torch.equal(both[1, -12:], one[0, -12:])
    ids = batch["input_ids"][:1]
    read = hub(ids[:, :-1])
    logits = hub(ids[:, -1:], state=read.state).logits[:, -1]
    torch.testing.assert_close(logits, hub(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_document_is_read_once_and_asked_later(folder, tmp_path, capsys):
    """``--save-state``, then ``--state``, equals a prompt of the document's tokens and the question's."""
    state, text = tmp_path / "document", "abc def ghij klmn op " * 20
    words = ["generate", str(folder / "run"), "--temperature", "0", "--max-new-tokens", "10"]
    assert cli.run([*words[:2], "--prompt", text, "--max-new-tokens", "0", "--save-state", str(state)]) == 0
    capsys.readouterr()
    assert cli.run([*words, "--state", str(state), "--prompt", "kabc def"]) == 0
    later, run = capsys.readouterr().out, load_run(folder / "run")
    ids = run.tokenizer.document(text) + run.tokenizer.encode("kabc def")
    for _ in range(10):
        ids.append(run.model(torch.tensor([ids]))[0][0, -1].argmax().item())
    decoder = StreamDecoder(run.tokenizer, continues=True)
    assert later == "".join(map(decoder.push, ids[-10:])) + decoder.finish() + "\n"
    assert state.stat().st_size < 200_000
    assert cli.run(["generate", str(folder / "run"), "--prompt", text, "--max-new-tokens", "0"]) == 2
    assert "--max-new-tokens 0 only reads the prompt: also give --save-state, or 1 or more" in capsys.readouterr().err
