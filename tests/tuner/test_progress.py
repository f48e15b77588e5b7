"""Heartbeat lines on a fake clock; the estimate; the choice by terminal."""

import io

import pytest

from replayssm_tune.tuner import progress
from replayssm_tune.tuner.progress import Estimate, Event, Heartbeat


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


def lines(stream):
    return stream.getvalue().splitlines()


def test_first_line_at_once(clock, stream):
    Heartbeat(stream, clock).tick()
    assert lines(stream) == ["[00:00] start"]


def test_a_new_phase_is_a_line_and_events_within_are_not(clock, stream):
    heartbeat = Heartbeat(stream, clock)
    for done in range(50):
        heartbeat(Event("compile", done, 50))
    heartbeat(Event("gate", 0, 10, "mamba2"))
    assert lines(stream) == ["[00:00] compile 0/50", "[00:00] gate 0/10 - mamba2"]


def test_a_line_every_ten_seconds_with_or_without_events(clock, stream):
    heartbeat = Heartbeat(stream, clock)
    heartbeat(Event("search", 0, 100))
    for _ in range(60):
        clock.now_s += 1
        heartbeat.tick()
    assert len(lines(stream)) == 7
    clock.now_s += 9.5
    heartbeat(Event("search", 50, 100))
    assert len(lines(stream)) == 7
    clock.now_s += 0.5
    heartbeat(Event("search", 60, 100))
    assert lines(stream)[-1] == "[01:10] search 60/100 ETA 00:47"


def test_unknown_total_shows_the_count_alone(clock, stream):
    heartbeat = Heartbeat(stream, clock)
    heartbeat(Event("plan"))
    clock.now_s += 10
    heartbeat(Event("plan", 7))
    assert lines(stream)[-1] == "[00:10] plan 7"


def test_replayed_work_does_not_flatter_the_estimate():
    estimate = Estimate()
    assert estimate.update(Event("search", 900, 1000), 0.0)
    assert estimate.remaining_s(Event("search", 900, 1000), 1.0) is None
    assert not estimate.update(Event("search", 910, 1000), 10.0)
    assert estimate.remaining_s(Event("search", 910, 1000), 10.0) == pytest.approx(90.0)


def test_an_estimate_is_there_within_thirty_seconds_of_the_first_result(clock, stream):
    heartbeat = Heartbeat(stream, clock)
    heartbeat(Event("compile", 0, 800))
    for _ in range(30):
        clock.now_s += 1
        heartbeat(Event("compile", round(clock.now_s - 100), 800))
    assert any("ETA" in line for line in lines(stream))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00"), (59.6, "01:00"), (3599, "59:59"), (3600, "1:00:00")]
)
def test_clock_text(seconds, text):
    assert progress.clock_text(seconds) == text


def test_no_terminal_gets_plain_lines(stream):
    with progress.progress(stream) as report:
        report(Event("compile", 1, 2))
    assert lines(stream) == ["[00:00] start", "[00:00] compile 1/2"]


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress.progress(stream) as report:
        report(Event("compile", 1, 2, "mamba2"))
        report(Event("gate", 2, 2))
    assert "compile" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    assert "start" not in stream.getvalue().partition("compile")[2]  # its row would pulse for ever
