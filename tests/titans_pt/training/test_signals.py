import os
import signal

import pytest

from titans_pt.training.signals import STOPS, StopSignals


def test_a_signal_is_noted_and_the_handlers_come_back():
    before = [signal.getsignal(n) for n in STOPS]
    with StopSignals() as signals:
        assert signals.decide(signals.flags()) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.flags() == [1.0, 0.0, 0.0, 0.0]
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.flags() == [1.0, 0.0, 1.0, 0.0]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.flags() == [1.0, 0.0, 1.0, 1.0]
    assert [signal.getsignal(n) for n in STOPS] == before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.flags() == [0.0, 0.0, 0.0, 0.0]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_decide_alike_from_the_sums():
    signals = StopSignals()
    assert signals.decide([0.0, 0.0, 0.0, 0.0]) == 0
    assert signals.decide([0.0, 2.0, 0.0, 0.0]) == signal.SIGINT
    assert signals.decide([1.0, 2.0, 0.0, 0.0]) == signal.SIGTERM
    assert signals.decide([0.0, 0.0, 1.0, 0.0]) == signal.SIGHUP
    assert signals.decide([0.0, 0.0, 0.0, 2.0]) == signal.SIGUSR1


def test_the_first_ctrl_c_says_what_happens(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            said = capfd.readouterr().err
            assert said.count("with a checkpoint. A second Ctrl-C changes nothing, a third ends the run") == lines
            os.kill(os.getpid(), signal.SIGINT)
            assert capfd.readouterr().err == "" and signals.flags() == [0.0, 1.0, 0.0, 0.0]


def test_the_third_ctrl_c_does_not_wait():
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
