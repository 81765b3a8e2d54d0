"""A checkpoint of a run as a Hugging Face folder, and such a folder as a run."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from titans_pt import checkpoints
from titans_pt.config import Config, config_hash
from titans_pt.config_file import validated
from titans_pt.config_history import as_stored
from titans_pt.data_pipeline.tokenizers import saved_tokenizer
from titans_pt.errors import UserError
from titans_pt.huggingface.card import model_card
from titans_pt.huggingface.modeling import TitansConfig, TitansForCausalLM, TitansTokenizer
from titans_pt.huggingface.source import MODELING, source_files
from titans_pt.run import load_run
from titans_pt.run_folder import RunFolder
from titans_pt.tasks.language import keep_tokenizer


def export_run(run_dir: str | Path, folder: str | Path, step: int | None = None) -> Path:
    """Writes config.json, model.safetensors, the tokenizer, the model's source files and a model card to ``folder``.

    Files of these names that are in the folder are replaced, others stay.

    Raises:
        UserError: ``folder`` is a file, or what ``load_run`` finds wrong with the run.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; name a folder")
    run = load_run(run_dir, step, precision="fp32")
    given = run.config.data.tokenizer
    tokenizer = TitansTokenizer(
        str(run.tokenizer.path), eos_token=given.eos_token, begin_with_bos=given.add_bos
    )
    config = TitansConfig(
        published(run.config), run.step, run.checkpoint_hash, eos_token_id=run.tokenizer.eos_id,
        bos_token_id=next(iter(run.tokenizer.begin), None), pad_token_id=run.tokenizer.eos_id, dtype="float32",
        auto_map={"AutoConfig": f"{MODELING}.TitansConfig", "AutoModelForCausalLM": f"{MODELING}.TitansForCausalLM"},
    )  # fmt: skip
    model = TitansForCausalLM(config)
    model.model.load_state_dict(run.model.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for name, text in source_files(run.config.model).items():
            Path(scratch, name).write_text(text, encoding="utf-8")
        _add(Path(scratch, "tokenizer_config.json"), auto_map={"AutoTokenizer": [f"{MODELING}.TitansTokenizer", None]})
        Path(scratch, "README.md").write_text(model_card(run), encoding="utf-8")
        for file in sorted(Path(scratch).iterdir()):
            file.chmod(0o666 & ~_umask())  # safetensors makes its file for the owner alone
            os.replace(file, folder / file.name)
    return folder


def published(config: Config) -> dict:
    """What an exported folder tells of a run's settings: all that the model and its tokenizer need, no path of this
    machine, and nothing of the user."""
    tree = config.model_dump(mode="json")
    tokenizer = {key: tree["data"]["tokenizer"][key] for key in ("eos_token", "add_bos")}
    data = {key: tree["data"][key] for key in ("seq_len", "reset_at_documents")}
    train = {key: tree["train"][key] for key in ("precision", "batch_tokens", "max_steps", "warmup_steps")}
    return {"task": tree["task"], "model": tree["model"], "data": data | {"tokenizer": tokenizer}, "train": train}


def import_run(folder: str | Path, run_dir: str | Path, overrides: Sequence[str] = ()) -> Path:
    """The run folder of what :func:`export_run` wrote: to evaluate, generate, inspect, and to start training from; it
    has no optimiser's state.

    Args:
        overrides: ``key=value`` settings, such as data.dir, which an exported folder does not tell.

    Raises:
        UserError: nothing that export wrote is there, or ``run_dir`` holds a run already.
    """
    folder, run = Path(folder), RunFolder(run_dir)
    _check_exported(folder)
    if run.config.exists():
        raise UserError(f"{run.path}: holds a run already; name another folder")
    tokenizer = saved_tokenizer(folder)
    try:
        model, found = TitansForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (SafetensorError, ValidationError) as error:
        raise UserError(f"{folder}: damaged, or of a later version ({' '.join(str(error).split())[:200]}); copy or "
                        "export it again") from None
    if different := sorted({*found["missing_keys"], *found["unexpected_keys"], *map(str, found["mismatched_keys"])}):
        raise UserError(f"{folder}: its weights are not those of the model in config.json: {len(different)} differ, "
                        f"such as {different[0]}; copy or export it again")
    stored = as_stored(model.config.settings)
    settings = validated(stored | {"run": stored.get("run", {}) | {"dir": str(run.path)}}, overrides)
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


def _check_exported(folder: Path):
    """
    Raises:
        UserError: ``folder`` is not one that :func:`export_run` wrote.
    """
    wrong = "name a folder that titans export wrote"
    for name in ("config.json", "model*.safetensors", saved_tokenizer(folder).name):
        if not any(folder.glob(name)):
            raise UserError(f"{folder}: holds no {name}; {wrong}")
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = tree.get("model_type")
    except (ValueError, AttributeError):
        raise UserError(f"{folder / 'config.json'}: not JSON with fields; {wrong}") from None
    if kind != TitansConfig.model_type or not isinstance(tree.get("settings"), dict):
        raise UserError(f"{folder}: holds a model of type {kind!r}, and only Titans can be imported; {wrong}")


def _add(path: Path, **entries):
    """Adds entries to a JSON file."""
    tree = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _umask() -> int:
    """The process's umask, which the system tells only to those who set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
