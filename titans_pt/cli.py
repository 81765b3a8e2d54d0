"""The command line: which words call what, and how a failure is told.

Each command imports what it needs when it runs, so that --help and --version answer at once.
"""

import argparse
import errno
import os
import re
import sys
import time
from pathlib import Path

from titans_pt import __version__
from titans_pt.config_file import load_config
from titans_pt.errors import UserError

EXIT_USER = 2
_OVERRIDES = "settings over the file's, e.g. train.max_steps=10"
_MEMORY = (
    "lower train.micro_batch or data.seq_len, set train.activation_checkpointing=true, "
    "or shard more with parallel.zero_stage=3"
)
_OS_REMEDIES = {
    errno.ENOSPC: "free some space, or set run.dir (data.dir for prepare) to another disk",
    errno.EDQUOT: "free some of your quota, or set run.dir (data.dir for prepare) to another disk",
    errno.EACCES: "change its permissions, or set run.dir (data.dir for prepare) to a folder you may write to",
    errno.EROFS: "set run.dir (data.dir for prepare) to a folder on a disk that can be written to",
    errno.ENOTDIR: "a part of the path is a file; set run.dir (data.dir for prepare) to another folder",
}
_CPU_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory", re.IGNORECASE)
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited|ncclRemoteError", re.IGNORECASE
)


def run(arguments: list[str]) -> int:
    """Runs a command line (without the program's name) and returns its exit status; errors go to stderr.

    0: done. 1: a fault of ours (with a traceback). 2: something for the user to mend, in one line.
    128 + n: stopped by signal n, after a checkpoint.
    """
    options = _parse(arguments)
    try:
        return options.command(options) or 0
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno not in _OS_REMEDIES:
            raise
        where = error.filename or getattr(options, "config", None) or getattr(options, "run", "")
        return _fail(f"{where}: {os.strerror(error.errno)}; {_OS_REMEDIES[error.errno]}")
    except MemoryError:
        return _fail(f"out of memory (CPU): {_MEMORY}")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except RuntimeError as error:
        return _runtime_error(error)


def _runtime_error(error: RuntimeError) -> int:
    """Out of memory, or a peer that has gone, in one line; any other error is raised again."""
    import torch

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _fail(f"out of memory ({text.split('. ')[0]}): {_MEMORY}")
    if _CPU_OUT_OF_MEMORY.search(text):
        return _fail(f"out of memory (CPU): {_MEMORY}")
    if _processes() > 1 and _LOST_PEER.search(text):
        return _fail("another process of this run has stopped; its own message says why", 1, patience=10.0)
    raise error


