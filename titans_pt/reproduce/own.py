"""Models of a user in a study: each is named by a config file, and compared with the study's models."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titans_pt.config import Config
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.reproduce.study import Row, Study


def is_own(word: str) -> bool:
    """Whether a word of --models is a config file, not the name of a study's model."""
    return Path(word).suffix in (".yaml", ".yml")


def name_of(word: str) -> str:
    """Name of the model that a word of --models names: a file's name without its ending."""
    return Path(word).stem if is_own(word) else word


def with_own(study: Study, files: Sequence[str], words: Sequence[str]) -> Study:
    """``study`` with the models of these config files: each has the rows that all models of the study have.

    Args:
        words: KEY=VALUE settings of every run.

    Raises:
        UserError: a model has the name of another or other data; or the study's models share no row.
    """
    if not files:
        return study
    known = list(dict.fromkeys(row.model for row in study.rows))
    rows = [{_content(row): row for row in study.rows if row.model == model} for model in known]
    shared = [row for content, row in rows[0].items() if all(content in each for each in rows)]
    if not shared:
        raise UserError(f"--models: given {files[0]!r}; the models of {study.target} share no row that an own model "
                        "could have; choose another target, such as table1")  # fmt: skip
    own: dict[str, str] = {}
    for file in files:
        name = name_of(file)
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UserError(f"--models: given {file!r}, whose name becomes that of its runs; rename the file to "
                            "letters, digits, '.', '_' and '-'")  # fmt: skip
        if name in known or name in own:
            raise UserError(f"--models: given {file!r}, but there is another model named {name!r}; rename the file")
        _check_alike(study, file, words)
        own[name] = file
    return replace(study, rows=(*study.rows, *(replace(row, model=name) for name in own for row in shared)), own=own)


def _content(row: Row) -> tuple:
    return row.variant, row.settings, row.after


def _check_alike(study: Study, file: str, words: Sequence[str]):
    """Raises UserError unless ``file`` has the settings that must be equal for figures of two models to compare."""
    beside = study.config(study.rows[0].model)
    ours, theirs = (_compared(load_config(each, words)) for each in (file, beside))
    for key, value in theirs.items():
        if ours[key] != value:
            raise UserError(f"{file}: {key} is {ours[key]!r}, and that of the models of {study.target} is {value!r}; "
                            f"begin the file with inherit: {beside}.yaml, or leave the setting out of it")  # fmt: skip


def _compared(config: Config) -> dict[str, object]:
    return {
        "task": config.task, "data.dir": config.data.dir, "data.seq_len": config.data.seq_len,
        "train.batch_tokens": config.train.batch_tokens, "train.max_steps": config.train.max_steps,
    }  # fmt: skip
