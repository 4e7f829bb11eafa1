"""The checks of the documentation find what is wrong."""

from pathlib import Path

import pytest

from tests.docs.commands import check, commands_of, configurations
from tests.docs.markdown import anchors, code_blocks, links

PAGE = """\
# A page

See `sgmcmc plan --config …` and [there](other.md#x).

```python exec="on" session="a page"
print(1)
```

## What `it` does, twice!

??? note
    ```console
    $ sgmcmc example digits_posterior > p.yaml
    $ CUDA_VISIBLE_DEVICES=0 uv run sgmcmc fit --config p.yaml \\
        --trainer.max_epochs 3  # a comment
    # sgmcmc nothing
    $ python -m tests.benchmarks.memory | tail
    ```

<img src="docs/a.png" alt="a"> `[no](link)` `sgmcmc fit --resume`
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_page_is_read(page: Path) -> None:
    python, console = code_blocks(page)
    assert (python.line, python.language, python.options) == (5, "python", {"exec": "on", "session": "a page"})
    assert python.code == "print(1)\n"
    assert console.code.startswith("$ sgmcmc example")
    assert links(page) == ["other.md#x", "docs/a.png"]
    assert anchors(page) == {"a-page", "what-it-does-twice"}
    assert configurations(page) == {"p.yaml": "digits_posterior"}
    assert list(commands_of(page)) == [
        "sgmcmc example digits_posterior",
        "sgmcmc fit --config p.yaml --trainer.max_epochs 3",
        "tests.benchmarks.memory",
        "sgmcmc plan --config",
        "sgmcmc fit --resume --config",
    ]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("sgmcmc fit --config x.yaml --trainer.max_epochs 3 --seed_everything 1", ""),
        ("sgmcmc plan --config", ""),
        ("sgmcmc compare A B --output c.md", ""),
        ("sgmcmc recipe NAME --data-root DIR", ""),
        ("sgmcmc fit", ""),
        ("sgmcmc --version", ""),
        ("recipes equal_cost --full", ""),
        ("sgmcmc fit --config x.yaml --trainer.epochs 3", "unrecognized"),
        ("sgmcmc fit --config x.yaml --model.init_args.temprature 1", "not"),
        ("sgmcmc fitt --config x.yaml", "code 2"),
        ("sgmcmc report", ""),
        ("sgmcmc report RUN --outptu x", "code 2"),
        ("sgmcmc recipe no_such_recipe", "code 2"),
        ("tests.benchmarks.nothing", "no such module"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_command_is_checked(command: str, problem: str, tmp_path: Path) -> None:
    if not problem:
        check(command, {}, tmp_path)
        return
    with pytest.raises(ValueError, match=problem):
        check(command, {}, tmp_path)
