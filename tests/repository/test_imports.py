"""Imports between product modules run one way and in no circle; the paths that CONTRIBUTING.md names exist.

All imports count, also those inside functions and under ``TYPE_CHECKING``. A module that is imported from a package's
``__init__`` counts as imported from where it is.
"""

from __future__ import annotations

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = {"ds_vpipe": "ds_vpipe", "engine": "ds_vpipe.engine", "models": "ds_vpipe.models"}
ENGINE = "ds_vpipe.engine"

# From the bottom to the top: no module imports one of a level above its own.
LEVELS = (
    ("",),  # everything that is not named below
    (ENGINE,),
    ("ds_vpipe", "ds_vpipe.__main__", "ds_vpipe.commands", "ds_vpipe.initialization", "ds_vpipe.run"),
    ("ds_vpipe.models",),
)
ENGINE_LEVELS = (
    ("backend_threads", "reduction_buffers"),
    ("links", "weights"),  # import nothing of the engine but themselves
    ("updates", "modules"),
    ("deepspeed_internals",),
    ("execution", "stage"),
    ("checkpoint", "observe", "build"),
    ("engine",),
    ("loop",),
)
# Exceptions that are known. A new one has to turn round; one that is gone leaves the list.
AGAINST_THE_LEVELS: set[tuple[str, str]] = set()
CLOSE_A_CIRCLE: set[tuple[str, str]] = set()


def module_files() -> dict[str, Path]:
    """Files of all product modules by name; a package has the name of its folder."""
    files = {}
    for folder, name in TREES.items():
        for path in (ROOT / folder).rglob("*.py"):  # which does not follow the links in ds_vpipe/
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return files


FILES = module_files()


@functools.cache
def imported(module: str) -> set[tuple[str, str]]:
    """Product modules and names that a module imports; the name is empty where a module as a whole is imported."""
    path = FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                found.add((whole, "") if whole in FILES else (source, alias.name))
    return {(target, name) for target, name in found if target in FILES}


def home(target: str, name: str) -> str:
    """The module that a name comes from: a package's ``__init__`` may only gather it."""
    gathered = [one for one, other in imported(target) if name and other == name]
    return home(gathered[0], name) if gathered and FILES[target].name == "__init__.py" else target


ARROWS = {(module, home(*found)) for module in FILES for found in imported(module)}


def engine_part(module: str) -> str:
    """Name of an engine module below ``ds_vpipe.engine``; empty for all other modules."""
    return module.removeprefix(f"{ENGINE}.") if module.startswith(f"{ENGINE}.") else ""


def level(module: str, levels: tuple[tuple[str, ...], ...]) -> int:
    """Index of the level that a module, or the nearest package around it, is in."""
    found = {name: index for index, names in enumerate(levels) for name in names}
    while module not in found:
        module = module.rpartition(".")[0] if "." in module else ""
        if module == "ds_vpipe":  # the package is around everything, its __init__ is on a level of its own
            module = ""
    return found[module]


def test_names_that_a_package_gathers_are_found_where_they_are() -> None:
    assert home("ds_vpipe.config", "VPipeConfig") == "ds_vpipe.config.block"
    assert ("ds_vpipe.commands.config", "ds_vpipe.config.block") in ARROWS
    assert home("ds_vpipe.errors", "Refusal") == "ds_vpipe.errors"


def test_relative_and_late_imports_count() -> None:
    assert ("ds_vpipe", "ds_vpipe.engine.observe.statistics") in ARROWS  # in a function
    assert ("ds_vpipe.simulation.costs", "ds_vpipe.planning.devices") in ARROWS  # under TYPE_CHECKING
    assert ("ds_vpipe.run", "ds_vpipe.initialization") in ARROWS


def test_no_module_imports_one_above_it() -> None:
    above = {(a, b) for a, b in ARROWS if level(a, LEVELS) < level(b, LEVELS)}
    assert not above, sorted(above)


def test_every_module_at_the_top_of_the_engine_has_a_level() -> None:
    parts = {engine_part(module).partition(".")[0] for module in FILES} - {""}
    assert parts == {name for names in ENGINE_LEVELS for name in names}


def test_imports_inside_the_engine_run_one_way() -> None:
    against = set()
    for pair in ARROWS:
        one, other = map(engine_part, pair)
        if not one or not other:
            continue
        package, package_there = one.partition(".")[0], other.partition(".")[0]
        upwards = level(one, ENGINE_LEVELS) < level(other, ENGINE_LEVELS)
        if upwards or (package in ("links", "weights") and package != package_there):
            against.add((one, other))
    assert against == AGAINST_THE_LEVELS


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for module, target in ARROWS - CLOSE_A_CIRCLE:
        if module != target and (engine_part(module), engine_part(target)) not in AGAINST_THE_LEVELS:
            graph[module].add(target)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    reached: dict[str, set[str]] = {}
    for module in order:
        reached[module] = graph[module].union(*(reached[target] for target in graph[module]))
    closing = {(module, target) for module, target in ARROWS if module in reached[target]}
    assert closing & CLOSE_A_CIRCLE == CLOSE_A_CIRCLE


# A path has a slash or ends like a file; ``{a, b}`` and words in capitals are not names.
PATH = re.compile(r"[\w.-]*(?:/[\w.-]*)+|[\w-]+\.(?:py|sh|md|toml|txt|sbatch)")


def named_paths(text: str) -> set[str]:
    """Paths in backquotes and the arguments of links."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text)))
    links = re.findall(r"\]\(([^)#\s]+)\)", text)
    return {*PATH.findall(quoted), *links}


def test_every_path_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = named_paths(text)
    assert {"engine/engine.py", "ds_vpipe/schedules/program.py", "docs/convergence.md"} <= paths
    folders = [
        ROOT,
        ROOT / "ds_vpipe",
        ROOT / "engine",
        *(path for path in (ROOT / "tests").rglob("*") if path.is_dir()),
    ]
    folders += [path for tree in ("engine", "ds_vpipe") for path in (ROOT / tree).iterdir() if path.is_dir()]
    missing = {path for path in paths if not any((folder / path).exists() for folder in folders)}
    assert not missing, sorted(missing)


def test_the_tree_of_contributing_is_that_of_the_repository() -> None:
    tree = re.search(r"(?s)## The tree\s+```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert tree is not None
    top, named = "", set[Path]()
    for line in tree[1].splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        top, below = (top, names) if line.startswith(" ") else (names[0], [""])
        for name in below:
            path = ROOT / top / name
            assert path.exists() or path.with_suffix(".py").exists(), f"{top}{name}"
            named.add(path if path.exists() else path.with_suffix(".py"))
    found = [path for top in ("ds_vpipe", "engine") for path in (ROOT / top).glob("[!_]*") if not path.is_symlink()]
    there = {path for path in found if path.is_dir() or path.suffix == ".py"}
    assert there <= named
