"""The user's command after each checkpoint (run.on_checkpoint)."""

import logging
import os
import subprocess
from pathlib import Path

from titans_pt.runs.checkpoints import step_of
from titans_pt.runs.folder import RunFolder
from titans_pt.tools.processes import outside

log = logging.getLogger(__name__)


def run_command(command: str, folder: RunFolder, checkpoint: Path):
    """Runs a shell command and waits for it; if it fails, a warning is logged, because the run matters more.

    It finds the run's folder, the checkpoint and its step in TITANS_RUN, TITANS_CHECKPOINT and TITANS_STEP. Its output
    goes to ``folder.on_checkpoint``. A signal to the training, such as Ctrl-C, does not reach it.
    """
    step, own = step_of(checkpoint), folder.on_checkpoint
    given = {"TITANS_RUN": str(folder.path.resolve()), "TITANS_CHECKPOINT": str(checkpoint.resolve()),
             "TITANS_STEP": str(step)}  # fmt: skip
    try:
        with own.open("ab") as output:
            status = subprocess.run(
                command, shell=True, env=outside(os.environ) | given, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False,
            ).returncode  # fmt: skip
    except OSError as error:
        log.warning("run.on_checkpoint: not run after step %d: %s", step, error)
        return
    if status:
        log.warning("run.on_checkpoint: status %d after step %d; its output is in %s", status, step, own)
