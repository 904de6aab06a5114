"""How `run` ends, without a daemon behind it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from modak.cli.commands.run import _stopping, _terminated_like_interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_does_not_wait(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    stop = threading.Event()
    with _stopping(stop, waiting=lambda: True):
        os.kill(os.getpid(), number)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            _receive(number)
    assert "Stopping after the current step" in capsys.readouterr().err
    assert signal.getsignal(number) is before


def test_while_spark_starts_the_first_signal_does_not_wait_either() -> None:
    stop = threading.Event()
    with _stopping(stop, waiting=lambda: False), pytest.raises(KeyboardInterrupt):
        _receive(signal.SIGINT)
    assert not stop.is_set()


def test_a_termination_while_starting_ends_it_like_ctrl_c() -> None:
    with _terminated_like_interrupted(), pytest.raises(KeyboardInterrupt):
        _receive(signal.SIGTERM)


def _receive(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(5)
