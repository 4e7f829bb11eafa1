"""Whether all nodes of a run see its files, asked before a rank reads one that another has written."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST


def check_common(what: str, find: Callable[[], Path | None], mark: Callable[[Path], Any]) -> Any:
    """Return what `find` does, once all ranks have seen the same there; all ranks call it.

    Args:
        what: what is looked for, for the message.
        find: returns its path for this rank, or None; what it raises is raised where the ranks agree otherwise.
        mark: returns what identifies it, the same on all ranks; None if it is not there.

    Raises:
        ValueError: on all ranks, if one sees another one than rank 0, or none, naming both nodes and the folder.
    """
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    path, error, seen = None, None, None
    try:
        path = find()
        seen = mark(path) if distributed and path is not None else None
    except ValueError as raised:
        error = raised
    if distributed:
        own = (socket.gethostname(), str((path or Path()).absolute()), seen)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        _compare(what, everyone)
    if error is not None:
        raise error
    return path


def _compare(what: str, everyone: list[Any]) -> None:
    node, where, first = everyone[0]
    for rank, (own_node, own_where, mark) in enumerate(everyone):
        if mark == first:
            continue
        seer, blind = ((0, node, where), (rank, own_node, own_where))
        if first is None:
            seer, blind = blind, seer
        sees = "does not see" if None in (mark, first) else "sees other files than"
        raise ValueError(
            f"rank {blind[0]} on node {blind[1]} (in {blind[2]}) {sees} {what} of rank {seer[0]} on node {seer[1]} (in "
            f"{seer[2]}): ranks read the run's samples and checkpoints, so let default_root_dir, dirpath and ckpt_path "
            "name a folder that all nodes share, or run on one node"
        )


def mark_of_store(path: Path) -> str | None:
    """Return what identifies a store, None if there is none."""
    if not (path / MANIFEST).exists():
        return None
    return DiskStore(path, skip_damaged=True).run_id or "a store of version 0.1.0"


def check_checkpoint(path: Path) -> None:
    """Raise ValueError unless all ranks, which read it together, see the same checkpoint."""
    check_common("the checkpoint", lambda: path, _mark_of_checkpoint)


def _mark_of_checkpoint(path: Path) -> str | None:
    if path.is_file():
        return f"{path.stat().st_size} bytes"
    return "a folder" if path.is_dir() else None
