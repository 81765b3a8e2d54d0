"""How layers and mixers say, by name, what tensor parallelism makes of them.

A class declares ``sharding``: a path from it (to a submodule or a parameter of its own, "" for itself) -> one of these
names. titans_pt.parallel.split gives the names their meaning; whoever declares them imports nothing of parallel/.

The pattern is Megatron-LM's (arXiv 1909.08053): heads, hidden units and vocabulary are shared out over the ranks. Rank
r of n holds heads [r H / n, (r + 1) H / n) with everything that belongs to them, takes whole inputs (ENTER), and sums
up with its peers at the end (ROW).
"""

from enum import Enum


class Shard(Enum):
    """What becomes of one module or parameter on a tensor rank."""

    WHOLE = "whole"
    """Nothing: every rank holds all of it and computes the same."""
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
    """ENTER and COLUMN: a linear layer on whole inputs that stands by itself."""
    SUMMED = "summed"
    """Parameters that every rank holds whole but uses on its own heads: their gradients are summed."""
    NORM_OF_ALL_HEADS = "norm of all heads"
    """An RMSNorm or LayerNorm over a width of which each rank holds a part: means are those of the whole width."""
    GATHER = "gather"
    """Its outputs, a part on each rank, are put together along the last dimension."""
    SPLIT = "split"
    """Of its outputs, whole on every rank, each keeps its own part along the last dimension."""
    CLOSE = "close"
    """Its outputs are whole and alike on every rank: a mixer that is not cut, or that adds such a thing at its end."""
    BETWEEN = "between"
    """It stands between mixers and MLPs, where parallel.sequence splits time."""
    OPEN = "open"
    """It takes what stands there, whole in time."""
    ENTER_OPEN = "enter open"
    """OPEN and ENTER."""
    VOCABULARY = "vocabulary"
    """An embedding of which each rank holds a part of the rows."""
    LOGITS = "logits"
    """The head whose outputs, logits of a part of the vocabulary, stay where they are."""


Sharding = dict[str, Shard]
