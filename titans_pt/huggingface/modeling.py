"""The model, its config and its tokenizer with Hugging Face's calls.

Exported folders carry this file as modeling_titans.py, and with it the files that it imports: it must import no more
than a model needs, and nothing may be found by its place in this package.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.utils import ModelOutput

from titans_pt.config import ModelConfig, with_todays_names
from titans_pt.config_history import as_stored
from titans_pt.data_pipeline.tokenizers import FILES, load_tokenizer, saved_tokenizer
from titans_pt.models import build_model


class TitansConfig(PreTrainedConfig):
    """The model section of the run's settings and little else, as ``settings``.

    Args:
        settings: a tree as in a run's config.yaml. Folders of version 0.1.0 have all of it.
        step, checkpoint_hash: of the checkpoint that the weights are from.
    """

    model_type = "titans"

    def __init__(self, settings: dict | None = None, step: int = 0, checkpoint_hash: str = "", **others: Any):
        self.settings = settings or {"model": ModelConfig().model_dump(mode="json")}
        self.step, self.checkpoint_hash = step, checkpoint_hash
        model = self.model
        self.vocab_size, self.hidden_size, self.num_hidden_layers = model.vocab_size, model.d_model, model.n_layers
        super().__init__(**{**others, "tie_word_embeddings": model.tie_embeddings})

    @property
    def model(self) -> ModelConfig:
        """The settings of the model, those that are newer than the folder completed."""
        return ModelConfig.model_validate(as_stored(with_todays_names(self.settings))["model"])


@dataclass
class TitansOutput(ModelOutput):
    """logits (B, T, vocab_size); ``state`` after the last token; loss where labels were given."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: Any = None


class TitansForCausalLM(PreTrainedModel, GenerationMixin):
    """titans_pt's language model with Hugging Face's call. Prompts of different lengths are filled up on the left, as
    the tokenizer does it, with an attention mask that says so; the memory begins where the prompt does."""

    config_class = TitansConfig
    base_model_prefix = "model"
    _is_stateful = True
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = build_model(config.model)
        # Folders from before models could change in the course of a training do not say how long it was.
        steps = config.settings.get("train", {}).get("max_steps") or max(config.step, 1)
        self.model.blocks.set_progress(config.step / steps)
        self.post_init()

    def _init_weights(self, module):
        """The model has initialised itself."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self):
        return self.model.embedding

    def get_output_embeddings(self):
        return self.model.head

    def forward(
        self,
        input_ids: Tensor,
        state: Any = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **unused: Any,
    ) -> TitansOutput:
        """input_ids (B, T) int64; ``state`` as an earlier call returned it; labels (B, T), shifted here.
        attention_mask (B, T), 0 for tokens to the left of where a row begins: their logits mean nothing, their labels
        do not count.

        Raises:
            ValueError: the mask hides other tokens, or some after a state.
        """
        starts = {}
        if attention_mask is not None and not bool(attention_mask.all()):
            shown = attention_mask.bool()
            if state is not None or not bool(shown[:, -1].all()) or bool((shown[:, :-1] & ~shown[:, 1:]).any()):
                raise ValueError(
                    "attention_mask: hides tokens after the start of a row, or after a state; a memory reads all of "
                    "them: pad on the left (tokenizer.padding_side='left')"
                )
            begins = shown.clone()
            begins[:, 1:] &= ~shown[:, :-1]
            starts = {"reset": begins.cpu()}
            labels = None if labels is None else labels.masked_fill(~shown | begins, -100)
        logits, state = self.model(input_ids, state, last_only=logits_to_keep == 1, **starts)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return TitansOutput(loss, logits, state)

    def prepare_inputs_for_generation(self, input_ids, state=None, attention_mask=None, is_first_iteration=False, **_):
        if state is not None and not is_first_iteration:
            input_ids, attention_mask = input_ids[:, -1:], None
        return {"input_ids": input_ids, "state": state, "attention_mask": attention_mask, "logits_to_keep": 1}


class TitansTokenizer(PreTrainedTokenizer):
    """data_pipeline's tokenizer: the same ids, after bos where training's documents began with it. The end of a text is
    eos_token; it is not added.

    Args:
        vocab_file: SentencePiece's model.
        tokenizer_file: a tokenizer.json. Without either: whichever lies in the folder ``name_or_path``.
        begin_with_bos: what data.tokenizer.add_bos was in training. (transformers drops an argument ``add_bos_token``.)
    """

    vocab_files_names = {"vocab_file": FILES[0], "tokenizer_file": FILES[1]}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self, vocab_file: str | None = None, tokenizer_file: str | None = None, eos_token: Any = None,
        begin_with_bos: bool = False, **others: Any,
    ):  # fmt: skip
        path = vocab_file or tokenizer_file or saved_tokenizer(Path(others["name_or_path"]))
        self.inner = load_tokenizer(path, None if eos_token is None else str(eos_token), begin_with_bos)
        self._ids = {name: i for i, name in enumerate(self.inner.names) if name}
        others.setdefault("pad_token", self.inner.names[self.inner.eos_id])  # hidden by the mask
        others |= {"begin_with_bos": begin_with_bos}
        if begin_with_bos:
            others["bos_token"] = self.inner.names[self.inner.bos_id]
        # Text is text: "</s>" in it is those four letters, as in training.
        super().__init__(**{**others, "eos_token": self.inner.names[self.inner.eos_id], "split_special_tokens": True})

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return [self.inner.names[i] for i in self.inner.encode(text)]

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None) -> list[int]:
        """A pair is one text: bos comes once, before it."""
        return [*self.inner.begin, *token_ids_0, *(token_ids_1 or [])]

    def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens=False) -> list[int]:
        """1 for bos and eos, 0 for text."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        return [1] * len(self.inner.begin) + [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.inner.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.inner.decode(self._ids[token] for token in tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        path = Path(save_directory) / self.inner.path.name
        if path.resolve() != self.inner.path.resolve():
            shutil.copyfile(self.inner.path, path)
        return (str(path),)
