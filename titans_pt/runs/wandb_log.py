"""Logging to Weights & Biases, whose failures never stop a run."""

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from titans_pt.config import Config, WandbConfig
from titans_pt.errors import UserError
from titans_pt.runs.checkpoints import list_checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.tools.files import check_room, write_text

INIT_TIMEOUT = 30.0
"""Seconds that a starting run tries to reach the server."""
FINISH_TIMEOUT = 600.0
"""Seconds that an ending run waits for W&B, which itself tries for hours; WANDB_FINISH_TIMEOUT replaces it."""
_MODES = {"online": "online", "offline": "offline", "disabled": "disabled", "shared": "shared", "dryrun": "offline",
          "run": "online"}  # fmt: skip
"""Values of WANDB_MODE -> the current mode that each means."""
_ID = "wandb-id.txt"
"""File of a run's folder with the id of its W&B run."""
log = logging.getLogger(__name__)


class WandbLog:
    """Sends metrics to W&B, online or to files in the run folder; after any failure it warns once and stops sending.

    If the server cannot be reached at the start, or refuses the login, it also warns and keeps the metrics in the run
    folder for ``wandb sync``. The run's id is kept there, and a resumed run continues the same curves. A copy of a run
    folder gets an id of its own as long as the original is there.

    W&B drops records for a step that it already has. Steps that are repeated after a crash or with another setting are
    therefore logged after the earlier ones, and all charts are drawn over our own metric, "step".

    The user's environment overrides our defaults (WANDB_MODE, WANDB_PROJECT, WANDB_NAME, WANDB_DIR); WANDB_RUN_ID and
    WANDB_DISABLED override everything.

    Attributes:
        id: id of the W&B run; None: W&B is off.
        begins: whether the id is new, and W&B has no records of the run yet.
    """

    def __init__(
        self, config: Config, folder: RunFolder, run_id: str | None, branch: bool = False, guest: bool = False
    ):
        """
        Args:
            run_id: id in the resumed checkpoint, used if the run folder has none; None makes a new id.
            branch: whether the run goes back to an earlier step on purpose; W&B then gets a new run.
            guest: whether another process logs to the W&B run at the same time. This one then does not end it, and
                leaves its settings, files and system metrics alone.
        """
        self.id, self.begins = None, False
        self._run = None
        self._guest = guest
        self._kept = folder.wandb
        self._offset: int | None = None
        if config.wandb.mode == "disabled":
            return
        try:
            mode = resolve_mode(config.wandb.mode)
            if mode == "disabled":
                return
            self._kept = _folder(folder) / "wandb"
            noted, place = _noted(folder.path)
            known = noted or run_id
            continued = known and not branch and not _is_copy(folder.path, noted, place)
            self.id = os.environ.get("WANDB_RUN_ID") or (known if continued else secrets.token_hex(4))
            self.begins = self.id != known
            write_text(folder.path / _ID, f"{self.id}\n{folder.path.resolve()}\n")
            try:
                self._run = self._init(config, folder, mode)
            except Exception as error:
                if mode == "offline":
                    raise
                text = "W&B is not online (%s); metrics are kept for `wandb sync` in %s"
                log.warning(text, _line(error), self._kept)
                import wandb

                wandb.teardown()  # W&B's service still holds the id
                self._run = self._init(config, folder, "offline")
        except (Exception, SystemExit) as error:
            self._give_up(error)

    def _init(self, config: Config, folder: RunFolder, mode: Any) -> Any:  # wandb refuses modes that it does not know
        import wandb

        own: dict[str, Any] = {} if os.environ.get("WANDB_FINISH_TIMEOUT") else {"finish_timeout": FINISH_TIMEOUT}
        if self._guest:
            own |= {"x_primary": False, "x_update_finish_state": False, "x_disable_stats": True}
        project, default = config.wandb.project, WandbConfig().project
        run = wandb.init(
            id=self.id,
            resume="allow",
            project=project if project != default else os.environ.get("WANDB_PROJECT") or default,
            entity=config.wandb.entity,
            name=config.wandb.name or os.environ.get("WANDB_NAME") or folder.path.resolve().name,
            dir=str(self._kept.parent),
            mode=mode,
            config=None if self._guest else config.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=INIT_TIMEOUT, finish_timeout_raises=True, **own
            ),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def write(self, step: int, values: dict[str, Any]):
        if self._run is None:
            return
        try:
            if self._offset is None:
                self._offset = max(0, self._run.step - step)
            known = {key: value for key, value in values.items() if value is not None}
            self._run.log(known | {"step": step}, step=step + self._offset)
        except Exception as error:
            self._give_up(error)

    def send(self, name: str, kind: str, folder: Path):
        """Sends a folder's files as an artifact ``name`` of type ``kind``.

        W&B copies the files first, to its folder unless WANDB_DATA_DIR names another, and removes what it has sent. Its
        defaults are the home folder, which is often small, and a cache that keeps every file for good.
        """
        if self._run is None:
            return
        given = os.environ.get("WANDB_DATA_DIR")
        try:
            import wandb

            os.environ["WANDB_DATA_DIR"] = given or str(self._kept.absolute())
            artifact = wandb.Artifact(f"{self.id}-{name}", kind)
            artifact.add_dir(str(folder), skip_cache=True)
            self._run.log_artifact(artifact)
        except Exception as error:
            self._give_up(error)
        finally:  # another run of this process has a folder of its own
            os.environ.pop("WANDB_DATA_DIR", None)
            if given is not None:
                os.environ["WANDB_DATA_DIR"] = given

    def close(self, status: int = 0):
        """Ends W&B's run, which shows how this one ended.

        Args:
            status: exit status. 0: finished. Above 128: stopped by a signal, which W&B calls preempted; an agent of a
                sweep starts such a run again. Others: failed.
        """
        if self._run is None:
            return
        try:
            if status > 128:
                self._run.mark_preempting()
            self._run.finish(exit_code=status)
        except TimeoutError:
            log.warning("W&B did not take the rest of the metrics in time; `wandb sync` sends them from %s", self._kept)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: BaseException):
        self._run = None
        log.warning("W&B is off for the rest of this run (wandb.mode=disabled avoids this): %s", _line(error))


