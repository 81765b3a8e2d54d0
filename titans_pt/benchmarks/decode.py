"""Generation on this machine: tokens per second after a prompt, one row, the mixers of a config in turns."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titans_pt.benchmarks.process import write_about, write_csv
from titans_pt.config import Config
from titans_pt.config.checks import mixers_of
from titans_pt.config.files import keys_of, load_config
from titans_pt.layers.state import state_bytes
from titans_pt.models import build_model
from titans_pt.streaming import best_device, greedy, prefill
from titans_pt.tools.files import write_text
from titans_pt.tools.markdown import markdown_table


@dataclass
class Decoding:
    """Figures of a model. tokens_per_second: rate of the median round. of_first: this model's rate divided by the first
    model's, median over rounds. state_mib: size of the state that is carried from token to token."""

    model: str
    parameters: int
    tokens_per_second: float
    of_first: float
    state_mib: float


ATTENTION_AND_TITANS = ("attention", "lmm", "mac", "mag", "mal")


def benchmark_decode(
    out: Path, config: str, overrides: Sequence[str], models: Sequence[str] | None, prompt: int, tokens: int,
    rounds: int,
):  # fmt: skip
    """Time generation, print a table and write ``out``/decode.{md,csv,json}.

    Tokens are random and weights untrained (speed does not depend on them), in bf16 on a GPU and fp32 on a CPU. The
    models take turns, so that a machine that slows down slows all of them.

    Args:
        config, overrides: as in :func:`titans_pt.config.files.load_config`.
        models: mixers, or several in turns as in mamba+swa; None: model.mixers of ``overrides``, else
            ATTENTION_AND_TITANS.

    Raises:
        UserError: an unknown mixer, or a wrong setting.
    """
    given = load_config(config, overrides)  # it also imports the user's own mixers
    if models is None:
        chosen = "model.mixers" in keys_of(overrides)
        models = ["+".join(given.model.mixers)] if chosen else ATTENTION_AND_TITANS
    # Each model gets its own section of the file.
    configs = {model: load_config(config, [*overrides, f"model.mixers=[{','.join(mixers_of(model))}]"])
               for model in models}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    found = measure(configs, prompt, tokens, rounds)
    text = table(found)
    write_text(out / "decode.md", text)
    write_csv(out / "decode.csv", found)
    settings = {model: own.model.model_dump(mode="json") for model, own in configs.items()}
    write_about(out / "decode.json", models=settings, prompt=prompt, tokens=tokens, rounds=rounds)
    print(f"{text}\n{out / 'decode.md'}")


def measure(configs: Mapping[str, Config], prompt: int, tokens: int, rounds: int) -> list[Decoding]:
    device = torch.device(best_device())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models, built, begun = list(configs), {}, {}
    for name, config in configs.items():
        torch.manual_seed(0)
        built[name] = build_model(config.model).to(device, dtype).eval()
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
    rows = [
        (d.model, f"{d.parameters:,}", f"{d.tokens_per_second:.0f}", f"{d.of_first:.2f}", f"{d.state_mib:.2f}")
        for d in found
    ]
    return markdown_table(("model", "parameters", "tokens/s", f"of {found[0].model}", "state MiB"), rows) + "\n"
