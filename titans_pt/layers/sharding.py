"""Declarations by which layers and mixers describe their tensor parallelism.

A class declares ``sharding``: path (of a submodule or parameter, "" for itself) -> one of these names.
titans_pt.parallel.split implements them: the declaring classes import nothing from parallel/.

The pattern is Megatron-LM's (arXiv 1909.08053): heads, hidden units and vocabulary are divided among the ranks. Rank
r of n holds heads [r H / n, (r + 1) H / n) with everything that belongs to them, takes whole inputs (ENTER), and adds
its outputs to those of its peers at the end (ROW).
"""

from enum import Enum

from torch import Tensor
from torch.nn import functional as F


class Shard(Enum):
    """Ways in which a tensor rank holds one module or parameter."""

    WHOLE = "whole"
    """Not cut: every rank holds all of it and computes the same."""
    COLUMN = "column"
    """Its parameters are cut along their first dimension: the outputs of a linear layer (out, in), the channels of a
    convolution, the heads of anything that stores one entry per head."""
    ROW = "row"
    """A linear layer (out, in) cut along its inputs, which are the rank's own heads; the outputs are summed over
    ranks, whole again."""
    LAST_ROW = "last row"
    """ROW for the layer that ends a mixer or an MLP."""
    ENTER = "enter"
    """A module that takes whole inputs and gives the rank's own part: the gradients of its inputs are summed."""
    ENTER_COLUMN = "enter column"
    """ENTER and COLUMN: a separate linear layer on whole inputs."""
    SUMMED = "summed"
    """Parameters that every rank holds whole but uses on its own heads: their gradients are summed."""
    NORM_OF_ALL_HEADS = "norm of all heads"
    """An RMSNorm or LayerNorm over a width of which each rank holds a part: means are those of the whole width."""
    GATHER = "gather"
    """Its outputs, a part on each rank, are concatenated along the last dimension."""
    SPLIT = "split"
    """Its outputs are whole on every rank; each rank keeps only its part along the last dimension."""
    CLOSE = "close"
    """Its outputs are whole and the same on every rank: a mixer that is not cut, or whose last layer is not."""
    BETWEEN = "between"
    """It lies between mixers and MLPs, where parallel.sequence splits time."""
    OPEN = "open"
    """It takes inputs from a BETWEEN module, made whole in time."""
    ENTER_OPEN = "enter open"
    """OPEN and ENTER."""
    VOCABULARY = "vocabulary"
    """An embedding whose rows are divided among the ranks. If they do not divide evenly, the rows of the last ranks are
    padded with zeros (:func:`filled`)."""
    LOGITS = "logits"
    """The head, cut like VOCABULARY: each rank keeps the logits of its part of the vocabulary."""


def filled(x: Tensor, dim: int, parts: int) -> Tensor:
    """x padded with zeros at the end of ``dim`` to a multiple of ``parts``; x itself if its size is a multiple."""
    missing = -x.shape[dim] % parts
    return F.pad(x, [0] * (2 * (x.dim() - dim) - 1) + [missing]) if missing else x


Sharding = dict[str, Shard]
