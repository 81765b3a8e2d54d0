"""Conversion of a run with full attention to one with a constant-size state: sliding window, sinks and a memory."""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_pt.config import Config, ModelConfig
from titans_pt.config.files import validated
from titans_pt.data_pipeline import TokenFiles
from titans_pt.errors import UserError
from titans_pt.layers.lora import merged
from titans_pt.models import LanguageModel, build_model
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import LoadedRun, load_run
from titans_pt.runs.written import check_new, check_weights, write_run

TARGETS = {"titans": "mab", "liza": "liza", "full": "attention", "window": "swa"}
"""Names that ``--to`` accepts -> the mixer of the chosen layers."""
SOURCES = ("attention", "swa")
"""Mixers whose layers can be converted."""
REST = "swa"
"""The mixer of layers without a memory."""


def convert_run(
    source: str | Path, out: str | Path, to: str, window: int, sinks: int = 0, layers: Sequence[int] | None = None,
    overrides: Sequence[str] = (), step: int | None = None,
) -> Path:  # fmt: skip
    """Writes ``source`` with other mixers to the run folder ``out``, as one checkpoint without optimiser state.

    Every layer gets the window and the sinks. Chosen layers differ by ``to``:

    - "titans": they get a memory. Its projections start from the layer's own queries, keys and values
      (:func:`_start_memory`), and its share of the output starts at 0.
    - "liza": they get a delta rule that starts in the same way.
    - "full": they keep full attention.

    With "titans" and "liza" the model starts bit for bit like the windowed source. Adapters of the source (model.lora)
    are merged into the weights.

    Args:
        window, sinks: model.window, model.attention.sinks.
        layers: layers to convert, counted from 0; None: all.
        overrides: ``key=value`` settings, such as model.memory.chunk_size.

    Raises:
        UserError: the source has other mixers or no text, a layer does not exist, settings do not fit, or ``out``
            already holds a run.
    """
    check_new(RunFolder(out))
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
    with_memory = [layer for layer, mixer in enumerate(settings.model.pattern) if mixer == TARGETS["titans"]]
    inputs = _inputs(run, settings, with_memory) if with_memory else {}
    for layer in with_memory:
        _start_memory(f"blocks.{layer}.mixer.", weights, settings.model, inputs[layer])
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
    # Memory settings that the source did not use get this project's defaults, not the stored values.
    model = {key: value for key, value in tree["model"].items() if key not in SOURCES}
    windowed = mixers != [TARGETS["full"]]  # without a window every token stays visible
    model["attention"] = tree["model"]["attention"] | {"sinks": sinks if windowed else 0}
    memory = {} if to == "titans" else {"memory": tree["model"]["memory"]}
    del model["memory"]
    return tree | {
        "run": tree["run"] | {"dir": str(out)},
        "model": model | memory | {"mixers": mixers, "window": window, "lora": None},
    }


FIRST = 4
"""Number of first tokens of a sample to leave out: as attention sinks they differ from all later tokens."""
CALIBRATION = 4096
"""Approximate number of tokens for which :func:`_inputs` records attention's inputs."""


def _inputs(run: LoadedRun, settings: Config, layers: Sequence[int]) -> dict[int, Tensor]:
    """Inputs of attention in these layers of the source, (tokens, d_model) each.

    They come from training text if it has been prepared, else from random tokens, whose keys resemble those of text
    less.
    """
    length = min(settings.data.seq_len, CALIBRATION)
    rows = CALIBRATION // length
    try:
        files = TokenFiles.open(settings)
        if files.tokenizer.sha256 != run.tokenizer.sha256:
            raise UserError(f"data.dir={settings.data.dir}: encoded with another tokenizer")
        samples = files.samples(settings)
        ids = torch.stack([torch.from_numpy(samples.sample(n)[0][:length]) for n in range(rows)])
        source = f"{ids.numel():,} training tokens of {settings.data.dir}"
    except UserError as error:
        ids = torch.randint(run.tokenizer.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
        source = f"random tokens, which say less than text ({error})"
    print(f"the memory's queries and keys are centred by the means of {source}", file=sys.stderr)
    model, found = cast(LanguageModel, run.model), {}
    with torch.no_grad():
        x = model.embed(ids)
        for layer, block in enumerate(islice(model.blocks, max(layers) + 1)):
            before = block.mixer_norm(x)
            if layer in layers:
                found[layer] = before[:, FIRST:].flatten(0, 1)
            x = block.feed(x + block.mixer(before)[0])
    return found


@torch.no_grad()  # after DeepSpeed's ZeRO 3 was used in a process, linear maps save their inputs for a backward pass
def _start_memory(prefix: str, weights: dict[str, Tensor], config: ModelConfig, inputs: Tensor):
    """Initialises the memory's projections from attention's, with keys and values repeated for heads that share them.

    If attention has norms of queries and keys (model.attention.qk_norm), the projections are multiplied by their
    weights: the memory then sees the same directions, and it makes all lengths 1.

    Biases subtract the mean from queries and keys. The keys of a pretrained head all point in nearly the same
    direction, and a memory written under such keys returns the mean of the values. Attention is not affected, because
    a common offset has no effect under a softmax. The norm of the memory's output starts at the size of the values.
    """
    group = config.n_heads // config.kv_heads
    for name, repeats in (("q", 1), ("k", group), ("v", group)):

        def of_all_heads(x: Tensor, repeats: int = repeats) -> Tensor:
            return x.unflatten(0, (-1, config.head_width)).repeat_interleave(repeats, 0).flatten(0, 1)

        found, target = of_all_heads(weights[f"{prefix}attention.{name}.weight"]), f"{prefix}memory.{name}."
        if (norm := weights.get(f"{prefix}attention.{name}_norm.weight")) is not None:
            found = found * norm.repeat(config.n_heads)[:, None]
        weights[f"{target}linear.weight"] = found
        own = weights.get(f"{prefix}attention.{name}.bias")
        if name != "v":  # attention's own bias is part of the subtracted mean
            weights[f"{target}linear.bias"] = -(inputs @ found.mT).mean(0)
        elif own is not None:
            weights[f"{target}linear.bias"] = of_all_heads(own)
        if f"{target}conv.weight" in weights:
            identity = torch.zeros_like(weights[f"{target}conv.weight"])
            identity[:, -1] = 1.0
            weights[f"{target}conv.weight"] = identity
    linear = f"{prefix}memory.v.linear."
    values = F.linear(inputs, weights[f"{linear}weight"], weights[f"{linear}bias"])
    norm = weights[f"{prefix}memory.output_norm.weight"]
    weights[f"{prefix}memory.output_norm.weight"] = torch.full_like(norm, values.square().mean().sqrt().item())
