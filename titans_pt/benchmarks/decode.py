"""Generation on this machine: tokens per second after a prompt, one row, the mixers of a config in turns."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titans_pt.benchmarks.process import write_csv
from titans_pt.config import Config, ModelConfig
from titans_pt.config_check import checked
from titans_pt.errors import UserError
from titans_pt.layers.state import state_bytes
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS
from titans_pt.run_folder import versions
from titans_pt.streaming import best_device, greedy, prefill
from titans_pt.tools.files import write_text


@dataclass
class Decoding:
    """tokens_per_second: of the median round. of_first: the median over rounds of this model's rate over that of the
    first one. state_mib: what is carried from token to token."""

    model: str
    parameters: int
    tokens_per_second: float
    of_first: float
    state_mib: float


def benchmark_decode(out: Path, config: Config, models: Sequence[str], prompt: int, tokens: int, rounds: int):
    """Measures, prints a table, writes ``out``/decode.{md,csv,json}.

    Random tokens, untrained weights (speed does not depend on them), bf16 on a GPU and fp32 on a CPU. The models take
    turns, so that a machine that slows down slows all of them.

    Raises:
        UserError: a model that is no mixer.
    """
    for model in models:
        if model not in MIXERS.names():
            raise UserError(f"--models: given {model!r}; allowed: {', '.join(MIXERS.names())}")
    out.mkdir(parents=True, exist_ok=True)
    found = measure(config, models, prompt, tokens, rounds)
    text = table(found)
    write_text(out / "decode.md", text)
    write_csv(out / "decode.csv", found)
    about = versions() | {
        "model": config.model.model_dump(mode="json"), "prompt": prompt, "tokens": tokens, "rounds": rounds,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    write_text(out / "decode.json", json.dumps(about, indent=1) + "\n")
    print(f"{text}\n{out / 'decode.md'}")


def measure(config: Config, models: Sequence[str], prompt: int, tokens: int, rounds: int) -> list[Decoding]:
    device = torch.device(best_device())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    built, begun = {}, {}
    for name in models:
        torch.manual_seed(0)
        model = ModelConfig(**config.model.model_dump() | {"mixers": [name]})
        own = checked(config.model_copy(update={"model": model})).model
        built[name] = build_model(own).to(device, dtype).eval()
        ids = torch.randint(0, config.model.vocab_size, (1, prompt))
        begun[name] = prefill(built[name], ids, config.evaluation.prefill_tokens)

    def rate(name: str, count: int) -> float:
        began = time.perf_counter()
        assert len(list(greedy(built[name], *begun[name], count + 1))) == count + 1  # the first is the prompt's
        return count / (time.perf_counter() - began)

    for name in models:
        rate(name, 3)
    rates = [[rate(name, tokens) for name in models] for _ in range(rounds)]
    return [
        Decoding(
            name, sum(p.numel() for p in built[name].parameters()), statistics.median(of_model),
            statistics.median(each / row[0] for each, row in zip(of_model, rates, strict=True)),
            state_bytes(begun[name][1]) / 2**20,
        )
        for name, of_model in zip(models, zip(*rates, strict=True), strict=True)
    ]  # fmt: skip


def table(found: list[Decoding]) -> str:
    """Markdown, one line per model."""
    lines = [f"| model | parameters | tokens/s | of {found[0].model} | state MiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {d.model} | {d.parameters:,} | {d.tokens_per_second:.0f} | {d.of_first:.2f} | {d.state_mib:.2f} |"
        for d in found
    ]
    return "\n".join(lines) + "\n"
