"""The language model: embedding, blocks, head. One call serves training, evaluation and generation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titans_pt.config import ModelConfig
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import MemoryGates
from titans_pt.layers.mlp import SwiGLU
from titans_pt.models.mixers import build_mixer
from titans_pt.models.mixers.mac import MAC


@dataclass
class LanguageModelState:
    """blocks: the mixer's state of each block. Constant in sequence length, but for full attention."""

    blocks: list[Any]


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); (B, T, d_model)."""

    def __init__(self, mixer: str, config: ModelConfig):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mixer = build_mixer(mixer, config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.hidden)

    def forward(self, x: Tensor, state: Any = None, documents: Documents | None = None) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.mixer_norm(x), state, documents)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


def whole_sequence(block: Block, x: Tensor, documents: Documents | None) -> Tensor:
    """A block over sequences that nobody continues: (B, T, d_model) -> (B, T, d_model)."""
    return block(x, None, documents)[0]


class LanguageModel(nn.Module):
    """ids -> logits and the state that continues the sequence; causal, rows independent."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self._whole_sequence = whole_sequence
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(mixer, config) for mixer in config.pattern)
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def _initialise(self):
        """Normal(0, init_std) for every matrix, those that end a residual branch smaller by sqrt(2 n_layers).

        M_0, convolutions and persistent tokens keep their own initialisation (see there).
        """
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_branch = name.endswith((".mixer.out", ".mixer.memory_out", ".mlp.down"))
                nn.init.normal_(module.weight, std=std / (2 * len(self.blocks)) ** 0.5 if ends_branch else std)
            if isinstance(module, MemoryGates):
                module.reset_parameters()

    def set_activation_checkpointing(self, on: bool):
        """Training then keeps only the blocks' inputs and computes each block again in the backward pass."""
        self.activation_checkpointing = on

    def set_compiled(self, on: bool):
        """Whole sequences (no state in, none out) then pass each block through torch.compile.

        Alike blocks share their code. The shape is compiled in: a new one is compiled anew. Of MAC, the whole segments
        of a stream as well, and they alone where documents cut a sequence: each batch would be another program.
        """
        self._whole_sequence = torch.compile(whole_sequence, dynamic=False) if on else whole_sequence
        for block in self.blocks:
            if isinstance(block.mixer, MAC):
                block.mixer.compiled = on

    def forward(
        self,
        ids: Tensor,
        state: LanguageModelState | None = None,
        reset: Tensor | None = None,
        last_only: bool = False,
        head: bool = True,
        output_final_state: bool = True,
    ) -> tuple[Tensor, LanguageModelState | None]:
        """One call for the whole sequence or any piece of it.

        Args:
            ids: (B, T) int64.
            state: what the previous piece returned; None at the start.
            reset: None or bool (B, T), True where a document starts: nothing before it is seen from there on. They are
                counted on the host: one that is on the CPU saves waiting for the GPU.
            last_only: logits of the last token alone, (B, 1, vocab_size).
            head: False leaves the head out: what it would be given, (B, T, d_model), instead of logits.
            output_final_state: False, for training: None in place of the state after the last token.

        Returns:
            Logits (B, T, vocab_size) in the parameters' dtype, and the state after the last token.
        """
        # The mixers' outputs are normalised, of unit scale: at the embedding's own 0.02 they would drown the token.
        x = self.embedding(ids) * self.config.d_model**0.5
        documents = None if reset is None else Documents.of(reset, ids.device)
        if state is None and not output_final_state:
            for block in self.blocks:
                cut = isinstance(block.mixer, MAC) and documents is not None
                x = self._run(whole_sequence if cut else self._whole_sequence, block, x, documents)
            after = None
        else:
            after = LanguageModelState([])
            for block, before in zip(self.blocks, state.blocks if state else [None] * len(self.blocks), strict=True):
                x, block_state = self._run(block, x, before, documents)
                after.blocks.append(block_state)
        if last_only:
            x = x[:, -1:]
        x = self.norm(x)
        return self.head(x) if head else x, after

    def _run(self, part: Callable, *arguments):
        """part(*arguments), computed again in the backward pass under activation checkpointing."""
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)
        return part(*arguments)


def build_model(config: ModelConfig) -> LanguageModel:
    """The model of a config's ``model`` section, fp32, initialised from torch's global generator."""
    return LanguageModel(config)
