"""TTT's layer (Sun et al., arXiv 2407.04620): projections, gates and the learned start around kernels.ttt_memory."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.kernels.ttt_memory import TTTState, ttt_memory
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, product
from titans_pt.layers.recurrence import precise, varying
from titans_pt.layers.rotary import rotate, rotation
from titans_pt.layers.sharding import Shard


@dataclass
class TestTimeTrainingState:
    """memory: the kernel's. inputs: the newest conv_width - 1 inputs of the convolutions, (B, conv_width - 1, d)."""

    memory: TTTState
    inputs: Tensor


class TTTNetwork(nn.Module):
    """Learned initial parameters of the inner network, and its LayerNorm, which the inner loop does not change.

    Calling the module returns copies of its parameters, for code that shards parameters by module. They have no weight
    decay, unlike in the authors' code: under the LayerNorm, smaller weights would make every inner step larger.
    """

    sharding = {"": Shard.COLUMN}

    def __init__(self, n_heads: int, widths: list[int]):
        super().__init__()
        self.layers = list(zip(widths[:-1], widths[1:], strict=True))
        for n, (a, b) in enumerate(self.layers):
            self.register_parameter(f"weight_{n}", nn.Parameter(torch.empty(n_heads, a, b).normal_(std=0.02)))
            self.register_parameter(f"bias_{n}", nn.Parameter(torch.zeros(n_heads, b)))
        self.norm_weight = nn.Parameter(torch.ones(n_heads, widths[0]))
        self.norm_bias = nn.Parameter(torch.zeros(n_heads, widths[0]))
        self.no_decay = tuple(name for name, _ in self.named_parameters())

    def forward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Weights, biases and norm as kernels.ttt_memory takes them."""
        weights, biases = (
            tuple(getattr(self, f"{kind}_{n}").clone() for n in range(len(self.layers))) for kind in ("weight", "bias")
        )
        return weights, biases, (self.norm_weight.clone(), self.norm_bias.clone())


class TestTimeTraining(nn.Module):
    """(B, T, d_model) -> (B, T, d_model): out(LayerNorm(memory(q, k, v)) * gelu(gate(x))).

    q and k are two convolutions of one projection, rotated by their place in the mini-batch. A token's learning rate is
    risen * base_lr * sigmoid(rate(x)) / head width.

    Attributes:
        risen: factor on base_lr, which may change during training: see ``varying``.
    """

    __test__ = False  # for pytest: the class is no test, "Test" belongs to the method's name
    sharding = {
        "": Shard.ENTER,
        "qk": Shard.COLUMN,
        "v": Shard.COLUMN,
        "q_conv": Shard.COLUMN,
        "k_conv": Shard.COLUMN,
        "rate": Shard.COLUMN,
        "tau": Shard.SUMMED,
        "gate": Shard.COLUMN,
        "norm": Shard.NORM_OF_ALL_HEADS,
        "out": Shard.ROW,
    }
    per_rank = ("n_heads",)
    ends = ("out",)

    def __init__(
        self, d_model: int, head_width: int, mini_batch: int, base_lr: float, expansion: int | None, conv_width: int,
        rope_base: float,
    ):  # fmt: skip
        """expansion: hidden size of the inner network over the head width; None: no hidden layer."""
        super().__init__()
        self.n_heads, self.head_width = d_model // head_width, head_width
        self.risen = varying(1.0)
        self.mini_batch, self.base_lr, self.rope_base = mini_batch, base_lr, rope_base
        self.qk, self.v, self.gate, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.q_conv, self.k_conv = (ShortConvolution(d_model, conv_width, bias=True) for _ in "qk")
        self.rate = nn.Linear(d_model, self.n_heads)
        self.tau = nn.Parameter(torch.zeros(mini_batch))
        hidden = [] if expansion is None else [expansion * head_width]
        self.network = TTTNetwork(self.n_heads, [head_width, *hidden, head_width])
        self.norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(
        self, x: Tensor, state: TestTimeTrainingState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, TestTimeTrainingState]:
        shared, before = self.qk(x), state.inputs if state else None
        q, _ = self.q_conv(shared, before, documents)
        k, inputs = self.k_conv(shared, before, documents)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)) for y in (q, k, self.v(x)))
        place = self._place(x, state, documents)
        turn = rotation(place, q.shape[-1], self.rope_base, q.dtype)
        q, k = rotate(q, *turn), rotate(k, *turn)
        rate = self.risen * self.base_lr * torch.sigmoid(precise(self.rate(x))) / self.head_width
        tau = precise(self.tau)
        tau = (1 / torch.arange(1, self.mini_batch + 1, device=x.device, dtype=tau.dtype) + tau).clamp(min=0)
        weights, biases, norm = self.network()
        y, memory = ttt_memory(
            q, k, v, rate, tau, weights, biases, norm, initial_state=state.memory if state else None,
            output_final_state=True, reset=documents.host if documents else None,
        )  # fmt: skip
        assert memory is not None
        y = self.norm(y.flatten(-2)) * F.gelu(self.gate(x), approximate="tanh")
        return self.out(y), TestTimeTrainingState(memory, inputs)

    def _place(self, x: Tensor, state: TestTimeTrainingState | None, documents: Documents | None) -> Tensor:
        """Index of each token in its mini-batch, (T,) or (B, T); mini-batches count from a document's start."""
        place = torch.arange(x.shape[1], device=x.device)
        read = place if state is None else state.memory.offset.to(x.device)[:, None] + place
        if documents is not None:
            read = torch.where(documents.begin < 0, read, place - documents.begin)
        return read % self.mini_batch

    def flops(self) -> Flops:
        """Per token: the linear layers, and for the inner network a forward pass, the backward pass to its hidden
        layer, the gradients of its weights, and a second forward pass to read."""
        inner = [product(a, b) for a, b in self.network.layers]
        return linear_flops(self) + self.n_heads * sum((3 * p for p in inner), (len(inner) - 1) * inner[0])

    def kept_state_bytes(self, length: int) -> int:
        """Bytes kept for the backward pass of a row of ``length`` tokens: fp32 parameters and their sums at evenly
        spaced mini-batches, about as many as the square root of the number of mini-batches."""
        one = self.n_heads * sum(a * b + b for a, b in self.network.layers)
        blocks = -(-length // self.mini_batch)
        return 8 * one * -(-blocks // math.isqrt(blocks))
