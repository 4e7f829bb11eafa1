"""The architecture, read from the source: no import circles, short files and functions, public names listed."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "lightning_sgmcmc"
INSTALLED = {PACKAGE: PACKAGE} | {name: f"{PACKAGE}.{name}" for name in ("callbacks", "datamodules", "recipes")}
"""The folders of the distribution, and the packages that they are installed as."""
LIBRARY = (PACKAGE, "callbacks", "datamodules")
"""Those that users import from; a recipe is a program."""
MOST_LINES_OF_A_FILE = 600
FEWEST_LINES_OF_A_FILE = 60
SHORT_BY_REASON: dict[str, str] = {}
"""Files that explain something alone in a few lines; any other short one is a piece of its importer."""
MOST_LINES_OF_A_FUNCTION = 80
MOST_FILES_IN_THE_ROOT = 15
MOST_TYPE_IGNORES = 25


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((REPOSITORY / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def shown(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


# -- imports ----------------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """Return the name that a file of the distribution is imported by."""
    folder, *rest = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join([INSTALLED[folder], *rest]).removesuffix(".__init__")


def imports() -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, in functions and for types too."""
    files = {module_name(path): path for path in python_files(*INSTALLED)}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{shown(path)}, line {node.lineno}: imports are absolute"
                base = node.module or ""
                wanted = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names]
            else:
                continue
            found[name] |= files.keys() & set(wanted)
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach one another (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1 or name in graph[name]:
                groups.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return groups


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == [["b", "c"], ["d"]]


def test_no_circle_of_imports() -> None:
    assert circles(imports()) == []


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_the_root_holds_few_files() -> None:
    files = sorted(path.name for path in (REPOSITORY / PACKAGE).glob("*.py"))
    assert len(files) <= MOST_FILES_IN_THE_ROOT, files


def test_files_are_short() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in python_files(*INSTALLED)}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FILE} == {}


def test_no_file_is_a_fragment() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in python_files(*LIBRARY)}
    short = {name for name, n in lengths.items() if n < FEWEST_LINES_OF_A_FILE and not name.endswith("__init__.py")}
    assert short - SHORT_BY_REASON.keys() == set(), "merge each into the file that uses it, or give a reason"
    assert SHORT_BY_REASON.keys() - short == set(), "these reasons are no longer needed"


def length_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


def test_functions_are_short() -> None:
    lengths = {
        f"{shown(path)}: {node.name}": length_without_docstring(node)
        for path in python_files(*INSTALLED)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION} == {}


