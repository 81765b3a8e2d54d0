"""SwiGLU (Shazeer, arXiv 2002.05202), as in Llama."""

import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard


class SwiGLU(nn.Module):
    """(B, T, d_model) -> (B, T, d_model): down(silu(gate(x)) * up(x))."""

    sharding = {"": Shard.ENTER_OPEN, "gate": Shard.COLUMN, "up": Shard.COLUMN, "down": Shard.LAST_ROW}
    ends = ("down",)

    def __init__(self, d_model: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def flops(self) -> Flops:
        """Per token."""
        return 3 * product(self.up.in_features, self.up.out_features)
