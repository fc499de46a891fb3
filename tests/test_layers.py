"""The house: imports point one way, the control plane and the engines know nothing of each other, and files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "localsgd_ext"

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        # What knows nothing of the rest, or only words of it.
        "_version errors build costs outer wire layout collectives background dtensors standing agreement mesh report items schedules checkpoint",
        # Engines; who averages with whom; what ranks tell each other.
        "backends backends.interface backends.coded backends.reference backends.native replicas groups control",
        # One averaging, and what a model gives it.
        "shadow anchors binding averager models gradient_sync functional",
        # One round.
        "decision entry rounds arguments",
        # The front end.
        "local_sgd __init__",
        # Around it.
        "integrations integrations.shared integrations.staged integrations.transformers integrations.lightning integrations.torchft "
        "cli cli.quantities cli.doctor cli.plan cli.bench cli.demo cli.demo_training __main__",
    )
)
"""From bottom to top. A module imports from lower layers, and from its own as long as that makes no circle."""

APART = {
    # The control plane has no notion of tensors' layouts, engines or averagings, nor they of it.
    "standing agreement mesh control": "wire layout outer items backends shadow anchors binding averager models",
    "wire layout outer items backends shadow anchors binding averager": "standing agreement mesh control decision entry rounds",
    # Reading what the command line computes needs no torch.
    "costs cli.plan cli.quantities cli.demo": "wire layout local_sgd backends",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def imported_nodes(node: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """Also inside functions, but not what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.ImportFrom, ast.Import)):
            yield child
        yield from imported_nodes(child)


def imports(name: str) -> set[str]:
    """The modules of the package that this one imports."""
    path, found = MODULES[name], set()
    package = ["localsgd_ext", *path.relative_to(PACKAGE).parent.parts]
    for node in imported_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*module, each.name]) for each in node.names]
            names = [each if each.removeprefix("localsgd_ext.") in MODULES else ".".join(module) for each in names]
        for each in names:
            if each == "localsgd_ext" or each.startswith("localsgd_ext."):
                found.add(each.removeprefix("localsgd_ext").removeprefix(".") or "__init__")
    return found - {name}


IMPORTS = {name: imports(name) for name in MODULES}


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


def test_every_module_has_its_layer() -> None:
    assert sorted(name for names in LAYERS for name in names) == sorted(MODULES)
    assert {"averager", "backends.interface"} <= IMPORTS["binding"] | IMPORTS["rounds"], "imports are found"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    upward = [each for each in IMPORTS[name] if each != "__init__" and layer(each) > layer(name)]
    assert not upward
    if "__init__" in IMPORTS[name]:  # the public names: for what stands around the front end
        assert layer(name) == len(LAYERS) - 1


def test_no_circles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            # A package's own file chooses among its modules, which do not import it.
            for each in IMPORTS[name]:
                visit(each, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize(("these", "those"), APART.items())
def test_what_is_kept_apart(these: str, those: str) -> None:
    def beneath(name: str) -> set[str]:
        return {name}.union(*map(beneath, IMPORTS[name] - {"__init__"}))

    for name in these.split():
        assert not beneath(name) & set(those.split()), name


@pytest.mark.parametrize("module", ["layout", "wire", "costs", "outer", "schedules"])
def test_arithmetic_knows_no_process_groups(module: str) -> None:
    assert "torch.distributed" not in "\n".join(map(ast.unparse, imported_nodes(ast.parse(MODULES[module].read_text()))))


SOURCES = [
    *PACKAGE.rglob("*.py"),
    *(path for path in (ROOT / "csrc").rglob("*") if path.is_file()),
    *(ROOT / "benchmarks").glob("*.py"),
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 400
