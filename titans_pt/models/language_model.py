"""The language model: embedding, backbone, head. One call serves training, evaluation and generation."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import usable
from titans_pt.models.backbone import Backbone, initialise

OWN_LOGIT = 4.0
"""Logit of the token just read in an untrained model: exp(4) among the V exponentials of the others."""


@dataclass
class LanguageModelState:
    """blocks: state of each block's mixer. Its size is constant in sequence length, but for full attention."""

    blocks: list[Any]


class LanguageModel(nn.Module):
    """ids -> logits and the state that continues the sequence; causal, rows independent.

    The embedding and the head have config.vocab_rows rows, of which the first ``tokens`` stand for tokens. The others
    only round their number up: they begin as zeros, and give no logits.

    Args:
        tokens: the tokenizer's entries; None: config.vocab_size.
    """

    sharding = {"embedding": Shard.VOCABULARY, "norm": Shard.BETWEEN, "head": Shard.LOGITS}

    def __init__(self, config: ModelConfig, tokens: int | None = None):
        super().__init__()
        self.config = config
        self.tokens = config.vocab_size if tokens is None else tokens
        self.embedding = nn.Embedding(config.vocab_rows, config.d_model)
        self.blocks = Backbone(config)
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_rows, bias=False)
        initialise(self, config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def counted_rows(self) -> dict[str, int]:
        """Parameter -> how many of its rows stand for tokens. The others may be left out, or be more."""
        return {"embedding.weight": self.tokens, "head.weight": self.tokens}

    def own_initialisation(self):
        """Rows that stand for no token are zeros. With tied embeddings the logit of the token just read starts at
        OWN_LOGIT at most.

        The scaled embedding reaches the norm through the residual stream. That logit is then up to init_std * d_model
        times the norm's weight: 15 at width 768, and the first loss is 13.0 although ln V is 10.4. A smaller weight of
        the norm changes neither the embeddings nor the blocks' inputs.
        """
        for module in (self.embedding, self.head):
            nn.init.zeros_(module.weight[self.tokens :])
        own = self.config.init_std * self.config.d_model
        if self.config.tie_embeddings and own > OWN_LOGIT:
            nn.init.constant_(self.norm.weight, OWN_LOGIT / own)

    def embed(self, ids: Tensor) -> Tensor:
        """ids (B, T) int64 -> input of the first block, (B, T, d_model)."""
        # The mixers' outputs are normalised, of unit scale: at the embedding's own 0.02 they would drown the token.
        return self.embedding(ids) * self.config.embedding_factor

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
            reset: None or bool (B, T), True where a document starts: tokens from there on see nothing before it. Starts
                are counted on the host: a ``reset`` on the CPU saves waiting for the GPU.
            last_only: logits of the last token alone, (B, 1, tokens).
            head: False leaves the head out and returns its input, (B, T, d_model), instead of logits.
            output_final_state: False, for training: None in place of the state after the last token.

        Returns:
            Logits (B, T, tokens) in the parameters' dtype, and the state after the last token.

        Raises:
            ValueError: no row or no token in ``ids``, or a ``reset`` of another shape.
        """
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(f"ids: given shape {tuple(ids.shape)}; must be (B, T) with at least one row and one token")
        if reset is not None and reset.shape != ids.shape:
            raise ValueError(f"reset: given shape {tuple(reset.shape)}; must be that of ids, {tuple(ids.shape)}")
        x = self.embed(ids)
        documents = None if reset is None else Documents.of(reset, ids.device)
        before = state and usable(state.blocks, documents)
        x, blocks = self.blocks(x, before, documents, output_final_state)
        if last_only:
            x = x[:, -1:]
        x = self.norm(x)
        x = self.head(x)[..., : self.tokens] if head else x
        return x, None if blocks is None else LanguageModelState(blocks)

    def flops(self, length: int) -> Flops:
        """Per token, mean over a sequence of ``length``; see titans_pt.layers.flops."""
        return self.blocks.flops(length) + product(self.head.in_features, self.head.out_features)


def build_model(config: ModelConfig, tokens: int | None = None) -> LanguageModel:
    """The model of a config's ``model`` section, fp32, initialised from torch's global generator.

    Args:
        tokens: as :class:`LanguageModel`.
    """
    return LanguageModel(config, tokens)
