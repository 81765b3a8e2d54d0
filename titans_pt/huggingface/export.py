"""Export a run's checkpoint as a Hugging Face folder; import such a folder, or a Llama-like model, as a run."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from titans_pt.config import Config
from titans_pt.config.checks import import_modules
from titans_pt.config.files import validated
from titans_pt.config.history import as_stored
from titans_pt.data_pipeline.tokenizers import FILES, saved_tokenizer
from titans_pt.data_pipeline.tokenizers.chat import answer_ends
from titans_pt.errors import UserError
from titans_pt.huggingface.card import model_card
from titans_pt.huggingface.llama import NAMES, model_type, read_llama, source_of
from titans_pt.huggingface.modeling import TitansConfig, TitansForCausalLM, TitansTokenizer
from titans_pt.huggingface.source import CARRIED, HEAD
from titans_pt.layers.lora import merged
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import load_run, with_rows
from titans_pt.runs.written import check_new, write_run
from titans_pt.tools.files import naming
from titans_pt.tools.locks import folder_locked
from titans_pt.tools.tensor_files import check_sums, write_sums
from titans_pt.training.transfer import counted_rows

_UNFINISHED = ".export-"
"""Prefix of the temporary folder in which an export is built; a leftover folder means that the export was cut short."""
_EXPORTED = (*FILES, "model*.safetensors", "model.safetensors.index.json", "generation_config.json", "chat_template*",
             "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # fmt: skip
"""Files that decide what is loaded, besides config.json and the code."""


def export_run(run_dir: str | Path, folder: str | Path, step: int | None = None) -> Path:
    """Write config.json, model.safetensors, the tokenizer, the model's source files and a model card to ``folder``.

    An earlier export there is replaced completely; files that do not belong to it stay. config.json is written last:
    without it, readers refuse a folder whose export was cut short.

    Raises:
        UserError: ``folder`` is a file, or holds a run, or a model or tokenizer that is not an export; or another
            export is at work there; or ``load_run`` refuses the run.
    """
    folder = Path(folder)
    _replaced(folder)  # refuses before the work
    run = load_run(run_dir, step, precision="fp32")
    given = run.config.data.tokenizer
    tokenizer = TitansTokenizer(
        str(run.tokenizer.path), eos_token=given.eos_token, begin_with_bos=given.add_bos,
        chat_template=run.tokenizer.chat_template,
    )  # fmt: skip
    # The embedding and the head get as many rows as the tokenizer has entries: other rows are padding. Adapters are
    # merged into the weights.
    exact = run.config.model.model_copy(update={"vocab_size": run.tokenizer.vocab_size, "lora": None})
    run = replace(run, config=run.config.model_copy(update={"model": exact}))
    ends = answer_ends(run.tokenizer)
    config = TitansConfig(
        published(run.config), run.step, run.checkpoint_hash, run.tokenizer.sha256,
        eos_token_id=ends if len(ends) > 1 else ends[0],
        bos_token_id=next(iter(run.tokenizer.begin), None), pad_token_id=run.tokenizer.eos_id, dtype="float32",
    )  # fmt: skip
    model = TitansForCausalLM(config)
    rows = dict.fromkeys(counted_rows(run.model), exact.vocab_size)
    weights = merged(run.model).items()
    model.model.load_state_dict({name: with_rows(p, rows[name]) if name in rows else p for name, p in weights})
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder), folder_locked(folder, "--out", "titans export"):
        stale = _replaced(folder)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=_UNFINISHED))
        try:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            (scratch / "README.md").write_text(model_card(replace(run, model=model.model)), encoding="utf-8")
            write_sums(scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        # From here on the folder is half an export, which the next one may replace as long as scratch is there.
        for path in stale:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for file in sorted(scratch.iterdir(), key=lambda file: (file.name == "config.json", file.name)):
            file.chmod(0o666 & ~_umask())  # only the owner can read the file that safetensors creates
            os.replace(file, folder / file.name)
        scratch.rmdir()
    return folder


def _replaced(folder: Path) -> list[Path]:
    """Files of an earlier export in ``folder``, config.json first.

    Raises:
        UserError: ``folder`` is a file, or holds a run, or a model or tokenizer that is not an export.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; name a folder")
    if RunFolder(folder).config.exists():
        raise UserError(f"--out {folder}: holds a run; name another folder")
    cut = sorted(folder.glob(f"{_UNFINISHED}*"))
    config = folder / "config.json"
    ours = [path for pattern in _EXPORTED for path in sorted(folder.glob(pattern))]
    if config.exists():
        ours = [config, *ours]
    if ours and not cut and model_type(folder) != TitansConfig.model_type:
        raise UserError(f"--out {folder}: holds {ours[0].name}, which titans export did not write; name another folder")
    return [*ours, *(path for path in folder.glob("*.py") if _carried(path)), *cut]


