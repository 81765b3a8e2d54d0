"""The contract of a sequence mixer: everything that the rest of the project uses of one."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, NoSettings, Section
from titans_pt.config.sections import Need, own_section
from titans_pt.config.values import typed
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops
from titans_pt.layers.sharding import Sharding
from titans_pt.models.ways import Blocks
from titans_pt.registry import Registry

MIXERS: "Registry[Mixer]" = Registry("titans_pt.models.mixers", "model.mixers")
"""Every mixer by the name that ``model.mixers`` gives it."""


class Mixer(nn.Module):
    """One sequence mixer: (B, T, d_model) -> (B, T, d_model), causal, rows independent, state in and out.

    A mixer is one file: it subclasses this, is decorated with ``@MIXERS.register``, and nothing outside knows its name.
    The members below are all that settings, tensor parallelism, optimiser, FLOP count, plan and compilation use; their
    defaults suit a mixer that has nothing special. docs/architecture.md has the recipe.

    Its state is a dataclass (of nested dataclasses, lists, tuples) of tensors whose first dimension is the row, and of
    plain numbers; its size is constant in the sequence length, except for full attention. A sequence may be cut
    anywhere: with the state passed on, the pieces give the same outputs as one call.
    """

    name: ClassVar[str]
    """Name of the mixer in ``model.mixers``."""
    Settings: ClassVar[type[Section]] = NoSettings
    """Its own section of the settings, ``model.<name>``."""
    shared: ClassVar[tuple[str, ...] | None] = None
    """Shared settings of ``model`` that this mixer uses; as a layer it takes no others. None: any.

    ``window`` and ``memory`` are not named here: the base classes in titans_pt/models/mixers/common.py imply them."""
    sharding: ClassVar[Sharding | None] = None
    """Split of the mixer over tensor ranks (titans_pt.layers.sharding). Its layers may declare their own parts; one of
    these declarations must name every parameter. None: parallel.tensor > 1 is refused."""
    per_rank: ClassVar[tuple[str, ...]] = ()
    """Attributes that count heads: on a tensor rank each becomes the rank's share."""
    write_gate: ClassVar[str] = ""
    """Name of the linear layer whose sigmoid is a token's share of its largest possible write, which
    model.memory.write_cost penalises. "": none; a memory's own gates (layers/memory_gates.py) need not be named."""
    ends: ClassVar[tuple[str, ...]] = ("out",)
    """Linear layers that end a residual branch: they start smaller, by sqrt(2 n_layers)."""
    no_decay: ClassVar[tuple[str, ...]] = ()
    """Its own parameters (its layers declare theirs) without weight decay. Parameters with one dimension have none
    anyway."""
    normalises: ClassVar[bool] = False
    """True: it normalises the residual stream itself, and its block has no norm before it."""
    compiles_documents: ClassVar[bool] = True
    """False: its block is not compiled for sequences that documents cut."""

    @classmethod
    def settings(cls, config: ModelConfig) -> Any:
        """Its section of ``config``, validated; settings that are not given have their defaults.

        Raises:
            UserError: one line about ``model.<name>``.
        """
        path = f"model.{cls.name}"
        defaults = {key.removeprefix(f"{path}."): value for key, value in cls.defaults(config).items()
                    if key.startswith(f"{path}.")}  # fmt: skip
        return own_section(defaults | config.section(cls.name), cls.Settings, path)

    @classmethod
    def _given(cls, config: ModelConfig) -> dict[str, Any]:
        """Given settings of the mixer's own section, not validated yet."""
        return typed(config.section(cls.name), cls.Settings, f"model.{cls.name}")

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        """Setting's dotted path -> default for this model, if the general default does not fit (a head width that
        does not divide model.d_model). A given setting takes precedence; a run stores the result.

        A default that fits is not changed: runs that have begun must stay the same model.

        Args:
            config: the given settings, which the mixer has not checked yet.
            length: data.seq_len; None if it is not known.
        """
        return {}

    @classmethod
    def check(cls, config: Config, need: Need):
        """Calls ``need`` for everything that must hold between its settings and the rest of the tree."""

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        """Setting -> number that parallel.tensor must divide, in addition to model.mlp_hidden and model.vocab_size."""
        shared = config.attention.kv_heads
        return {"model.n_heads": config.n_heads} | ({} if shared is None else {"model.attention.kv_heads": shared})

    def forward(self, x: Tensor, state: Any = None, documents: Documents | None = None) -> tuple[Tensor, Any]:
        """
        Args:
            x: (B, T, d_model), any T >= 1.
            state: what the previous piece of the same rows returned; None at the start.
            documents: where documents start inside x; tokens from a start on see nothing before it.

        Returns:
            (B, T, d_model) in x's dtype, and the state after the last token.
        """
        raise NotImplementedError

    def bind(self, mixers: "list[Mixer]"):
        """Called once, when the backbone is built, with the mixers of all blocks in order, itself included: for
        parameters that mixers share. Only the owner of such a parameter registers it; the others keep it where torch
        does not look for submodules (in a tuple), so that it has one name."""

    def around(self, blocks: Blocks, x: Tensor, state: Any, documents: Documents | None) -> tuple[Tensor, Any]:
        """Run a sequence through all blocks of the model; only the first block's mixer is asked to.

        It serves models that feed the last block's outputs to the first: ``x``, (B, T, d_model), may pass ``blocks`` in
        any pieces, with other tokens put beside them. The second result is the model's state; ``state`` is that result
        for the previous piece.
        """
        return blocks(x, state, documents)

    def unlimited(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Output for whole sequences without the window that a pretrained attention layer was given, for attention
        transfer; (B, T, d_model). A mixer without such a window gives its usual output."""
        return self(x, documents=documents)[0]

    def flops(self, length: int) -> Flops:
        """Per token, mean over a sequence of ``length`` (one document); see titans_pt.layers.flops."""
        raise NotImplementedError

    def own_initialisation(self):
        """Called once, after all linear layers and embeddings of the model were drawn, to set other initial values.

        Any layer may have this method. It is for linear layers whose weights or biases need other values; parameters
        of other kinds (a decay, a learned start) are best drawn where they are made.
        """

    def set_progress(self, done: float):
        """Called with the share of the training that is complete, for mixers that change during training."""

    def set_compiled(self, on: bool):
        """Called with whether torch.compile compiles the block for whole sequences: for parts that the mixer compiles
        itself."""

    def unserved(self, dtype: torch.dtype) -> str | None:
        """Reason why a GPU could not use the mixer's kernels for inputs of ``dtype``; None if it could.

        If None, the plan measures memory with meta tensors, which follow the GPU path; otherwise it measures on the CPU
        and scales up.
        """
        return None

    def needs(self) -> dict[str, str]:
        """Packages that it needs on a GPU -> the remedy, such as "install it: pip install NAME"."""
        return {}

    def scratch_bytes(self) -> int:
        """Bytes that its kernels keep on a GPU for all layers together, whatever the batch."""
        return 0

    def kept_state_bytes(self, length: int) -> int:
        """Bytes of recurrent states that one row of ``length`` tokens keeps for the backward pass on a CPU."""
        return 0

    @property
    def piece(self) -> int:
        """Period, in tokens, of the tensors that it keeps for the backward pass: the plan measures at least one."""
        return 1
