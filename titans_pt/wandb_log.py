"""Logging to Weights & Biases, whose failures never stop a run."""

import logging
import secrets
from pathlib import Path
from typing import Any

from titans_pt.config import Config
from titans_pt.run_folder import RunFolder

INIT_TIMEOUT = 30.0
"""Seconds for which a run tries to reach the server when it starts."""
log = logging.getLogger(__name__)


class WandbLog:
    """Sends metrics to W&B, online or to files in the run folder; after any failure it warns once and stops sending.

    A server that cannot be reached when the run starts, or refuses the login, is a warning, too: the metrics are then
    kept in the run folder for ``wandb sync``. So is the run's id, so that a resumed run continues the same curves.
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
            mode = resolve_mode(config.wandb.mode)
            if mode == "disabled":
                return
            self.id = run_id or (id_file.read_text().strip() if id_file.is_file() else secrets.token_hex(4))
            id_file.write_text(self.id + "\n")
            try:
                self._run = self._init(config, folder, mode)
            except Exception as error:
                if mode == "offline":
                    raise
                text = "W&B is not online (%s); metrics are kept for `wandb sync` in %s"
                log.warning(text, _line(error), folder.wandb)
                import wandb

                wandb.teardown()  # its service still holds the id
                self._run = self._init(config, folder, "offline")
        except (Exception, SystemExit) as error:
            self._give_up(error)

    def _init(self, config: Config, folder: RunFolder, mode: str) -> Any:
        import wandb

        return wandb.init(
            id=self.id,
            resume="allow",
            project=config.wandb.project,
            entity=config.wandb.entity,
            name=config.wandb.name or folder.path.resolve().name,
            dir=str(folder.path),
            mode=mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT),
        )

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
        log.warning("W&B is off for the rest of this run (wandb.mode=disabled avoids this): %s", _line(error))


def resolve_mode(mode: str) -> str:
    """What "auto" stands for on this machine; other modes are as they are.

    That of WANDB_MODE or `wandb offline`, where there is one; else online if wandb finds a login for its server
    (WANDB_BASE_URL) wherever it keeps logins, and offline if not.
    """
    if mode != "auto":
        return mode
    import wandb

    chosen = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if chosen == "online" and not wandb.login(prompt=False, verify=False):
        return "offline"
    return chosen


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
