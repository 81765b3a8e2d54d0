"""configs/paper-literal: the forms in every file, and the models' parameters."""

from pathlib import Path

import pytest
import torch

from titans_pt.config.files import load_config
from titans_pt.models import build_model

CONFIGS = Path(__file__).parents[3] / "configs"
SIZES, MODELS = ("170m", "340m", "400m", "760m"), ("lmm", "mac", "mag", "mal")
OWN = {
    "lmm": {"output_gate": "silu"},
    "mac": {"write": "attention", "gate": "product", "gate_activation": "silu"},
    "mag": {"gate": "product", "gate_activation": "silu"},
    "mal": {"residual": False, "output_gate": "silu"},
}
MEMORY = {
    "theta": "free", "gates": "sigmoid", "forget_to": "zero", "alpha": "channel", "per_layer_gates": True,
    "norm": True, "residual": True,
}  # fmt: skip
V1 = MEMORY | {"norm": False, "residual": False, "alpha": "head", "per_layer_gates": False}


def parameters(config):
    """Number of parameters; all blocks of these models are alike, therefore only one is built."""
    with torch.device("meta"):
        model = build_model(config.model.model_copy(update={"n_layers": 1}))
    block, whole = (sum(p.numel() for p in part.parameters()) for part in (model.blocks[0], model))
    return whole + (config.model.n_layers - 1) * block


def files(folder):
    return {path.stem for path in (CONFIGS / folder).glob("*m-*.yaml")}


def test_no_file_is_missing_and_none_is_left_over():
    literal = {f"{size}-{model}" for size in SIZES for model in MODELS} | {f"340m-{model}-v1" for model in MODELS}
    assert files("paper-literal") == literal


@pytest.mark.parametrize("name", sorted(files("paper-literal")))
def test_the_forms_of_the_paper(name):
    size, model, *v1 = name.split("-")
    config = load_config(CONFIGS / "paper-literal" / f"{name}.yaml")
    ours = load_config(CONFIGS / size / f"{model}.yaml")
    assert config.run.dir == f"runs/paper-literal-{name}" and config.model.mixers == [model]
    forms = V1 if v1 else MEMORY
    assert {key: getattr(config.model.memory, key) for key in forms} == forms
    own = config.model.section(model)
    assert {key: own[key] for key in OWN[model]} == OWN[model]
    # The window is 2,048, and models that use it train on samples of 2K tokens; all else is the size's own recipe.
    length = 2048 if model in ("mag", "mal") else 4096
    assert (config.data.seq_len, config.model.window, config.train) == (length, 2048, ours.train)
    assert abs(parameters(config) / parameters(ours) - 1) < 0.01
