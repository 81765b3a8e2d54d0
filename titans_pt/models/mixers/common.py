"""Parts that mixers share: checks of settings, the base of memory mixers, persistent tokens, the gate of branches."""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import CachingConfig, Config, HierarchyConfig, MemoryConfig, ModelConfig, Section
from titans_pt.kernels.memory.rules import Rule
from titans_pt.layers.attention import Attention
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.hierarchy import HierarchicalMemory, HierarchyState
from titans_pt.layers.memory import NeuralMemory, NeuralMemoryState
from titans_pt.layers.norm import RMSNorm
from titans_pt.models.mixers.base import MIXERS, Mixer, Need

Memory = NeuralMemory | HierarchicalMemory
"""Memory of a mixer: ``model.memory.hierarchy`` decides which kind."""

AnyMemoryState = NeuralMemoryState | HierarchyState
"""State of either kind of memory."""


class Windowed:
    """Marks mixers with attention over ``model.window``."""


class WindowedAttention(Windowed):
    """Mixers that replace a pretrained attention layer: they keep its ``attention``, now over a window, and ``out``."""

    attention: Attention
    out: nn.Linear

    def unlimited(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Output without the window: see :meth:`Mixer.unlimited`."""
        return self.out(self.attention.unlimited(x, documents))

    def limited(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Output of the window alone, (B, T, d_model)."""
        return self.out(self.attention(x, documents=documents)[0])


class BesideAttention(WindowedAttention):
    """Marks mixers that add something to the window's output, to bring it to the output of :meth:`unlimited`."""


def check_attention(config: Config, need: Need, any_width: bool = True):
    """Checks a mixer with rotary attention, in its :meth:`Mixer.check`.

    Args:
        any_width: whether the total width of its heads may differ from the model's.
    """
    width, heads, own = config.model.d_model, config.model.n_heads, config.model.attention
    if own.head_width is None:
        need(width % 2 == 0, "model.d_model", width, "must be even: RoPE rotates pairs of numbers within a head")
        need(width % heads == 0, "model.n_heads", heads, f"must divide model.d_model={width}")
        need(
            (width // heads) % 2 == 0,
            "model.n_heads",
            heads,
            f"head width d_model / n_heads = {width // heads} must be even for RoPE",
        )
    else:
        need(own.head_width % 2 == 0, "model.attention.head_width", own.head_width, "must be even for RoPE")
        need(
            any_width or own.head_width * heads == width,
            "model.attention.head_width",
            own.head_width,
            f"must be model.d_model / model.n_heads = {width / heads:g} for mac and mag, which add or mix attention "
            "and memory head by head; leave it out, or use attention, swa or mal",
        )
    need(
        own.sinks == 0 or any(issubclass(MIXERS.find(name), Windowed) for name in config.model.kinds),
        "model.attention.sinks",
        own.sinks,
        "must be 0: no attention of model.mixers has a window, and all see the first tokens; swa, mag, mal have one",
    )
    need(
        heads % config.model.kv_heads == 0,
        "model.attention.kv_heads",
        own.kv_heads,
        f"must divide model.n_heads={heads}",
    )


def divisor(number: int, most: int, even: bool = False) -> int | None:
    """Divisor of ``number`` up to ``most``; None if there is none. ``even``: only even numbers.

    It is ``most`` itself if possible, else the largest power of two from 32 on, which suits kernels, else the largest
    divisor.
    """
    powers = [2**n for n in range(30, 4, -1) if 2**n < most]
    allowed = (n for n in (most, *powers, *range(most - 1, 0, -1)) if not (even and n % 2))
    return next((n for n in allowed if number % n == 0), None)


def fitting_attention(config: ModelConfig, length: int | None = None) -> dict[str, Any]:
    """Defaults for :meth:`Mixer.defaults`: a window up to ``length``, and n_heads if the usual number does not fit."""
    found = {} if length is None else {"model.window": min(config.window, length)}
    if config.attention.head_width is not None:
        return found
    width, usual = config.d_model, config.n_heads
    heads = (n for n in range(usual, 0, -1) if width % n == 0 and width // n % 2 == 0)
    return found | {"model.n_heads": next(heads, usual)}


def used_length(config: Config) -> float:
    """Largest useful size of a model's window or segment: data.seq_len. It is infinite for a run that begins with
    trained weights: its samples may be shorter than earlier ones (the first stages of a curriculum)."""
    return math.inf if config.train.init_from else config.data.seq_len


def check_window(config: Config, need: Need, any_width: bool = True):
    """Checks a mixer with attention over ``model.window``, in its :meth:`Mixer.check`; see check_attention."""
    check_attention(config, need, any_width)
    length = used_length(config)
    need(
        config.model.window <= length,
        "model.window",
        config.model.window,
        f"at most data.seq_len={length}; a wider window never fills: lower it, or raise data.seq_len",
    )


def check_periods(config: Config, need: Need):
    """Checks ``model.mlp_periods`` against other settings; errors take one line."""
    model, name = config.model, "model.mlp_periods"
    if not model.mlp_periods:
        return
    heads, length = model.memory_heads, config.data.seq_len
    need(
        model.d_model % heads == 0 and (heads < model.d_model or not model.memory.norm),
        "model.memory.n_heads" if model.memory.n_heads else "model.n_heads",
        heads,
        f"must divide model.d_model={model.d_model} and be below it with {name}, whose levels have as many heads",
    )
    need(
        max(model.mlp_periods) < length,
        name,
        model.mlp_periods,
        f"each below data.seq_len={length}; nothing that a level learns in the first period is read in it",
    )
    need(
        model.kinds != ["rmt"],
        name,
        model.mlp_periods,
        "must be [] with the mixer rmt, which reads each segment more than once",
    )


PROJECTED = ("conv_width", "value_filters", "norm_eps", "init_std", "n_layers")
"""Settings for :attr:`Mixer.shared` of convolutions of queries, keys and values, a norm, and ``out``."""


class MemoryMixer(Mixer):
    """A mixer around one :class:`NeuralMemory`, or a hierarchy of them, its attribute ``memory``."""

    shared: ClassVar[tuple[str, ...] | None] = ("n_heads", "persistent_tokens", *PROJECTED)
    stale: ClassVar[bool] = False
    """Whether tokens read the memory of their chunk's start under every rule."""
    memory: Memory

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        memory, found = config.memory, {}
        if not memory.n_heads:
            most = config.n_heads if config.n_heads < config.d_model or not memory.norm else config.d_model // 2
            heads = (n for n in range(most, 0, -1) if config.d_model % n == 0)
            found["model.n_heads"] = next(heads, config.n_heads)
        if length is None:
            return found
        chunk = memory.chunk_size
        if chunk >= length:
            chunk = max(1, length // 4) if cls.reads_start(memory) else length
        found["model.memory.chunk_size"] = chunk
        if memory.caching is not None and "segment" not in memory.caching.model_fields_set:
            chunk, usual = found["model.memory.chunk_size"], memory.caching.segment
            if usual % chunk or usual >= length:
                most = max(chunk, min(usual, length // 2))  # two segments: the first is read
                found["model.memory.caching.segment"] = most - most % chunk
        if (levels := memory.hierarchy) is not None:
            given, name = levels.model_fields_set, "model.memory.hierarchy"
            chunk = levels.chunk if "chunk" in given or levels.chunk < length else max(1, length // 4)
            shard = levels.shard - levels.shard % chunk if levels.chunk == chunk else chunk
            found |= {f"{name}.chunk": chunk, f"{name}.shard": shard or chunk}
        return found

    @classmethod
    def check(cls, config: Config, need: Need):
        model = config.model
        heads = "model.memory.n_heads" if model.memory.n_heads else "model.n_heads"
        need(
            model.d_model % model.memory_heads == 0,
            heads,
            model.memory_heads,
            f"must divide model.d_model={model.d_model}",
        )
        need(
            model.memory_heads < model.d_model or not model.memory.norm,
            heads,
            model.memory_heads,
            f"at most model.d_model / 2 = {model.d_model // 2}: the LayerNorm of a head of width 1 is constant",
        )
        chunk, length = model.memory.chunk_size, config.data.seq_len
        levels, caching = model.memory.hierarchy, model.memory.caching
        if caching is not None:
            check_caching(model.memory, caching, length, need)
        if levels is None:
            need(
                chunk < length or not cls.reads_start(model.memory),
                "model.memory.chunk_size",
                chunk,
                f"below data.seq_len={length}; tokens read the memory of their chunk's start, and nothing of the first",
            )
            need(
                chunk <= length,
                "model.memory.chunk_size",
                chunk,
                f"at most data.seq_len={length}; in a longer chunk every gradient is taken at the memory's start",
            )
        else:
            check_hierarchy(model.memory, levels, length, need)

    @classmethod
    def reads_start(cls, memory: MemoryConfig) -> bool:
        """Whether tokens read the memory of their chunk's start."""
        return cls.stale or Rule.of(memory).nonlinear

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        return super().split_sizes(config) | {"model.memory.n_heads": config.memory_heads}

    def set_progress(self, done: float):
        if isinstance(self.memory, HierarchicalMemory):
            self.memory.set_progress(done)

    def unserved(self, dtype: torch.dtype) -> str | None:
        return self.memory.unserved(dtype)

    def scratch_bytes(self) -> int:
        return self.memory.scratch_bytes()

    def kept_state_bytes(self, length: int) -> int:
        return self.memory.kept_state_bytes(length)

    @property
    def piece(self) -> int:
        return self.memory.piece


def check_caching(memory: MemoryConfig, caching: CachingConfig, length: int, need: Need):
    """Checks a memory's settings against the settings of its caches."""
    chunk, name = memory.chunk_size, "model.memory.caching"
    need(
        memory.hierarchy is None,
        name,
        "set",
        "must be null with model.memory.hierarchy, whose memories begin again by themselves",
    )
    need(
        caching.segment % chunk == 0,
        f"{name}.segment",
        caching.segment,
        f"must be a multiple of model.memory.chunk_size={chunk}",
    )
    need(
        caching.segment < length,
        f"{name}.segment",
        caching.segment,
        f"below data.seq_len={length}; what is cached at a sample's end is never read",
    )


def check_hierarchy(memory: MemoryConfig, levels: HierarchyConfig, length: int, need: Need):
    """Checks a memory's settings against the settings of its hierarchy."""
    name = "model.memory.hierarchy"
    need(
        levels.chunk < length,
        f"{name}.chunk",
        levels.chunk,
        f"below data.seq_len={length}; nothing of the first chunk is read from the global memory",
    )
    need(
        levels.shard % levels.chunk == 0,
        f"{name}.shard",
        levels.shard,
        f"must be a multiple of {name}.chunk={levels.chunk}",
    )
    need(
        all(size <= levels.shard for size in levels.locals),
        f"{name}.locals",
        levels.locals,
        f"each at most {name}.shard={levels.shard}",
    )
    final = levels.locals if levels.final_locals is None else levels.final_locals
    need(
        len(final) == len(levels.locals) and all(a <= b for a, b in zip(final, levels.locals, strict=False)),
        f"{name}.final_locals",
        final,
        f"one for each of {name}.locals={levels.locals}, none larger than it",
    )
    need(
        memory.alpha == "head",
        "model.memory.alpha",
        memory.alpha,
        f"must be head with {name}",
    )


class WindowedMemoryMixer(Windowed, MemoryMixer):
    """A memory with attention over ``model.window``. any_width: as in :func:`check_attention`."""

    shared: ClassVar[tuple[str, ...] | None] = ("n_heads", "persistent_tokens", "rope_base", "attention", *PROJECTED)
    any_width: ClassVar[bool] = True

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        return super().defaults(config, length) | fitting_attention(config, length)

    @classmethod
    def check(cls, config: Config, need: Need):
        check_window(config, need, cls.any_width)
        super().check(config, need)


def build_memory(config: ModelConfig, head_width: int | None = None, affine: bool = False) -> Memory:
    """The memory of a mixer.

    head_width: None: its heads together are as wide as the model. affine: see :class:`Projection`.
    """
    kind = NeuralMemory if config.memory.hierarchy is None else HierarchicalMemory
    width, heads = config.d_model, config.memory_heads
    return kind(width, heads, config.conv_width, config.memory, config.norm_eps, head_width, affine)


def persistent(config: ModelConfig) -> nn.Parameter | None:
    """Learned tokens (P, d_model) of unit scale, like the normalised sequence that they precede; None for P = 0."""
    if config.persistent_tokens == 0:
        return None
    return nn.Parameter(torch.randn(config.persistent_tokens, config.d_model))


def remember(
    memory: Memory,
    x: Tensor,
    tokens: Tensor | None,
    state: AnyMemoryState | None,
    documents: Documents | None,
) -> tuple[Tensor, AnyMemoryState]:
    """Run the memory over [persistent | x]; the persistent tokens are written only if a document can begin here."""
    begins = state is None or documents is not None
    start = memory.start_after(tokens[None])[1] if begins and tokens is not None else None
    return memory(x, state, documents, start=start)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


class GateSettings(Section):
    """Settings of a mixer that joins attention and memory by a :class:`BranchGate`."""

    gate: Literal["mix", "product"] = "mix"
    """Join of attention and memory. mix: a learned share of each, per token and head. product: as in the paper, the
    product of both, each normalised and passed through gate_activation."""
    gate_activation: Literal["sigmoid", "silu", "tanh", "identity"] = "silu"
    """Non-linearity of gate=product, which the paper does not name."""


class OutputGateSettings(Section):
    """Settings of a mixer that gates the memory's output by a linear layer."""

    output_gate: Literal["sigmoid", "silu"] = "sigmoid"
    """Non-linearity between the gate's linear layer and its product with the memory's output. silu: as in other
    recurrent models; recall then reaches a third of the answers that it reaches with a sigmoid."""


class BranchGate(nn.Module):
    """gate=mix: o = s * b + (1 - s) * a, s = sigmoid(linear(x)): a share of each of two branches, per token and head.
    gate=product: o = act(a) * act(b). In both, a and b are normalised with a learned vector first.

    The product follows Titans, Section 4.2: "we normalize the outputs using learnable vector-valued weights, followed
    by a non-linearity"; the non-linearity is not published. It multiplies the memory's output (b) by whatever attention
    (a) has at that token. The mix is the default because with a product, even one that is added to the sum and learned
    from zero, recall stays at 31 % (docs/notebook.md).

    x, a, b, o: (B, T, d_model). The mixer declares how the norms are cut.
    """

    per_rank = ("n_heads",)

    def __init__(self, config: ModelConfig, settings: "GateSettings"):
        super().__init__()
        self.n_heads = config.memory_heads
        self.d_model = config.d_model
        self.activation = ACTIVATIONS[settings.gate_activation]
        self.norm_a = RMSNorm(config.d_model, eps=config.norm_eps)
        self.norm_b = RMSNorm(config.d_model, eps=config.norm_eps)
        self.linear = nn.Linear(config.d_model, self.n_heads, bias=False) if settings.gate == "mix" else None

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.norm_a(a), self.norm_b(b)
        if self.linear is None:
            return self.activation(a) * self.activation(b)
        a, b = (y.unflatten(-1, (self.n_heads, -1)) for y in (a, b))
        share = torch.sigmoid(self.linear(x)).unsqueeze(-1)
        # Under autocast the branches differ in dtype; lerp takes one.
        return torch.lerp(a, b.to(a.dtype), share.to(a.dtype)).flatten(-2)

    def flops(self) -> Flops:
        return Flops(0, 0) if self.linear is None else product(self.d_model, self.n_heads)


def any_memory(mixers: Iterable[str]) -> bool:
    """Whether one of these mixers, by name, has the memory of Titans."""
    return any(issubclass(MIXERS.find(name), MemoryMixer) for name in mixers)
