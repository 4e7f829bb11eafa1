"""The folder of a reference run: samples, the state of its chains, and its record."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.files import read_regular, write_atomically
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.lock import StoreLock
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.tables import Columns

SAMPLES, STATE = "samples", "chains.pt"
LARGEST_STATE = 2**34


class RunFolder:
    """A folder in which one process at a time makes a run, and a later one continues it.

    `samples` is the store, and `chains.pt` the state of the chains after an iteration that is complete in the store.

    Args:
        path: the folder, created if needed.
        facts: what the draws depend on, as plain data.
        description: of the network, see `DiskStore.create`.
        columns: what inputs and targets are.
        shared: what is not sampled, by name.

    Attributes:
        store: the samples.
        state: the state to continue from; None for a new run.

    Raises:
        FileExistsError: if the folder has samples of another kind of run.
        ValueError: if it has a run that depends on other facts, or its state is damaged.
        RuntimeError: if another process writes there.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        description: Any,
        columns: Columns,
        shared: Mapping[str, Tensor],
    ) -> None:
        self.path = path
        self._facts = dict(facts)
        self._lock = StoreLock(path / SAMPLES)
        try:
            self.state = self._saved()
            if self.state is None:
                self.store = self._created(description, columns, shared)
            else:
                self.store = self._continued(self.state)
        except BaseException:
            self._lock.release()
            raise

    def _saved(self) -> dict[str, Any] | None:
        file = self.path / STATE
        try:
            content = read_regular(file, LARGEST_STATE)
        except FileNotFoundError:
            return None
        try:
            saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            facts = saved["facts"]
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(
                f"{file} is damaged ({str(error).splitlines()[0][:100]}): remove {self.path} and start again"
            ) from error
        for name, own in self._facts.items():
            if facts.get(name) != own:
                what = name if name in ("data", "what is not sampled", "parameters") else f"{name}={facts.get(name)!r}"
                raise ValueError(
                    f"{self.path} has a run with another {what} (now {_shown(own)}), and a run cannot change what its "
                    "draws depend on: pass the same, or another folder as out"
                )
        found: dict[str, Any] = saved["state"]
        return found

    def _created(self, description: Any, columns: Columns, shared: Mapping[str, Tensor]) -> DiskStore:
        manifest = self.path / SAMPLES / MANIFEST
        if manifest.exists():
            if len(DiskStore(self.path / SAMPLES)):
                raise FileExistsError(
                    f"{self.path / SAMPLES} has samples of another run, without {STATE}: pass another folder as out"
                )
            manifest.unlink()  # of a run that ended before its first draw
        return DiskStore.create(self.path / SAMPLES, description, columns, shared)

    def _continued(self, state: Mapping[str, Any]) -> DiskStore:
        """Return the store without draws after the saved iteration, which are made again."""
        store = DiskStore(self.path / SAMPLES)
        made = int(state["chains"]["iteration"])
        store.keep([record for record in store.records if record.step <= made])
        if len(store) != int(state["samples"]):
            raise ValueError(
                f"{self.path / SAMPLES} holds {len(store)} of the run's {state['samples']} samples: restore the "
                "folder, or pass another one as out"
            )
        return store

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state of the chains.

        Args:
            state: plain data and tensors.
        """
        content = io.BytesIO()
        torch.save({"facts": self._facts, "state": dict(state)}, content)
        write_atomically(self.path / STATE, content.getbuffer())

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.release()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
