import pytest
import torch
from torch import nn

from titans_pt.experiments.study import _load, _save


@pytest.mark.parametrize("damage", ["none", "flip", "cut", "zero", "text"])
def test_a_damaged_training_starts_again(tmp_path, capsys, damage):
    """Flipped bits in the weights, which torch itself does not notice, among them."""
    path, model = tmp_path / "kept", nn.Linear(40, 40)
    _save(path, model, torch.optim.AdamW(model.parameters()), curve=[], step=50, seconds=1.0)
    content = bytearray(path.read_bytes())
    if damage == "none":
        assert torch.equal(_load(path, "a model")["model"]["weight"], model.weight)
        return
    if damage == "flip":
        content[content.index(model.weight.detach().numpy().tobytes()[:64]) + 9] ^= 4
    path.write_bytes({"cut": content[:-99], "zero": bytes(len(content)), "text": b"text"}.get(damage, content))
    assert _load(path, "a model") is None
    assert f"a model: {path} is damaged" in capsys.readouterr().out


def test_without_a_file_nothing_is_said(tmp_path, capsys):
    assert _load(tmp_path / "none", "a model") is None and not capsys.readouterr().out
