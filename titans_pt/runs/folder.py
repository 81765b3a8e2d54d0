"""Run folders: one folder holds everything about a run."""

import contextlib
import json
import logging
import os
import platform
import zlib
from importlib import metadata
from pathlib import Path

import torch

from titans_pt import __version__
from titans_pt.config import Config, config_hash
from titans_pt.config.names import ABOUT, SETTINGS, STARTED_IN
from titans_pt.config.yaml import resolved_yaml
from titans_pt.errors import UserError
from titans_pt.tools.files import DISK_FAILED, write_text
from titans_pt.tools.locks import sign, take

log = logging.getLogger(__name__)
_PACKAGES = ("torch", "deepspeed", "numpy", "pydantic", "safetensors", "sentencepiece", "triton", "wandb")


class _LogFile(logging.FileHandler):
    """A log that ignores a full disk: the error that then ends the run names the disk and the file."""

    def handleError(self, record: logging.LogRecord): ...

    def close(self):
        with contextlib.suppress(OSError):
            super().close()


class RunFolder:
    """The paths of a run folder, its lock, its log and the files written once.

    Raises:
        UserError: the path is not UTF-8, which checkpoints require.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            os.fsencode(self.path).decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: the name is not UTF-8; rename the folder, or name another") from None
        self.config = self.path / SETTINGS
        self.versions = self.path / ABOUT
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.evaluation = self.path / "evaluation"
        self.plots = self.path / "plots"
        self.profile = self.path / "profile"
        self.wandb = self.path / "wandb"
        self.tensorboard = self.path / "tensorboard"
        self.stacks = self.path / "stacks"
        self.on_checkpoint = self.path / "on-checkpoint.txt"
        """File with the output of the commands of run.on_checkpoint."""
        self.diverged = self.path / "diverged.txt"
        """File with the reason why the last training here was given up, for other processes to read."""

    @property
    def tokenizer(self) -> Path:
        """tokenizer.model or tokenizer.json, depending on the run's tokenizer."""
        from titans_pt.data_pipeline import saved_tokenizer

        return saved_tokenizer(self.path)

    def reading(self, key: str) -> Path:
        """File for the state of an unfinished reading by the evaluation job ``key``, a hash."""
        return self.evaluation / f"reading-{key[:16]}.safetensors"

    @contextlib.contextmanager
    def lock(self, setting: str = "run.dir"):
        """Locks the folder for one process that writes it (see :mod:`titans_pt.tools.locks`).

        The system releases the lock even if the process is killed. On a file system without locks, a warning is logged.

        Args:
            setting: the setting or option that names the folder, for messages.

        Raises:
            UserError: another run uses this folder, or it cannot be written to.
            OSError: the disk failed, one of DISK_FAILED.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            if error.errno in DISK_FAILED:
                raise
            in_the_way = isinstance(error, FileExistsError)
            why = "a file, or a link to a folder that does not exist here" if in_the_way else error.strerror
            raise UserError(f"{setting}: {error.filename}: {why}; set {setting} to a folder you may write to") from None
        with file:
            if not take(file.fileno(), self.path, "a second run here would not be noticed"):
                file.seek(0)
                raise UserError(
                    f"{setting}: {self.path} is in use by another run ({file.read().strip() or 'just starting'}); "
                    f"wait for it to end, or set another {setting}"
                )
            sign(file)
            yield self

    def in_use(self) -> bool:
        """Whether a process holds the lock, such as a training at work. On a file system without locks: False."""
        try:
            with (self.path / ".lock").open() as file:  # closing it releases the shared lock
                return not take(file.fileno(), self.path, "a training at work here is not noticed", shared=True)
        except OSError:  # there is no such file, or it belongs to someone else
            return False

    def holder(self) -> str:
        """The text that names the process which holds the lock, or held it last; "" if it cannot be read."""
        try:
            return (self.path / ".lock").read_text(errors="replace")
        except OSError:
            return ""

    @contextlib.contextmanager
    def opened(self):
        """Locks the folder (:meth:`lock`) and writes our log to ``log``, warnings also to stderr."""
        with self.lock():
            self.diverged.unlink(missing_ok=True)
            ours = logging.getLogger("titans_pt")
            to_file = _LogFile(self.log, encoding="utf-8", errors="backslashreplace")
            to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            to_screen = logging.StreamHandler()
            to_screen.setFormatter(logging.Formatter("titans: %(levelname)s: %(message)s"))
            to_screen.setLevel(logging.WARNING)
            before = ours.level
            ours.setLevel(logging.INFO)
            for handler in (to_file, to_screen):
                ours.addHandler(handler)
            try:
                yield self
            except BaseException as error:
                ours.info("stopped: %s: %s", type(error).__name__, error)
                raise
            finally:
                ours.setLevel(before)
                for handler in (to_file, to_screen):
                    ours.removeHandler(handler)
                    handler.close()

    def write_settings(self, config: Config):
        """Writes versions.json, then config.yaml.

        config.yaml has the resolved settings, with their hash and a checksum of the lines in comments. versions.json
        also has the folder from which relative paths count.

        train.resume belongs to a single start and is written as auto, so that a run continues from its own config.yaml.
        """
        config = config.model_copy(update={"train": config.train.model_copy(update={"resume": "auto"})})
        text = resolved_yaml(config)
        head = f"# sha256 of the settings: {config_hash(config)}\n{_LINES}{_crc(text.encode())}\n"
        write_text(self.versions, json.dumps(versions() | {STARTED_IN: os.getcwd()}, indent=1) + "\n")
        write_text(self.config, head + text)

    def check_settings(self):
        """Warns if config.yaml changed since a training wrote it: a truncated file could pass for a whole one.

        The file is still used, because the user may have changed it. Files of earlier versions have no checksum.
        """
        with contextlib.suppress(OSError):
            _, marked, rest = self.config.read_bytes().partition(_LINES.encode())
            written, _, text = rest.partition(b"\n")
            if marked and written.decode(errors="replace") != _crc(text):
                log.warning("%s: damaged, or changed since training wrote it; what it says now is used", self.config)


_LINES = "# crc32 of the lines below: "


def _crc(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, and the machine's processor."""
    found = {"titans_pt": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["platform"] = platform.platform()
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return found


def _processor() -> str:
    """The CPU's name (or architecture, if it has none), and the widest instructions that PyTorch uses on it."""
    name = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
