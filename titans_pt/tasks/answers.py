"""Tasks that ask for single tokens: short samples packed into rows, the loss at the answers, accuracy.

A sample is a sequence of token ids in which a question stands before each answer. Only the answers count in the loss:
the other tokens are random draws, which no model can predict.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.config.checks import stop_condition
from titans_pt.errors import UserError
from titans_pt.kernels.common import sent
from titans_pt.layers.loss import cross_entropy
from titans_pt.models import LanguageModel, build_model
from titans_pt.models.mixers.base import Need
from titans_pt.parallel import RankGroup
from titans_pt.parallel.layers import vocabulary_best, vocabulary_cross_entropy
from titans_pt.tasks.base import Task, TaskData, nan_unless_finite, with_weights
from titans_pt.tasks.next_token import NextTokenLoss, piece
from titans_pt.tasks.writing import with_write_cost, write_gates
from titans_pt.tools.records import digest

Stage = TypeVar("Stage")

VALIDATION_SEED, EVALUATION_SEED = 2**31, 2**31 + 1
"""Seeds of the samples of validation and of evaluation. They differ because validation may end a training
(train.stop_when). run.seed, which training draws its samples with, may be neither. Until version 0.2.0 evaluation used
the seed of validation."""
ENOUGH = 0.99
"""Share of a row's answers that must be right before its writes cost something. A cost from the first step on would
close gates before the model knows what they are good for."""


class Questions(Protocol):
    """A task's samples as a pure function of (seed, index).

    length: tokens of a sample.
    """

    @property
    def length(self) -> int: ...

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64, and the places (P,) int64 of the questions' last tokens; an answer follows each."""


class WithChance(Questions, Protocol):
    """Questions whose answers can be guessed."""

    @property
    def chance(self) -> float:
        """Accuracy of a guesser who knows which tokens are answers, and nothing else."""


