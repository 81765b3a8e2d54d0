"""Logging to Weights & Biases, whose failures never stop a run."""

import logging
import netrc
import os
import secrets
from pathlib import Path
from typing import Any

from titans_pt.config import Config
from titans_pt.run_folder import RunFolder

log = logging.getLogger(__name__)


class WandbLog:
    """Sends metrics to W&B, online or to files in the run folder; after any failure it warns once and stops sending.

    The run id is kept in the run folder, so that a resumed run continues the same curves.
    """

    def __init__(self, config: Config, folder: RunFolder, run_id: str | None):
        """
        Args:
            run_id: of the checkpoint that is resumed; None takes the run folder's, or makes a new one.
        """
        self.id = None
        self._run = None
        if config.wandb.mode == "disabled":
            return
        id_file = folder.path / "wandb-id.txt"
        try:
            import wandb

            self.id = run_id or (id_file.read_text().strip() if id_file.is_file() else secrets.token_hex(4))
            id_file.write_text(self.id + "\n")
            self._run = wandb.init(
                id=self.id,
                resume="allow",
                project=config.wandb.project,
                entity=config.wandb.entity,
                name=config.wandb.name or folder.path.resolve().name,
                dir=str(folder.path),
                mode=resolve_mode(config.wandb.mode),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True, console="off", init_timeout=30),
            )
        except (Exception, SystemExit) as error:
            self._give_up(error)

    def write(self, step: int, values: dict[str, Any]):
        if self._run is None:
            return
        try:
            self._run.log({k: v for k, v in values.items() if v is not None}, step=step)
        except Exception as error:
            self._give_up(error)

    def send(self, name: str, kind: str, folder: Path):
        """Sends a folder's files as an artifact ``name`` of type ``kind``; W&B takes a copy of them first."""
        if self._run is None:
            return
        try:
            import wandb

            artifact = wandb.Artifact(f"{self.id}-{name}", kind)
            artifact.add_dir(str(folder))
            self._run.log_artifact(artifact)
        except Exception as error:
            self._give_up(error)

    def close(self):
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: BaseException):
        self._run = None
        reason = " ".join(str(error).split()) or type(error).__name__
        log.warning("W&B is off for the rest of this run (wandb.mode=disabled avoids this): %s", reason[:300])


def resolve_mode(mode: str) -> str:
    """auto -> online when an API key is set or stored in a netrc file, else offline; others as they are."""
    if mode != "auto":
        return mode
    return "online" if os.environ.get("WANDB_API_KEY") or _stored_login() else "offline"


def _stored_login() -> bool:
    for path in (os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"):
        try:
            if path and netrc.netrc(path).authenticators("api.wandb.ai"):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
