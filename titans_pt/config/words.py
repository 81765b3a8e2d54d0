"""Dotted paths of settings, and one-line messages about wrong settings."""

import difflib
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from titans_pt.config.plain import as_list, usual
from titans_pt.config.tree import Config


def known_paths(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted paths of all sections and settings, in the order of their declaration."""
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        inside = "." if isinstance(field.annotation, UnionType) else ".0."  # a section or null, or a list of sections
        for kind, dot in ((field.annotation, "."), *((item, inside) for item in get_args(field.annotation))):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                paths += known_paths(kind, prefix + name + dot)
    return paths


def one_line(error: ValidationError, prefix: str = "", section: type[BaseModel] = Config) -> str:
    """A message with the first error of a tree and the number of further errors.

    ``section`` is the type of the tree and ``prefix`` its path.
    """
    first, *others = _with_alternatives_joined(error.errors())
    path = prefix + ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    known = known_paths(section, prefix)
    # These places take sections of mixers, memory rules and tasks: a plain value can only be a mistyped setting.
    open_sections = ((), ("model",), ("model", "memory"))
    mistyped = first["type"] == "dict_type" and first["loc"][:-1] in open_sections and path not in known
    flat = "." in str(first["loc"][-1]) if first["loc"] else False
    if first["type"] == "extra_forbidden" or mistyped or (flat and first["type"] == "dict_type"):
        return unknown_key(path, first["input"], known, flat) + more
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        path = path.rstrip(".")
        return f"{path}.{message}{more}" if path else f"{message}{more}"
    given = _short(first["input"])
    allowed = _ALLOWED.get(first["type"], first["msg"].replace("\n", " "))
    if first["type"] == "list_type" and not isinstance(first["input"], dict | type(None)):
        allowed += f", such as {as_list(str(first['input']))}"
    return f"{path}: given {given}; allowed: {allowed}{more}"


_ALLOWED = {
    "dict_type": "a section, which has settings under it",
    "model_type": "a section, which has settings under it",
    "model_attributes_type": "a section, which has settings under it",
    "list_type": "a list",
    "bool_type": "true or false",
    "string_type": "a text",
}
"""pydantic's error name -> allowed values in plain words, for errors that pydantic describes in Python's terms."""


def _with_alternatives_joined(errors: list[ErrorDetails]) -> list[dict[str, Any]]:
    """Joins the errors of a value that fits no alternative of its setting (``"auto" | int``) into one error.

    pydantic gives one error per alternative, named at the end of the place: ('train', 'resume', "literal['auto']").
    """
    joined: dict[tuple, dict[str, Any]] = {}
    for error in errors:
        *place, last = error["loc"] or ("",)
        alternative = isinstance(last, str) and last.startswith(("literal[", "constrained-"))
        loc = tuple(place) if alternative else error["loc"]
        message = error["msg"].removeprefix("Input should be ")
        if alternative and loc in joined:
            message = f"{joined[loc]['msg']}, or {message}"
        joined[loc] = {**error, "loc": loc, "msg": message}
    return list(joined.values())


def _short(value: Any) -> str:
    text = repr(usual(value))
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(path: str, given: Any, known: list[str], flat: bool = False) -> str:
    """Message for a key that is not a setting.

    Args:
        flat: the key itself has dots, as on the command line.
    """
    if flat and (path in known or path.split(".")[0] in known):
        *sections, key = path.split(".")
        tree = f"{': {'.join([*sections, key])}: {_short(given)}{'}' * len(sections)}"
        return f"{path}: a key with dots is for the command line; write it in the file as {tree}"
    parent, _, leaf = path.rpartition(".")
    here = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == parent}
    anywhere = {p.rpartition(".")[2]: p for p in reversed(known)} | here
    near = anywhere.get(leaf)  # the right name in the wrong section
    if near is None and NAMES_ELSEWHERE.get(leaf) in known:
        near = NAMES_ELSEWHERE[leaf]
    for names, cutoff in ((here, 0.6), (anywhere, 0.75)):
        if near is None and (found := difflib.get_close_matches(leaf, list(names), n=1, cutoff=cutoff)):
            near = names[found[0]]
    unknown = f"{path}: unknown key (given {_short(given)})"
    if near:
        return f"{unknown}; nearest known key: {near}"
    if not here:
        return f"{unknown}; {parent or 'this section'} has no settings of its own"
    return f"{unknown}; {parent or 'the config'} has {', '.join(here)}"


NAMES_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "max_lr"), "train.lr"),
    **dict.fromkeys(("batch_size", "global_batch_size", "gradient_accumulation_steps"), "train.batch_tokens"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "train.micro_batch"),
    **dict.fromkeys(("steps", "max_iters", "train_iters", "num_train_epochs", "epochs"), "train.max_steps"),
    **dict.fromkeys(("warmup", "warmup_ratio", "warmup_iters"), "train.warmup_steps"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad_norm", "gradient_clipping"), "train.clip"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_decay_style", "scheduler"), "train.schedule"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_interval"), "train.checkpoint_every"),
    **dict.fromkeys(("eval_steps", "eval_interval"), "train.eval_every"),
    **dict.fromkeys(("logging_steps", "log_interval"), "train.log_every"),
    **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16"), "train.precision"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "train.activation_checkpointing"),
    **dict.fromkeys(("hidden_size", "dim", "n_embd"), "model.d_model"),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "n_layer"), "model.n_layers"),
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_head"), "model.n_heads"),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "d_ff"), "model.mlp_hidden"),
    **dict.fromkeys(("sliding_window", "window_size"), "model.window"),
    **dict.fromkeys(("seq_length", "sequence_length", "max_seq_len", "block_size"), "data.seq_len"),
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel", "tp", "tp_size"), "parallel.tensor"),
    **dict.fromkeys(("context_parallel_size", "context_parallel", "cp", "cp_size"), "parallel.context"),
    **dict.fromkeys(("stage", "zero"), "parallel.zero_stage"),
    **dict.fromkeys(("output_dir", "save_dir", "out_dir", "save"), "run.dir"),
}
"""Name in other trainers -> the setting here."""
