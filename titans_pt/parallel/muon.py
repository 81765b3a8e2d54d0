"""Muon under tensor parallelism and ZeRO 1 and 2: matrices are put together from the ranks' parts, and cut again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titans_pt.kernels.memory.rules.muon import newton_schulz
from titans_pt.parallel.split import TensorParallel
from titans_pt.parallel.topology import RankGroup

RMS = 0.2
"""Root mean square of an update divided by the learning rate, about AdamW's (Liu et al., arXiv 2502.16982, section
2.2): both then take the same learning rate and weight decay."""


@dataclass(frozen=True)
class Fragment:
    """A rank's fragment of a matrix, in the flat tensor in which ZeRO keeps this rank's weights."""

    name: str
    shape: torch.Size
    """Shape of the tensor rank's part of the matrix."""
    at: int
    """First element in the flat tensor."""
    spans: dict[int, tuple[int, int]]
    """Replica -> [start, stop) of its fragment in the flattened part; together they are the whole part."""


class Muon(torch.optim.AdamW):
    """Updates matrices by their orthogonalised momentum, and all other parameters by AdamW.

        S <- momentum S + (1 - momentum) G,  O = orthogonal(momentum S + (1 - momentum) G)
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(a, b)) O                                  for W (a, b)

    Sources: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; weight decay and
    scale: Liu et al., arXiv 2502.16982.

    A group with ``matrices=True`` has matrices alone. :meth:`place` must be called before the first step: ZeRO updates
    flat tensors, of which an orthogonal matrix cannot be computed. Most of a rank's matrices are whole there; the ranks
    exchange only those that lie across two ranks' tensors. Tensor ranks gather their parts of a matrix, and each
    computes the same whole.

    Args:
        groups: parameter groups, as for torch.optim.AdamW.
        momentum: decay rate of S.
        dtype: dtype of the Newton-Schulz steps.
        rest: arguments of torch.optim.AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, dtype: torch.dtype, **rest: Any):
        super().__init__(groups, **rest)
        self.momentum, self.dtype = momentum, dtype
        self._fragments: dict[Tensor, list[Fragment]] = {}

    def place(self, fragments: dict[Tensor, list[Fragment]], replicas: RankGroup, split: TensorParallel):
        """Tells which matrices the flat tensors hold.

        Args:
            fragments: flat tensor -> its fragments, in an order that is the same on all tensor ranks.
            replicas: the ranks over which ZeRO shards.
            split: the cut over tensor ranks.
        """
        self._fragments, self._replicas, self._split = fragments, replicas, split

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One update. Collective: all ranks with fragments of a matrix take part."""
        for group in self.param_groups:
            for flat in group["params"] if group.get("matrices") else ():
                if flat.grad is not None:
                    gradient, flat.grad = flat.grad, None  # AdamW leaves out what has no gradient
                    self._update(flat, gradient, group["lr"], group["weight_decay"])
        return super().step(closure)

    def _update(self, flat: Tensor, gradient: Tensor, lr: float, weight_decay: float):
        state = self.state[flat]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(flat)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        ahead = gradient.lerp(momentum, self.momentum).to(self.dtype)
        flat.mul_(1 - lr * weight_decay)
        if flat.is_meta:  # a plan, which counts the state
            return
        fragments = self._fragments[flat]
        for fragment, part in zip(fragments, self._parts(ahead, fragments), strict=True):
            start, stop = fragment.spans[self._replicas.rank]
            whole = self._split.whole(fragment.name, part.view(fragment.shape))
            norm = torch.linalg.vector_norm(whole, dtype=torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
            direction = newton_schulz(whole / norm).to(flat.dtype)
            own = self._split.part(fragment.name, direction).flatten()[start:stop]
            scale = lr * RMS * max(whole.shape) ** 0.5
            flat[fragment.at : fragment.at + stop - start].sub_(own, alpha=scale)

    def _parts(self, flat: Tensor, fragments: list[Fragment]) -> list[Tensor]:
        """Flat parts of matrices, whole, of which ``flat`` has fragments; ranks exchange what is missing."""
        rank, parts, exchanges = self._replicas.rank, [], []
        for fragment in fragments:
            start, stop = fragment.spans[rank]
            own = flat[fragment.at : fragment.at + stop - start]
            if len(fragment.spans) == 1:
                parts.append(own)
                continue
            part = flat.new_empty(fragment.shape.numel())
            part[start:stop] = own
            for peer, (first, last) in fragment.spans.items():
                if peer != rank:
                    there = part[first:last]
                    exchanges += [self._exchange(dist.isend, own, peer), self._exchange(dist.irecv, there, peer)]
            parts.append(part)
        for done in dist.batch_isend_irecv(exchanges) if exchanges else ():
            done.wait()
        return parts

    def _exchange(self, send_or_receive: Callable, x: Tensor, peer: int) -> dist.P2POp:
        group = self._replicas.group
        assert group is not None
        return dist.P2POp(send_or_receive, x, dist.get_global_rank(group, peer), group)