def _carried(path: Path) -> bool:
    """Whether a Python file is one that exports carry."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return path.stem == CARRIED or HEAD.match(file.readline()) is not None


def published(config: Config) -> dict:
    """Settings of a run for an exported folder: all that the model and its tokenizer need, no path of this machine.

    User modules, which define the model's own mixers and rules, are only named, for :func:`import_run`.
    """
    tree = config.model_dump(mode="json")
    tokenizer = {key: tree["data"]["tokenizer"][key] for key in ("eos_token", "add_bos")}
    data = {key: tree["data"][key] for key in ("seq_len", "reset_at_documents")}
    train = {key: tree["train"][key] for key in ("precision", "batch_tokens", "max_steps", "warmup_steps")}
    settings = {"task": tree["task"], "model": tree["model"], "data": data | {"tokenizer": tokenizer}, "train": train}
    return settings | ({"run": {"imports": config.run.imports}} if config.run.imports else {})


def import_run(folder: str | Path, run_dir: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Write a run folder from a folder of :func:`export_run`, or from a Llama-like model, and return it.

    The run can evaluate, generate, inspect, and start training; it has no optimiser state.

    Args:
        folder: a folder with config.json, or a GGUF file.
        overrides: ``key=value`` settings, such as data.dir, which an exported folder does not hold. run.imports names
            the modules of the model's own mixers and rules, if they differ from those that the folder names.

    Raises:
        UserError: ``folder`` is neither of these, or its model cannot be computed exactly; ``run_dir`` already holds a
            run; or a module cannot be imported.
    """
    folder, run = Path(folder), RunFolder(run_dir)
    check_new(run)
    if (source := source_of(folder)) is not None:
        with tempfile.TemporaryDirectory() as scratch:
            found = read_llama(source, Path(scratch))
            tree = found.settings | {"task": "language", "run": {"dir": str(run.path)}}
            tree["data"]["tokenizer"]["path"] = str(run.path / found.tokenizer.name)
            return write_run(run, validated(tree, overrides), found.weights, found.tokenizer, step=0)
    tokenizer = _check_exported(folder)
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))["settings"]
    own = [word for word in overrides if word.startswith("run.imports=")]
    import_modules(validated({"run": told.get("run", {})}, own, model=False).run.imports)
    try:
        model, found = TitansForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (SafetensorError, ValidationError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder}: damaged, or of a later version ({' '.join(str(error).split())[:200]}); copy or export it again"
        ) from None
    if different := sorted({*found["missing_keys"], *found["unexpected_keys"], *map(str, found["mismatched_keys"])}):
        raise UserError(
            f"{folder}: its weights are not those of the model in config.json: {len(different)} differ, "
            f"such as {different[0]}; copy or export it again"
        )
    stored = as_stored(model.config.settings)
    data = stored.get("data", {})
    own = data.get("tokenizer", {}) | {"path": str(run.path / tokenizer.name)}  # titans prepare must use this file
    stored |= {"run": stored.get("run", {}) | {"dir": str(run.path)}, "data": data | {"tokenizer": own}}
    settings = validated(stored, overrides)
    return write_run(run, settings, dict(model.model.named_parameters()), tokenizer, model.config.step)


def _check_exported(folder: Path) -> Path:
    """Check an exported folder and return its tokenizer's file.

    Raises:
        UserError: ``folder`` is not a complete folder of :func:`export_run`, or its tokenizer is not the model's.
    """
    wrong = f"name a folder that titans export wrote, or one of a model of type {NAMES}"
    if any(folder.glob(f"{_UNFINISHED}*")):
        raise UserError(f"{folder}: an export into it was cut short; export again")
    for name in ("config.json", "model*.safetensors", saved_tokenizer(folder).name):
        if not any(folder.glob(name)):
            raise UserError(f"{folder}: holds no {name}; {wrong}")
    check_sums(folder)
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = tree.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise UserError(f"{folder / 'config.json'}: not JSON with fields; {wrong}") from None
    if kind != TitansConfig.model_type or not isinstance(tree.get("settings"), dict):
        raise UserError(
            f"{folder / 'config.json'}: has no settings with the model_type {TitansConfig.model_type!r}; {wrong}"
        )
    found = [folder / name for name in FILES if (folder / name).is_file()]
    trained = tree.get("tokenizer_hash")
    if trained:
        found = [path for path in found if hashlib.sha256(path.read_bytes()).hexdigest() == trained]
        if not found:
            raise UserError(
                f"{saved_tokenizer(folder)}: not the tokenizer of this model (sha256 {trained[:12]}...); "
                "copy or export it again"
            )
    elif len(found) > 1:  # the config.json of older folders has no tokenizer_hash
        raise UserError(
            f"{folder}: holds {' and '.join(path.name for path in found)}; delete the one that is not this model's"
        )
    return found[0]


def _umask() -> int:
    """The process's umask; the system reports it only when it is set."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
