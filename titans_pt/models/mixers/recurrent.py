"""Parts that the mixers around kernels.linear_memory share."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig
from titans_pt.kernels.linear_memory import linear_memory, unserved
from titans_pt.kernels.linear_memory.chunked import CHUNK
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, product
from titans_pt.layers.recurrence import RecurrentState
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import Mixer, Need
from titans_pt.models.mixers.common import divisor

CONVOLVED = {
    "": Shard.ENTER,
    "q": Shard.COLUMN,
    "k": Shard.COLUMN,
    "v": Shard.COLUMN,
    "q_conv": Shard.COLUMN,
    "k_conv": Shard.COLUMN,
    "v_conv": Shard.COLUMN,
    "norm": Shard.SUMMED,
    "out": Shard.LAST_ROW,
}
"""Split over tensor ranks of a mixer with :meth:`LinearMemoryMixer.make_convolved`, a norm per head and ``out``."""


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class LinearMemoryMixer(Mixer):
    """A mixer around one linear memory of ``n_heads`` heads with keys of ``key_width`` and values of ``value_width``.

    A subclass calls :meth:`remember` once in its forward pass, and defines :meth:`heads`.
    """

    per_rank = ("n_heads",)
    delta: ClassVar[bool] = False
    """Whether it writes by the delta rule."""
    erases: ClassVar[bool] = False
    """Whether it erases at other keys than it writes."""
    decay: str | None = None
    """Unit with a decay of its own: None, "head", "token" or "channel" (see kernels.linear_memory.unserved)."""

    def __init__(self, config: ModelConfig, key_width: int, value_width: int):
        super().__init__()
        _, self.n_heads = self.heads(config)
        self.key_width, self.value_width = key_width, value_width

    @classmethod
    def heads(cls, config: ModelConfig) -> tuple[str, int]:
        """The setting that gives the number of heads, and the number."""
        raise NotImplementedError

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        return dict([cls.heads(config)])

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H W) -> (B, T, H, W)."""
        return x.unflatten(-1, (self.n_heads, -1))

    def make_convolved(self, config: ModelConfig, queries: int, keys: int, values: int):
        """Make the layers of :meth:`convolved`, with these widths."""
        widths = queries, keys, values
        self.q, self.k, self.v = (linear(config.d_model, width) for width in widths)
        self.q_conv, self.k_conv = (ShortConvolution(width, config.conv_width) for width in widths[:2])
        self.v_conv = ShortConvolution(values, config.conv_width, of_values=True)

    def convolved(
        self, x: Tensor, state: RecurrentState | None, documents: Documents | None
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """q, k and v of x (B, T, d_model), each a linear layer, a convolution and SiLU: (B, T, its width). Also the
        convolutions' inputs for the next state."""
        convolutions = self.q_conv, self.k_conv, self.v_conv
        return convolve((self.q(x), self.k(x), self.v(x)), convolutions, state, documents)

    def remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        state: RecurrentState | None,
        documents: Documents | None,
        erase: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Heads' outputs (B, T, H, V) and the memory after the last token; the caller has scaled q by K^-1/2."""
        y, memory = linear_memory(
            q, k, v, decay, beta, erase=erase, initial_state=state.memory if state else None, output_final_state=True,
            reset=None if documents is None else documents.starts,
        )  # fmt: skip
        assert memory is not None, "it was asked for"
        return y, memory

    def flops(self, length: int) -> Flops:
        """Its linear layers, the write, the read, and with the delta rule the read before the correction."""
        return linear_flops(self) + self.n_heads * (3 if self.delta else 2) * product(self.key_width, self.value_width)

    def unserved(self, dtype):
        return unserved(dtype, self.n_heads, self.key_width, self.value_width, self.decay, self.delta, self.erases)

    def needs(self) -> dict[str, str]:
        return {"fla": "install it: pip install fla-core"}

    @property
    def piece(self) -> int:
        return CHUNK


class HeadWidths(Mixer):
    """A mixer whose setting ``head_width`` says how many heads model.d_model has."""

    @classmethod
    def heads(cls, config: ModelConfig) -> tuple[str, int]:
        """The setting that gives the number of heads, and the number."""
        return f"model.d_model / model.{cls.name}.head_width", config.d_model // cls.settings(config).head_width

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        return dict([cls.heads(config)])

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        return fitting_width(cls, config.d_model)

    @classmethod
    def check(cls, config: Config, need: Need):
        width = cls.settings(config.model).head_width
        need(
            config.model.d_model % width == 0,
            f"model.{cls.name}.head_width",
            width,
            f"must divide model.d_model={config.model.d_model}",
        )


class HeadWidthMixer(HeadWidths, LinearMemoryMixer):
    """A linear memory of :class:`HeadWidths`."""


class ExpansionMixer(LinearMemoryMixer):
    """A linear memory whose settings ``n_heads``, ``key_expansion`` and ``value_expansion`` say how wide it is."""

    @classmethod
    def widths(cls, config: ModelConfig) -> dict[str, float]:
        """Widths of all keys and of all values by the settings that give them. They need not be whole numbers before
        :meth:`check`."""
        own = cls.Settings.model_validate(cls._given(config))
        return {name: config.d_model * getattr(own, name) for name in ("key_expansion", "value_expansion")}

    @classmethod
    def heads(cls, config: ModelConfig) -> tuple[str, int]:
        return f"model.{cls.name}.n_heads", cls.settings(config).n_heads

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        """n_heads, if the usual number does not divide the widths."""
        widths, usual = cls.widths(config).values(), cls.Settings.model_fields["n_heads"].default
        heads = next((n for n in range(usual, 0, -1) if all(width % n == 0 for width in widths)), usual)
        return {} if heads == usual else {f"model.{cls.name}.n_heads": heads}

    @classmethod
    def check(cls, config: Config, need: Need):
        heads = cls.settings(config.model).n_heads
        for setting, width in cls.widths(config.model).items():
            need(
                width % heads == 0,
                f"model.{cls.name}.n_heads",
                heads,
                f"must divide model.d_model * model.{cls.name}.{setting} = {width:g}",
            )


def fitting_width(mixer: type[Mixer], whole: int) -> dict[str, int]:
    """``mixer``'s default head_width if the usual one does not divide ``whole``, for :meth:`Mixer.defaults`."""
    field = mixer.Settings.model_fields["head_width"]
    even = any(getattr(rule, "multiple_of", 1) == 2 for rule in field.metadata)
    width = divisor(whole, field.default, even)
    return {} if width in (None, field.default) else {f"model.{mixer.name}.head_width": width}


def convolve(
    xs: Sequence[Tensor],
    convolutions: Sequence[ShortConvolution],
    state: RecurrentState | None,
    documents: Documents | None,
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """silu(convolution(x)) of each x, and the convolutions' inputs for the next state."""
    shapes = ((len(x), conv.width - 1, x.shape[2]) for x, conv in zip(xs, convolutions, strict=True))
    before = state.of_inputs(*shapes) if state else [None] * len(xs)
    found = [conv(x, past, documents, silu=True) for x, conv, past in zip(xs, convolutions, before, strict=True)]
    return [y for y, _ in found], tuple(past for _, past in found)
