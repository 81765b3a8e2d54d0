import builtins
import time

import pytest

from titans_pt.config import Config
from titans_pt.run_folder import RunFolder
from titans_pt.wandb_log import WandbLog, resolve_mode


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_auto_is_online_only_with_a_login(monkeypatch, tmp_path):
    assert resolve_mode("auto") == "offline"
    assert resolve_mode("online") == "online"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert resolve_mode("auto") == "online"
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode("auto") == "online"


def test_a_failure_is_one_warning(monkeypatch, tmp_path, caplog):
    real = builtins.__import__

    def broken(name, *rest, **named):
        if name == "wandb":
            raise RuntimeError("no\nwandb today")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", broken)
    wandb = WandbLog(Config(), RunFolder(tmp_path), None)
    wandb.write(1, {"loss": 1.0})
    wandb.close()
    assert [r.getMessage() for r in caplog.records] == [
        "W&B is off for the rest of this run (wandb.mode=disabled avoids this): no wandb today"
    ]


def test_offline_keeps_its_files_and_its_id_in_the_run_folder(tmp_path, capfd):
    folder = RunFolder(tmp_path)
    config = Config.model_validate({"wandb": {"mode": "offline"}})
    ids = []
    for _ in range(2):
        wandb = WandbLog(config, folder, None)
        wandb.write(1, {"loss": 1.0, "mfu": None})
        wandb.close()
        ids.append(wandb.id)
    assert ids[0] and ids[0] == ids[1]
    assert list(folder.wandb.glob(f"offline-run-*{ids[0]}"))
    assert capfd.readouterr().out == ""


@pytest.fixture
def offline(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return folder, WandbLog(Config.model_validate({"wandb": {"mode": "offline"}}), folder, None)


def test_an_artifact_is_kept_offline(offline, tmp_path):
    folder, wandb = offline
    sent = tmp_path / "checkpoint"
    sent.mkdir()
    (sent / "model.safetensors").write_text("weights")
    wandb.send("checkpoint", "model", sent)
    wandb.close()
    (record,) = folder.wandb.glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # W&B's own process writes it, at its leisure on a busy machine
    while f"{wandb.id}-checkpoint".encode() not in record.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_artifact_that_fails_is_one_warning(offline, tmp_path, caplog):
    _, wandb = offline
    for _ in range(2):
        wandb.send("checkpoint", "model", tmp_path / "missing")
    assert len([r for r in caplog.records if "W&B is off" in r.getMessage()]) == 1
