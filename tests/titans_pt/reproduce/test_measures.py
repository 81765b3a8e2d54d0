"""Figures found in results, and a memory at other chunk sizes than its own."""

import torch

from titans_pt.config import ModelConfig
from titans_pt.config.files import load_config
from titans_pt.models import build_model
from titans_pt.reproduce import measures
from titans_pt.reproduce.measures import chunks_of
from titans_pt.reproduce.studies import TINY

SMALL = dict(mixers=["lmm"], vocab_size=32, d_model=16, n_layers=2, n_heads=2, persistent_tokens=2)


def test_other_chunks_are_other_models_for_a_while():
    torch.manual_seed(0)
    model = build_model(ModelConfig(**SMALL, memory={"chunk_size": 4}))
    ids = torch.randint(0, 32, (1, 24))
    with torch.no_grad():
        own = model(ids)[0]
        with chunks_of(model, 8):
            other = model(ids)[0]
        with chunks_of(model, 4):
            same = model(ids)[0]
        again = model(ids)[0]
    assert torch.equal(own, again) and torch.equal(own, same)
    assert torch.allclose(own[:, :2], other[:, :2], atol=1e-6), "the first chunk begins where it began"
    assert not torch.allclose(own, other, atol=1e-6)


def test_only_a_memory_is_frozen():
    memory, none = ModelConfig(**SMALL), ModelConfig(**(SMALL | {"mixers": ["swa"]}))
    long = TINY["long"]
    assert long.settings(memory) == [*long.words, "evaluation.perplexity.freeze_after=[0, 512]"]
    assert long.settings(none) == list(long.words)


def test_a_measure_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    """A record holds how it was measured; records are shared, and compared by the last names of paths."""
    config = load_config("quickstart", ["evaluation.perplexity.text=/secret/place/tokens"])
    given = config.evaluation.perplexity.model_dump(mode="json")
    told = []

    def evaluate(run, words, suite):
        told.extend(words)
        return {suite: {"settings": given, "text": given["text"], "loss": 3.0}}

    monkeypatch.setattr(measures.runner, "evaluate", evaluate)
    found = TINY["text"].take(tmp_path, config, {})
    assert "/secret/place/tokens" in "".join(told) and "secret" not in str(found)
    assert found["evaluation"]["perplexity"]["text"] == found["text"] == "tokens"
    assert TINY["text"].done(found, config)


def test_figures_of_lm_eval():
    tasks = {"wikitext": {"n": 62, "word_perplexity": 20.0}, "piqa": {"n": 100, "acc": 0.5},
             "lambada_openai": {"n": 10, "perplexity": 30.0, "acc": 0.2}}  # fmt: skip
    result = {"tasks": tasks, "average": 0.35, "averaged": {"piqa": "acc", "lambada_openai": "acc"}}
    assert measures.harness("piqa", "acc")(result) == measures.Figure("accuracy", 0.5, 100)
    assert measures.harness("piqa", "acc_norm")(result) is None
    assert measures.both_perplexities(result) == measures.Figure("number", 25.0, 72)
    assert measures.average(result) == measures.Figure("number", 35.0, 110)


def test_figures_of_questions():
    rows = [{"length": 2048, "mean": 0.5, "n": 10}, {"length": 4096, "mean": 0.25, "n": 20}]
    result = {"tasks": {"qa1": {"by_length": rows}}}
    assert measures.question("qa1", 4096)(result).shown == 25.0
    assert measures.question("qa2", 4096)(result) is None
    assert measures.mean_of(("qa1",), (2048, 4096))(result) == measures.Figure("number", 37.5, 30)
    assert measures.mean_of(("qa1", "qa2"), (2048,))(result) is None


def test_figures_of_text():
    rows = [{"last": 1, "n": 4}, {"last": 2, "n": 4}, {"last": 4, "n": 8}]
    by_length = [{"length": 4, "loss": 2.5}]
    about = {"loss": 2.0, "tokens": 16, "stderr": 0.1, "streams": 4, "by_stream": [1.9, 2.0, 2.0, 2.1]}
    result = about | {"positions": rows, "by_length": by_length}
    result["frozen"] = [result | {"after": 512, "loss": 3.0}]
    assert measures.loss_up_to(4)(result) == measures.Figure("perplexity", 2.5, 16)
    assert measures.loss_up_to(8)(result) is None
    assert measures.frozen_loss(512)(result) == measures.Figure("perplexity", 3.0, 16, 0.1, 4, (1.9, 2.0, 2.0, 2.1))
    assert measures.frozen_loss(0)(result) is None
