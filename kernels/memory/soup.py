"""Read several memories at once, as one memory with a mean of their weights."""

from dataclasses import dataclass

from torch import Tensor

from titans_pt.kernels.memory.state import Weights


@dataclass(frozen=True, eq=False)
class Soup:
    """Other memories that queries read together with the running one (Memory Soup, arXiv 2602.24281).

    For each token M has the weights shares[0] W_t + sum_i shares[1 + i] W_i.

    weights: n times L tensors (B, H, d_in, d_out), or (B H, d_in, d_out) beside folded tokens.
    shares: (B, T, H, 1 + n).
    A layer is linear in its weights, and no token needs its own weight set: z W = sum_i shares_i (z W_i).
    """

    weights: tuple[Weights, ...]
    shares: Tensor

    def layer(self, n: int, z: Tensor, running: Tensor, shares: Tensor) -> Tensor:
        """Output of layer n for inputs z (..., c, d_in) and shares (..., c, 1 + n).

        running: output of the running memory's layer for z.
        """
        first, *others = shares.split(1, -1)
        y = first * running
        for share, weights in zip(others, self.weights, strict=True):
            y = y + share * (z @ weights[n])
        return y
