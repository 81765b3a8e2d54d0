"""A new run that starts with the weights of another one: train.init_from."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics
from titans_pt.training import loop

STILL = ["train.lr=1e-30", "train.weight_decay=0", "train.stop_at=1"]
"""One step that changes no weight except zeros, which it moves by 1e-30."""


@pytest.fixture(autouse=True, scope="module")
def one_group(ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "process_group", lambda timeout: nullcontext(ranks))
        yield


@pytest.fixture
def source(tmp_path, prepared) -> Path:
    return untrained_run(tmp_path / "source", prepared, seed=5)


@pytest.fixture
def start(tiny, tmp_path, source):
    """``start(overrides)`` trains a new run from ``source`` and returns the weights that it saved."""

    def run(*overrides: str, given: str | Path = source, step: int = 1, **changes) -> dict[str, torch.Tensor]:
        config = load_config(tiny(**changes), [f"train.init_from={given}", *overrides])
        assert loop.train(config) == 0
        return weights(tmp_path / "run", step)

    return run


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoints.read_weights(checkpoints.checkpoint_path(run / "checkpoints", step))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-25)


@pytest.mark.parametrize("what", ["run", "checkpoint", "export"])
def test_a_run_starts_with_the_weights_it_is_given(start, source, tmp_path, what, caplog):
    given = source / "checkpoints/step-00000003" if what == "checkpoint" else source
    if what == "export":
        pytest.importorskip("transformers")
        assert cli.run(["export", str(source), "--out", str(tmp_path / "exported")]) == 0
        given = tmp_path / "exported"
    found = start(*STILL, "data.seq_len=8", given=given)
    assert same(found, weights(source, 3))
    assert f"weights of {given}" in (tmp_path / "run/log.txt").read_text()
    state = checkpoints.read_state(checkpoints.find(tmp_path / "run/checkpoints"))
    digest = checkpoints.checkpoint_hash(source / "checkpoints/step-00000003")[:12]
    assert digest in state.origin
    assert (state.step, state.samples, state.adam_step) == (1, 8, 1)
    assert state.config["train"]["init_from"] == str(given)


@pytest.mark.parametrize("multiple", [1, 64, 7])
@pytest.mark.parametrize("rows", [{"vocab_multiple": 1}, {"vocab_size": 500}], ids=str)
def test_rows_that_stand_for_no_token_are_added_or_left_out(start, prepared, tmp_path, rows, multiple):
    """A model of 288 tokens takes weights of 288 rows and of a run with room for 500."""
    given = untrained_run(tmp_path / "given", prepared, **rows)
    if rows == {"vocab_multiple": 1}:  # as before the setting existed
        state = checkpoints.read_state(path := checkpoints.find(given / "checkpoints"))
        del state.config["model"]["vocab_multiple"]
        checkpoints.save(given / "checkpoints", checkpoints.read_weights(path), {}, state)
    found = start(*STILL, f"model.vocab_multiple={multiple}", given=given)["embedding.weight"]
    assert found.shape[0] == {1: 288, 64: 320, 7: 294}[multiple]
    assert close(found[:288], weights(given, 3)["embedding.weight"][:288]) and not found[288:].any()


def test_weights_without_an_optimisers_state_are_not_continued_in_place(source, tiny):
    """An imported, converted or averaged run is what another run starts from."""
    config = load_config(tiny(), [f"run.dir={source}"])
    with pytest.raises(UserError, match="run.dir: .*/source holds weights without an optimiser's state, .* in a folder "
                                        "of their own: run.dir=NEW train.init_from=.*/source"):  # fmt: skip
        loop.train(config)
    assert checkpoints.list_checkpoints(source / "checkpoints") == [source / "checkpoints/step-00000003"]


def test_the_schedule_warms_up_again_and_a_resume_reads_the_weights_no_more(start, source, tmp_path):
    start("train.stop_at=4", step=4)
    shutil.rmtree(source)
    start("train.stop_at=10", step=10)
    records = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, 11))
    assert [r["lr"] for r in records[:2]] == [0.005, 0.01]
    assert checkpoints.read_state(checkpoints.find(tmp_path / "run/checkpoints")).origin.startswith(str(source))


def test_what_is_named_starts_fresh(start, source, prepared, tmp_path):
    found = start(*STILL, "train.init_fresh=[blocks.1.*, norm.weight]", model={"n_layers": 2})
    given = weights(source, 3)
    torch.manual_seed(0)
    drawn = dict(build_model(load_config(tmp_path / "config.yaml").model).named_parameters())
    fresh = {name for name in found if name.startswith("blocks.1.")} | {"norm.weight"}
    assert fresh > {"norm.weight"}
    for name, tensor in found.items():
        assert close(tensor, drawn[name] if name in fresh else given[name]), name


@pytest.mark.parametrize(("overrides", "given", "message"), [
    ([], {"mixers": ["swa"]}, r"parameters are not in it.* \(model\.mixers=\['swa'\] there and \['mac'\] here"),
    (["train.init_fresh=[blocks.1.*]"], {"d_model": 8, "n_layers": 2},
     r"have another shape, such as \S+, \(320, 8\) there and \(320, 16\) here \(model\.d_model=8 there and 16 here"),
    ([], {"vocab_size": 280, "vocab_multiple": 1},
     r"have another shape, such as embedding\.weight, \(280, 16\) there and \(320, 16\) here "
     r"\(model\.vocab_size=280 there and 288 here.*\); make the settings alike, or .* train\.init_fresh"),
    ([], {"tie_embeddings": False}, r"1 parameters are in it alone, such as head\.weight"),
    (["train.init_fresh=[bloks.*]"], {}, r"train\.init_fresh: 'bloks\.\*' is the name of no parameter"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_in_one_line(start, tmp_path, prepared, overrides, given, message):
    with pytest.raises(UserError, match=message) as error:
        start(*overrides, given=untrained_run(tmp_path / "given", prepared, **given))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/checkpoints").exists()


def test_adapters_that_the_given_weights_lack_start_as_they_are_drawn(start, source, tmp_path):
    """Only adapters are drawn: B is 0, A is from the run's seed. A run without adapters refuses weights with them."""
    found = start(*STILL, "model.lora.rank=3", 'train.trainable=["*.lora_*"]')
    given = weights(source, 3)
    torch.manual_seed(0)
    drawn = dict(build_model(load_config(tmp_path / "run/config.yaml").model).named_parameters())
    adapters = found.keys() - given.keys()
    assert adapters == {name for name in drawn if ".lora_" in name} and len(adapters) > 10
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert all(close(found[name], drawn[name]) for name in adapters)
    (tmp_path / "run").rename(tmp_path / "adapted")
    with pytest.raises(UserError, match=r"are in it alone, such as blocks\.0\..*lora_a \(model\.lora="):
        start(given=tmp_path / "adapted")
    with pytest.raises(
        UserError, match=r"another shape, such as blocks\.0\..*lora_a, \(3, 16\) there and \(2, 16\) here"
    ):
        start("model.lora.rank=2", given=tmp_path / "adapted")


