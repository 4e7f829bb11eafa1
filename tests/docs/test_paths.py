"""The hook that keeps the building machine's paths out of the pages."""

import logging
from types import SimpleNamespace

import pytest

from docs.hooks.paths import on_post_page

PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/a.py"))


def shown(html: str, root: str = "/home/someone/clone") -> str:
    return on_post_page(html, PAGE, SimpleNamespace(config_file_path=f"{root}/mkdocs.yml"))


def test_a_warnings_file_is_named_from_the_repository(caplog: pytest.LogCaptureFixture) -> None:
    text = "<pre>/home/someone/clone/callbacks/chain_health.py:241: UserWarning: ChainHealth: hot</pre>"
    assert shown(text) == "<pre>callbacks/chain_health.py:241: UserWarning: ChainHealth: hot</pre>"
    assert shown("/home/x/lib/python3.11/site-packages/torch/nn.py:3: W") == "torch/nn.py:3: W"
    assert shown("<pre>/tmp/ipykernel_12/345.py:6: UserWarning") == "<pre>a cell: UserWarning"
    assert caplog.records == []


@pytest.mark.parametrize("path", ["/tmp/tmpa1/runs", "/root/x.py", "/home/other/file.txt"])
def test_another_path_of_the_machine_fails_a_strict_build(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shown(f"<p>written to {path}</p>")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert path in caplog.text
    assert caplog.records[0].name.startswith("mkdocs."), "else strict would not count it"


def test_addresses_and_links_are_no_paths(caplog: pytest.LogCaptureFixture) -> None:
    shown('<a href="https://example.org/home/x">a</a> <a href="../tmp/y/">b</a> runs/tmp/z /v1/root')
    assert caplog.records == []
