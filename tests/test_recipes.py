"""The complete examples of docs/architecture.md keep the promises that their recipes make."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from titans_pt.config import ModelConfig
from titans_pt.config.files import load_config
from titans_pt.inspection.promises import check_promises
from titans_pt.parallel import RankGroup
from titans_pt.tasks import task_of

PAGE = (Path(__file__).parent.parent / "docs/architecture.md").read_text()
EXAMPLES = re.findall(r"in (my_\w+)\.py:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = {"d_model": 16, "n_heads": 2, "mlp_hidden": 24, "window": 8, "vocab_size": 64, "memory": {"chunk_size": 4}}


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The examples as modules, such as my_rules."""
    for name, code in EXAMPLES:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, f"docs/architecture.md, {name}.py", "exec"), vars(module))


def test_every_complete_example_is_here():
    assert [name for name, _ in EXAMPLES] == ["my_mixers", "my_rules", "my_tasks"]
    assert len(EXAMPLES) == PAGE.count("```python\n")


@pytest.mark.parametrize("settings", [
    {"mixers": ["running_mean"]},
    {"mixers": ["lmm"], "memory": {"chunk_size": 4, "rule": "log_cosh"}},
])  # fmt: skip
def test_a_mixer_and_a_rule_keep_their_promises(settings, capsys):
    check_promises(ModelConfig(**SMALL | settings), 24)
    assert "kept" in capsys.readouterr().out


def test_a_task_reports_its_figures(tiny):
    task = task_of(load_config(tiny(task="my_language", run={"imports": ["my_tasks"]})))
    model = task.build_model()
    objective = task.objective(model, RankGroup())
    ids = torch.randint(model.tokens, (2, 9), generator=torch.Generator().manual_seed(0))
    assert objective(ids, None).isfinite()
    found = objective(ids, None, weight=torch.ones(2))
    assert set(found) == set(task.figures)
    logits, _ = model(ids[:, :-1])
    assert found["accuracy"] == (logits.argmax(-1) == ids[:, 1:]).float().mean()
    more = task.after_validation(model, 1, {"loss": 2.0})
    assert more == {"perplexity": pytest.approx(7.389, rel=1e-4)}
    groups = task.optimizer(model, torch.device("cpu")).param_groups
    assert [group.get("lr_scale") for group in groups] == [1.0, 0.5]
    rates = [task.learning_rate(step, usual=0.5) for step in (task.config.train.warmup_steps, 400)]
    assert rates == [0.5, task.config.train.lr * (task.config.train.warmup_steps / 400) ** 0.5]
