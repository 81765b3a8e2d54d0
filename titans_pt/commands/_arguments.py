"""Arguments and number types that several commands share; all are checked before a command does anything."""

import functools
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from titans_pt.commands import SUBJECT


class Checked(click.ParamType):
    """Type that converts a word with ``read``; an error is one line that says what is allowed.

    Args:
        read: raises ValueError for a word that is not allowed.
        allowed: completes the sentence "allowed: ...".
    """

    name = "value"

    def __init__(self, read: Callable[[str], Any], allowed: str):
        self.read, self.allowed = read, allowed

    def convert(self, value, param, ctx):
        try:
            return self.read(value)
        except ValueError:
            self.fail(f"given {value!r}; allowed: {self.allowed}", param, ctx)


MOST = 2**63 - 1
"""Largest value of counts, seeds and positions: 64 bits hold it."""


def whole(least: int) -> Checked:
    """An int of at least ``least``."""

    def read(word: str) -> int:
        number = int(word)
        if not least <= number <= MOST:
            raise ValueError
        return number

    return Checked(read, f"a whole number of at least {least}")


def real(allows: Callable[[float], bool], allowed: str) -> Checked:
    """A finite float for which ``allows`` is true."""

    def read(word: str) -> float:
        number = float(word)
        if not (math.isfinite(number) and allows(number)):
            raise ValueError
        return number

    return Checked(read, allowed)


def several(number: Checked, allowed: str) -> Checked:
    """A list of such numbers, from words such as 1024,2048; each counts once."""
    return Checked(lambda words: list(dict.fromkeys(map(number.read, words.split(",")))), allowed)


GIB = real(lambda number: 0 < number < 2**40, "a number of GiB above 0")
COUNTS = several(whole(1), "whole numbers of at least 1, with commas between")
NAMES = Checked(lambda words: list(dict.fromkeys(words.split(","))), "names with commas between")
"""A list of str from words such as mac,mag, each once; the action knows which are allowed."""
WORDS = Checked(shlex.split, "words, with a closing quote for each that opens")
"""A list of str from words as a shell splits them."""


class PathName(click.Path):
    """A path to be read, as str; ``~`` and ``$VARIABLES`` in it are expanded, which shells do not do after a "=".
    "-" is standard input where the action says so."""

    def convert(self, value, param, ctx):
        from titans_pt.config.values import expanded  # imports pydantic, which --help does not need

        where = param.opts[-1] if param.param_type_name == "option" else param.human_readable_name
        return super().convert(expanded(str(value), where), param, ctx)


class Output(PathName):
    """A Path that the action will write; whether it can is checked before the work begins."""

    def convert(self, value, param, ctx):
        from titans_pt.tools.files import check_room

        path = Path(super().convert(value, param, ctx))
        if not ctx.resilient_parsing:
            check_room(path, param.opts[-1], folder=not self.file_okay)
        return path


PATH = PathName()
FILE = Output(dir_okay=False)
FOLDER = Output(file_okay=False)


def _subject(context: click.Context, _parameter: click.Parameter, value: str) -> str:
    context.meta[SUBJECT] = value
    return value


def overrides(help: str = "settings that override the file's, e.g. train.max_steps=10", option: str = ""):
    """Add KEY=VALUE words, which may stand anywhere among the options, as ``overrides``, a tuple of str.

    option: the option that a word without "=" is taken to be of, in the message that refuses it.
    """

    def checked(_context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if "=" not in word:
                way = f"give it as {option} {shlex.quote(word)}; settings are" if option else "settings are"
                raise click.UsageError(f"Given {word!r}: {way} KEY=VALUE, such as run.seed=1.")
        return words

    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", help=help, callback=checked)


config_name = click.argument(
    "config", metavar="CONFIG", type=PATH, callback=_subject,
    help="settings: a YAML file, or the name of one in configs/, such as quickstart",
)  # fmt: skip


def settings(action, model: bool = True):
    """Add CONFIG and KEY=VALUE words to a command; the action gets the loaded settings as ``config``.

    ``model=False``: for actions on data; it skips the checks of the model and its task, which import torch.
    """

    @config_name
    @overrides()
    @functools.wraps(action)
    def loaded(config: str, overrides: tuple[str, ...], **options):
        from titans_pt.config.files import load_config

        return action(load_config(config, overrides, model=model), **options)

    return loaded


data_settings = functools.partial(settings, model=False)

run_folder = click.argument("run", metavar="RUN", type=PATH, callback=_subject, help="the run.dir of a training run")

checkpoint_step = click.option(
    "--checkpoint", "step", type=whole(0), metavar="STEP",
    help="step of the checkpoint (default: the newest complete one; with train.patience the best)",
)  # fmt: skip

study_ranks = click.option(
    "--ranks", type=whole(1), metavar="N", help="processes of a training (default: one for each GPU)"
)


def sampling(action):
    """Add the options that say how tokens are drawn; the action gets them as ``sampling``, a dict of the fields of
    :class:`titans_pt.streaming.Sampling`."""
    temperatures = real(lambda t: t == 0 or 1e-6 <= t <= 1e6, "0, or a number from 0.000001 to a million")
    shares = real(lambda p: 0 < p <= 1, "a number above 0 and at most 1")
    options = (
        click.option("--temperature", type=temperatures, default=0.8, metavar="T", help="0 is greedy"),
        click.option("--top-k", type=whole(1), metavar="N", help="sample from the N most likely tokens (default: all)"),
        click.option(
            "--top-p", type=shares, default=0.95, metavar="P",
            help="sample from the fewest tokens with this total probability",
        ),
        click.option("--seed", type=whole(0), default=0, metavar="N", help="random seed of the samples"),
    )  # fmt: skip

    @functools.wraps(action)
    def bundled(temperature: float, top_k: int | None, top_p: float, seed: int, **more):
        return action(sampling=dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed), **more)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), bundled)
