"""Samples that stay in memory between predictions, and that predict at once or one after another."""

import copy
import pickle
from pathlib import Path

import pytest
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.chains import together
from lightning_sgmcmc.posterior import manifest, predictive
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support.posteriors import MODULES, classifier, filled, in_memory, inputs


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sample files that are read."""
    seen: list[Path] = []
    read = manifest.read_sample_file
    monkeypatch.setattr(manifest, "read_sample_file", lambda path: seen.append(path) or read(path))  # type: ignore[func-returns-value]
    return seen


def stored(folder: Path) -> Posterior:
    module = classifier()
    filled(DiskStore.create(folder), module)
    return Posterior.load(folder, model=module)


def test_small_samples_are_read_once(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = stored(tmp_path / "s")
    first = posterior.predict(inputs())
    count = len(reads)
    assert torch.equal(posterior.predict(inputs()).probabilities, first.probabilities)
    assert len(reads) == count, "nothing is read again"
    for twin in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior)), posterior[:]):
        assert torch.equal(twin.predict(inputs()).probabilities, first.probabilities)
    assert len(reads) == count + 3 * len(posterior), "copies and selections read their own"
    last = posterior[len(posterior) - 1]
    last.step += 1
    last.parameters = {name: 2 * p for name, p in last.parameters.items()}
    posterior.store.append(last)
    more = posterior.predict(inputs(), return_samples=True)
    assert len(more.sample_probabilities) == len(posterior)
    assert not torch.equal(more.probabilities, first.probabilities)
    posterior.store.set_log_weights([0.0] * len(posterior))
    torch.testing.assert_close(posterior.predict(inputs()).probabilities, more.sample_probabilities.mean(0))

    monkeypatch.setattr(predictive, "free_memory", lambda device=None: 800)
    large = Posterior.load(tmp_path / "s", model=classifier())
    for _ in range(2):
        count = len(reads)
        large.predict(inputs())
        assert len(reads) == count + len(large), "large samples are read for each prediction"


@pytest.mark.parametrize("most", [2, 16])
@pytest.mark.parametrize("name", MODULES)
def test_at_once_as_one_after_another(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts of a prediction agree to 1e-5; regression's variance is a small difference, so to 1e-4."""
    posterior, x = in_memory(MODULES[name]()), [*inputs().split(7)]
    alone = posterior.predict(x, return_samples=True)
    for module in (together, predictive):
        monkeypatch.setattr(module, "runs_at_once", lambda device: True)
    monkeypatch.setattr(predictive, "MOST", most)
    for _ in range(2):
        posterior = posterior[:]
        found = posterior.predict(x, return_samples=True)
        assert found.parts.keys() == alone.parts.keys()
        for part, value in found.parts.items():
            torch.testing.assert_close(value, alone.parts[part], rtol=1e-4, atol=1e-5)
        assert posterior._ready is not None
        assert posterior._ready.call._together is not None, "vmap runs all of these networks"
