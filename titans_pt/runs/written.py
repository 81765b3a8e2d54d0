"""Writing a run folder from weights that did not come from a training here: an import, a conversion."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import with_rows
from titans_pt.tasks.language import keep_tokenizer, tokenizer_of

COUNTED = ("embedding.weight", "head.weight")
"""Parameters of a language model whose rows stand for tokens (LanguageModel.counted_rows)."""


def write_run(
    run: RunFolder, settings: Config, weights: Mapping[str, Tensor], tokenizer: Path, step: int
) -> Path:  # fmt: skip
    """Writes a run folder with one checkpoint of ``weights``; embedding and head get the settings' number of rows.

    Raises:
        UserError: the settings are for another model than the weights.
    """
    tokenizer_of(tokenizer, settings)  # before anything is written
    weights = {name: p.detach().clone().contiguous() for name, p in weights.items()}
    check_weights(run.path, settings, weights)
    rows = settings.model.vocab_rows
    weights |= {name: with_rows(weights[name], rows) for name in COUNTED if name in weights}
    state = checkpoints.TrainerState(
        step=step, samples=0, adam_step=0, nonfinite=0, nonfinite_in_a_row=0,
        config=settings.model_dump(mode="json"),
        identity={"tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest()},
    )  # fmt: skip
    with new_run(run):
        checkpoints.save(run.checkpoints, weights, {}, state)
        keep_tokenizer(tokenizer, settings, run)
        run.write_settings(settings)
    return run.path


def check_new(run: RunFolder):
    """
    Raises:
        UserError: the folder holds a run.
    """
    if run.config.exists():
        raise UserError(f"--out {run.path}: holds a run already; name another folder")


@contextmanager
def new_run(run: RunFolder) -> Iterator[None]:
    """Locks a folder in which a run is written, one without a training.

    The settings are written last: a folder with settings counts as a run. What a killed process wrote does not, and is
    replaced.

    Raises:
        UserError: the folder holds a run, or another process writes there.
    """
    with run.lock("--out"):
        check_new(run)
        yield


def check_weights(path: Path, settings: Config, weights: Mapping[str, Tensor]):
    """Compares ``weights`` with the model of ``settings``; only rows of the embedding and the head may be missing.

    Raises:
        UserError: the model has other parameters than ``weights``.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in build_model(settings.model).named_parameters()}
    given = {name: p.shape for name, p in weights.items()}
    for name in COUNTED:
        if name in given and given[name][0] <= settings.model.vocab_rows:
            given[name] = torch.Size([settings.model.vocab_rows, *given[name][1:]])
    if different := sorted(name for name in shapes.keys() | given if shapes.get(name) != given.get(name)):
        raise UserError(
            f"{path}: the settings of model are not those of the weights: {len(different)} parameters differ, such "
            f"as {different[0]}; leave the model's sizes as they are in the source"
        )
