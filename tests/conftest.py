"""Fixtures shared by all tests: a tiny prepared corpus, and a tiny model's settings."""

import json
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import settings

# Triton decides at import. Without a GPU, its interpreter runs the kernels on CPU tensors.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Parallel tests share the cores. If each used all cores, threads that spin for work would slow all down tenfold.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Every run draws the same examples: a failure is the change's fault. --hypothesis-profile=default searches more widely.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

_OWN = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("data", "corpora", "runs"))
"""Folders of a checkout that git ignores."""


def _refuse_own_files(event: str, arguments: tuple):
    """A test that reads what somebody prepared in this checkout does otherwise in a fresh one."""
    if event == "open" and isinstance(arguments[0], str) and os.path.abspath(arguments[0]).startswith(_OWN):
        raise RuntimeError(f"a test opens {arguments[0]}, which a fresh checkout lacks; make it in tmp_path")


sys.addaudithook(_refuse_own_files)

LONGEST = (
    "test_processes", "test_faults", "test_matrix", "test_watchdog", "test_exchange", "test_baselines_trained",
    "test_compile", "test_memory", "test_training", "test_operators", "test_equality", "test_contract", "test_answers",
    "test_context", "test_engine", "test_damage", "test_launch", "test_modeling", "test_huggingface", "test_results",
)  # fmt: skip
"""Files that take longest. They run first, so that no parallel process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


class AtOnce:
    """Show failures of GPU tests at once: a run that is cut by its machine's time limit would not report them."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        if report.failed and "gpu" in report.keywords:
            self.config.get_terminal_writer().line(f"\n{report.longreprtext}")


def pytest_configure(config: pytest.Config):
    config.pluginmanager.register(AtOnce(config))


def pytest_runtest_setup(item: pytest.Item):
    """End the process after an illegal access: it can do nothing more on its GPU, and every later test would fail.

    With xdist only the next test is lost, and another process continues.
    """
    if torch.cuda.is_initialized() and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


@pytest.fixture
def without_c(monkeypatch):
    """Replace C by PyTorch's operators, which torch's counters and hooks see."""
    monkeypatch.setattr("titans_pt.kernels.native.library", lambda *_: "switched off by a test")


@pytest.fixture
def assembler(tmp_path):
    """``assembler("12.9.86")``: path of a program that claims to be ptxas of this version."""
    made = []

    def put(version: str) -> str:
        path = tmp_path / f"ptxas{len(made)}"
        path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release 0.0, V{version}"\n')
        path.chmod(0o755)
        made.append(path)
        return str(path)

    return put


TINY = {
    "data": {"seq_len": 16, "validation_fraction": 0.2},
    "model": {
        "mixers": ["mac"], "vocab_size": 288, "d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_hidden": 32,
        "window": 8, "segment": 8, "memory_tokens": 4, "persistent_tokens": 2,
        "memory": {"chunk_size": 4, "depth": 1},
    },
    "train": {
        "max_steps": 10, "batch_tokens": 64, "micro_batch": 1, "lr": 1e-2, "warmup_steps": 2, "log_every": 1,
        "eval_every": 0, "eval_samples": 5, "checkpoint_every": 1000, "precision": "fp32",
    },
    "wandb": {"mode": "disabled"},
}  # fmt: skip


def merged(base: dict, top: dict) -> dict:
    """Merge ``top`` over ``base``, key by key; neither is changed."""
    out = dict(base)
    for key, value in top.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def prepare_corpus(folder: Path, documents: int = 60) -> Path:
    """Write token files of a made-up text under ``folder``, about 160 tokens per document; return their data.dir."""
    from titans_pt.config import Config
    from titans_pt.data_pipeline.prepare import prepare

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 6))) for _ in range(100)]
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=40))}) + "\n")
    data = {"dir": str(folder / "data"), "sources": [{"kind": "files", "path": str(folder / "text.jsonl")}]}
    prepare(Config.model_validate(merged(TINY, {"data": data})))
    return folder / "data"


@pytest.fixture(scope="session")
def interpreter():
    """Make Triton's interpreter (unused with a GPU) usable."""
    import triton.language as tl
    from triton.runtime import interpreter

    swap, swap_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def once(fn):
        """Swap the functions of triton.language once per kernel: the interpreter does it at every call of a device
        function, which takes most of its time."""
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        if modules and not any(tl.core.is_builtin(m.load) for m in modules):
            return interpreter._LangPatchScope()
        return swap(fn)

    def with_numbers(tensor, scope):
        """Before Triton 3.9, a number in a tensor is an array with one entry, which NumPy 2.4 no longer converts."""
        swap_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang, interpreter._patch_lang_tensor = once, with_numbers
    yield
    interpreter._patch_lang, interpreter._patch_lang_tensor = swap, swap_tensor


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A data.dir with token files of a small made-up text; tests must not write there."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def ranks():
    """This process as a group of one, for all training in this process: DeepSpeed keeps the first group it sees."""
    from titans_pt.training.ranks import process_group

    with process_group() as alone:
        yield alone


@pytest.fixture(scope="module")
def one_group(ranks):
    """Run a module's trainings in the group of ``ranks``: a process has one group at a time."""
    from titans_pt.training import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "process_group", lambda timeout: nullcontext(ranks))
        yield


@pytest.fixture
def tiny(prepared, tmp_path):
    """``tiny(section={key: value}, ...)`` writes a tiny config file with these changes and returns its path.

    It trains in seconds on ``prepared``; run.dir is a new folder under tmp_path.
    """
    source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
    base = merged(TINY, {"run": {"dir": str(tmp_path / "run")}, "data": {"dir": str(prepared), "sources": [source]}})

    def write(**changes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(merged(base, changes)))
        return path

    return write


@pytest.fixture
def recurrent():
    """A small model with a state, for tests that need no memory."""
    from tests.helpers.stand_ins import Recurrent

    torch.manual_seed(0)
    return Recurrent().eval()
