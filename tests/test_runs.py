"""What a run says about itself: three requests on one server, by hand."""

import pickle

import numpy as np
import pytest

from lib.runs import ROW, STEP, Run

# arrival, prompt, output, start, prefilled, moved, first, end, server, preemptions
ROWS = [
    (1.0, 10, 3, 1.0, 2.0, 2.0, 3.0, 7.0, 0, 0),  # first token after 2 s, then 4 s for two more: 2 s each
    (2.0, 20, 1, 4.0, 6.0, 6.0, 7.0, 7.0, 0, 0),  # one token: after 5 s
    (5.0, 30, 5, 8.0, 9.0, 9.0, 9.0, 11.0, 0, 1),  # 4 s, then 2 s for four: 0.5 s each
]
STEPS = [  # server, start, end, decoding, read, pages
    (0, 1.0, 2.0, 0, 10, 1),
    (0, 2.0, 5.0, 1, 0, 2),
    (0, 6.0, 7.0, 2, 20, 3),
    (0, 8.0, 9.0, 0, 30, 0),
    (0, 9.0, 11.0, 3, 0, 3),
]
RUN = Run(np.array(ROWS, ROW), np.array(STEPS, STEP), 8, 1.5)


def test_measures():
    """Seconds of each request; the one of a single token has none from token to token."""
    assert [2, 5, 4] == RUN.of("ttft").tolist()
    assert [2, 0.5] == RUN.of("tpot").tolist()
    assert [6, 5, 6] == RUN.of("latency").tolist()
    assert [0, 2, 3] == RUN.of("wait").tolist()


def test_seconds_from_time_0():
    """The last token comes at 11."""
    assert 11 == RUN.seconds


@pytest.mark.parametrize(("share", "expected"), [(0.5, 4), (0.25, 3), (0.75, 4.5), (1e-9, 2), (1 - 1e-12, 5)])
def test_percentiles(share, expected):
    """First tokens after 2, 4 and 5 s: the median is 4, halfway to either neighbour 3 and 4.5."""
    assert expected == pytest.approx(RUN.percentile("ttft", share))


@pytest.mark.parametrize(
    ("ttft", "tpot", "share"),
    [
        (5, 2, 1),  # all, exactly on both promises
        (4.99, 2, 2 / 3),  # not the second
        (5, 1.99, 2 / 3),  # not the first
        (4, 0.5, 1 / 3),  # the third alone
        (1.99, 9, 0),  # none
        (5, 1e-9, 1 / 3),  # the one that has no second token keeps any promise about it
    ],
)
def test_attained(ttft, tpot, share):
    """Both promises, each kept when met exactly."""
    assert share == pytest.approx(RUN.attained(ttft, tpot))


def test_batch_is_weighed_by_time():
    """1 for 3 s, 2 for 1 s, 3 for 2 s; reading alone does not count: 11 sequence seconds in 6."""
    assert 11 / 6 == pytest.approx(RUN.batch)


def test_busy_from_the_first_arrival():
    """8 of the 10 seconds from 1 to 11."""
    assert 0.8 == pytest.approx(RUN.busy(0))


def test_throughput_from_the_first_arrival():
    """9 tokens in 10 s."""
    assert 0.9 == pytest.approx(RUN.throughput)


def test_a_server_without_a_pass():
    """Named, with those that have some."""
    with pytest.raises(ValueError, match=r"no pass of server 3.*\[0\]"):
        RUN.busy(3)


@pytest.mark.parametrize("measure", ["", "TTFT", "end", None, 3])
def test_unknown_measures(measure):
    """Refused, with the known ones."""
    with pytest.raises(ValueError, match="ttft, tpot, latency, wait"):
        RUN.of(measure)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, 90, float("nan"), "0.9", None, True])
def test_shares_lie_between_0_and_1(share):
    """90 is not a share; neither are the ends."""
    with pytest.raises(ValueError, match="share"):
        RUN.percentile("ttft", share)
    with pytest.raises(ValueError, match="share"):
        RUN.gap(share)


@pytest.mark.parametrize("promise", [0, -1, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("name", ["ttft", "tpot"])
def test_promises_are_positive(name, promise):
    """And named."""
    with pytest.raises(ValueError, match=name):
        RUN.attained(**{"ttft": 1.0, "tpot": 1.0, name: promise})


def test_text():
    """Requests, passes, seconds."""
    assert "run: 3 requests, 5 passes, 11.0 s" == repr(RUN)


def test_a_run_goes_through_a_pickle():
    """Rows and steps, byte by byte."""
    again = pickle.loads(pickle.dumps(RUN))
    assert (RUN.rows.tobytes(), RUN.steps.tobytes(), 8, 1.5) == (
        again.rows.tobytes(),
        again.steps.tobytes(),
        again.pages,
        again.present,
    )
