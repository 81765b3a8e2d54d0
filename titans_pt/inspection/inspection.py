"""Result of an inspection of the memories, token by token."""

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np

AROUND = 256
"""Tokens before and after a token; their median is its usual surprise."""


def shown(text: str) -> str:
    """A text on one line: line feeds become visible, unprintable characters (escapes, other line ends) become dots."""
    return "".join("\u21b5" if c == "\n" else c if c.isprintable() else "\u00b7" for c in text)


@dataclass
class Inspection:
    """Figures of T tokens in N memories with H heads each, as numpy arrays. The .npz file has them under these names,
    and the path of the text as ``source``.

    ids: (T,) int64. pieces: (T,) str, the tokens' text; joined, they are the text that was read.
    nll: (T,) fp32, the model's own loss of each token, -log p(token | earlier tokens), nats; NaN for the first.
    memories: (N,) str, the modules' names, such as blocks.0.mixer.memory.
    surprise, theta, eta, alpha, weight_norm, momentum_norm: (N, T, H) fp32, see MemoryFigures.
    """

    ids: np.ndarray
    pieces: np.ndarray
    nll: np.ndarray
    memories: np.ndarray
    surprise: np.ndarray
    theta: np.ndarray
    eta: np.ndarray
    alpha: np.ndarray
    weight_norm: np.ndarray
    momentum_norm: np.ndarray

    @cached_property
    def relative(self) -> np.ndarray:
        """Surprise (N, T), mean over heads, as a multiple of the memory's own median around the token. 1 is usual.

        A gradient's scale means nothing by itself: it differs between layers, and drifts with ||M|| (under a LayerNorm
        as 1 / ||W||). The median, unlike the mean, does not move with a few tokens that stand out.
        """
        heads = self.surprise.mean(-1)
        padded = np.pad(heads, ((0, 0), (AROUND, AROUND)), constant_values=np.nan)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * AROUND + 1, axis=1)
        with warnings.catch_warnings():
            # A memory that was never finite stays NaN.
            warnings.filterwarnings("ignore", "All-NaN slice")
            # One memory at a time: numpy copies what it takes the median of.
            usual = np.stack([np.nanmedian(of_memory, axis=1) for of_memory in around])
        return heads / np.maximum(usual, np.finfo(np.float32).tiny)

    @cached_property
    def score(self) -> np.ndarray:
        """Mean of :attr:`relative` over memories, (T,)."""
        return self.relative.mean(0)
