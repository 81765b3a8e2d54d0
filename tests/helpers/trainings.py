"""Trainings in the process of the test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import curve
from titans_pt.config import Config
from titans_pt.tasks import language
from titans_pt.training import loop


def spoil_logits(patch: pytest.MonkeyPatch, factor: float) -> set[int]:
    """Multiply a language model's logits by ``factor`` in some steps of later trainings.

    Returns:
        these steps: empty at first, the test fills it.
    """
    build, take, current, spoilt = language.build_model, loop.Trainer._train_step, [0], set()

    def hook(_module, _args, output):
        return (output[0] * factor, output[1]) if current[0] in spoilt else None

    def build_spoilt(*settings):
        model = build(*settings)
        model.register_forward_hook(hook)
        return model

    def counted(trainer):
        current[0] = trainer.step + 1
        return take(trainer)

    patch.setattr(language, "build_model", build_spoilt)
    patch.setattr(loop.Trainer, "_train_step", counted)
    return spoilt


def check_resume(configured: Callable[..., Config], folder: Path, *words: str):
    """Train four steps in ``folder``/whole, and in two parts in ``folder``/parts, and compare the losses."""
    whole, parts = (configured(f"run.dir={folder / name}", *words) for name in ("whole", "parts"))
    loop.train(whole)
    loop.train(configured(f"run.dir={parts.run.dir}", "train.stop_at=2", *words))
    loop.train(parts)
    found = [curve(folder / name, "loss") for name in ("whole", "parts")]
    assert len(found[0]) == 4 and found[0] == found[1]
