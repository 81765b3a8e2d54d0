"""The model, its config and its tokenizer with Hugging Face's calls.

Exported folders carry this file as modeling_titans.py, and all files that it imports. It must therefore import no more
than a model needs, and must not find anything by its place in this package.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.generation import GenerationMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from titans_pt.config import ModelConfig, with_todays_names
from titans_pt.config.history import as_stored
from titans_pt.data_pipeline.tokenizers import FILES, StreamDecoder, load_tokenizer, saved_tokenizer
from titans_pt.layers.state import take_rows
from titans_pt.models import build_model
from titans_pt.token_plans import put_on

MODELING = "modeling_titans"
"""This file's name, without .py, in exported folders."""
LONGEST = 1 << 20
"""Value of the tokenizer's model_max_length. A memory has no longest text, but tools without a number truncate at their
own default, and some tools pad to the number: it must be finite."""
_UNSERVED = {
    "inputs_embeds": "the model reads token ids; pass input_ids",
    "output_attentions": "a memory has no attention weights; leave it out",
    "position_ids": "the model counts tokens itself; leave it out, and pass a packed batch as rows of their own",
    "token_type_ids": "the model has one kind of token; leave it out",
    "cache_position": "the state knows its place; leave it out",
    "cache_params": "the past is called state here; pass state=",
}
"""Arguments of other models -> what to do instead. None and False, which wrappers pass on, are ignored."""
_SETTINGS = {"vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "n_layers",
             "tie_word_embeddings": "tie_embeddings"}  # fmt: skip
"""transformers' name of a setting -> its name in the model section."""


class TitansConfig(PreTrainedConfig):
    """Config with the model section of the run's settings, and little else, as ``settings``.

    Args:
        settings: a tree as in a run's config.yaml. Folders of version 0.1.0 have the whole tree.
        step, checkpoint_hash: step and hash of the checkpoint that the weights come from.
        tokenizer_hash: SHA-256 of the tokenizer's file that the weights were trained with; "" is unknown.
        use_cache: whether calls return a state by default.
    """

    model_type = "titans"
    keys_to_ignore_at_inference = ["past_key_values"]
    source_files: ClassVar[Callable[[ModelConfig], dict[str, str]] | None] = None
    """Function: settings -> the code that a saved folder carries. It is set if this package is installed; otherwise the
    code came with a folder, and transformers copies it."""

    def __init__(
        self,
        settings: dict | None = None,
        step: int = 0,
        checkpoint_hash: str = "",
        tokenizer_hash: str = "",
        use_cache: bool = True,
        **others: Any,
    ):
        self.settings = settings or {"model": ModelConfig().model_dump(mode="json")}
        self.step, self.checkpoint_hash, self.tokenizer_hash = step, checkpoint_hash, tokenizer_hash
        self.use_cache = use_cache
        model = self.model
        self.vocab_size, self.hidden_size, self.num_hidden_layers = model.vocab_size, model.d_model, model.n_layers
        others = {name: value for name, value in others.items() if name not in _SETTINGS}  # config.json's copies
        super().__init__(**others, tie_word_embeddings=model.tie_embeddings)

    def __setattr__(self, name: str, value: Any):
        """Change the setting if its name of transformers is changed, as ``from_pretrained(DIR, num_hidden_layers=1)``
        does: the model is built from the settings."""
        changed = name in _SETTINGS and vars(self).get(name, value) != value
        super().__setattr__(name, value)
        if changed:
            self.settings = self.settings | {"model": self.settings["model"] | {_SETTINGS[name]: value}}

    @property
    def model(self) -> ModelConfig:
        """Settings of the model, completed with settings that are newer than the folder.

        The embedding and the head have vocab_size rows: training may pad them, exported weights are not padded.
        """
        model = ModelConfig.model_validate(as_stored(with_todays_names(self.settings))["model"])
        return model.model_copy(update={"vocab_multiple": 1})

    def save_pretrained(self, save_directory: str | Path, *rest: Any, **options: Any):
        """Write config.json, and next to it the code that trust_remote_code=True runs.

        Checksums of an earlier export into the folder are deleted: they no longer fit its files. use_cache is saved as
        True: the Trainer sets it to False for its own calls, but users of the folder want states.
        """
        Path(save_directory, "SHA256SUMS").unlink(missing_ok=True)
        if source_files := type(self).source_files:
            self.auto_map = {"AutoConfig": f"{MODELING}.TitansConfig",
                             "AutoModelForCausalLM": f"{MODELING}.TitansForCausalLM"}  # fmt: skip
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for name, text in source_files(self.model).items():
                Path(save_directory, name).write_text(text, encoding="utf-8")
        given, self.use_cache = self.use_cache, True
        try:
            return super().save_pretrained(save_directory, *rest, **options)
        finally:
            self.use_cache = given


