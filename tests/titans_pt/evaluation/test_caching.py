"""Memory Caching as a setting of an evaluation: a run that was trained without it is read with it."""

import json

import pytest
import torch

from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config import CachingConfig
from titans_pt.errors import UserError
from titans_pt.evaluation.caching import cache_memories, unread
from titans_pt.evaluation.long_context import read
from titans_pt.models import build_model
from titans_pt.runs.loaded import load_run
from titans_pt.runs.states import load_state, read_about, save_state
from titans_pt.streaming import greedy

AVERAGE = ["evaluation.caching={segment: 8, shares: average}", "evaluation.perplexity.length=64"]


def test_a_run_is_measured_with_and_without(tmp_path, prepared, capsys):
    data = {"dir": str(prepared), "sources": [{"kind": "files", "path": str(prepared.parent / "text.jsonl")}]}
    run = untrained_run(tmp_path / "run", prepared, data=data, mixers=["lmm"])
    words = ["evaluate", str(run), "--suite", "perplexity", "evaluation.perplexity.tokens=128"]
    found = []
    for more in (AVERAGE, AVERAGE[1:], AVERAGE):
        assert cli.run([*words, *more]) == 0, capsys.readouterr().err
        (path,) = (run / "evaluation").rglob("summary.json")
        found.append(json.loads(path.read_text()))
    cached, plain, again = found
    assert cached["perplexity"]["loss"] != plain["perplexity"]["loss"] and again == cached
    assert cached["caching"]["shares"] == "average" and "caching" not in plain
    lines = (path.parent / "perplexity.jsonl").read_text().splitlines()
    assert len(lines) == 4, "two streams, each measured once in both ways"


def test_the_weights_are_those_of_the_model_that_was_trained_without(tmp_path, prepared):
    """The evaluated model gives the output of a model with these settings and the same weights."""
    run = load_run(untrained_run(tmp_path / "run", prepared, mixers=["mag"]), overrides=AVERAGE[:1])
    caching = run.config.evaluation.caching
    model = run.config.model
    memory = model.memory.model_copy(update={"caching": caching})
    other = build_model(model.model_copy(update={"memory": memory})).eval()
    other.load_state_dict(run.model.state_dict())
    ids = torch.randint(0, 40, (1, 30))
    with torch.no_grad():
        before = run.model(ids)[0]
        cache_memories(run.model, caching)
        after = run.model(ids)[0]
        torch.testing.assert_close(after, other(ids)[0], rtol=0, atol=0)
    assert torch.equal(after[:, :8], before[:, :8]) and not torch.equal(after[:, 8:], before[:, 8:])


@torch.no_grad()
@pytest.mark.parametrize("trained", [{"segment": 8}, {"segment": 8, "shares": "change", "fresh": True}])
def test_the_caches_of_a_run_that_has_them_are_changed(trained, tmp_path, prepared):
    """Segments become longer and more are kept; all else stays as trained, learned shares included."""
    path = untrained_run(tmp_path / "run", prepared, mixers=["lmm"], memory={"caching": trained})
    run = load_run(path, overrides=["evaluation.caching={segment: 16, slots: 2}"])
    found = cache_memories(run.model, run.config.evaluation.caching)
    expected = CachingConfig(**trained | {"segment": 16, "slots": 2})
    assert found.model_dump(exclude={"last"}) == expected.model_dump()
    memory = run.config.model.memory.model_copy(update={"caching": expected})
    other = build_model(run.config.model.model_copy(update={"memory": memory})).eval()
    other.load_state_dict(run.model.state_dict())
    ids = torch.randint(0, 40, (1, 60))
    torch.testing.assert_close(run.model(ids)[0], other(ids)[0], rtol=0, atol=0)


