"""Rendezvous of a job's processes, or the reason why it fails."""

import socket
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError

from tests.helpers.processes import run_forked
from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.runs.folder import RunFolder
from titans_pt.training import loop
from titans_pt.training.ranks import process_group

SCRIPT = """
import resource, sys
import torch
from titans_pt.config.files import load_config
from titans_pt.runs import checkpoints
from titans_pt.tasks import task_of
from titans_pt.training import resume
from titans_pt.training.ranks import process_group

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
with process_group() as ranks:
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    task = task_of(load_config(sys.argv[1], ["train.batch_tokens=64", "train.micro_batch=1"]))
    weights = {name: torch.full_like(p, 0.5) for name, p in task.build_model().state_dict().items()}

    def load(model, start, task):
        assert ranks.first
        model.load_state_dict(weights)

    resume._load = load
    engine = resume.build_engine(task, resume.Start(task.config, weights=object()), ranks)
    assert all((p == 0.5).all() for p in engine.model.parameters())
    print("alike", flush=True)
"""


@pytest.fixture
def enter(monkeypatch):
    def run(**variables: str):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with process_group():
            pytest.fail("it met nobody")

    return run


FIRST = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(("variables", "message"), [
    (FIRST | {"MASTER_ADDR": ""}, "WORLD_SIZE=2 is set, but MASTER_ADDR is not; start with torchrun"),
    (FIRST, "MASTER_PORT: given ''; must be a port of localhost, from 1 to 65535"),
    (FIRST | {"MASTER_PORT": "nonsense"}, "MASTER_PORT: given 'nonsense'"),
    (FIRST | {"MASTER_PORT": "65536"}, "MASTER_PORT: given '65536'"),
    (FIRST | {"RANK": "2"}, "RANK: given '2'; must be a number below WORLD_SIZE, which is 2"),
])  # fmt: skip
def test_a_place_to_meet_is_named(enter, variables, message):
    with pytest.raises(UserError, match=message):
        enter(**variables)


def test_a_port_that_is_in_use_is_named_and_torchrun_may_choose_another(enter):
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        taken = FIRST | {"MASTER_PORT": str(other.getsockname()[1])}
        with pytest.raises(UserError, match="rank 0 of 2 cannot connect to the other ranks: the port is in use"):
            enter(**taken)
        with pytest.raises(DistNetworkError):
            enter(TORCHELASTIC_RUN_ID="of torchrun", **taken)


def test_one_process_alone_meets_itself_in_any_temporary_folder(tmp_path, monkeypatch):
    """A path in a URL would end at the #."""
    folder = tmp_path / "a #b ?c%20 \u00e9"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    class Met(Exception):
        pass

    def met(backend, store, **_):
        store.set("key", "value")
        assert [path.name for path in folder.rglob("*") if path.is_file()] == ["store"]
        raise Met

    monkeypatch.setattr("titans_pt.training.ranks.dist.init_process_group", met)
    with pytest.raises(Met), process_group():
        pass


def test_ranks_raise_the_limit_of_open_files_and_rank_0_alone_reads_weights(tmp_path, tiny):
    """Rank 0's store has two connections for each rank; and a thousand ranks would each read all of a checkpoint."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_forked(2, str(script), str(tiny()))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("alike") == 2


def test_ranks_with_other_data_are_refused_by_name(monkeypatch):
    """This happens when one node misses a copy of the data to the nodes' own disks."""
    config = Config.model_validate({"data": {"dir": "/local/text"}})
    data = SimpleNamespace(identity={"data": "new"})
    told = [({"data": "new"}, "a"), ({"data": "new"}, "b"), ({"data": "old"}, "c")]
    ranks = SimpleNamespace(gather_objects=lambda own: told)
    with pytest.raises(UserError, match=r"data.dir: /local/text on c \(rank 2\) holds other data than on a \(rank 0\)"):
        loop._check_alike(data, config, ranks)
    told.pop()
    loop._check_alike(data, config, ranks)


def test_a_run_folder_that_is_not_shared_is_refused_at_the_start(tmp_path, monkeypatch):
    """Without this, training on nodes with disks of their own failed at its first resume."""
    own, of_rank_0 = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    ranks = SimpleNamespace(rank=1, on_first=lambda action: of_rank_0.holder(), together=lambda action: action())
    monkeypatch.setattr(loop, "SHARING", 0.0)
    with of_rank_0.lock():
        with pytest.raises(UserError, match=rf"run.dir: {own.path} on .* \(rank 1\) is not the folder of rank 0"):
            loop._check_shared(own, ranks)
        loop._check_shared(of_rank_0, ranks)
