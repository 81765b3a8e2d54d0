"""A tiny exported model, loaded once."""

import pytest
import torch

from tests.helpers.untrained import untrained_run

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from titans_pt import huggingface  # noqa: E402


@pytest.fixture(scope="session")
def exported(tmp_path_factory, prepared):
    """A folder with ``run`` and its export ``hf``; do not write there. The weights are far enough from their start for
    texts, states and beams to differ."""
    folder = tmp_path_factory.mktemp("exported")
    run = untrained_run(folder / "run", prepared, n_layers=2, mixers=["mac", "lmm"])
    huggingface.export_run(run, folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder / "hf")
    return folder


@pytest.fixture(scope="session")
def hub(exported):
    """The exported model, shared: do not change it."""
    return AutoModelForCausalLM.from_pretrained(exported / "hf")


@pytest.fixture
def fresh(exported):
    """The exported model, to be changed."""
    return AutoModelForCausalLM.from_pretrained(exported / "hf")


@pytest.fixture
def tokenizer(exported):
    return AutoTokenizer.from_pretrained(exported / "hf")


@pytest.fixture
def ids():
    """(2, 13)."""
    return torch.randint(3, 280, (2, 13), generator=torch.Generator().manual_seed(0))