def send_results(config: Config, trained: RunFolder, results: RunFolder, name: str, kind: str, folder: Path):
    """Sends ``folder`` as an artifact to the W&B run of the training in ``trained``, which may still be at work.

    Args:
        results: folder of the process that evaluates, often ``trained`` itself; gets W&B's files.
        name, kind: see :meth:`WandbLog.send`.
    """
    run_id, _ = _noted(trained.path)
    log = WandbLog(config, results, run_id or None, guest=trained.in_use())
    log.send(name, kind, folder)
    log.close()


def check_sweep(folder: RunFolder):
    """
    Raises:
        UserError: this process trains a run of a W&B sweep, and the folder has the checkpoints of another run. Without
            this check the training would continue from them, or find nothing left to do and report the other's figures.
    """
    own = os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID")
    noted, _ = _noted(folder.path)
    if own and noted and noted != own and list_checkpoints(folder.checkpoints):
        raise UserError(f"run.dir: {folder.path} has the checkpoints of the W&B run {noted}, and this is the run {own} "
                        "of a sweep; give each run its own folder, with run.dir=runs/$WANDB_RUN_ID in the sweep's "
                        "command")  # fmt: skip


def resolve_mode(mode: str) -> str:
    """Mode that "auto" stands for on this machine; other modes are returned unchanged.

    "auto" is the mode set by WANDB_MODE or `wandb offline`, if any. Else it is online if wandb finds a login for its
    server (WANDB_BASE_URL), and offline if not. WANDB_DISABLED disables every mode.
    """
    if os.environ.get("WANDB_DISABLED", "").strip().lower() in ("1", "true", "yes", "on", "y", "t"):
        return "disabled"
    given = os.environ.pop("WANDB_MODE", "")
    if meant := _MODES.get(given.strip().lower()):
        os.environ["WANDB_MODE"] = meant
    elif given.strip():  # wandb does not start with an unknown mode
        log.warning("WANDB_MODE: given %r; allowed: %s", given, ", ".join(_MODES))
        if mode == "auto":
            return "offline"
    if mode != "auto":
        return mode
    import wandb

    chosen = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if chosen == "online" and not wandb.login(prompt=False, verify=False):
        return "offline"
    return chosen


def _noted(folder: Path) -> tuple[str, str]:
    """(id of the W&B run, the folder's path at that time) from _ID; earlier versions did not note the path."""
    path = folder / _ID
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    number, _, place = text.strip().partition("\n")
    return number, place


def _is_copy(folder: Path, number: str, place: str) -> bool:
    """Whether ``place``, where _ID was written, is another folder than ``folder`` and still has the same id."""
    try:
        return bool(place) and not folder.samefile(place) and _noted(Path(place))[0] == number
    except OSError:  # it is gone, or belongs to someone else
        return False


def _folder(folder: RunFolder) -> Path:
    """Parent folder of W&B's folder "wandb": WANDB_DIR, or the run's folder.

    W&B itself would write to /tmp, without a word, if WANDB_DIR cannot be written to.
    """
    if given := os.environ.get("WANDB_DIR"):
        try:
            check_room(Path(given), "WANDB_DIR", folder=True)
            return Path(given)
        except (UserError, OSError) as error:
            log.warning("%s; W&B's files are in %s", _line(error), folder.wandb)
    return folder.path


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
