"""Pages without paths of the machine that builds them: Python's warnings name the file that warns."""

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.paths")  # its warnings fail a strict build
CELL = re.compile(r"/[\w./-]*/ipykernel_\d+/\d+\.py:\d+")
PACKAGES = re.compile(r"/[\w./-]*/site-packages/")
ABSOLUTE = re.compile(r"(?<![\w./:~-])/(?:home|root|tmp|work|Users|private|mnt|var/folders)/[\w.-][^\s<&\"']*")


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return the page with paths from the repository's root; warn of one that leads elsewhere.

    Args:
        output: the page as HTML.
        page: mkdocs' page.
        config: mkdocs' configuration.
    """
    output = output.replace(f"{Path(config.config_file_path).resolve().parent}/", "")
    output = PACKAGES.sub("", CELL.sub("a cell", output))
    found = ABSOLUTE.search(output)
    if found:
        log.warning(f"{page.file.src_uri} shows the path {found.group()}, which only this machine has")
    return output
