"""SwiGLU (Shazeer, arXiv 2002.05202), as in Llama."""

import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.kernels.one_token import Map, Maps
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard
from titans_pt.layers.token_plan import TokenPlan, weight_of


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

    def token_plan(self, x: Tensor, term: Tensor) -> TokenPlan:
        """x, term (B, d_model) -> term + what :meth:`forward` makes of x."""
        gate, up, down = (weight_of(part) for part in (self.gate, self.up, self.down))
        maps = Map(x, gate, activation="silu"), Map(x, up, factor=0), Map(1, down, term=term)
        step = Maps(len(x), *maps)

        def advance(state: None):
            step()

        return TokenPlan(step.out[-1], lambda state: True, advance)

    def flops(self) -> Flops:
        """Per token."""
        return 3 * product(self.up.in_features, self.up.out_features)