def test_the_map_names_files_that_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    named = {
        name for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|html))`", text) if "NAME" not in name and "KIND" not in name
    }
    assert len(named) > 30
    missing = [n for n in named if not (REPOSITORY / n).exists() and not (REPOSITORY / PACKAGE / n).exists()]
    assert missing == []


# -- habits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quote", ['"', "'"])
def test_no_attribute_is_set_or_read_past_the_module(quote: str) -> None:
    poke = f"__dict__[{quote}"
    assert [shown(path) for path in python_files(*INSTALLED, "tests") if poke in path.read_text()] == []


def test_few_types_are_ignored() -> None:
    comment = "# type: ignore"
    counts = {shown(path): path.read_text().count(comment) for path in python_files(*INSTALLED)}
    assert sum(counts.values()) <= MOST_TYPE_IGNORES, {name: count for name, count in counts.items() if count}


HOST_FACTORIES = ("tensor", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn")
FLOAT64_ELSEWHERE = {
    "lightning_sgmcmc/tensors.py": "the helpers that all others use",
    "lightning_sgmcmc/contour/contour.py": "a contour is on its device's `exact_device`",
    "lightning_sgmcmc/contour/partition.py": "as the contour",
    "lightning_sgmcmc/contour/start.py": "as the contour",
    "lightning_sgmcmc/planning/": "a plan is made in the host's memory",
    "lightning_sgmcmc/priors/centers.py": "a centre is read from a file",
    "lightning_sgmcmc/report/": "columns that were read from files",
    "lightning_sgmcmc/simulation/": "toy targets; `simulate` refuses a device without float64",
    "lightning_sgmcmc/tables/": "arrays and frames are in the host's memory",
    "datamodules/": "data are scaled where they were read, in the host's memory",
}
"""Files and folders that may make float64 themselves, and why."""


def _is_on_the_host(call: ast.expr) -> bool:
    """Return whether a call makes a tensor of the host's memory: `….cpu()`, or a factory of torch without a device or
    with device=exact_device(…)."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cpu":
        return True
    devices = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "device"]
    own = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch" and call.func.attr in HOST_FACTORIES
    return own and all(device.startswith("exact_device(") for device in devices)


def makes_float64(tree: ast.Module) -> list[int]:
    """Return the lines that make float64 of a tensor that may be on any device."""
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr == "double" and not _is_on_the_host(node.value):
            lines.append(node.lineno)
        if node.attr in ("float64", "complex128") and ast.unparse(node.value) == "torch":
            place = above[node]
            place = above[place] if isinstance(place, ast.Tuple | ast.Set) else place
            compared = isinstance(place, ast.Compare | ast.BinOp)  # a dtype is read, not made
            host = isinstance(place, ast.keyword) and _is_on_the_host(above[place])  # type: ignore[arg-type]
            if not compared and not host:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("x.double()", True),
        ("x.double().cpu()", True),
        ("x.cpu().double()", False),
        ("x.to(torch.float64)", True),
        ("x.sum(1, dtype=torch.float64)", True),
        ("x.new_zeros(3, dtype=torch.float64)", True),
        ("map(torch.Tensor.double, x)", True),
        ("torch.zeros(3, dtype=torch.float64, device=x.device)", True),
        ("torch.zeros(3, dtype=torch.float64, device=exact_device(x.device))", False),
        ("torch.zeros(3, dtype=torch.float64)", False),
        ("torch.as_tensor(x, dtype=torch.float64)", True),
        ("x.dtype in (torch.float32, torch.float64)", False),
    ],
)
def test_float64_is_found(line: str, is_found: bool) -> None:
    assert bool(makes_float64(ast.parse(line))) is is_found


def test_float64_is_made_where_the_device_has_it() -> None:
    """Apple's devices have none, so `tensors.exact` and `tensors.widest` decide, except in what is on the host."""
    found = [f"{shown(path)}:{line}" for path in python_files(*LIBRARY) for line in makes_float64(parsed(path))]
    assert [place for place in found if not place.startswith(tuple(FLOAT64_ELSEWHERE))] == []
    unused = [name for name in FLOAT64_ELSEWHERE if not any(place.startswith(name) for place in found)]
    assert unused == []


def opens_text(tree: ast.Module) -> list[int]:
    """Return the lines that read or write text in the system's own encoding, which is not UTF-8 on Windows."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        is_text = not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in given)
        opens = isinstance(node.func, ast.Name) and name == "open" and is_text
        pipes = any(k.arg in ("text", "universal_newlines") and ast.unparse(k.value) == "True" for k in node.keywords)
        if opens or pipes or (name == "read_text" and not node.args) or (name == "write_text" and len(node.args) < 2):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='a')", True),
        ("open(path, 'rb')", False),
        ("open(path, encoding='utf-8')", False),
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("subprocess.run(command, text=True)", True),
    ],
)
def test_text_without_an_encoding_is_found(line: str, is_found: bool) -> None:
    assert bool(opens_text(ast.parse(line))) is is_found


def test_text_files_name_their_encoding() -> None:
    assert [f"{shown(path)}:{line}" for path in python_files(*LIBRARY) for line in opens_text(parsed(path))] == []


def test_every_package_says_what_it_offers() -> None:
    lacking = []
    for path in python_files(*LIBRARY):
        if path.name != "__init__.py":
            continue
        tree = parsed(path)
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if ast.get_docstring(tree) is None:
            lacking.append(f"{shown(path)} has no docstring")
        if "__all__" not in assigned:
            lacking.append(f"{shown(path)} has no __all__")
    assert lacking == []
