"""Compiles the native engine while installing, where that is possible, and never blocks an installation.

What to build, and how, is in localsgd_ext/build.py, which is loaded by its path: importing the package would need torch, and in
pip's isolated builds there is none. What is not built here is built on first use, from the sources that travel along.
"""

import functools
import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_spec = importlib.util.spec_from_file_location("build_description", Path(__file__).parent / "localsgd_ext" / "build.py")
build = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = build  # dataclasses look their module up
_spec.loader.exec_module(build)


@functools.cache
def plan() -> tuple["build.Plan | None", str]:
    """What to build, or None and the reason why nothing is built now."""
    choice = build.switch()
    if choice == "off":
        return None, f"{build.SWITCH}=off"
    try:
        build.compiler()
        target = build.installed_target()
        if target is None:
            return _not_now(choice, "no torch in the environment that this is installed into")
        return build.make_plan(target), ""
    except build.BuildError as error:
        return _not_now(choice, str(error))


def _not_now(choice: str, why: str) -> tuple[None, str]:
    if choice != "auto":
        raise SystemExit(f"localsgd_ext: {build.SWITCH}={choice}, but {why}")
    return None, why


class BuildPy(build_py):
    """Puts the binary beside the modules."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for left in Path(self.build_lib, "localsgd_ext").glob(
            f"{build.MODULE}*"
        ):  # by an earlier build, perhaps of other sources
            left.unlink()
        what, why = plan()
        if what is not None:
            try:
                build.compile_into(Path(self.build_lib) / "localsgd_ext", what)
                print(f"localsgd_ext: built the native engine ({what.flavour}) for torch {what.target.torch}", file=sys.stderr)
                return
            except build.BuildError as error:
                why = str(error)
                if build.switch() != "auto":
                    raise SystemExit(f"localsgd_ext: {why}") from None
        print(f"localsgd_ext: the native engine is not built now, but on first use ({why})", file=sys.stderr)


class Sdist(sdist):
    """With the tests, the benchmarks and the changelog, which are no part of the package."""

    def make_distribution(self) -> None:
        for folder in ("tests", "benchmarks"):
            self.filelist.graft(folder)
        self.filelist.include("CHANGELOG.md")
        self.filelist.global_exclude("*.py[cod]")
        super().make_distribution()


class BinaryDistribution(Distribution):
    """A wheel with a binary inside belongs to one platform; without one it is for all. (After a compilation that failed it is
    without one, and yet for one platform: the name is asked for before.)"""

    def has_ext_modules(self) -> bool:
        return plan()[0] is not None


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist}, distclass=BinaryDistribution)
