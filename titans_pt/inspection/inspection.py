"""Record of a look into the memories, token by token."""

import warnings
from dataclasses import dataclass

import numpy as np

AROUND = 256
"""Usual for a token is the median over this many tokens before and after it."""


def shown(text: str) -> str:
    """A text on one line: line feeds are seen, and what cannot be printed (escapes, other line ends) is a dot."""
    return "".join("\u21b5" if c == "\n" else c if c.isprintable() else "\u00b7" for c in text)


@dataclass
class Inspection:
    """T tokens, N memories, H heads a memory. All numpy arrays; the .npz file has them under these names,
    and as ``source`` the path of the text.

    ids: (T,) int64. pieces: (T,) str, the tokens' text; joined, the text that was read.
    nll: (T,) fp32, the model's own loss of each token, -log p(token | those before), nats; NaN for the first.
    memories: (N,) str, the modules' names, blocks.0.mixer.memory.
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

    @property
    def relative(self) -> np.ndarray:
        """(N, T): surprise, mean over heads, as a multiple of the memory's own median around there. 1 is usual.

        A gradient's scale differs between layers, and drifts with ||M|| (under a LayerNorm it goes as 1 / ||W||): it
        means nothing by itself. The median, unlike the mean, does not move with a few tokens that stand out.
        """
        heads = self.surprise.mean(-1)
        padded = np.pad(heads, ((0, 0), (AROUND, AROUND)), constant_values=np.nan)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * AROUND + 1, axis=1)
        with warnings.catch_warnings():
            # Of a memory that was never finite all stays NaN.
            warnings.filterwarnings("ignore", "All-NaN slice")
            usual = np.nanmedian(around, axis=2)
        return heads / np.maximum(usual, np.finfo(np.float32).tiny)

    @property
    def score(self) -> np.ndarray:
        """(T,): :attr:`relative`, mean over memories."""
        return self.relative.mean(0)
