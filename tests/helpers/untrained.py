"""A run folder with an untrained tiny model, in the form that training leaves, made in milliseconds."""

import hashlib
from pathlib import Path

import torch

from tests.conftest import TINY, merged
from tests.helpers.mixers import own_settings
from titans_pt.config import Config
from titans_pt.data_pipeline.tokenizers import saved_tokenizer
from titans_pt.models import build_model
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.tasks.language import keep_tokenizer


def untrained_run(folder: Path, prepared: Path, seed: int = 0, data: dict | None = None, **model) -> Path:
    """Fill ``folder``; ``prepared`` holds the tokenizer; ``data`` and ``model`` are changes to TINY's settings. Without
    a ``dir`` in ``data`` the run has no token files."""
    model = own_settings(model.get("mixers", [])) | model
    data = {"dir": str(folder / "no-data")} | (data or {})
    config = Config.model_validate(merged(TINY, {"model": model, "data": data}))
    torch.manual_seed(seed)
    weights = {name: p.detach().clone() for name, p in build_model(config.model).named_parameters()}
    folder.mkdir(exist_ok=True)
    RunFolder(folder).write_settings(config)
    keep_tokenizer(saved_tokenizer(prepared), config, RunFolder(folder))
    state = checkpoints.TrainerState(
        step=3, samples=0, adam_step=3, nonfinite=0, nonfinite_in_a_row=0,
        config=config.model_dump(mode="json"),
        identity={"tokenizer": hashlib.sha256(saved_tokenizer(prepared).read_bytes()).hexdigest()},
    )  # fmt: skip
    checkpoints.save(folder / "checkpoints", weights, {}, state)
    return folder
