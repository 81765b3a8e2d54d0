"""State tracking: after every token, the product of a finite group's elements so far, or an expression's value.

    x1   x2     x3       ...   xn        elements of the group, or generators of it
    x1   x1 x2  x1 x2 x3       x1 ... xn  what the model is asked for after each

This is the word problem of a group (arXiv 2404.08819). For groups that are not solvable, such as S5 and A5, it is
complete for NC1, which constant-depth Transformers and diagonal linear recurrences are believed not to reach. Modular
arithmetic follows arXiv 2411.12537 and 2207.02098. Answers are labels and no inputs: reading them would give the state
away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from titans_pt.config import Config, Section
from titans_pt.kernels.common import sent
from titans_pt.models.mixers.base import Need
from titans_pt.tasks.answers import VALIDATION_SEED, AnswerTask, PackedQuestions, WholeAnswers, at_stage
from titans_pt.tasks.base import TASKS, Task
from titans_pt.tasks.groups import Group, group

NOTHING = -1
"""Target of a token after which nothing is asked."""
ARITHMETIC = ("arithmetic", "brackets")
OPERATIONS = "+-*"
SIGNS = OPERATIONS + "()="
SETTLED = 64
"""Factors after which the distribution of random products is as uniform as it becomes."""
_LENGTHS = r"[1-9]\d{0,8}((-|(/[1-9]\d{0,8})*/)[1-9]\d{0,8})?(:[1-9]\d{0,4})?"


@dataclass(frozen=True)
class States:
    """Samples as a pure function of (seed, index).

    lengths: one of these is drawn for each sample. Shorter samples are padded, and nothing is asked in the padding.
    every: whether every prefix is asked for, or the end alone.
    """

    lengths: tuple[int, ...]
    every: bool

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return max(self.lengths)

    @property
    def symbols(self) -> int:
        """Token ids in use: answers first, then signs, the filler last."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """Accuracy of a guesser who knows the length and nothing else, at the end of a long sample."""
        raise NotImplementedError

    @property
    def prefixes(self) -> bool:
        """Whether the beginning of a long sample is a short one, with all its questions."""
        return self.every

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64, and targets (length,) int64: the answer after each token, or NOTHING."""
        draw = np.random.default_rng([seed, index])
        ids = np.full(self.length, self.symbols - 1, dtype=np.int64)
        targets = np.full(self.length, NOTHING, dtype=np.int64)
        size = self.lengths[draw.integers(len(self.lengths))]
        ids[:size], targets[:size] = self._drawn(draw, size)
        if not self.every:
            targets[: size - 1] = NOTHING
        return ids, targets

    def _drawn(self, draw: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError


@dataclass(frozen=True)
class Word(States):
    """Products in the group ``name`` of elements among ``generators`` (:meth:`Group.generators`).

    tokens: tokens of an element: itself, then fillers. The product is asked after the last one. Lengths are in tokens.
    """

    name: str
    generators: str
    tokens: int

    @property
    def group(self) -> Group:
        return group(self.name)

    @property
    def symbols(self) -> int:
        return self.group.order + 1

    @cached_property
    def chance(self) -> float:
        return float(self.group.products(self.group.generators(self.generators), SETTLED).max())

    def _drawn(self, draw: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        count, table = size // self.tokens, self.group.table.tolist()
        drawn = draw.choice(self.group.generators(self.generators), count)
        product, products = 0, []
        for element in drawn.tolist():
            product = table[product][element]
            products.append(product)
        ids = np.full(size, self.symbols - 1, dtype=np.int64)
        targets = np.full(size, NOTHING, dtype=np.int64)
        ids[:: self.tokens], targets[self.tokens - 1 :: self.tokens] = drawn, products
        return ids, targets


@dataclass(frozen=True)
class Arithmetic(States):
    """Expressions of numbers below ``modulus`` with + - *, and their value after the = at the end.

    brackets: put every operation in brackets, as in arXiv 2207.02098. Without brackets products come before sums, and
    with ``every`` the value so far is asked after every number.
    """

    brackets: bool
    modulus: int

    @property
    def symbols(self) -> int:
        return self.modulus + len(SIGNS) + 1

    @property
    def prefixes(self) -> bool:
        return False  # a sample ends with =

    @cached_property
    def chance(self) -> float:
        """Share of the commonest value among a thousand expressions. That value is 0, because of products."""
        size = min(self.length, SETTLED)
        drawn = (self._drawn(np.random.default_rng([VALIDATION_SEED, n]), size)[1][-1] for n in range(1000))
        return float(np.bincount(list(drawn)).max() / 1000)

    def _drawn(self, draw: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        make = self._bracketed if self.brackets else self._flat
        text, values = make(draw, size - 1)
        return np.array([*text, self._sign("=")]), np.array([*values, values[-1]])

    def _sign(self, sign: str) -> int:
        return self.modulus + SIGNS.index(sign)

    def _flat(self, draw: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
        """Draw ``size`` tokens and the value after each number. If ``size`` is even, they begin with a minus."""
        numbers = draw.integers(self.modulus, size=size)
        operations = draw.integers(len(OPERATIONS), size=size)
        if size % 2:
            total, product, sign, text, values = 0, 1, "*", [], []
        else:
            total, product, sign, text, values = 0, 0, "-", [self._sign("-")], [NOTHING]
        while True:
            number = int(numbers[len(text)])
            if sign == "*":
                product = product * number % self.modulus
            else:
                total, product = (total + product) % self.modulus, number if sign == "+" else -number
            text.append(number)
            values.append((total + product) % self.modulus)
            if len(text) == size:
                return text, values
            sign = OPERATIONS[operations[len(text)]]
            text.append(self._sign(sign))
            values.append(NOTHING)

    def _bracketed(self, draw: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
        """Draw ``size`` tokens; the last value is the value of the whole expression."""
        text, value = self._expression(draw, size)
        return text, [NOTHING] * (size - 1) + [value]

    def _expression(self, draw: np.random.Generator, size: int) -> tuple[list[int], int]:
        if size < 5:  # a number, -number, (number), (-number)
            number = int(draw.integers(self.modulus))
            text = [number] if size % 2 else [self._sign("-"), number]
            return (text if size < 3 else self._inside(text)), (number if size % 2 else -number) % self.modulus
        left = int(draw.integers(1, size - 3))
        sign = OPERATIONS[draw.integers(len(OPERATIONS))]
        (first, a), (second, b) = self._expression(draw, left), self._expression(draw, size - 3 - left)
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] % self.modulus
        return self._inside([*first, self._sign(sign), *second]), value

    def _inside(self, text: list[int]) -> list[int]:
        return [self._sign("("), *text, self._sign(")")]


class PackedStates(PackedQuestions):
    """Counterpart of PackedQuestions for :class:`States`."""

    at: Any

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids (T,) int64; reset (T,) bool, True where a sample starts; targets (T,) int64, NOTHING if none."""
        states: States = self.at(position)
        fit = self.seq_len // states.length
        ids = np.full(self.seq_len, states.symbols - 1, dtype=np.int64)
        targets = np.full(self.seq_len, NOTHING, dtype=np.int64)
        for n in range(fit):
            place = slice(n * states.length, (n + 1) * states.length)
            ids[place], targets[place] = states.sample(self.seed, position * fit + n)
        reset = np.arange(self.seq_len) % states.length == 0
        return ids, reset & (np.arange(self.seq_len) <= fit * states.length), targets


class StateLoss(WholeAnswers):
    """The loss of labels that are not part of the input."""

    def forward(  # type: ignore[override]  # its targets are no inputs
        self, ids: Tensor, reset: Tensor, targets: Tensor, weight: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """ids and targets (B, T) int64, targets preferably on the CPU; reset and weight as in AnswerLoss."""
        known = sent(targets.clamp(min=0), ids.device)
        return self._of_answers(ids, known, reset, targets != NOTHING, weight)


def stages(lengths: str) -> list[tuple[Sequence[int], int]]:
    """(lengths, parts) of each stage: "4:2,3-5,32/64" -> [([4], 2), (range(3, 6), 1), ([32, 64], 1)]."""
    found: list[tuple[Sequence[int], int]] = []
    for stage in lengths.split(","):
        sizes, _, parts = stage.partition(":")
        low, _, high = sizes.partition("-")
        each = range(int(low), int(high) + 1) if high else [int(size) for size in sizes.split("/")]
        found.append((each, int(parts or 1)))
    return found


@TASKS.register
class StateTracking(AnswerTask):
    """Asks for the element of a group, or the number, that the tokens read so far amount to."""

    name = "state_tracking"
    suites = {"state_tracking": "titans_pt.evaluation.state_tracking:StateAnswers"}
    usual = ("state_tracking",)
    figures = ("loss", "accuracy", "whole", "last")
    packed = PackedStates
    answer_loss = StateLoss
    cut = Task.cut  # refuses parallel.context

    class Settings(Section):
        problem: str = "parity"
        """Problem to track. parity, or a group: Zn (numbers modulo n), Sn (permutations), An (even permutations),
        products such as A4xZ5. arithmetic: sums and products modulo ``modulus``; brackets: the same with brackets."""
        generators: Annotated[str, Field(pattern=r"^(all|pair|swaps|three_cycles|moves-[1-9]\d{0,2})$")] = "all"
        """Elements of a group that are drawn: all; pair (the first two that generate it); swaps (of two points);
        three_cycles; moves-K (all that move at most K points)."""
        tokens: Annotated[int, Field(ge=1, le=64)] = 1
        """Tokens of an element: itself, then fillers. The product is asked for after the last one."""
        modulus: Annotated[int, Field(ge=2, le=1000)] = 5
        """Modulus of the values, in arithmetic and brackets."""
        asked: Literal["every", "last"] = "every"
        """Places of the questions. every: the product after every element (arithmetic: the value after every number).
        last: at the end alone. With brackets there is a value at the end alone."""
        lengths: Annotated[str, Field(pattern=rf"^{_LENGTHS}(,{_LENGTHS})*$")] = "3-40"
        """Elements of a sample (arithmetic: tokens, the = included): 32, a range 3-40 or a choice 32/64/128, from which
        each sample draws. Stages with commas between come one after the other, each for its parts of train.max_steps:
        "4:1,8:1,3-40:6". As many samples as fit share a row of data.seq_len tokens; short samples are padded."""

    settings: Settings

    @classmethod
    def check(cls, config: Config, need: Need):
        settings, size = cls.Settings.model_validate(config.section(cls.name)), config.model.vocab_size
        try:
            problem = cls.problem_of(settings, (8,))
        except ValueError as error:
            need(False, "state_tracking.problem", settings.problem, str(error) + "; or arithmetic, brackets")
            return
        if isinstance(problem, Word):
            drawn = len(problem.group.generators(settings.generators))
            need(
                drawn > 1,
                "state_tracking.generators",
                settings.generators,
                f"{settings.problem} has {drawn or 'none'} of them, and at least two are needed; set all",
            )
        else:
            for key, usual in (("generators", "all"), ("tokens", 1)):
                need(getattr(settings, key) == usual, f"state_tracking.{key}", getattr(settings, key),
                     f"{usual}: {settings.problem} has no group elements")  # fmt: skip
        need(
            problem.symbols <= size,
            "model.vocab_size",
            size,
            f"at least {problem.symbols} for state_tracking.problem={settings.problem}",
        )
        cls._check_lengths(config, settings, problem, need)

    @classmethod
    def _check_lengths(cls, config: Config, settings: "StateTracking.Settings", problem: States, need: Need):
        drawn, asked = [lengths for lengths, _ in stages(settings.lengths)], config.evaluation.state_tracking.lengths
        need(all(drawn), "state_tracking.lengths", settings.lengths, "ranges from the lower length to the higher")
        if isinstance(problem, Arithmetic):
            least = min(map(min, filter(None, drawn)), default=2)
            need(least >= 2, "state_tracking.lengths", settings.lengths, "each at least 2: a number and =")
            need(min(asked) >= 2, "evaluation.state_tracking.lengths", asked, "each at least 2: a number and =")
        longest = max(map(max, filter(None, drawn)), default=1) * settings.tokens
        need(
            longest <= config.data.seq_len,
            "state_tracking.lengths",
            settings.lengths,
            f"each at most data.seq_len={config.data.seq_len} tokens, those of a row; set data.seq_len={longest}",
        )

    @staticmethod
    def problem_of(settings: "StateTracking.Settings", lengths: Sequence[int]) -> States:
        """Samples of ``lengths`` elements. Raises ValueError for an unknown group."""
        sizes, every = tuple(length * settings.tokens for length in lengths), settings.asked == "every"
        if settings.problem in ARITHMETIC:
            brackets = settings.problem == "brackets"
            return Arithmetic(sizes, every and not brackets, brackets, settings.modulus)
        group(settings.problem)
        return Word(sizes, every, settings.problem, settings.generators, settings.tokens)

    @cached_property
    def _stages(self) -> list[States]:
        """The problem of each part of the training."""
        return [self.problem_of(self.settings, lengths)
                for lengths, parts in stages(self.settings.lengths) for _ in range(parts)]  # fmt: skip

    def questions(self, position: int | None) -> States:
        """Samples at ``position``: all samples of a step are of one stage; validation has the last stage."""
        return at_stage(self._stages, position, self)

    def asked(self, length: int) -> States:
        """Samples of ``length`` elements, for evaluation."""
        return self.problem_of(self.settings, [length])
