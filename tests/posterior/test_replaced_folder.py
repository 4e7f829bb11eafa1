"""A folder that changes under an opened posterior, as a server's does: no other run's samples, and why."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import Categorical, Posterior
from lightning_sgmcmc.posterior import predictive


def save(folder: Path) -> None:
    Posterior.from_states(nn.Linear(4, 3), [nn.Linear(4, 3) for _ in range(5)], Categorical()).save(folder)


def rename(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def copy_over(folder: Path, other: Path) -> None:
    for file in other.iterdir():
        shutil.copyfile(file, folder / file.name)


MOVED, REPLACED = (
    "moved or deleted after they were opened: load",
    "another run has written there .*: load the posterior again",
)
CHANGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "moved": (rename, MOVED),
    "deleted": (lambda folder, _: shutil.rmtree(folder), MOVED),
    "replaced": (replace, REPLACED),
    "copied over": (copy_over, REPLACED),
}
X, Y = torch.randn(20, 4), torch.randint(3, (20,))
USES: dict[str, Callable[[Posterior], Any]] = {
    "predict, too large to keep": lambda posterior: posterior.predict(X),
    "evaluate": lambda posterior: posterior.evaluate([(X, Y)]),
    "calibrate": lambda posterior: posterior.calibrate([(X, Y)]),
    "a selection": lambda posterior: posterior.thin(count=3).predict(X),
    "networks": lambda posterior: list(posterior.networks()),
    "summary": Posterior.summary,
    "to_arviz": Posterior.to_arviz,
    "save": lambda posterior: posterior.save(posterior.store.path.with_name("saved")),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_named(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the same names were taken for those that had been read before."""
    for name in ("served", "tonight"):
        save(tmp_path / name)
    posterior = Posterior.load(tmp_path / "served")
    kept = posterior.predict(X).probabilities
    act, reason = CHANGES[change]
    act(tmp_path / "served", tmp_path / "tonight")
    assert torch.equal(posterior.predict(X).probabilities, kept)
    monkeypatch.setattr(predictive, "HOST_SHARE", 0.0)
    posterior._ready = None
    for use in USES.values():
        with pytest.raises(ValueError, match=reason):
            use(posterior)


def test_a_later_run_leaves_the_samples_that_it_moves_aside(tmp_path: Path) -> None:
    save(tmp_path / "served")
    posterior = Posterior.load(tmp_path / "served")
    before = posterior.evaluate([(X, Y)]).bma
    (tmp_path / "served").rename(tmp_path / "served-1")
    save(tmp_path / "served")
    assert posterior.evaluate([(X, Y)]).bma == before
    assert str(posterior.summary()) == str(Posterior.load(tmp_path / "served-1").summary())
