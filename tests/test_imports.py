"""Who knows whom: every import of the package, those inside of functions and for type checkers included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import lrmoe

SOURCE = Path(lrmoe.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of this package that a source names: in import statements, wherever they stand, and as strings, by
    which some are imported when they are asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.value


def graph() -> dict[str, set[str]]:
    return {
        name: {other for other in imported(ast.parse(path.read_text(encoding="utf-8"))) if other in MODULES} - {name}
        for name, path in MODULES.items()
    }


def test_no_module_knows_itself_through_others() -> None:
    # The package's own names are those of its modules, which know each other's homes and not the package.
    known = {name: others - {"lrmoe"} for name, others in graph().items() if name != "lrmoe"}
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def levels() -> list[set[str]]:
    """The rooms as CONTRIBUTING draws them, lowest first; those of one line do not know each other."""
    _, _, rest = CONTRIBUTING.read_text(encoding="utf-8").partition("Who may know whom")
    drawn = [line for line in rest.partition("\n\n")[2].partition("\n\n")[0].splitlines() if line.startswith("    ")]
    assert drawn
    return [set(re.findall(r"[a-z_]+", line.partition("#")[0])) for line in reversed(drawn)]


def room(module: str) -> str:
    """The folder of a module, or the module at the root."""
    return module.split(".")[1] if "." in module else "lrmoe"


def test_rooms_know_only_what_is_drawn_below_them() -> None:
    height = {name: level for level, names in enumerate(levels()) for name in names}
    assert {room(name) for name in MODULES} == set(height), "CONTRIBUTING draws every room once"
    wrong = {
        f"{name} (in {room(name)}) knows {other}"
        for name, others in graph().items()
        for other in others
        if room(name) != room(other) and height[room(other)] >= height[room(name)]
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_what_is_read_are_the_imports() -> None:
    tree = ast.parse("import lrmoe.config\ndef f():\n    from lrmoe.ops import glu\nx = {'a': 'lrmoe.layer'}\n")
    assert {name for name in imported(tree) if name in MODULES} == {"lrmoe.config", "lrmoe.ops.glu", "lrmoe.layer"}
