from types import SimpleNamespace

import pytest
import torch

from titans_pt.training.gauges import Gauges, lost_to


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("titans_pt.training.gauges.time.perf_counter", lambda: now[0])

    def advance(seconds: float):
        now[0] += seconds

    return advance


def ranks(*others: list[float], device: str = "cpu") -> SimpleNamespace:
    """This process as rank 0, and ``others``: the values that the other ranks gather."""
    gather = lambda own: [own, *others]  # noqa: E731
    return SimpleNamespace(gather=gather, world_size=1 + len(others), device=torch.device(device))


def test_time_is_lost_to_the_innermost(clock):
    class Run:
        gauges = Gauges(ranks())

        @lost_to("checkpoint")
        def save(self):
            clock(4)

        @lost_to("evaluation")
        def evaluate(self):
            clock(1)
            self.save()
            clock(2)

    run = Run()
    clock(50)  # a step
    run.evaluate()
    run.save()
    read = run.gauges.read({}, 0.0)
    assert (read["lost_to_evaluation_seconds"], read["lost_to_checkpoint_seconds"]) == (3, 8)
    assert read["lost_to_validation_seconds"] == 0
    assert run.gauges.read({}, 0.0)["lost_to_checkpoint_seconds"] == 0


def test_the_loss_is_averaged_between_two_records():
    gauges = Gauges(ranks())
    for loss in (1.0, 2.0, 6.0):
        gauges.step(loss)
    assert gauges.read({}, 0.0)["loss_mean"] == 3.0
    assert gauges.read({}, 0.0)["loss_mean"] is None
    gauges.step(5.0)
    assert gauges.read({}, 0.0)["loss_mean"] == 5.0


def test_the_slowest_rank_is_named():
    gauges = Gauges(ranks([0.5, 0.0], [9.0, 0.0], [0.7, 0.0]))
    read = gauges.read({"data": 0.2, "probe": 70.0, "forward": 0.4, "backward": 80.0}, 400.0)
    assert (read["slowest_rank"], read["slowest_rank_seconds"]) == (2, 9.0)
    assert read["median_rank_seconds"] == pytest.approx(0.65)
    assert read["tokens_per_second_per_device"] == 100.0
    assert read["gpu_memory_gib"] is None


def test_gpu_memory_is_the_peak_since_the_last_record_of_the_fullest(monkeypatch):
    resets = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    gauges = Gauges(ranks([0.0, 5.0 * 2**30], device="cuda"))
    assert gauges.read({}, 0.0)["gpu_memory_gib"] == 5.0
    assert resets == [torch.device("cuda")]