def _fail(message: str, status: int = EXIT_USER, patience: float = 5.0) -> int:
    """Says ``message`` in one line. Under torchrun, others than rank 0 wait ``patience`` seconds first.

    Most errors hit all ranks alike, and torchrun ends the others as soon as one has failed: so one line is seen,
    and an error of one rank alone is still told.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank and _processes() > 1:
        time.sleep(patience + min(0.3 * rank, 5.0))
    print(f"titans: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


# ---- commands


def _prepare(options: argparse.Namespace):
    config = load_config(options.config, options.overrides)
    from titans_pt.data_pipeline import prepare

    prepare(config, force=options.force, shard=options.shard, workers=options.workers)


def _data_inspect(options: argparse.Namespace):
    config = load_config(options.config, options.overrides)
    from titans_pt.data_pipeline.inspection import inspect_data

    inspect_data(config, options.sample, options.step, options.count, options.documents, options.verify)


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    from titans_pt.training.loop import train

    return train(config)


def _plan(options: argparse.Namespace):
    config = load_config(options.config, options.overrides)
    from titans_pt.training.plan import make_plan

    plan = make_plan(config, options.ranks, gpu=None if options.memory is None else True)
    print(plan.text())
    plan.check(options.memory)


def _checkpoint(options: argparse.Namespace):
    from titans_pt import checkpoint_tools

    if options.action == "prune":
        if options.keep_last < 1:
            raise UserError(f"--keep-last: given {options.keep_last}; at least 1, the newest is never deleted")
        checkpoint_tools.prune_run(options.run, options.keep_last, options.keep_every)
    elif options.action == "verify":
        checkpoint_tools.verify_run(options.run)
    else:
        checkpoint_tools.list_run(options.run)


def _evaluate(options: argparse.Namespace):
    from titans_pt.evaluation import evaluate

    evaluate(options.run, options.overrides, step=options.checkpoint, suite=options.suite)


def _generate(options: argparse.Namespace):
    from titans_pt.evaluation import generate

    generate(
        options.run,
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        step=options.checkpoint,
        state_file=options.state,
        save_to=options.save_state,
    )


def _compare(options: argparse.Namespace):
    from titans_pt.evaluation.compare import compare

    compare(options.runs, options.task, Path(options.out), step=options.checkpoint)


def _babilong(options: argparse.Namespace):
    from titans_pt.evaluation.babilong import write_documents

    write_documents(options.run, options.overrides, options.samples, Path(options.out))


def _export(options: argparse.Namespace):
    from titans_pt.huggingface import export_run

    print(export_run(options.run, options.out, step=options.checkpoint))


def _import(options: argparse.Namespace):
    from titans_pt.huggingface import import_run

    print(import_run(options.folder, options.out))


def _inspect(options: argparse.Namespace):
    from titans_pt.inspection import inspect

    inspect(options.run, options.text, max_tokens=options.max_tokens, step=options.checkpoint)


def _benchmark_memory(options: argparse.Namespace):
    from titans_pt.benchmarks.memory import benchmark_memory

    benchmark_memory(Path(options.out), rounds=options.rounds, longest=options.longest)


def _benchmark_kernels(options: argparse.Namespace):
    from titans_pt.benchmarks.kernels import benchmark_kernels

    benchmark_kernels(Path(options.out), rounds=options.rounds, longest=options.longest, tokens=options.tokens)


def _benchmark_training(options: argparse.Namespace):
    from titans_pt.benchmarks.training import benchmark_training

    benchmark_training(
        Path(options.out), options.config, options.overrides, options.models.split(","), options.lengths,
        options.tokens, options.sweeps,
    )  # fmt: skip


def _benchmark_stream(options: argparse.Namespace):
    config = load_config(options.config, options.overrides)
    from titans_pt.benchmarks.stream import benchmark_stream

    benchmark_stream(Path(options.out), config, options.tokens, options.stretches)


def _recall(options: argparse.Namespace):
    config = load_config(options.config, options.overrides)
    from titans_pt.experiments.mqar import MQAR
    from titans_pt.experiments.recall import chosen, recall

    task = MQAR(config.model.vocab_size, config.data.seq_len, options.pairs, options.distance)
    recall(config, chosen(options.models.split(","), options.changes.split(",")), task)


def _needles(options: argparse.Namespace):
    config = load_config(options.config, options.overrides)
    from titans_pt.experiments.needles_in_noise import Curriculum, NeedlesInNoise, train_and_ask

    curriculum = Curriculum(options.lengths)
    task = NeedlesInNoise(config.model.vocab_size, min(curriculum.lengths), options.needles)
    train_and_ask(config, options.models.split(","), task, curriculum, options.asked)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes only the first run of KEY=VALUE words; those after an option are overrides just as well.
    if "overrides" not in options or any(word.startswith("-") for word in rest):
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return options
    options.overrides += rest
    return options


def _from(least: int):
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a whole number from {least} on")
        return int(text)

    return number


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"given {text!r}; allowed: I/N, with I from 0 to N - 1")
    return int(found[1]), int(found[2])


def _counts(text: str) -> list[int]:
    return [_from(1)(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="titans", description="Pretrain and study Titans language models.")
    parser.add_argument("--version", action="version", version=f"titans {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action, text: str, subject: str, subject_help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=action)
        sub.add_argument(subject, metavar=subject.upper(), help=subject_help)
        return sub

    yaml = "settings, a YAML file (see configs/)"
    folder = "the run.dir of a training run"
    step = "step of the checkpoint (default: the newest complete one)"

    prepare = command("prepare", _prepare, "turn text into token files", "config", yaml)
    prepare.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    prepare.add_argument("--force", action="store_true", help="replace token files that other settings made")
    cores = len(os.sched_getaffinity(0))
    prepare.add_argument("--workers", type=_from(1), default=cores, metavar="N",
                         help="cores to use (default: all, %(default)s here)")
    prepare.add_argument("--shard", type=_shard, metavar="I/N", help="only this share of the work, I from 0 to N - 1; "
                         "run once more without it when all are done")

    data = commands.add_parser("data", help="look into token files").add_subparsers(required=True, metavar="ACTION")
    look = data.add_parser("inspect", help="documents, tokens, lengths, what a sample contains")
    look.set_defaults(command=_data_inspect)
    look.add_argument("config", metavar="CONFIG", help=yaml)
    look.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    shown = "documents to show of each stream (default: %(default)s)"
    look.add_argument("--documents", type=_from(0), default=3, metavar="K", help=shown)
    look.add_argument("--verify", action="store_true", help="compare the token files with their checksums")
    which = look.add_mutually_exclusive_group()
    which.add_argument("--sample", type=_from(0), metavar="N", help="what training reads after N samples")
    which.add_argument("--step", type=_from(1), metavar="S", help="the batch of a step, as --sample")
    look.add_argument("--count", type=_from(1), default=1, metavar="K", help="samples from --sample on")

    train = command("train", _train, "train a model, or continue its training", "config", yaml)
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)

    plan = command("plan", _plan, "what a training would need, without starting it", "config", yaml)
    plan.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    ranks = "number of processes (default: WORLD_SIZE, or the machine's GPUs, or parallel.tensor)"
    plan.add_argument("--ranks", type=int, metavar="N", help=ranks)
    memory = "memory of a rank's GPU (default: of this machine's; without any the plan is a CPU's, never refused)"
    plan.add_argument("--memory", type=float, metavar="GIB", help=memory)

    checkpoint = commands.add_parser("checkpoint", help="list, check or delete a run's checkpoints")
    checkpoint.set_defaults(command=_checkpoint)
    actions = "list them; verify every byte; prune old ones"
    checkpoint.add_argument("action", choices=("list", "verify", "prune"), help=actions)
    checkpoint.add_argument("run", metavar="RUN", help=folder)
    keep_last = "prune: newest checkpoints to keep (default: %(default)s)"
    checkpoint.add_argument("--keep-last", type=int, default=3, metavar="N", help=keep_last)
    keep_every = "prune: keep those of steps that divide by N, too"
    checkpoint.add_argument("--keep-every", type=int, metavar="N", help=keep_every)

    evaluate = command("evaluate", _evaluate, "measure a trained model", "run", folder)
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="evaluation.* settings over the run's")
    evaluate.add_argument("--checkpoint", type=int, metavar="STEP", help=step)
    evaluate.add_argument(
        "--suite", choices=("perplexity", "needle", "babilong", "commonsense"),
        help="one of them (default: perplexity and needle)",
    )  # fmt: skip

    generate = command("generate", _generate, "continue a prompt", "run", folder)
    generate.add_argument("--prompt", help="text to continue; it may be left out with --state")
    generate.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="(default: %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)")
    generate.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens (default: all)")
    generate.add_argument("--top-p", type=float, default=0.95, help="(default: %(default)s)")
    generate.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    generate.add_argument("--checkpoint", type=int, metavar="STEP", help=step)
    generate.add_argument("--save-state", metavar="FILE", help="keep the state behind prompt and new text in FILE")
    generate.add_argument("--state", metavar="FILE", help="go on from a state that --save-state kept")

    compare = commands.add_parser("compare", help="accuracy against length of several runs in one picture")
    compare.set_defaults(command=_compare)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="folders that titans evaluate has filled")
    compare.add_argument("--task", default="niah_single_1", help="a needle or babilong task (default: %(default)s)")
    compare.add_argument("--out", default="runs/compare.png", metavar="FILE", help="(default: %(default)s)")
    compare.add_argument("--checkpoint", type=int, metavar="STEP", help="(default: the newest evaluated one of each)")

    text = "write documents of BABILong's stories, to fine-tune on"
    babilong = command("babilong", _babilong, text, "run", folder)
    babilong.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="evaluation.babilong.* settings")
    babilong.add_argument("--samples", type=int, default=1000, metavar="N", help="a length (default: %(default)s)")
    babilong.add_argument("--out", required=True, metavar="DIR", help="gets a file LENGTH.jsonl for each length")

    export = command("export", _export, "write a checkpoint as a Hugging Face folder", "run", folder)
    export.add_argument("--out", required=True, metavar="DIR")
    export.add_argument("--checkpoint", type=int, metavar="STEP", help=step)

    back = command("import", _import, "make a run of a folder that export wrote", "folder", "a Hugging Face folder")
    back.add_argument("--out", required=True, metavar="RUN")

    inspect = command("inspect", _inspect, "see what the memory finds surprising in a text", "run", folder)
    inspect.add_argument("--text", required=True, metavar="FILE", help="a text file (UTF-8)")
    inspect.add_argument("--max-tokens", type=int, default=2048, metavar="N", help="(default: %(default)s)")
    inspect.add_argument("--checkpoint", type=int, metavar="STEP", help=step)

    benchmark = commands.add_parser("benchmark", help="time the memory, its kernels or training on this machine")
    kinds = benchmark.add_subparsers(metavar="WHAT", required=True)

    def kind(name: str, run, about: str, rounds: bool = True) -> argparse.ArgumentParser:
        parser = kinds.add_parser(name, help=about)
        parser.set_defaults(command=run)
        if rounds:
            timings = "timings a case (default: %(default)s)"
            parser.add_argument("--rounds", type=int, default=3, metavar="N", help=timings)
            parser.add_argument("--longest", type=int, default=65_536, metavar="TOKENS", help="(default: %(default)s)")
        parser.add_argument("--out", default="runs/benchmark", metavar="DIR", help="(default: %(default)s)")
        return parser

    together = "tokens of all rows of a call together, B * T (default: %(default)s)"
    kind("memory", _benchmark_memory, "the memory layer, and titans-pytorch's, by length")
    kernels = kind("kernels", _benchmark_kernels, "the memory's kernels, the dual form, and flash-linear-attention's")
    kernels.add_argument("--tokens", type=int, default=32_768, metavar="N", help=together)
    training = kind("training", _benchmark_training, "the whole training step of every model, by length", rounds=False)
    config = "a YAML file; {model} in it becomes the model's name (default: %(default)s)"
    training.add_argument("--config", default="configs/170m/{model}.yaml", metavar="FILE", help=config)
    models = "lmm,mac,mag,mal,transformer,gated-deltanet,mamba2,deltanet,gla"
    training.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    training.add_argument("--models", default=models, metavar="NAMES", help="(default: %(default)s)")
    text, lengths = "tokens a sequence (default: %(default)s)", "2048,4096,8192,16384,32768"
    training.add_argument("--lengths", default=lengths, type=_counts, metavar="NUMBERS", help=text)
    training.add_argument("--tokens", type=int, default=32_768, metavar="N", help=together)
    training.add_argument("--sweeps", action="store_true", help="also memories of depth 1 to 4, and of several chunks")

    text = "a long stream of random tokens through an untrained model, its state carried"
    stream = kind("stream", _benchmark_stream, text, rounds=False)
    stream.add_argument("config", metavar="CONFIG", help=yaml)
    stream.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    text = "of the stream (default: %(default)s)"
    stream.add_argument("--tokens", type=_from(1), default=10_000_000, metavar="N", help=text)
    text = "equal parts that are timed each (default: %(default)s)"
    stream.add_argument("--stretches", type=_from(1), default=10, metavar="N", help=text)

    recall = command("recall", _recall, "train small models to recall, with memory and without", "config", yaml)
    recall.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    recall.add_argument("--models", default="lmm,mac,mag,mal", metavar="NAMES", help="(default: %(default)s)")
    recall.add_argument(
        "--changes", default="plain,memory-off", metavar="NAMES",
        help="what to take from them, of plain, memory-off, no-momentum, no-forgetting, linear-memory, no-conv, no-ln "
             "(default: %(default)s)",
    )  # fmt: skip
    recall.add_argument("--pairs", type=int, default=8, metavar="N", help="key-value pairs (default: %(default)s)")
    distance = "least number of tokens between pairs and queries (default: %(default)s)"
    recall.add_argument("--distance", type=int, default=40, metavar="N", help=distance)

    text = "train small models on needles and ask far beyond their training length"
    needles = command("needles", _needles, text, "config", yaml)
    needles.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    needles.add_argument("--models", default="lmm,mac,mag,mal,swa", metavar="NAMES", help="(default: %(default)s)")
    needles.add_argument("--needles", type=int, default=8, metavar="N", help="in a sample (default: %(default)s)")
    lengths, asked = "96:8,256,512,1024,2048", "1024,2048,4096,8192,16384,32768,65536"
    text = "of training, one after the other, and parts of the steps for each (default: %(default)s)"
    needles.add_argument("--lengths", default=lengths, metavar="TOKENS[:PARTS],...", help=text)
    text = "of evaluation (default: %(default)s)"
    needles.add_argument("--asked", default=asked, type=_counts, metavar="TOKENS,...", help=text)
    return parser