def test_layers_that_the_given_weights_lack(start):
    with pytest.raises(UserError, match=r"are not in it, such as blocks\.1\..* \(model\.n_layers=1 there and 2 here"):
        start(model={"n_layers": 2})


def test_layers_that_only_the_given_weights_have(start, prepared, tmp_path):
    deeper = untrained_run(tmp_path / "deeper", prepared, n_layers=2)
    with pytest.raises(UserError, match=r"are in it alone, such as blocks\.1\."):
        start(given=deeper)
    found = start(*STILL, "train.init_fresh=[blocks.1.*]", given=deeper)
    expected = weights(deeper, 3)
    assert same(found, {name: tensor for name, tensor in expected.items() if not name.startswith("blocks.1.")})


def test_another_tokenizer_is_refused_unless_the_embedding_starts_fresh(start, source):
    path = source / "checkpoints/step-00000003"
    state = checkpoints.read_state(path)
    state.identity["tokenizer"] = "0" * 64
    checkpoints.save(path.parent, weights(source, 3), {}, state)
    with pytest.raises(UserError, match=r"its tokenizer .* not the one .*source.*init_fresh=\[embedding\.weight\]"):
        start()
    assert not torch.equal(start(*STILL, "train.init_fresh=[embedding.weight]")["embedding.weight"],
                           weights(source, 3)["embedding.weight"])  # fmt: skip


@pytest.mark.parametrize("mixer", [["swa"], ["mac"], ["rmt"]])
def test_samples_may_be_shorter_than_what_the_weights_came_from(tiny, source, mixer):
    words = [f"model.mixers={mixer}", "model.window=16", "data.seq_len=8", "train.batch_tokens=64"]
    own = {"mac": ["model.mac.segment=16"], "rmt": ["model.rmt.segment=16"]}.get(mixer[0], [])
    with pytest.raises(UserError, match="given 16; (at most|below) data.seq_len=8"):
        load_config(tiny(), [*words, *own])
    load_config(tiny(), [*words, *own, f"train.init_from={source}"])


def test_other_settings_are_a_warning(start, source, caplog):
    start(*STILL, model={"window": 4})
    assert "train.init_from: model.window is 4" in caplog.text
    assert "was trained with 8" in caplog.text


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda source: None, "which is neither a run's folder nor one of its checkpoints"),
    (lambda source: source.joinpath("config.json").write_text("{}"), "config.json is not of titans export"),
    (lambda source: source.joinpath("config.yaml").write_text(""), "holds no checkpoint yet"),
])  # fmt: skip
def test_folders_that_hold_no_weights(start, tmp_path, spoil, message):
    (tmp_path / "other").mkdir()
    spoil(tmp_path / "other")
    with pytest.raises(UserError, match=f"^train.init_from: given {tmp_path}/other.*{message}"):
        start(given=tmp_path / "other")


def test_a_checkpoint_under_another_name(start, source):
    copy = (source / "checkpoints/step-00000003").rename(source / "checkpoints/step-00000003-2")
    with pytest.raises(UserError, match=f"^train.init_from: given {copy}, which is neither a run's folder nor"):
        start(given=copy)


def test_an_export_without_its_weights(start, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": {}, "checkpoint_hash": "0" * 64}))
    with pytest.raises(UserError, match="it holds no model.safetensors"):
        start(given=folder)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"its model.safetensors is damaged \(.*\); copy or export it again"):
        start(given=folder)
    for text in ("{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UserError, match=r"its model.safetensors.index.json is damaged \(.*\); copy or export it"):
            start(given=folder)


def test_a_pattern_without_weights_to_begin_with(tiny):
    with pytest.raises(UserError, match="train.init_fresh: .*only with train.init_from"):
        load_config(tiny(), ["train.init_fresh=[norm.weight]"])
