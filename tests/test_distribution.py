"""What `setup.py` and `pyproject.toml` install: every package of the tree, with its data files."""

import re
import runpy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from lightning_sgmcmc.report import page

REPOSITORY = Path(__file__).parents[1]
BESIDE = ("callbacks", "datamodules", "recipes")
"""Folders that are installed as packages of `lightning_sgmcmc`."""


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `setup.py` passes to setuptools."""
    setuptools = pytest.importorskip("setuptools")
    found: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("setup.py")
    return found


def _packages(folder: str, name: str) -> dict[str, str]:
    """Return the folders with Python files under a folder, by the name of their package."""
    parents = {path.parent.relative_to(REPOSITORY / folder) for path in (REPOSITORY / folder).rglob("*.py")}
    return {".".join([name, *parent.parts]): (Path(folder) / parent).as_posix() for parent in parents}


def test_every_package_is_listed(settings: dict[str, Any]) -> None:
    expected = _packages("lightning_sgmcmc", "lightning_sgmcmc")
    for beside in BESIDE:
        expected |= _packages(beside, f"lightning_sgmcmc.{beside}")
    assert sorted(settings["packages"]) == sorted(expected)
    for package, folder in expected.items():
        assert (REPOSITORY / folder / "__init__.py").is_file(), f"{package} has no __init__.py"
        known = settings["package_dir"]
        parent = max((name for name in known if package == name or package.startswith(f"{name}.")), key=len)
        mapped = "/".join([known[parent], *package[len(parent) :].split(".")[1:]])
        assert mapped == folder, f"{package} would be installed from {mapped}"


def test_every_data_file_is_listed() -> None:
    """Reads pyproject.toml by eye: `tomllib` is not in Python 3.10."""
    text = (REPOSITORY / "pyproject.toml").read_text().split("[tool.setuptools.package-data]")[1].split("\n[")[0]
    packages = ("lightning_sgmcmc", *BESIDE)
    data = [
        path
        for package in packages
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert {path.name for path in data} >= {"py.typed", "report.css", "report.html", "digits_csghmc.yaml"}
    for path in data:
        package = ".".join(path.parent.relative_to(REPOSITORY).parts)
        package = f"lightning_sgmcmc.{package}" if package.split(".")[0] in BESIDE else package
        lines = [line for line in text.splitlines() if line.split("=")[0].strip().strip('"') == package]
        assert lines, f"pyproject.toml installs no data of {package}, but there is {path.name}"
        patterns = re.findall(r'"([^"]+)"', lines[0].split("=", 1)[1])
        assert any(fnmatchcase(path.name, pattern) for pattern in patterns)
    assert all(Path(page.__file__).with_name(name).is_file() for name in ("report.css", "report.html", "parts.html"))


@pytest.mark.parametrize("folder", BESIDE)
def test_packages_import_one_another_by_their_installed_names(folder: str) -> None:
    """A clone has `callbacks`, `datamodules` and `recipes` in its root; an installed package does not."""
    lines = [
        f"{path.relative_to(REPOSITORY)}, line {number}: {line.strip()}"
        for package in ("lightning_sgmcmc", *BESIDE, "tests")
        for path in (REPOSITORY / package).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(rf"\s*(from|import) {folder}\b", line)
    ]
    assert lines == []
