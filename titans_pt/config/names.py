"""Names of config files: those that come with the package, and the one in a run's folder."""

import difflib
import os
from pathlib import Path

from titans_pt.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
"""configs/ of the repository."""
SETTINGS, ABOUT = "config.yaml", "versions.json"
"""Files of a run's folder with its settings, and with the versions that made it."""
STARTED_IN = "started in"
"""Key of ABOUT for the folder in which the run was started."""


def is_of_a_run(path: Path) -> bool:
    """Whether ``path`` is the config.yaml that a run keeps in its folder."""
    return path.name == SETTINGS and os.path.isfile(path.parent / ABOUT)  # False in a folder that may not be entered


def packaged() -> dict[str, Path]:
    """Name, such as 170m/mac -> file, for all packaged configs."""
    return {file.relative_to(CONFIGS).with_suffix("").as_posix(): file for file in sorted(CONFIGS.rglob("*.yaml"))}


def named(last: str) -> list[str]:
    """Names of packaged configs whose last part is ``last``."""
    return [name for name in packaged() if name.rpartition("/")[2] == last]


def find_config(name: str | Path, folder: Path = Path()) -> Path:
    """The file that ``name`` stands for: an existing path (relative to ``folder``), or else a config of the package.

    ``170m/mac``, ``170m/mac.yaml`` and ``configs/170m/mac.yaml`` all name the same config.

    Raises:
        UserError: neither exists; the message suggests the nearest names.
    """
    path = folder / name
    if path.exists() and not path.is_dir():
        return path
    asked = Path(name).as_posix().removeprefix("configs/").removesuffix(".yaml")
    file = CONFIGS / f"{asked}.yaml"
    if file.is_relative_to(CONFIGS) and ".." not in file.parts and file.is_file():
        return file
    known = packaged()
    near = (
        named(asked)  # the right name without its folder
        or difflib.get_close_matches(asked, known, n=3, cutoff=0.5)
        or dict.fromkeys(f"{each.partition('/')[0]}/*" if "/" in each else each for each in known)
    )
    problem = "is a folder" if path.is_dir() else "does not exist"
    if path.is_dir() and (path / SETTINGS).is_file():
        problem += f" (its settings are {path / SETTINGS})"
    raise UserError(
        f"config {path}: {problem}; name a YAML file, or a config that comes with titans-pt: {', '.join(near)}"
    )
