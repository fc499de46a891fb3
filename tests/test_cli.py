"""The command line as a user meets it: in a process of its own, by its exit status and what it prints."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "localsgd_ext"]
PNG = "localsgd-demo.png"


def start(*arguments: object) -> subprocess.Popen[str]:
    """In a session of its own, and open to SIGINT even if this process was started in the background, where it is ignored."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process: subprocess.Popen[str], limit: float = 120) -> tuple[int, str, str]:
    """Exit status, stdout, stderr; after `limit` seconds everything is killed and the test fails."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        pytest.fail(f"did not end within {limit} s: {process.communicate()}")
    return process.returncode, out, err


def rows(table: str) -> dict[str, list[str]]:
    """The table's rows by run."""
    return {name: cells.split() for name, cells in re.findall(r"^(localsgd_ext|accelerate|ddp) +(.*)$", table, re.MULTILINE)}


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def test_demo_trains_ours_and_accelerates(tmp_path):
    status, out, err = finish(
        start("demo", "--processes", 2, "--steps", 6, "--local-sgd-steps", 2, "--output", tmp_path / "new" / "folder")
    )
    assert status == 0, err
    assert err == ""
    table = rows(out)
    assert list(table) == ["localsgd_ext", "accelerate"]
    assert [cells[-1] for cells in table.values()] == ["yes", "yes"]
    (_, seconds, loss, megabytes, _), (_, their_seconds, their_loss, their_megabytes, _) = table.values()
    assert loss == their_loss  # at 2 ranks the averages are equal to the bit
    assert float(seconds) > 0
    assert float(their_seconds) > 0
    assert float(megabytes) > 0
    # Leaving the block, Accelerate averages a fourth time though nothing has changed since the third.
    assert float(their_megabytes) / float(megabytes) == pytest.approx(4 / 3, rel=0.01)
    png = tmp_path / "new" / "folder" / PNG
    if has_matplotlib():
        assert png.read_bytes().startswith(b"\x89PNG")
        assert str(png) in out
    else:
        assert 'pip install "localsgd_ext[demo]"' in out


def test_demo_without_baseline_on_one_process(tmp_path):
    status, out, err = finish(start("demo", "--processes", 1, "--steps", 2, "--baseline", "none", "--output", tmp_path))
    assert status == 0, err
    table = rows(out)
    assert list(table) == ["localsgd_ext"]
    assert table["localsgd_ext"][1] == "0.00"  # nobody to average with
    assert table["localsgd_ext"][3:] == ["0.0", "yes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--processes", "0"], "--processes"),
        (["demo", "--steps", "-1"], "--steps"),
        (["demo", "--local-sgd-steps", "two"], "--local-sgd-steps"),
        (["demo", "--baseline", "horovod"], "--baseline"),
        (["demo", "--output", f"{__file__}/below"], "--output"),
        (["dmeo"], "dmeo"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, named, capsys):
    from localsgd_ext.cli import main

    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert named in err


def test_a_wrong_argument_ends_the_process_with_status_2():
    status, out, err = finish(start("demo", "--processes", "none"))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_a_reader_who_has_seen_enough_is_no_error():
    with start("doctor") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert err == ""


def test_without_a_command_it_prints_help(capsys):
    from localsgd_ext.cli import main

    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_version(capsys):
    from localsgd_ext import __version__
    from localsgd_ext.cli import main

    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"localsgd-ext {__version__}\n"


def test_the_package_does_not_import_its_command_line():
    code = "import sys, localsgd_ext; sys.exit(any(name.startswith('localsgd_ext.cli') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("moment", ["ranks starting", "training"])
def test_ctrl_c_ends_every_process(moment, tmp_path):
    """Ctrl-C in a terminal: SIGINT to the whole process group of the command."""
    process = start("demo", "--processes", 2, "--steps", 100_000, "--output", tmp_path)
    ranks = wait_for_ranks(process, seconds_of_cpu=0 if moment == "ranks starting" else 5)
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = finish(process, limit=30)
    assert status == 130
    assert err == "interrupted\n"
    _, alive = psutil.wait_procs(ranks, timeout=15)
    assert alive == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_ranks_end_with_a_killed_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what a killed launcher leaves behind
    process = start("demo", "--processes", 2, "--steps", 100_000, "--output", tmp_path)
    ranks = wait_for_ranks(process, seconds_of_cpu=0)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert alive == []


def test_a_failed_rank_is_named_in_one_line(tmp_path):
    process = start("demo", "--processes", 2, "--steps", 100_000, "--output", tmp_path)
    ranks = wait_for_ranks(process, seconds_of_cpu=0)
    ranks[1].kill()
    status, _, err = finish(process, limit=30)
    assert status == 1
    assert err.startswith("localsgd-ext demo: rank 1 failed: Signal 9 (SIGKILL)")
    assert len(err.splitlines()) == 1
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []


def wait_for_ranks(process: subprocess.Popen[str], seconds_of_cpu: float) -> list[psutil.Process]:
    """The two ranks in order, once each has computed for that long: importing torch takes some 3 seconds of it."""
    launcher = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = launcher.children()
        with contextlib.suppress(psutil.NoSuchProcess):
            # Between fork and exec a rank still has the launcher's environment.
            begun = len(ranks) == 2 and all("RANK" in rank.environ() for rank in ranks)
            if begun and all(sum(rank.cpu_times()[:2]) >= seconds_of_cpu for rank in ranks):
                return sorted(ranks, key=lambda rank: rank.environ()["RANK"])
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"the ranks did not start: {process.communicate()}")
