"""Two hosts whose network goes down in the middle of an averaging. Needs root, for network namespaces."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.hosts import Hosts, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"NOT RUN: {REASON}")


def _run(steps: int, timeout: float, outage: float | None) -> list[str]:
    """At 100 Mbit/s one averaging of 5 M float32 takes about 2 s. The plug is pulled in the second one; `outage` None: for
    good."""
    command = [sys.executable, "-m", "tests.on_host", "5000000", str(steps), str(timeout)]
    with Hosts(2, mbit=100) as hosts:
        processes = hosts.launch(command, stdout=subprocess.PIPE)
        try:
            for process in processes:
                while "step 1" not in (line := process.stdout.readline()):  # type: ignore[union-attr]
                    assert line, "ended before its second averaging"
            time.sleep(0.7)
            hosts.unplug(1)
            if outage is not None:
                time.sleep(outage)
                hosts.plug_in(1)
            deadline = time.monotonic() + 50
            return [
                process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0].splitlines()[-1] for process in processes
            ]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def test_a_network_that_stays_down_is_an_error_on_both_sides_at_the_timeout() -> None:
    for rank, line in enumerate(_run(4, 8, None)):
        kind, _, rest = line.partition(" ")
        assert kind == "PeerTimeoutError", line
        assert rest.startswith(f"[{1 - rank}] ")
        assert 7 < float(rest.split()[1]) < 20, line


def test_a_network_that_comes_back_in_time_is_nothing() -> None:
    assert _run(3, 30, 3.0) == ["done [4.5]"] * 2