def at_stage(every: Sequence[Stage], position: int | None, task: Task) -> Stage:
    """Return the training stage in which the row ``position`` is read; None (validation) gives the last stage.

    The stages are equal parts of train.max_steps. A run may resume with another batch size (:attr:`Task.begins`).
    """
    if position is None:
        return every[-1]
    train, (samples, steps) = task.config.train, task.begins
    step = steps + (position - samples) // max(1, train.batch_tokens // task.config.data.seq_len)
    return every[min(max(step, 0) * len(every) // train.max_steps, len(every) - 1)]


def stacked(questions: Questions, seed: int, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Samples first .. first + rows - 1: ids (rows, length) and places (rows, P), both int64."""
    ids, places = np.empty((rows, questions.length), dtype=np.int64), []
    for row in range(rows):  # one copy in memory: a sample may have millions of tokens
        ids[row], asked = questions.sample(seed, first + row)
        places.append(asked)
    return torch.from_numpy(ids), torch.from_numpy(np.stack(places))


class PackedQuestions:
    """Rows of ``seq_len`` tokens that hold as many whole samples as fit, each a document of its own.

    Args:
        at: position of a row -> the questions of its samples, which may become longer in the course of a training.
        seed: seed of the samples.
    """

    def __init__(self, at: Callable[[int], Questions], seq_len: int, seed: int):
        self.at, self.seq_len, self.seed = at, seq_len, seed

    def __len__(self) -> int:
        return 2**31  # samples are drawn: none repeats

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids (T + 1,) int64; reset (T,) bool, True where a sample starts; asked (T,) bool, True before an answer.

        The rest of a row is token 0.
        """
        questions = self.at(position)
        fit = self.seq_len // questions.length
        ids = np.zeros(self.seq_len + 1, dtype=np.int64)
        reset, asked = np.zeros((2, self.seq_len), dtype=bool)
        for n in range(fit):
            start = n * questions.length
            ids[start : start + questions.length], places = questions.sample(self.seed, position * fit + n)
            reset[start], asked[start + places] = True, True
        if fit * questions.length < self.seq_len:
            reset[fit * questions.length] = True
        return ids, reset, asked

    def describe(self, position: int) -> dict:
        return {"seed": self.seed, "length": self.at(position).length, "position": position}


def equal_samples(reset: Tensor) -> tuple[int, int] | None:
    """Return (samples per row, tokens per sample) of rows that all hold samples of one length; None if rows or lengths
    differ. reset: (B, T) bool, True where a sample starts."""
    starts = reset[0].nonzero().flatten()
    length = int(starts[1]) if len(starts) > 1 else reset.shape[1]
    regular = torch.arange(reset.shape[1], device=reset.device) % length == 0
    return (reset.shape[1] // length, length) if torch.equal(reset, regular.expand_as(reset)) else None


def apart(x: Tensor, samples: int, length: int) -> Tensor:
    """Split (B, T, ...) into (B * samples, length, ...), a row for each sample: rows run side by side without masks."""
    return x[:, : samples * length].unflatten(1, (samples, length)).flatten(0, 1)


class AnswerLoss(NextTokenLoss):
    """Mean cross-entropy of the answers in fp32 and nats, and accuracy: the share of answers that are the best guess.

    Args:
        best: maps fp32 logits (N, V), or a rank's part of them, to the token with the highest logit, (N,) int64.
        write_cost: factor of the mean write gate's gradient, in rows whose answers are right (:data:`ENOUGH`).
        parts: number of ranks that share each sequence's steps (parallel.sequence).
    """

    figures = ("loss", "accuracy")
    """Figures that exist for pieces of rows too."""
    of_one_length: ClassVar[bool] = True
    """Whether the samples of a row have one length (:class:`PackedQuestions`): they then run side by side, without
    masks, and each counts the same in the row's mean. False: each answer of a row counts the same."""

    def __init__(self, model: nn.Module, cross_entropy: Callable[..., Tensor], best: Callable[[Tensor], Tensor],
                 z_loss: float, write_cost: float, parts: int = 1):  # fmt: skip
        super().__init__(model, cross_entropy, z_loss)
        self.best, self.write_cost, self.parts = best, write_cost, parts

    def forward(  # type: ignore[override]  # its batches have a third part
        self, ids: Tensor, reset: Tensor, asked: Tensor, here: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """
        Args:
            ids: (B, T + 1) int64.
            reset: (B, T) bool, True where a sample starts, preferably on the CPU.
            asked: (B, T) bool, True where the next token is an answer, preferably on the CPU; every row has one.
            here: (B, T) fp32, for a piece of each row: :meth:`shares` of the whole row, times the number of pieces. The
                results of all pieces then have the row's results as their mean. None: the rows are whole.
            weight: (B,) fp32 weight of each row in the means; None: all count the same.

        Returns:
            The mean loss, a scalar; NaN if it is infinite. With weights {"loss": ..., "accuracy": ...}, where an
            infinite loss stays infinite.
        """
        return self._of_answers(ids[:, :-1], ids[:, 1:], reset, asked, weight, here)

    def _of_answers(
        self, ids: Tensor, targets: Tensor, reset: Tensor, asked: Tensor, weight: Tensor | None,
        here: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """Compute :meth:`forward` from ids and targets, both (B, T) int64: targets[:, t] is the target of ids[:, t]."""
        rows, samples = len(ids), equal_samples(reset) if self.of_one_length and here is None else None
        split = samples if samples and samples[1] % self.parts == 0 else None  # None: ranks share steps of whole rows
        places = asked
        if split:
            ids, targets, places = (apart(part, *split) for part in (ids, targets, asked))
        with write_gates(self.model, collect=self.write_cost > 0 and weight is None) as gates:
            x, _ = self.model(ids, reset=None if split else reset, head=False, output_final_state=not self.training)
        found, starts = self._at_answers(x, targets, places), reset
        if samples:
            found = found if split else apart(found, *samples)
            asked, starts = (apart(part, *samples) for part in (asked, reset))
        asked = sent(asked, found.device)
        share = asked.to(found.dtype) / asked.sum(1, keepdim=True) if here is None else here
        figures = (found * share.unsqueeze(-1)).sum(1)  # loss and accuracy of each sample or row
        loss, accuracy = figures.view(rows, -1, 2).mean(1).unbind(-1)
        if weight is not None:
            more = self._more(found[..., 1] > 0, asked, starts.to(asked.device)) if here is None else {}
            means = {"loss": loss, "accuracy": accuracy}
            means |= {name: figure.view(rows, -1).mean(1) for name, figure in more.items()}
            return {name: with_weights(figure, weight) for name, figure in means.items()}
        paying = (accuracy >= ENOUGH).to(loss.dtype)
        return nan_unless_finite(with_write_cost(loss.mean(), gates, self.write_cost, paying))

    @classmethod
    def shares(cls, reset: Tensor, asked: Tensor) -> Tensor:
        """Share of each answer in its row's mean, (B, T) fp32; see :attr:`of_one_length`."""
        sample = reset.long().cumsum(1) - 1 if cls.of_one_length else torch.zeros_like(asked, dtype=torch.int64)
        count = torch.zeros_like(sample).scatter_add(1, sample, asked.long())  # answers of each sample
        return asked / count.gather(1, sample).clamp(min=1) / (count > 0).sum(1, keepdim=True)

    def _more(self, right: Tensor, asked: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """Further figures of each row, (b,), from (b, T) bool masks: right answers, asked places, starts of samples."""
        return {}

    def _at_answers(self, x: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
        """Compute :meth:`_losses` at the places ``asked`` (b, t) alone, which are few; 0 elsewhere."""
        if self.parts > 1:  # ranks share the steps of each sequence, and gather them for the head
            return self._few_at_a_time(x, targets)
        places = sent(asked.flatten().nonzero().flatten(), x.device)
        if not len(places):  # a piece of a row: the backward pass still goes through the model
            places = places.new_zeros(1)
        x, chosen = (part.flatten(0, 1)[places].unsqueeze(0) for part in (x, targets))
        losses = self._few_at_a_time(x, chosen, cut=True)[0]
        return losses.new_zeros(targets.numel(), 2).index_copy(0, places, losses).unflatten(0, targets.shape)

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (b, t, d_model), targets (b, t) -> (b, t, 2) fp32: each target's loss, and 1 where it is the best guess."""
        logits = self.model.head(x).flatten(0, 1).float()
        losses = self.cross_entropy(logits, targets.flatten(), "none", self.z_loss, self.model.tokens)
        right = self.best(logits.detach()) == targets.flatten()  # cross_entropy hid rows without a token
        return torch.stack([losses, right.to(losses.dtype)], -1).unflatten(0, targets.shape)

    def _fused(self, x: Tensor) -> bool:
        return False  # accuracy needs logits, which the fused head does not return


class WholeAnswers(AnswerLoss):
    """Loss of samples with several answers. Figures: accuracy, the mean over samples of the share of right answers;
    whole, the share of samples without a wrong answer; last, the share of samples whose last answer is right."""

    def _more(self, right: Tensor, asked: Tensor, starts: Tensor) -> dict[str, Tensor]:
        number = starts.long().cumsum(1) - 1  # index of each token's sample
        blank = torch.zeros(len(right), int(number.max()) + 1, dtype=torch.int64, device=right.device)
        so_far = asked.long().cumsum(1)
        ends = blank.scatter_reduce(1, number, so_far * asked, "amax")
        last = asked & (so_far == ends.gather(1, number))
        wrong = blank.scatter_add(1, number, (asked & ~right).long())
        samples = last.sum(1)
        return {
            "whole": ((wrong == 0) & (ends > 0)).sum(1) / samples,
            "last": (last & right).sum(1) / samples,
        }


class AnswersOnly(Task):
    """Base of tasks that train the answers alone."""

    baseline_name = "chance"
    figures: ClassVar[tuple[str, ...]] = AnswerLoss.figures
    answer_loss: ClassVar[type[AnswerLoss]] = AnswerLoss

    @property
    def seed(self) -> int:
        """Seed of the samples that training draws.

        Raises:
            UserError: run.seed is the seed of validation or evaluation.
        """
        if (seed := self.config.run.seed) in (VALIDATION_SEED, EVALUATION_SEED):
            raise UserError(f"run.seed: given {seed}, with which the samples of validation or evaluation are drawn; "
                            "give another")  # fmt: skip
        return seed

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        whole = tensor.size == 1
        loss = cross_entropy if whole else partial(vocabulary_cross_entropy, group=tensor)
        best = partial(vocabulary_best, group=tensor)
        cost = self.config.model.memory.write_cost / tensor.size
        parts = tensor.size if self.config.parallel.sequence else 1
        return self.answer_loss(model, loss, best, self.config.train.z_loss, cost, parts)

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        if config.parallel.context == 1:
            return
        cost, figure = config.model.memory.write_cost, config.train.stop_when
        need(not cost, "model.memory.write_cost", cost, "must be 0 with parallel.context > 1: only rows whose answers "
             "are all right pay it, and a rank sees a piece of each")  # fmt: skip
        need(figure is None or stop_condition(figure)[0] in AnswerLoss.figures, "train.stop_when", figure,
             f"with parallel.context > 1 only {' and '.join(AnswerLoss.figures)}")  # fmt: skip

    def cut(self, batch: tuple[Tensor, ...], part: int, parts: int) -> tuple[Tensor, ...]:
        _, reset, asked = batch
        return piece((*batch, parts * self.answer_loss.shares(reset, asked)), part, parts)

    def to_device(self, batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor | None, ...]:
        """Move ids to the device. Starts of samples and places of answers stay on the host, where they are counted."""
        ids, reset, asked, *here = batch
        return ids.to(device, non_blocking=True), reset, asked, *(each.to(device, non_blocking=True) for each in here)


class AnswerTask(AnswersOnly):
    """Questions and answers of one token each among token ids. Subclasses say what a sample is."""

    unit = "nats per answer"
    packed: ClassVar[type[PackedQuestions]] = PackedQuestions
    """Dataset class that packs its samples into rows."""

    @abstractmethod
    def questions(self, position: int | None) -> WithChance:
        """Samples of the training row at ``position``; None: samples of validation."""

    @property
    def chance(self) -> float:
        """:attr:`WithChance.chance` of the samples of validation."""
        return self.questions(None).chance

    def build_model(self) -> LanguageModel:
        return build_model(self.config.model)

    def open(self) -> TaskData:
        length, seed = self.config.data.seq_len, self.seed
        told = digest(self.settings.model_dump(mode="json"), self.config.model.vocab_size)
        return TaskData(
            self.packed(self.questions, length, seed),
            self.packed(lambda position: self.questions(None), length, VALIDATION_SEED),
            {"data": told}, -math.log(self.chance),
        )  # fmt: skip


@torch.no_grad()
def answered(model: nn.Module, ids: Tensor, places: Tensor, state: object = None) -> Tensor:
    """Return (B, P) bool: whether the best guess after each question is its answer.

    Args:
        ids: (B, T) int64.
        places: (B, P) int64, the questions' last tokens.
        state: the model's state before ``ids``.
    """
    logits, _ = model(ids, state)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    return logits[row, places].argmax(-1) == ids[row, places + 1]
