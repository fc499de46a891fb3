"""Do the tests hold? Breaks lines of the engines and the control plane, one at a time in a copy of the project, and looks
whether a test goes red.

    python -m tests.mutation [NUMBER...]

Not a test itself: with all mutants it takes about ten minutes, since the engine is compiled anew for some. Exits with 1 if one
of them survives, or if the tests fail without any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """file: of `old`, which occurs there once. test: a file, and `-k` for what in it is to fail."""

    what: str
    file: str
    old: str
    new: str
    test: str
    chosen: str


MUTANTS = (
    Mutant(
        "a scale is rounded to nearest, so that the largest value is clipped", "csrc/elementwise.h",
        "Coding<kCode>::kLevels)) + 0xffffu)", "Coding<kCode>::kLevels)) + 0x8000u)",
        "test_coded_on_cpu.py", "every_outer",
    ),
    Mutant(
        "Nesterov's step forgets the progress itself", "csrc/elementwise.h",
        "return nesterov ? momentum * m + d : m;", "return nesterov ? momentum * m : m;",
        "test_coded_on_cpu.py", "every_outer and nesterov",
    ),
    Mutant(
        "a staging buffer is taken while its second collective still travels", "csrc/pipeline.cpp",
        "while (std::any_of(flying.begin(), flying.end(), is_in_its_buffer)) land();",
        "if (std::any_of(flying.begin(), flying.end(), is_in_its_buffer)) land();",
        "test_wires.py", "engines_agree and int8 and 3",
    ),
    Mutant(
        "a chunk's residual is looked for in bytes, not in elements", "csrc/coded_bucket.cpp",
        "residual += begin * residual_.here()->element_size();", "residual += begin;",
        "test_wires.py", "engines_agree and int8 and 3",
    ),
    Mutant(
        "the residual is no share of the mean", "csrc/cpu/coded.cpp",
        "LOCALSGD_LOOP(times_run, v, share, e + begin, n);", "LOCALSGD_LOOP(times_run, v, W(1), e + begin, n);",
        "test_sanitizers.py", "random_buckets and cpu-coded",
    ),
    Mutant(
        "the last element of an odd run is not measured", "csrc/cpu/loops.h",
        "for (; i < count; ++i) add(i, 0);", "for (; i + 1 < count; ++i) add(i, 0);",
        "test_sanitizers.py", "random_buckets and cpu-4000",
    ),
    Mutant(
        "parameters and buffers lie mixed", "localsgd_ext/layout.py",
        "ordered = sorted(members, key=lambda index: not specs[index].is_parameter)", "ordered = list(members)",
        "test_layout.py", "drift_covers",
    ),
    Mutant(
        "buffers travel in codes", "localsgd_ext/wire.py",
        "elif wire == EXACT or not is_parameter:", "elif wire == EXACT:",
        "test_codes.py", "values_travel",
    ),
    Mutant(
        "ranks that are done count in the divisor", "localsgd_ext/backends/reference.py",
        "return self.apply(terms.divisor)", "return self.apply(group.size())",
        "test_uneven.py", "simulated_weights and torch and plain",
    ),
    Mutant(
        "what was dropped is sent back too small", "localsgd_ext/backends/coded.py",
        "v[: self._numel].add_(residual * terms.divisor)", "v[: self._numel].add_(residual)",
        "test_coded_on_cpu.py", "every_outer",
    ),
    Mutant(
        "an exact average pays a debt in part", "localsgd_ext/anchors.py",
        "tensor.copy_(tensor + divisor * self.residual[number][part]", "tensor.copy_(tensor + self.residual[number][part]",
        "test_debts.py", "every_exact_average and averaged",
    ),
    Mutant(
        "DiLoCo without Nesterov", "localsgd_ext/outer.py",
        "return OuterSGD(lr, momentum, nesterov=True)", "return OuterSGD(lr, momentum)",
        "test_outer.py", "fifty_rounds and torch and DiLoCo and parameter and 2",
    ),
    Mutant(
        "an error names a rank by its number in the group", "localsgd_ext/control.py",
        "return kind(message, [self.global_ranks[rank] for rank in ranks])", "return kind(message, list(ranks))",
        "test_failures.py", "named_by_their_number",
    ),
    Mutant(
        "what wakes a waiting rank is taken for a message", "localsgd_ext/mesh.py",
        "if self._rows[other].number != self._sent:", "if self._rows[other].number > self._sent:",
        "test_failures.py", "raises_is_named and torch and 2 and middle",
    ),
    Mutant(
        "NaN in the first parameter is not seen", "localsgd_ext/decision.py",
        "if active[s.replica] and s.bad >= 0}", "if active[s.replica] and s.bad > 0}",
        "test_nonfinite.py", "before_anything_is_averaged and torch",
    ),
    Mutant(
        "two changes of a sign cancel each other in a checksum", "localsgd_ext/agreement.py",
        "mixed.bitwise_xor_(wide)", "mixed.copy_(wide)",
        "test_debts.py", "order_or_sign and torch",
    ),
    Mutant(
        "the closing averaging forgets what is still to be sent", "localsgd_ext/rounds.py",
        "self.is_unsent = outcome.mode is Mode.WIRE and lossy", "self.is_unsent = outcome.mode is Mode.EXACT and lossy",
        "test_wires.py", "asked_for_and_the_last and torch and int8",
    ),
    Mutant(
        "the progress made meanwhile is lost", "localsgd_ext/shadow.py",
        "now.sub_(before).add_(after)", "now.copy_(after)",
        "test_overlap.py", "weights_in_the_middle",
    ),
    Mutant(
        "fragments are due too early", "localsgd_ext/schedules.py",
        "points = [-(-(number + 1) * interval // fragments)", "points = [(number + 1) * interval // fragments",
        "test_schedules.py", "fragments_are_due",
    ),
    Mutant(
        "all ranks resume with rank 0's optimizer", "localsgd_ext/checkpoint.py",
        'f"local_sgd_optimizers_{self._rank}.bin"', '"local_sgd_optimizers_0.bin"',
        "test_checkpoint.py", "mid_window and torch and plain and before",
    ),
)  # fmt: skip


def run_tests(folder: Path, mutant: Mutant, cache: Path) -> tuple[int, str]:
    """Exit status of pytest, and its last line."""
    environment = {**os.environ, "LOCALSGD_EXT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"tests/{mutant.test}",
        "-k",
        mutant.chosen,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900)
    return done.returncode, (done.stdout.strip().splitlines() or ["said nothing"])[-1]


def main() -> int:
    numbers = [int(each) for each in sys.argv[1:]] or range(1, len(MUTANTS) + 1)
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary) / "copy", Path(temporary) / "cache"
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for number in numbers:
            mutant, begun = MUTANTS[number - 1], time.monotonic()
            path = folder / mutant.file
            text = path.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{number}: {mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times, not once")
            status, said = run_tests(folder, mutant, cache)
            if status != 0:
                print(f"{number:2} NOT GREEN BEFORE: {mutant.test} -k '{mutant.chosen}': {said}", flush=True)
                bad += 1
                continue
            path.write_text(text.replace(mutant.old, mutant.new))
            status, said = run_tests(folder, mutant, cache)
            path.write_text(text)
            caught = status == 1  # others are no failures of a test
            bad += not caught
            print(
                f"{number:2} {'caught' if caught else 'SURVIVED'}: {mutant.what} ({mutant.file}; {mutant.test} -k '{mutant.chosen}': {said}; "
                f"{time.monotonic() - begun:.0f} s)",
                flush=True,
            )
    print(f"{len(numbers) - bad} of {len(numbers)} caught")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
