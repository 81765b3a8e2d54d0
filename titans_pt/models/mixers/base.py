"""The contract of a sequence mixer: all that the rest of the project asks of one."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops
from titans_pt.layers.sharding import Sharding
from titans_pt.registry import Registry

MIXERS: "Registry[type[Mixer]]" = Registry("titans_pt.models.mixers", "model.mixers")
"""Every mixer by the name that ``model.mixers`` gives it."""


class NoSettings(Section):
    """The settings of a mixer that has none of its own."""


Blocks = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""All blocks of a model, (x, their states or None) -> (x, their states after it or None)."""


class Need(Protocol):
    """Raises a UserError of one line, "path: given ...; allowed", unless ``ok``."""

    def __call__(self, ok: bool, path: str, given: Any, allowed: str) -> None: ...


class Mixer(nn.Module):
    """One sequence mixer: (B, T, d_model) -> (B, T, d_model), causal, rows independent, state in and out.

    A mixer is one file: it subclasses this, is decorated with ``@MIXERS.register``, and nothing outside knows its name.
    What stands below is all that settings, tensor parallelism, the optimiser, the FLOP count, the plan and compilation
    ask; the defaults are those of a mixer that has nothing special. docs/architecture.md has the recipe.

    Its state is a dataclass (of nested dataclasses, lists, tuples) of tensors whose first dimension is the row, and of
    plain numbers; of constant size in the sequence length for all but full attention. Any cut of a sequence, the state
    handed on, gives what one call gives.
    """

    name: ClassVar[str]
    """What ``model.mixers`` calls it."""
    Settings: ClassVar[type[Section]] = NoSettings
    """Its own section of the settings, ``model.<name>``."""
    sharding: ClassVar[Sharding | None] = None
    """How it is cut over tensor ranks (titans_pt.layers.sharding). Layers that it is made of may declare their own
    part; every parameter must be named by one of them. None: parallel.tensor > 1 is refused."""
    per_rank: ClassVar[tuple[str, ...]] = ()
    """Attributes that count heads: each becomes the tensor rank's share."""
    ends: ClassVar[tuple[str, ...]] = ("out",)
    """Linear layers that end a residual branch: they start smaller, by sqrt(2 n_layers)."""
    no_decay: ClassVar[tuple[str, ...]] = ()
    """Parameters of its own (not of its layers, which declare theirs) that weight decay leaves alone, beside all that
    have one dimension."""
    normalises: ClassVar[bool] = False
    """Whether it takes the residual stream as it is and normalises it itself: its block then has no norm before it."""
    compiles_documents: ClassVar[bool] = True
    """Whether its block may be compiled for whole sequences that documents cut."""

    @classmethod
    def settings(cls, config: ModelConfig) -> Any:
        """Its section of ``config``, validated; what is not given there is at its default.

        Raises:
            pydantic.ValidationError: for ``model.<name>``.
        """
        return cls.Settings.model_validate(config.section(cls.name))

    @classmethod
    def check(cls, config: Config, need: Need):
        """Calls ``need`` for everything that must hold between its settings and the rest of the tree."""

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        """Setting -> number that parallel.tensor must divide, beside model.mlp_hidden and model.vocab_size."""
        return {"model.n_heads": config.n_heads}

    def forward(self, x: Tensor, state: Any = None, documents: Documents | None = None) -> tuple[Tensor, Any]:
        """
        Args:
            x: (B, T, d_model), any T >= 1.
            state: what the previous piece of the same rows returned; None at the start.
            documents: where documents start inside x; nothing before a start is seen from there on.

        Returns:
            (B, T, d_model) in x's dtype, and the state after the last token.
        """
        raise NotImplementedError

    def bind(self, mixers: "list[Mixer]"):
        """Told once, when the backbone is built, of the mixers of all its blocks in their order, itself among them:
        for what they share. One that is not the parameter's owner keeps it where torch does not look for submodules
        (in a tuple), so that it has one name."""

    def around(self, blocks: Blocks, x: Tensor, state: Any, documents: Documents | None) -> tuple[Tensor, Any]:
        """A sequence through all blocks of the model; asked of the first block's mixer alone.

        For models that hand the last block's outputs to the first: ``x``, (B, T, d_model), may pass ``blocks`` in any
        pieces, with anything put beside them. What it returns beside the outputs is the model's state, and ``state``
        what it returned for the previous piece.
        """
        return blocks(x, state)

    def flops(self, length: int) -> Flops:
        """Per token, mean over a sequence of ``length`` (one document); see titans_pt.layers.flops."""
        raise NotImplementedError

    def own_initialisation(self):
        """Called once, after every linear layer and embedding of the model was drawn: what starts otherwise.

        Any layer may have this method. Parameters that are neither (a decay, a learned start) are best drawn where
        they are made; this is for linear layers whose weights or biases need other values.
        """

    def set_compiled(self, on: bool):
        """Told whether whole sequences pass the block through torch.compile: for what it compiles by itself."""

    def unserved(self, dtype: torch.dtype) -> str | None:
        """Why a GPU would not run it by its own kernels on inputs of ``dtype``; None if it would.

        The plan then measures on a GPU's paths, with meta tensors; else it measures on a CPU and scales up.
        """
        return None

    def needs(self) -> dict[str, str]:
        """Package that it cannot run without on a GPU -> the remedy, such as "install it: pip install NAME"."""
        return {}

    def scratch_bytes(self) -> int:
        """Bytes that its kernels keep on a GPU for all layers together, whatever the batch."""
        return 0

    def kept_state_bytes(self, length: int) -> int:
        """Bytes of recurrent states that one row of ``length`` tokens keeps for the backward pass on a CPU."""
        return 0

    @property
    def piece(self) -> int:
        """Tokens after which what it keeps for the backward pass repeats: the plan measures no fewer."""
        return 1
