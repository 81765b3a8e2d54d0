from pathlib import Path

import click

from titans_pt.commands._arguments import COUNTS, FOLDER, NAMES, PATH, config_name, overrides, settings, whole

SECTION = "study"
WRITES = "--out"

_out = click.option("--out", type=FOLDER, default="runs/benchmark", metavar="DIR", help="folder of the results")
_rounds = click.option("--rounds", type=whole(1), default=3, metavar="N", help="timings per case")
_tokens = click.option("--tokens", type=whole(1), default=32_768, metavar="N", help="tokens per call, B * T")


def _longest(least: int):
    return click.option("--longest", type=whole(least), default=65_536, metavar="TOKENS", help="the longest sequence")


@click.group(no_args_is_help=False)
def benchmark():
    """Time the memory, its kernels, training, generation or a long stream on this machine."""


@benchmark.command()
@_rounds
@_longest(1024)
@_out
def memory(out: Path, rounds: int, longest: int):
    """Time the memory layer and titans-pytorch's at growing lengths."""
    from titans_pt.benchmarks.memory import benchmark_memory

    benchmark_memory(out, rounds=rounds, longest=longest)


@benchmark.command()
@_rounds
@_longest(1)
@_out
@_tokens
def kernels(out: Path, rounds: int, longest: int, tokens: int):
    """Time the memory's kernels beside other implementations.

    Those are the dual form in PyTorch operators and flash-linear-attention's kernels.
    """
    from titans_pt.benchmarks.kernels import benchmark_kernels

    benchmark_kernels(out, rounds=rounds, longest=longest, tokens=tokens)


@benchmark.command()
@overrides()
@_out
@click.option(
    "--config", type=PATH, default="configs/170m/{model}.yaml", metavar="FILE",
    help="a YAML file; {model} stands for the model's name",
)  # fmt: skip
@click.option(
    "--models", type=NAMES, default="lmm,mac,mag,mal,transformer,gated_deltanet,mamba2,deltanet,gla", metavar="NAMES",
    help="the models to time: mixers or configs by name",
)  # fmt: skip
@click.option(
    "--lengths", type=COUNTS, default="2048,4096,8192,16384,32768", metavar="NUMBERS", help="tokens per sequence"
)
@_tokens
@click.option("--sweeps", is_flag=True, help="also time memories of depth 1 to 4 and several chunk sizes")
def training(
    overrides: tuple[str, ...], out: Path, config: str, models: list[str], lengths: list[int], tokens: int, sweeps: bool
):
    """Time the whole training step of every model at growing lengths."""
    from titans_pt.benchmarks.training import benchmark_training

    benchmark_training(out, config, list(overrides), models, lengths, tokens, sweeps)


@benchmark.command()
@config_name
@overrides()
@_out
@_rounds
@click.option(
    "--models", type=NAMES, metavar="NAMES",
    help="the models to time: mixers, or hybrids such as mamba+swa; the others are compared with the first "
    "(default: model.mixers if it is given here, else attention,lmm,mac,mag,mal)",
)  # fmt: skip
@click.option("--prompt", type=whole(1), default=256, metavar="N", help="tokens read first")
@click.option("--tokens", type=whole(1), default=100, metavar="N", help="tokens generated per round")
def decode(
    config: str, overrides: tuple[str, ...], out: Path, rounds: int, models: list[str] | None, prompt: int, tokens: int
):
    """Time token-by-token generation with each mixer.

    The models are untrained and have the sizes of CONFIG.
    """
    from titans_pt.benchmarks.decode import benchmark_decode

    benchmark_decode(out, config, overrides, models, prompt, tokens, rounds)


@benchmark.command()
@settings
@_out
@click.option("--tokens", type=whole(1), default=10_000_000, metavar="N", help="tokens of the stream")
@click.option("--stretches", type=whole(1), default=10, metavar="N", help="equal parts, each timed separately")
def stream(config, out: Path, tokens: int, stretches: int):
    """Time a model that reads a long stream.

    The model is untrained, the tokens are random, and the state is carried along.
    """
    from titans_pt.benchmarks.stream import benchmark_stream

    benchmark_stream(out, config, tokens, stretches)
