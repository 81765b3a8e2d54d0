"""Checks of settings beyond their types: what mixers and tasks require of the whole tree."""

import importlib
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from titans_pt.config.history import as_stored, unless_given
from titans_pt.config.names import named, packaged
from titans_pt.config.plain import FLOAT, usual
from titans_pt.config.sections import own_section
from titans_pt.config.tree import Config
from titans_pt.config.words import known_paths, unknown_key
from titans_pt.errors import UserError


def checked(config: Config) -> Config:
    """``config`` with the sections of its mixers and its task filled in, after all of them have checked it.

    Sections of mixers and tasks that the run does not use are left out.

    Raises:
        UserError: an unknown mixer or task, a wrong setting of these, or settings that conflict.
    """
    import_modules(config.run.imports)
    # Not at the top: they import torch, which takes seconds. Preparing data, or a mistyped key, should not cost these.
    from titans_pt.models.mixers import Mixer
    from titans_pt.tasks import TASKS, Task

    task = TASKS.find(config.task)
    config = checked_model(config)
    config = _with_sections(config, "", {config.task: task}, TASKS)
    task.check(config, _need)
    mixers = {name: find_mixer(name) for name in config.model.kinds}
    for suite in config.evaluation.suites if config.evaluation.every else ():
        _need(suite in task.suites, "evaluation.suites", suite, f"allowed: {', '.join(task.suites) or 'none'}")
    if config.train.stop_when is not None:
        figure, _, _ = stop_condition(config.train.stop_when)
        _need(
            figure in task.figures,
            "train.stop_when",
            config.train.stop_when,
            f"figures of task={config.task}: {', '.join(task.figures)}",
        )
    _tensor_parallel(config, mixers)
    if config.parallel.context > 1:
        for name, mixer in mixers.items():
            _need(
                mixer.around is Mixer.around,
                "parallel.context",
                config.parallel.context,
                f"must be 1 with the mixer {name!r}, whose last block's outputs go to the first",
            )
        _need(
            task.cut is not Task.cut,
            "parallel.context",
            config.parallel.context,
            f"must be 1 with task={config.task}, whose samples cannot be cut",
        )
    return config


def checked_model(config: Config) -> Config:
    """``config`` with the sections of its mixers and its memory rule filled in, after these have checked it.

    It imports no task, because a layer in a user's own model has none.

    Raises:
        UserError: an unknown mixer, a wrong setting of a mixer or memory rule, or settings that conflict.
    """
    # Not at the top: see checked.
    from titans_pt.kernels.memory.rules import RULES
    from titans_pt.models.mixers import MIXERS
    from titans_pt.models.mixers.common import check_periods

    mixers = {name: find_mixer(name) for name in config.model.kinds}
    model = _with_defaults(config, mixers.values()).model
    rule = RULES.find(model.memory.rule)
    memory = _with_sections(model.memory, "model.memory.", {rule.name: rule}, RULES)
    model = _with_sections(model.model_copy(update={"memory": memory}), "model.", mixers, MIXERS)
    config = config.model_copy(update={"model": model})
    for mixer in mixers.values():
        mixer.check(config, _need)
    rule.check(config.model.memory, _need)
    check_periods(config, _need)
    return config


def find_mixer(name: str, setting: str = "model.mixers") -> Any:
    """The mixer of that name.

    Raises:
        UserError: there is no such mixer. If a config has this name, the message says how to start it.
    """
    from titans_pt.models.mixers import MIXERS

    try:
        return MIXERS.find(name)
    except UserError as error:
        configs = named(name)
        if not configs:
            raise UserError(str(error).replace("model.mixers", setting, 1)) from None
    mixers = next(filter(None, map(_mixers_in, configs)), [])
    give = f"--models {'+'.join(mixers)}" if setting == "--models" else f"{setting}=[{','.join(mixers)}]"
    as_it = f"set {give}, as it does, or " if mixers else ""
    starts = [f"titans {_STUDIES.get(config.partition('/')[0], 'train')} {config}" for config in configs]
    raise UserError(f"{setting}: given {name!r}, which is no mixer but a config; {as_it}start it by its name: "
                    f"{', '.join(starts)}")  # fmt: skip


_STUDIES = {"recall": "recall", "needles": "needles"}
"""Folder of configs -> their command, if it is not train."""


def mixers_of(model: str) -> list[str]:
    """Value of model.mixers for a model named with --models: ``mamba+swa`` alternates the two.

    Raises:
        UserError: a mixer is unknown.
    """
    mixers = model.split("+")
    for name in mixers:
        find_mixer(name, "--models")
    return mixers


