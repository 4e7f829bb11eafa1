"""A posterior goes to the Hub and comes back, with a card that says what the run was and no paths."""

import fnmatch
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support.posteriors import classifier, filled, inputs


class FakeHub:
    """Keeps repositories in folders, and gives snapshots of links as the Hub's cache does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pushes, self.calls = folder, 0, []

    def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> None:
        assert exist_ok
        self.calls.append((repo_id, private))
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(
        self, repo_id: str, folder_path: str, commit_message: str, delete_patterns: list[str]
    ) -> SimpleNamespace:
        repository = self.folder / repo_id
        for file in list(repository.iterdir()):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in delete_patterns):
                file.unlink()
        shutil.copytree(folder_path, repository, dirs_exist_ok=True)
        self.pushes += 1
        return SimpleNamespace(commit_url="")

    def snapshot_download(self, repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        cache = self.folder / "cache" / repo_id
        blobs, snapshot = cache / "blobs", cache / "snapshots" / (revision or f"commit{self.pushes}")
        blobs.mkdir(parents=True, exist_ok=True)
        if snapshot.exists():
            return str(snapshot)
        snapshot.mkdir(parents=True)
        for file in (self.folder / repo_id).iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                blob = blobs / f"{self.pushes}-{file.name}"
                shutil.copy(file, blob)
                (snapshot / file.name).symlink_to(blob)
        return str(snapshot)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    for name in ("create_repo", "upload_folder", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(fake, name))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return fake


def stored(folder: Path) -> Posterior:
    module = classifier()
    filled(DiskStore.create(folder / "samples"), module)
    return Posterior.load(folder, model=module)


def test_it_comes_back(hub: FakeHub, tmp_path: Path) -> None:
    posterior, x = stored(tmp_path / "run"), inputs()
    address = posterior.push_to_hub("someone/flowers", private=True)
    assert address == "hf://someone/flowers"
    assert hub.calls == [("someone/flowers", True)]
    again = Posterior.load(address, model=classifier())
    assert torch.equal(again.predict(x).probabilities, posterior.predict(x).probabilities)
    # Another push replaces the samples, and one that is open stays as it is.
    posterior.thin(count=2).push_to_hub("someone/flowers", dtype="bfloat16", base="mean")
    fewer = Posterior.load(address, model=classifier())
    assert len(fewer) == 2
    assert fewer.store.narrow is not None
    assert len(Posterior.load(f"{address}@commit1", model=classifier())) == len(again) == len(posterior)
    assert torch.equal(again.in_memory().predict(x).probabilities, posterior.predict(x).probabilities)


def test_the_card_says_what_the_run_was_and_no_path(hub: FakeHub, tmp_path: Path) -> None:
    posterior = stored(tmp_path / "run")
    results = {
        "recipe": "flowers of spring",
        "kind": "posterior sample",
        "stage": "test",
        "sentences": {"quality": f"The average is right for 91 % ({tmp_path}/run/table.md).", "next": "sgmcmc test"},
        "verdict": {"verdict": "healthy", "advice": ""},
        "rows": [{"method": "bma", "metric": "nll", "value": 0.21345, "error": None}, {"method": "x", "value": None}],
        "origin": {"command": f"python {tmp_path}/train.py", "versions": {"torch": "2.9.1"}},
    }
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    posterior.push_to_hub("someone/flowers")
    card = (hub.folder / "someone" / "flowers" / "README.md").read_text()
    for said in ("flowers of spring", "posterior sample", "91 %", "healthy", "0.2135", "torch 2.9.1", "hf://someone"):
        assert said in card, said
    every = "".join(
        file.read_bytes().decode(errors="ignore") for file in (hub.folder / "someone" / "flowers").iterdir()
    )
    assert str(tmp_path) not in every
    assert "train.py" not in every
    calibrated = posterior.calibrate([(inputs(), torch.zeros(len(inputs())).long())])
    calibrated.push_to_hub("someone/other", run=tmp_path / "run")
    assert Posterior.load("hf://someone/other", model=classifier()).calibration is not None
    assert f"calibrated by: {calibrated.calibration}" in (hub.folder / "someone" / "other" / "README.md").read_text()


def test_what_is_refused(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior: Any = stored(tmp_path / "run")
    for name in ("flowers", "a/b/c", "https://somewhere/a", "someone/flowers@main"):
        with pytest.raises(ValueError, match=r"repo_id='.*"):
            posterior.push_to_hub(name)
    with pytest.raises(ValueError, match=r"run='.*missing' has no readable results.json"):
        posterior.push_to_hub("someone/flowers", run=tmp_path / "missing")
    assert not hub.folder.exists()
    (hub.folder / "someone" / "empty").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"hf://someone/empty has no manifest.jsonl"):
        Posterior.load("hf://someone/empty")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"push_to_hub needs huggingface_hub: pip install"):
        posterior.push_to_hub("someone/flowers")
    with pytest.raises(ImportError, match=r"Posterior.load\('hf://a/b'\) needs huggingface_hub"):
        Posterior.load("hf://a/b")