@torch.no_grad()
def test_the_last_tokens_of_a_prompt_alone_read_the_caches(tmp_path, prepared):
    """The length of the stretches and a kill between them change nothing."""
    run = load_run(untrained_run(tmp_path / "run", prepared, mixers=["lmm"], n_layers=2))
    for parameter in run.model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(0, 40, (2, 50))
    plain = run.model(ids)[0]
    cache_memories(run.model, CachingConfig(segment=8, shares="change", fresh=True))
    all_read = run.model(ids)[0]
    with unread(run.model):
        _, state = run.model(ids[:, :37])
    expected = run.model(ids[:, 37:], state)[0][:, -1]
    for save_every, chunk in ((50, 50), (20, 7), (37, 16), (1, 1)):
        found = read(run.model, ids, chunk, save_every, tmp_path / "reading", last=13)
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-5)
    seen = []

    def die(stretch):
        seen.append(stretch["tokens"])
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(run.model, ids, 50, 16, tmp_path / "reading", show=die, last=13)
    found = read(
        run.model, ids, 50, 16, tmp_path / "reading", show=lambda stretch: seen.append(stretch["tokens"]), last=13
    )
    assert seen == [16, 32, 48, 48, 50]
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-5)
    for other in (plain[:, -1], all_read[:, -1]):
        assert (other - expected).abs().max() > 1e-3
    found = read(run.model, ids, 50, 50, tmp_path / "reading", last=60)
    torch.testing.assert_close(found.logits, all_read[:, -1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_text_is_read_once_and_asked_about_with_caches(tmp_path, prepared, capsys):
    run = str(untrained_run(tmp_path / "run", prepared, mixers=["lmm"], n_layers=2))
    caching = "evaluation.caching={segment: 8, slots: 4, shares: change, fresh: true, last: 5}"
    text, question = "walks and talks and looks at it " * 3, " and then"
    loaded = load_run(run, overrides=[caching])
    cache_memories(loaded.model, loaded.config.evaluation.caching)
    ids, more = (torch.tensor([loaded.tokenizer.encode(words)]) for words in (text, question))
    with unread(loaded.model):
        _, state = loaded.model(ids[:, :-5])
    _, state = loaded.model(ids[:, -5:], state)
    logits, state = loaded.model(more, state)
    expected = loaded.tokenizer.decode(list(greedy(loaded.model, logits[:, -1], state, 8, set())))
    file, words = str(tmp_path / "state"), ["generate", run, caching]
    assert cli.run([*words, "--prompt", text, "--max-new-tokens", "0", "--save-state", file]) == 0
    capsys.readouterr()
    ask = ["--state", file, "--prompt", question, "--max-new-tokens", "8", "--temperature", "0"]
    assert cli.run([*words, *ask]) == 0
    assert capsys.readouterr().out.strip("\n") == expected.strip("\n")
    about = read_about(file)  # as version 0.3.0 wrote it, which had one more setting
    save_state(load_state(file), file, about | {"caching": about["caching"].replace("{", '{"drop":"oldest",')})
    assert cli.run([*words, *ask]) == 0
    assert capsys.readouterr().out.strip("\n") == expected.strip("\n")
    assert cli.run(["generate", run, *ask]) == 2
    assert "saved with other caches; give the same, evaluation.caching={" in capsys.readouterr().err
    assert cli.run(["generate", run, "train.lr=1", "--prompt", "a"]) == 2
    assert "only evaluation.KEY=VALUE can be set here" in capsys.readouterr().err


def test_a_suite_without_prompts_has_no_last_tokens(tmp_path, prepared, capsys):
    run = untrained_run(tmp_path / "run", prepared, mixers=["lmm"])
    words = ["evaluate", str(run), "--suite", "perplexity", "evaluation.caching={segment: 8, shares: sum, last: 4}"]
    assert cli.run(words) == 2
    assert "evaluation.caching.last: set, but the suite perplexity has no prompts" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "word", "message"), [
    ({"mixers": ["swa"]}, "{shares: sum, segment: 8}", "evaluation.caching: set, but the run has no neural memory"),
    ({"mixers": ["lmm"], "memory": {"hierarchy": {"chunk": 4, "shard": 8, "locals": [4]}}}, "{shares: sum, segment: 8}",
     "evaluation.caching: set; must be null for a run with model.memory.hierarchy"),
    ({"mixers": ["lmm"]}, "{shares: sum, segment: 7}", "evaluation.caching.segment: given 7; must be a multiple of"),
    ({"mixers": ["lmm"]}, "{segment: 8}", "evaluation.caching.shares: given 'gated'; must be average, sum or change"),
    ({"mixers": ["lmm"], "memory": {"caching": {"segment": 8, "shares": "sum"}}}, "{shares: gated}",
     "evaluation.caching.shares: given 'gated'; must be average, sum or change"),
    ({"mixers": ["lmm"], "memory": {"caching": {"segment": 8, "soup": True}}}, "{shares: sum}",
     "evaluation.caching.soup: given True with shares='sum'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(model, word, message, tmp_path, prepared):
    path = untrained_run(tmp_path / "run", prepared, **model)
    with pytest.raises(UserError, match=message):
        run = load_run(path, overrides=[f"evaluation.caching={word}"])
        cache_memories(run.model, run.config.evaluation.caching)
