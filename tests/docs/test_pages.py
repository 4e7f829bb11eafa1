"""Pages: their Python runs while the site is built, their commands parse, and links of the root's files resolve."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.commands import check, commands_of, configurations
from tests.docs.markdown import anchors, code_blocks, links
from tests.support.paths import REPOSITORY

ROOT_PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SITE_PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
TUTORIALS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_every_block_of_python_runs_or_says_why_not() -> None:
    """A page's block is run by the site's build (`exec`), or it has a reason in `notest`."""
    lacking = [
        f'{name_of(path)}, line {block.line}: add exec="on", or notest="why it cannot run"'
        for path in SITE_PAGES
        for block in code_blocks(path)
        if block.language in ("python", "py")
        and block.options.get("exec") != "on"
        and len(block.options.get("notest", "").split()) < 2
    ]
    assert lacking == []


def test_the_blocks_of_a_page_share_their_names() -> None:
    """Else a reader who runs them one after the other would not see what the page shows."""
    lacking = []
    for path in SITE_PAGES:
        blocks = [block for block in code_blocks(path) if block.options.get("exec") == "on"]
        sessions = {block.options.get("session") for block in blocks}
        if len(blocks) > 1 and (None in sessions or len(sessions) > 1):
            lacking.append(f"{name_of(path)} has the sessions {sorted(map(str, sessions))}: one name for all blocks")
    assert lacking == []


def test_commands_parse(tmp_path: Path) -> None:
    """Each with the example that its page writes to the configuration's name; the same command once."""
    wrong, seen = [], set()
    for path in [*ROOT_PAGES, *SITE_PAGES]:
        known = configurations(path)
        for command in commands_of(path):
            as_parsed = tuple(known.get(word, word) for word in command.split())
            if as_parsed in seen:
                continue
            seen.add(as_parsed)
            try:
                check(command, known, tmp_path)
            except ValueError as error:
                wrong.append(f"{name_of(path)}: {error}")
    assert wrong == []
    assert len(seen) > 20, "else the commands were not found"


@pytest.mark.parametrize("path", [*ROOT_PAGES, *SITE_PAGES], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """Files and headings. Addresses on the web are not opened."""
    dead = []
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = unquote(link).partition("#")
        page = (path.parent / target).resolve() if target else path
        if not page.exists() or not page.is_relative_to(REPOSITORY):
            dead.append(f"{link}: there is no {target}")
        elif anchor and page.suffix == ".md" and anchor not in anchors(page):
            dead.append(f"{link}: {page.name} has no heading #{anchor}")
    assert dead == []


@pytest.mark.parametrize("path", TUTORIALS, ids=name_of)
def test_links_of_tutorials_lead_somewhere(path: Path) -> None:
    """They are addresses of the built site, which its build does not check: a page is a folder there."""
    dead = []
    for link in re.findall(r"\]\((\.\./[^)]*)\)", path.read_text(encoding="utf-8")):
        address, _, anchor = link.partition("#")
        place = (path.with_suffix("") / address).resolve()
        page = next(
            (p for p in (place.with_suffix(".md"), place / "index.md", place.with_suffix(".py")) if p.exists()), None
        )
        if page is None or (anchor and anchor not in anchors(page)):
            dead.append(link)
    assert dead == []


@pytest.mark.slow
@pytest.mark.parametrize("path", SITE_PAGES, ids=name_of)
@pytest.mark.filterwarnings("ignore")
def test_the_blocks_of_a_page_run(path: Path) -> None:
    """As in the site's build, without mkdocs: in order, in one namespace."""
    Path("docs").symlink_to(REPOSITORY / "docs")  # pages name files of the repository
    names = {"__name__": "__main__"}
    for block in code_blocks(path):
        if block.options.get("exec") == "on" and block.language in ("python", "py"):
            exec(compile(block.code, f"{name_of(path)}, line {block.line}", "exec"), names)