def _mixers_in(config: str) -> list[str] | None:
    """Value of model.mixers that a packaged config itself sets, without inherited values."""
    from titans_pt.config.yaml import parse_yaml  # not at the top: layers do without PyYAML

    tree = usual(parse_yaml(packaged()[config].read_text(encoding="utf-8"), config))
    return tree.get("model", {}).get("mixers")


def _with_defaults(config: Config, mixers: Iterable[Any]) -> Config:
    """``config`` with the mixers' defaults for its sizes (Mixer.defaults), for settings that were not given."""
    found: dict[str, Any] = {}
    for mixer in mixers:
        try:
            own = mixer.defaults(config.model, config.data.seq_len)
        except ValidationError:
            continue  # the mixer's section is wrong; it is validated later
        for path, value in own.items():
            found[path] = min(value, found.get(path, value))  # the smaller number of heads fits both mixers
    for path, value in found.items():
        config = unless_given(config, path.split("."), value)
    return config


def stop_condition(text: str) -> tuple[str, str, float]:
    """Parses train.stop_when: "accuracy >= 0.99" -> ("accuracy", ">=", 0.99).

    Raises:
        UserError: it is none.
    """
    if not (parts := re.fullmatch(rf"\s*(\w+)\s*([<>]=)\s*({FLOAT.pattern})\s*", text)):
        raise UserError(f"train.stop_when: given {text!r}; write it as in 'accuracy >= 0.99'")
    return parts[1], parts[2], float(parts[3])


def completed(tree: dict) -> dict:
    """A stored tree completed with newer settings, set to the behaviour before they existed.

    A tree that is no longer valid is returned unchanged: the caller then names the differences.

    Raises:
        UserError: a setting that is gone had another value than the one that is left.
    """
    stored = as_stored(tree)
    try:
        return checked(Config.model_validate(stored)).model_dump(mode="json")
    except (ValidationError, UserError):
        return tree


def _with_sections(section: Any, prefix: str, owners: dict[str, Any], registry: Any) -> Any:
    """``section`` with complete sections for ``owners`` (mixers, rules or tasks), and no other sections."""
    found = {}
    for name, values in (dict.fromkeys(owners, {}) | section.__pydantic_extra__).items():
        if name not in owners and name not in registry.names():
            known = [*known_paths(type(section), prefix), *(prefix + owner for owner in registry.names())]
            raise UserError(unknown_key(prefix + name, values, known, flat="." in name))
        own = own_section(values, registry.find(name).Settings, prefix + name).model_dump(mode="json")
        if own and name in owners:
            found[name] = own
    tree = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section).model_construct(section.model_fields_set | found.keys(), **tree, **found)


def _need(ok: bool, path: str, given: Any, allowed: str):
    if not ok:
        raise UserError(f"{path}: given {given!r}; {allowed}")


def _tensor_parallel(config: Config, mixers: dict[str, Any]):
    model, tensor = config.model, config.parallel.tensor
    if tensor == 1:
        return
    for name, mixer in mixers.items():
        _need(
            mixer.sharding is not None,
            "parallel.tensor",
            tensor,
            f"the mixer {name!r} does not say how it is cut over tensor ranks; set parallel.tensor=1",
        )
    split = {path: size for mixer in mixers.values() for path, size in mixer.split_sizes(model).items()}
    split |= {"model.mlp_hidden": model.hidden}
    split |= {"model.memory.n_heads": model.memory_heads} if model.mlp_periods else {}
    if config.parallel.sequence:
        split["data.seq_len"] = config.data.seq_len // config.parallel.context
    for path, size in split.items():
        _need(
            size % tensor == 0,
            "parallel.tensor",
            tensor,
            f"must divide {path}={size}, which is split over the tensor ranks; set it to "
            f"{math.gcd(tensor, *split.values())}, or change {path}",
        )


def import_modules(names: Iterable[str]):
    """Imports the modules of run.imports, also from the working directory.

    Raises:
        UserError: a module cannot be imported.
    """
    for name in names:
        if "/" in name or name.startswith(".") or name.endswith(".py"):
            module = PurePath(name).name.removesuffix(".py")
            raise UserError(
                f"run.imports: given {name!r}, a file; name the module, such as {module}, and start in the folder that "
                "holds it"
            )
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)  # an installed program does not search the working directory by itself
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"run.imports: given {name!r}, which cannot be imported ({error}); install it, or start in the "
                "folder that holds it"
            ) from None