@dataclass
class TitansOutput(ModelOutput):
    """Output of a call.

    loss: a scalar, if labels were given. logits: (B, T, vocab_size).
    past_key_values: the state after the last token, under the name that transformers' own loops use.
    hidden_states: if requested, n_layers + 1 tensors (B, T, d_model): the input of each block, then of the head.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def state(self) -> Any:
        """The state after the last token."""
        return self.past_key_values


class TitansForCausalLM(PreTrainedModel, GenerationMixin):
    """titans_pt's language model with Hugging Face's calls.

    The tokenizer pads prompts of different lengths on the left and returns an attention mask; the memory begins at the
    first token of each prompt.
    """

    config_class = TitansConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Block"]
    _supported_generation_modes = [
        GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE,
    ]  # fmt: skip
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = build_model(config.model)
        # post_init() ties them again: transformers regards one tensor with two names as loaded when neither name was.
        self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())
        self.gradient_checkpointing = False
        # A model without a checkpoint starts at the end of its schedules: the length of its future training is unknown.
        # The same holds for folders of older versions, which do not have the length of theirs.
        steps = config.settings.get("train", {}).get("max_steps")
        exported = bool(config.step or config.checkpoint_hash)
        self.model.blocks.set_progress(config.step / steps if exported and steps else 1.0)
        self.post_init()

    def _init_weights(self, module):
        """Do nothing: the model has initialised itself."""

    def _initialize_missing_keys(self, *rest: Any):
        """Initialise weights that a folder lacks as in an untrained model."""
        missing = [name for name, p in self.model.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        if missing:
            fresh = dict(build_model(self.config.model).named_parameters())
            for name in missing:
                self.model.get_parameter(name).data.copy_(fresh[name])
        super()._initialize_missing_keys(*rest)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self):
        return self.model.embedding

    def set_input_embeddings(self, value):
        self.model.embedding = value

    def get_output_embeddings(self):
        return self.model.head

    def set_output_embeddings(self, new_embeddings):
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *sizes: Any, **options: Any):
        embedding = super().resize_token_embeddings(*sizes, **options)
        self.model.tokens = embedding.num_embeddings
        return embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        state: Any = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> TitansOutput | tuple:
        """Compute logits for whole sequences, or for the tokens that come after a state.

        Args:
            input_ids: (B, T) int64.
            state: the state that an earlier call returned; ``past_key_values`` is another name for it.
            labels: (B, T), shifted here; -100 is ignored.
            attention_mask: (B, T), 0 for padding on the left or on the right. Logits of padding mean nothing, and its
                labels are ignored. With a state the mask may also cover the tokens before.
            logits_to_keep: number of final tokens to return logits for, or a tensor of positions; 0: all.
            use_cache: whether to return the state; None: the config's value. Rows padded on the right have no state.
            num_items_in_batch: divides the sum of the loss over all labels, in place of a mean. It is the Trainer's
                count of labels over all micro-batches of a step. The count includes a first token after padding on the
                left, which nothing predicts: under gradient accumulation the loss is smaller by that share.

        Raises:
            ValueError: a mask that hides tokens other than padding; an argument that means nothing here.
            TypeError: an unknown argument; a state of another kind, such as transformers' DynamicCache.
        """
        _refuse(others)
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("logits_to_keep: given with labels, whose loss needs all logits; leave one out")
        if input_ids is None:
            raise ValueError("input_ids: missing; pass token ids (B, T)")
        if past_key_values is not None:
            if state is not None:
                raise ValueError("state, past_key_values: two names of one thing; give one")
            state = past_key_values
        if state is not None and not hasattr(state, "blocks"):
            raise TypeError(f"state: given a {type(state).__name__}; a call changes no state and no cache: pass none "
                            "at first, then the state (or past_key_values) of the last output")  # fmt: skip
        if state is not None:  # not earlier: it changes the class name by which FSDP and device_map find blocks
            put_on(self.model.blocks)
        # A caller with a state wants the next one, even if the Trainer has left use_cache=False in the config.
        keep = (self.config.use_cache or state is not None) if use_cache is None else use_cache
        starts = {}
        if attention_mask is not None and not bool(attention_mask.all()):
            shown, begins = _rows(attention_mask, input_ids, state)
            if not bool(shown[:, -1].all()):
                if use_cache:
                    raise ValueError(
                        "attention_mask: hides tokens at the end of a row, after which there is no state to go on "
                        "from; pad on the left (tokenizer.padding_side='left')"
                    )
                keep = False
            if bool(begins[:, 1:].any()):
                starts = {"reset": begins.cpu()}
            if labels is not None:
                # The Trainer counts a first token after padding, which nothing predicts. A count of this batch alone is
                # corrected here. A count over several micro-batches cannot be: the others' first tokens are unknown.
                given, labels = labels, labels.masked_fill(~shown | begins, -100)
                if num_items_in_batch is not None and num_items_in_batch == _count(given):
                    num_items_in_batch = _count(labels).clamp(min=1)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        self.model.blocks.set_activation_checkpointing(self.gradient_checkpointing)
        last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1
        with self._watched(wanted) as seen:
            logits, state = self.model(input_ids, state, last_only=last_only, output_final_state=bool(keep), **starts)
        if not last_only:
            logits = logits[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch)
        hidden_states = self._hidden_states(seen, input_ids.shape[1]) if wanted else None
        output = TitansOutput(loss, logits, state, hidden_states)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    @contextmanager
    def _watched(self, wanted: bool) -> Iterator[list[Tensor]]:
        """Collects the input of each block, and the output of the last one."""
        seen: list[Tensor] = []
        hooks = []
        if wanted:
            blocks = self.model.blocks
            hooks = [block.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for block in blocks]
            hooks.append(blocks[-1].register_forward_hook(lambda _, given, result: seen.append(result[0])))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _hidden_states(self, seen: list[Tensor], length: int) -> tuple[Tensor, ...]:
        if [x.shape[1] for x in seen] != [length] * (len(self.model.blocks) + 1):
            raise ValueError("output_hidden_states: these mixers put tokens of their own between those of the text, "
                             "whose vectors alone there are not; leave it out")  # fmt: skip
        return *seen[:-1], self.model.norm(seen[-1])

    def prepare_inputs_for_generation(
        self, input_ids, state=None, past_key_values=None, attention_mask=None, use_cache=None,
        output_hidden_states=None, is_first_iteration=False, **internal,
    ):  # fmt: skip
        """Arguments of the next call: the prompt, then one token at a time; without a cache, all tokens each time."""
        if past_key_values is not None:
            input_ids, attention_mask, state = input_ids[:, -1:], None, past_key_values
        return {"input_ids": input_ids, "state": state, "attention_mask": attention_mask, "use_cache": use_cache,
                "output_hidden_states": output_hidden_states, "logits_to_keep": 1}  # fmt: skip

    def _get_deprecated_gen_repo(self, generation_mode: GenerationMode, *rest: Any) -> str | None:
        """Refuses ways of generating that do not work with a state.

        transformers calls this method first; without it most versions would send the user to code on the hub.
        """
        if generation_mode not in self._supported_generation_modes:
            raise ValueError(
                f"generate(): {generation_mode.value.replace('_', ' ')} needs to go back to earlier "
                "tokens, or is not made for a state; use greedy search, sampling or beam search"
            )
        return super()._get_deprecated_gen_repo(generation_mode, *rest)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]):
        if model_kwargs.get("past_key_values") is not None:
            raise ValueError("past_key_values: generate() goes on from a state with the tokens after it alone; pass "
                             "state=, and only the new input_ids")  # fmt: skip
        _refuse({name: model_kwargs[name] for name in _UNSERVED if name in model_kwargs})
        super()._validate_model_kwargs(model_kwargs)

    def _prepare_model_inputs(self, inputs: Tensor | None = None, bos_token_id=None, model_kwargs=None):
        ids, state = inputs, (model_kwargs or {}).get("state")
        if ids is None:
            ids = (model_kwargs or {}).get("input_ids")
        if ids is None and state is not None or ids is not None and ids.numel() == 0:
            raise ValueError("input_ids: given no token; generate() needs at least one, also after a state: read the "
                             "text without its last token, and pass this token with the state")  # fmt: skip
        return super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)

    def _expand_inputs_for_generation(self, expand_size: int = 1, **options: Any):
        """Repeat each row ``expand_size`` times, in the inputs and in the state."""
        input_ids, options = super()._expand_inputs_for_generation(expand_size=expand_size, **options)
        if expand_size > 1 and options.get("state") is not None:
            options["state"] = take_rows(options["state"], torch.arange(len(input_ids)) // expand_size)
        return input_ids, options

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """States of the beams that continue."""
        return take_rows(past_key_values, beam_idx)


# The Trainer's label smoothing shifts labels only for classes of this list, which AutoModel's register() does not fill.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TitansConfig.model_type] = TitansForCausalLM.__name__


def _count(labels: Tensor) -> Tensor:
    """Number of labels (B, T) that the Trainer counts."""
    return (labels[:, 1:] != -100).sum()


def _rows(mask: Tensor, ids: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """Two bool tensors (B, T): the tokens that a mask shows, and the first of them in every row.

    Raises:
        ValueError: a mask of another shape; one that hides tokens between others, after a state, or a whole row.
    """
    if mask.ndim == 2 and state is not None:
        mask = mask[:, -ids.shape[1] :]
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: given shape {tuple(mask.shape)}; must be that of input_ids, "
                         f"{tuple(ids.shape)}")  # fmt: skip
    shown = mask.bool()
    begins = shown.clone()
    begins[:, 1:] &= ~shown[:, :-1]
    if state is not None and not bool(shown.all()) or not bool((begins.sum(dim=1) == 1).all()):
        raise ValueError(
            "attention_mask: hides tokens between others, after a state, or a whole row; a memory reads all tokens: "
            "pad on the left (tokenizer.padding_side='left')"
        )
    return shown, begins


def _refuse(others: dict[str, Any]):
    """
    Raises:
        TypeError: an unknown argument.
        ValueError: an argument of other models.
    """
    for name, value in others.items():
        if name not in _UNSERVED:
            raise TypeError(f"{name}: no argument of a Titans model; given {value!r}")
        if value is not None and value is not False:
            raise ValueError(f"{name}: {_UNSERVED[name]}")


class TitansTokenizer(PreTrainedTokenizer):
    """data_pipeline's tokenizer with Hugging Face's calls and the same ids.

    bos comes before a text if training's documents began with it. eos_token ends a text; it is not added.

    Args:
        vocab_file: SentencePiece's model.
        tokenizer_file: a tokenizer.json. Without either file: the one in the folder ``name_or_path``.
        begin_with_bos: value of data.tokenizer.add_bos in training. (transformers drops an argument ``add_bos_token``.)

    Raises:
        ValueError: both files are given; one of them belongs to another tokenizer.
    """

    vocab_files_names = {"vocab_file": FILES[0], "tokenizer_file": FILES[1]}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self, vocab_file: str | None = None, tokenizer_file: str | None = None, eos_token: Any = None,
        begin_with_bos: bool = False, **others: Any,
    ):  # fmt: skip
        if vocab_file and tokenizer_file:
            raise ValueError(f"{vocab_file}, {tokenizer_file}: one of them is another model's; delete it")
        path = vocab_file or tokenizer_file or saved_tokenizer(Path(others["name_or_path"]))
        self.inner = load_tokenizer(path, None if eos_token is None else str(eos_token), begin_with_bos)
        self._ids = {name: i for i, name in enumerate(self.inner.names) if name}
        controls = [name for name, piece in zip(self.inner.names, self.inner.pieces, strict=True) if name and not piece]
        others.setdefault("pad_token", self.inner.names[self.inner.eos_id])  # hidden by the mask
        others.setdefault("model_max_length", LONGEST)
        # "</s>" in a text is those four letters, as in training.
        others.setdefault("split_special_tokens", True)
        if begin_with_bos:
            others["bos_token"] = self.inner.names[self.inner.bos_id]
        others |= {
            "begin_with_bos": begin_with_bos,
            "eos_token": self.inner.names[self.inner.eos_id],
            "extra_special_tokens": controls,  # skip_special_tokens hides them
            "special_tokens_pattern": "none",
            "auto_map": {"AutoTokenizer": [f"{MODELING}.TitansTokenizer", None]},
        }
        super().__init__(**others)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _add_tokens(self, new_tokens: list[Any], special_tokens: bool = False) -> int:
        """Mark tokens as special. New tokens are refused: the model has no rows for them, and no text becomes them.

        Raises:
            ValueError: a token that is not in the vocabulary.
        """
        self._check(new_tokens or [])
        return super()._add_tokens(new_tokens, special_tokens)

    def __setattr__(self, name: str, value: Any):
        if name in self.SPECIAL_TOKENS_ATTRIBUTES and value is not None:
            self._check([value])
        super().__setattr__(name, value)

    def _check(self, tokens: list[Any]):
        if unknown := [str(token) for token in tokens if str(token) and str(token) not in self._ids]:
            raise ValueError(
                f"{', '.join(unknown)}: no token of this vocabulary, which training has settled; use one "
                "of get_vocab(), such as eos_token, or train with a tokenizer that has it"
            )

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return [self.inner.names[i] for i in self.inner.encode(text)]

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None) -> list[int]:
        """Treat a pair as one text: bos comes once, before it."""
        return [*self.inner.begin, *token_ids_0, *(token_ids_1 or [])]

    def apply_chat_template(self, *given: Any, tokenizer_kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Apply transformers' chat template; control tokens that it or a message spells become control tokens."""
        spelled = {"split_special_tokens": False} | (tokenizer_kwargs or {})
        return super().apply_chat_template(*given, tokenizer_kwargs=spelled, **options)

    def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens=False) -> list[int]:
        """1 for bos and eos, 0 for text."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        return [1] * len(self.inner.begin) + [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        """
        Raises:
            IndexError: an id that no token has; Python would count a negative one from the vocabulary's end.
        """
        if not 0 <= index < self.vocab_size:
            raise IndexError(f"id {index}: not one of the {self.vocab_size} tokens; leave out labels of -100, "
                             "which stand for none")  # fmt: skip
        return self.inner.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens, with control tokens spelled out."""
        decoder = StreamDecoder(self.inner)
        text = []
        for token in tokens:
            i = self._ids[token]
            text += [decoder.push(i)] if self.inner.pieces[i] else [decoder.finish(), token]
        return "".join([*text, decoder.finish()])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        path = Path(save_directory) / self.inner.path.name
        if path.resolve() != self.inner.path.resolve():
            shutil.copyfile(self.inner.path, path)
        return (str(path),)
