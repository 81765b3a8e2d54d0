"""Low-rank adapters on linear layers (Hu et al., arXiv 2106.09685), for fine-tuning: model.lora.

peft is not used: it renames the parameters of the layers that it wraps, and checkpoints, tensor-parallel cuts and
train.trainable use these names. Here an adapter adds two names and changes none.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_pt.config import LoraConfig
from titans_pt.layers.flops import Flops, product
from titans_pt.tools.patterns import check_patterns, matches

ADAPTER = ("lora_a", "lora_b")
"""Names of an adapter's matrices in its layer."""


class LowRank(nn.Linear):
    """W x + b + alpha / rank B A x, (..., in) -> (..., out). B starts at 0: the layer starts as the one it adapts.

    Args:
        linear: the layer; its parameters become this one's.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, alpha / rank
        bound = linear.in_features**-0.5  # as nn.Linear and peft draw it
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features).uniform_(-bound, bound))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merged(self) -> Tensor:
        """The weight of a plain layer that computes the same."""
        return self.weight + self.scale * (self.lora_b @ self.lora_a)

    def shared(self, dim: int) -> nn.Parameter:
        """The adapter matrix that every tensor rank holds whole if the weight is cut along ``dim``. Each rank has a
        part of its gradient: from the rank's own outputs (A), or its own inputs (B)."""
        return self.lora_a if dim == 0 else self.lora_b

    def flops(self) -> Flops:
        """Per token, of the adapter alone."""
        rank = len(self.lora_a)
        return product(self.in_features, rank) + product(rank, self.out_features)


def adapt(model: nn.Module, blocks: nn.Module, config: LoraConfig):
    """Puts adapters on the linear layers in ``blocks``, a part of ``model``, whose names in ``model`` match.

    Raises:
        UserError: a pattern matches no linear layer.
    """
    inside = {id(module) for module in blocks.modules()}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside}
    check_patterns("model.lora.layers", config.layers, layers, "linear layer")
    for name, layer in layers.items():
        if matches(name, config.layers):
            model.set_submodule(name, LowRank(layer, config.rank, config.alpha))


def is_adapter(parameter: str) -> bool:
    """Whether this is the name of an adapter's matrix."""
    return parameter.rpartition(".")[2] in ADAPTER


@torch.no_grad()
def merged(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the same model without adapters: they are added to the weights."""
    found = {name: p for name, p in model.state_dict().items() if not is_adapter(name)}
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LowRank)}
    return found | {f"{name}.weight": layer.merged() for name, layer in adapted.items()}
