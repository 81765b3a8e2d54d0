"""Runs as Hugging Face folders and back, bit for bit; importing this registers the model with AutoModelForCausalLM.

    import titans_pt.huggingface
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model.generate(**tokenizer("text", return_tensors="pt"), max_new_tokens=20)

generate() carries the memory's state: every token is read once, at any length. What it returns with
``return_dict_in_generate=True`` has no state; call the model itself for that, and pass ``state=`` to continue.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt import checkpoints
from titans_pt.config import Config, config_hash
from titans_pt.config_check import checked
from titans_pt.config_history import as_stored
from titans_pt.data_pipeline.tokenizers import FILES, load_tokenizer, saved_tokenizer
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.run import load_run
from titans_pt.run_folder import RunFolder
from titans_pt.tasks.language import keep_tokenizer

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizer,
    )
    from transformers.utils import ModelOutput
except ImportError as error:
    raise UserError(f"transformers: cannot be imported ({error}); install it: pip install 'titans-pt[eval]'") from None


class TitansConfig(PreTrainedConfig):
    """The whole settings tree of the run as ``settings``; of it only the model section matters here.

    Args:
        settings: as in a run's config.yaml.
        step, checkpoint_hash: of the checkpoint that the weights are from.
    """

    model_type = "titans"

    def __init__(self, settings: dict | None = None, step: int = 0, checkpoint_hash: str = "", **others: Any):
        self.settings = settings or Config().model_dump(mode="json")
        self.step, self.checkpoint_hash = step, checkpoint_hash
        model = self.tree.model
        self.vocab_size, self.hidden_size, self.num_hidden_layers = model.vocab_size, model.d_model, model.n_layers
        super().__init__(**{**others, "tie_word_embeddings": model.tie_embeddings})

    @property
    def tree(self) -> Config:
        return checked(Config.model_validate(as_stored(self.settings)))


@dataclass
class TitansOutput(ModelOutput):
    """logits (B, T, vocab_size); ``state`` after the last token; loss where labels were given."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: Any = None


class TitansForCausalLM(PreTrainedModel, GenerationMixin):
    """titans_pt's language model with Hugging Face's call. Batches must be of one length: there is no padding."""

    config_class = TitansConfig
    base_model_prefix = "model"
    _is_stateful = True
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = build_model(config.tree.model)
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

        Raises:
            ValueError: the attention mask hides something.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: hides tokens; a memory reads all of them: make batches of one length")
        logits, state = self.model(input_ids, state, last_only=logits_to_keep == 1)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return TitansOutput(loss, logits, state)

    def prepare_inputs_for_generation(self, input_ids, state=None, attention_mask=None, is_first_iteration=False, **_):
        if state is not None and not is_first_iteration:
            input_ids, attention_mask = input_ids[:, -1:], None
        return {"input_ids": input_ids, "state": state, "attention_mask": attention_mask, "logits_to_keep": 1}


class TitansTokenizer(PreTrainedTokenizer):
    """data_pipeline's tokenizer: the same ids, nothing added before or after them. The end of a text is eos_token.

    Args:
        vocab_file: SentencePiece's model; None: whichever tokenizer lies in the folder ``name_or_path``.
    """

    vocab_files_names = {"vocab_file": FILES[0]}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str | None = None, eos_token: Any = None, **others: Any):
        path = vocab_file or saved_tokenizer(Path(others["name_or_path"]))
        self.inner = load_tokenizer(path, None if eos_token is None else str(eos_token))
        self._ids = {name: i for i, name in enumerate(self.inner.names) if name}
        # Text is text: "</s>" in it is those four letters, as in training.
        super().__init__(**{**others, "eos_token": self.inner.names[self.inner.eos_id], "split_special_tokens": True})

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return [self.inner.names[i] for i in self.inner.encode(text)]

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


AutoConfig.register(TitansConfig.model_type, TitansConfig)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
AutoTokenizer.register(TitansConfig, slow_tokenizer_class=TitansTokenizer)


def export_run(run_dir: str | Path, folder: str | Path, step: int | None = None) -> Path:
    """Writes config.json, model.safetensors and the tokenizer of a run's checkpoint to ``folder``.

    Raises:
        UserError: what ``load_run`` finds wrong with the run.
    """
    run, folder = load_run(run_dir, step, precision="fp32"), Path(folder)
    tokenizer = TitansTokenizer(str(run.tokenizer.path), run.config.data.tokenizer.eos_token)
    config = TitansConfig(
        run.config.model_dump(mode="json"), run.step, run.checkpoint_hash,
        eos_token_id=run.tokenizer.eos_id, dtype="float32",
    )  # fmt: skip
    model = TitansForCausalLM(config)
    model.model.load_state_dict(run.model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def import_run(folder: str | Path, run_dir: str | Path) -> Path:
    """The run folder of what :func:`export_run` wrote: to evaluate, generate, inspect; it has no optimiser's state.

    Raises:
        UserError: nothing that export wrote is there, or ``run_dir`` holds a run already.
    """
    folder, run = Path(folder), RunFolder(run_dir)
    tokenizer = saved_tokenizer(folder)
    for path in (folder / "config.json", tokenizer):
        if not path.is_file():
            raise UserError(f"{folder}: holds no {path.name}; name a folder that titans export wrote")
    if run.config.exists():
        raise UserError(f"{run.path}: holds a run already; name another folder")
    model = TitansForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = model.config.tree
    weights = {name: p.detach().clone().contiguous() for name, p in model.model.named_parameters()}
    state = checkpoints.TrainerState(
        step=model.config.step, samples=0, adam_step=0, nonfinite=0, nonfinite_in_a_row=0,
        model_hash=config_hash(settings.model), config_hash=config_hash(settings),
        config=settings.model_dump(mode="json"),
        identity={"tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest()},
    )  # fmt: skip
    checkpoints.save(run.checkpoints, weights, {}, state)
    run.write_settings(settings)
    keep_tokenizer(tokenizer, settings, run)
    return run.path
