"""A run with full attention as one whose state is of constant size: a window, first tokens, and a memory beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titans_pt.config import ModelConfig
from titans_pt.config.files import validated
from titans_pt.errors import UserError
from titans_pt.layers.lora import merged
from titans_pt.models import build_model
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import LoadedRun, load_run
from titans_pt.runs.written import check_weights, write_run

TARGETS = {"titans": "mab", "liza": "liza", "full": "attention", "window": "swa"}
"""Names that ``--to`` accepts -> the mixer of the layers that are chosen."""
SOURCES = ("attention", "swa")
"""Mixers whose layers can be converted."""
REST = "swa"
"""The mixer of layers without a memory."""


def convert_run(
    source: str | Path, out: str | Path, to: str, window: int, sinks: int = 0, layers: Sequence[int] | None = None,
    overrides: Sequence[str] = (), step: int | None = None,
) -> Path:  # fmt: skip
    """Writes ``source`` with other mixers to the run folder ``out``, one checkpoint without optimiser state.

    Every layer gets the window and the sinks. With ``to="titans"``, chosen layers get a memory whose projections start
    from the layer's own queries, keys and values, and whose output starts at 0; with "liza", a delta rule whose share
    of the output starts at 0: the model starts as the windowed source, bit for bit. With "full", they keep full
    attention. Adapters of the source (model.lora) end in the weights.

    Args:
        window, sinks: model.window, model.attention.sinks.
        layers: which layers become ``to``, counted from 0; None: all.
        overrides: ``key=value`` settings, such as model.memory.chunk_size.

    Raises:
        UserError: a source that has other mixers or no text, layers that it does not have, settings that do not fit,
            or ``out`` holds a run already.
    """
    if RunFolder(out).config.exists():
        raise UserError(f"--out {out}: holds a run already; name another folder")
    run = load_run(source, step, precision="fp32")
    if others := [kind for kind in run.config.model.kinds if kind not in SOURCES]:
        raise UserError(f"{source}: model.mixers has {others[0]!r}; only layers of {' and '.join(SOURCES)} can be "
                        "converted: name a run of those, such as titans import writes")  # fmt: skip
    path = run.tokenizer.path
    settings = validated(_settings(run, Path(out), to, window, sinks, layers), overrides)
    if "swa" in run.config.model.kinds and settings.data.seq_len > run.config.model.window:
        seen = run.config.model.window
        raise UserError(f"{source}: its attention sees {seen} tokens, and a conversion takes it for full attention; "
                        f"give data.seq_len={seen} or less, of which it sees all")  # fmt: skip
    if settings.model.mlp_periods:
        raise UserError(f"model.mlp_periods: given {settings.model.mlp_periods}; a conversion has none: it begins as "
                        "its source, to which the levels would add")  # fmt: skip
    torch.manual_seed(settings.run.seed)
    fresh = build_model(settings.model, run.tokenizer.vocab_size)
    given, kept = merged(run.model), [name for name, _ in run.model.named_parameters()]
    weights: dict[str, Tensor] = dict(fresh.named_parameters()) | {name: given[name] for name in kept if name in given}
    check_weights(Path(out), settings, weights)
    for layer, mixer in enumerate(settings.model.pattern):
        if mixer == TARGETS["titans"]:
            _start_memory(f"blocks.{layer}.mixer.", weights, settings.model)
    return write_run(RunFolder(out), settings, weights, path, run.step)


def _settings(run: LoadedRun, out: Path, to: str, window: int, sinks: int, layers: Sequence[int] | None) -> dict:
    tree: dict[str, Any] = run.config.model_dump(mode="json")
    count = run.config.model.n_layers
    chosen = range(count) if layers is None else layers
    if wrong := [layer for layer in chosen if not 0 <= layer < count]:
        raise UserError(f"--layers: given {wrong[0]}; {run.folder.path} has layers 0 to {count - 1}")
    if layers is not None and TARGETS[to] == REST:
        raise UserError(f"--layers: given with --to {to}, which every layer gets; leave it out")
    mixers = [TARGETS[to] if layer in chosen else REST for layer in range(count)]
    if len(set(mixers)) == 1:
        mixers = mixers[:1]
    length = run.config.data.seq_len
    if window > length:
        raise UserError(f"--window: given {window}; at most data.seq_len={length} of {run.folder.path}")
    # What the memory needs of settings that the source did not use has this project's defaults, not stored ones.
    model = {key: value for key, value in tree["model"].items() if key not in SOURCES}
    windowed = mixers != [TARGETS["full"]]  # without a window every token stays visible
    model["attention"] = tree["model"]["attention"] | {"sinks": sinks if windowed else 0}
    memory = {} if to == "titans" else {"memory": tree["model"]["memory"]}
    del model["memory"]
    return tree | {
        "run": tree["run"] | {"dir": str(out)},
        "model": model | memory | {"mixers": mixers, "window": window, "lora": None},
    }


def _start_memory(prefix: str, weights: dict[str, Tensor], config: ModelConfig):
    """Projections of the memory, copied from attention's, with keys and values repeated for heads that share them. They
    keep their random values if the heads' total width differs from the model's."""
    group = config.n_heads // config.kv_heads
    for name, repeats in (("q", 1), ("k", group), ("v", group)):
        heads = weights[f"{prefix}attention.{name}.weight"].unflatten(0, (-1, config.head_width))
        found, target = heads.repeat_interleave(repeats, 0).flatten(0, 1), f"{prefix}memory.{name}."
        if found.shape != weights[f"{target}linear.weight"].shape:
            continue
        weights[f"{target}linear.weight"] = found
        if f"{target}conv.weight" in weights:
            identity = torch.zeros_like(weights[f"{target}conv.weight"])
            identity[:, -1] = 1.0
            weights[f"{target}conv.weight"] = identity
