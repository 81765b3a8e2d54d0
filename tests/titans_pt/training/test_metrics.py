import pytest
import torch

from titans_pt.training.metrics import Progress, peak_flops
from titans_pt.training.plots import plot_loss


def test_no_peak_on_a_cpu():
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA GH200 480GB", 989e12),
    ("NVIDIA A100-PCIE-40GB", 312e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H20", None),
    ("NVIDIA RTX A1000", None),
])  # fmt: skip
def test_the_peak_is_that_of_the_gpus_form(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_hidden_progress_says_nothing(capsys):
    bar = Progress(0, 3, shown=False)
    bar.update(1.0, 10.0)
    bar.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("unigram", [None, 5.0])
def test_plot(tmp_path, unigram):
    records = [
        {"kind": "train", "step": 1, "loss": 6.0},
        {"kind": "nonfinite", "step": 2, "loss": None},
        {"kind": "train", "step": 3, "loss": 5.5},
        {"kind": "validation", "step": 3, "validation_loss": 5.6},
    ]
    plot_loss(records, tmp_path / "plots" / "loss.png", "nats per token", "unigram baseline", unigram, "quickstart")
    plot_loss(records, tmp_path / "loss.svg", "nats per token", title="quickstart")
    assert "quickstart" in (tmp_path / "loss.svg").read_text()
    assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
