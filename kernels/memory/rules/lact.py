"""LaCT (arXiv 2505.23884): large chunks, the dot product as the loss, orthogonal steps, weights of constant length."""

from typing import ClassVar

import torch
from torch import Tensor

from titans_pt.kernels.memory.rules.base import RULES, Own
from titans_pt.kernels.memory.rules.dot import Dot
from titans_pt.kernels.memory.rules.muon import ChunkSteps


@RULES.register
class Lact(ChunkSteps, Dot):
    """The loss -2 <M(k), v> and one step per chunk along orthogonalised S; then each column of M is as long as before.

    For a chunk that starts at F, with F' = (prod_t (1 - alpha_t)) F and the step dM of :class:`ChunkSteps`, column j is

        M_j = (F'_j + dM_j) |F'_j| / |F'_j + dM_j|

    A column holds the weights of one output. Without forgetting, columns keep their lengths in M_0 for ever, as in the
    paper, and a loss that corrects nothing cannot make M grow.

    The paper's chunks have 2,048 tokens or more (model.memory.chunk_size), its momentum is optional, and it has neither
    forgetting nor a LayerNorm around the network (model.memory.momentum, .forgetting, .norm). Its network is a SwiGLU
    with three matrices; here it is the memory's own MLP.
    """

    name: ClassVar[str] = "lact"

    def closed(self, weights: Tensor, momentum: Tensor, own: Own) -> Tensor:
        moved = super().closed(weights, momentum, own)
        before, after = (torch.linalg.vector_norm(w, dim=-2, keepdim=True) for w in (weights, moved))
        return moved * (before / after.clamp(min=1e-6))
