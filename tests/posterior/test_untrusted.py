"""What a store, a checkpoint or a run's folder from elsewhere may not do, one door after another."""

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.cli.commands import report
from lightning_sgmcmc.posterior import manifest
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST, write_manifest
from tests.support import corpus, small_run
from tests.support.trainers import quiet_trainer


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.sound_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound run, in the working directory."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def change_line(store: Path, number: int, **changes: Any) -> None:
    lines = (store / MANIFEST).read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    (store / MANIFEST).write_text("\n".join(lines) + "\n")


def describe_net(run: Path, net: dict[str, Any]) -> None:
    model = {"class": "lightning_sgmcmc.module:BayesianModule", "arguments": {"net": net}}
    change_line(run / "samples", 0, model=model)


class Payload:
    """Pickles to a call that writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# -- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.samples.payload:Net", r"run\.samples\.payload is not imported.*import run\.samples\.payload first"),
        ("unittest.__main__:Net", "is not imported"),
        ("torch.hub:load", "torch.hub has no networks that a store may name"),
        ("torch.nn.modules.linear:torch.jit.ScriptModule", "no torch"),
        ("torch.nn.modules.linear:math.inf", "no math"),
        ("os:system", "not a torch module"),
    ],
)
def test_a_store_imports_and_calls_nothing(
    name: str, message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    net = {"class": name, "arguments": {}}
    change_line(
        run / "samples", 0, model={"class": "lightning_sgmcmc.module:BayesianModule", "arguments": {"net": net}}
    )
    posterior = Posterior.load(run / "samples")
    assert len(list(posterior)) == 6
    with pytest.raises(RuntimeError, match=message):
        posterior.predict(torch.zeros(1, 2))
    assert not (run / "samples" / "imported").exists()
    assert "unittest.__main__" not in sys.modules


def test_trust_imports(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    net = {"class": "run.samples.payload:Net", "arguments": {"in_features": 2, "out_features": 2}}
    change_line(
        run / "samples", 0, model={"class": "lightning_sgmcmc.module:BayesianModule", "arguments": {"net": net}}
    )
    Posterior.load(run / "samples", trust=True)
    assert (run / "samples" / "imported").exists()
    for name in [name for name in sys.modules if name == "run" or name.startswith("run.")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_newer_library_is_named(run: Path) -> None:
    description = DiskStore(run / "samples").model_description
    description["arguments"]["of_the_future"] = 3
    change_line(run / "samples", 0, model=description, library="7.1.0")
    message = r"rebuilt .*of_the_future.*lightning-sgmcmc 7\.1\.0 wrote the store, and this version is older: update it"
    with pytest.raises(RuntimeError, match=message):
        Posterior.load(run / "samples").predict(torch.zeros(1, 2))


def test_sizes_of_a_description_take_no_memory(run: Path) -> None:
    description = DiskStore(run / "samples").model_description
    description["arguments"]["net"]["children"][0][1]["arguments"]["in_features"] = 10**12
    change_line(run / "samples", 0, model=description)
    with pytest.raises(RuntimeError, match=r"another network than its samples: 'net\.0\.weight' differs"):
        Posterior.load(run / "samples").predict(torch.zeros(1, 2))


# -- names of files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../victim", "victim", "{folder}/victim", "sample-00000002-chain-000.safetensors/.."])
def test_a_record_names_a_sample(name: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (run / "victim").touch()
    (run / "samples" / "victim").touch()
    change_line(run / "samples", 2, file=name.format(folder=tmp_path))
    with pytest.raises(ValueError, match=r"line 3 of .* is damaged"):
        DiskStore(run / "samples")
    store = DiskStore(run / "samples", skip_damaged=True)
    assert len(store) == 5
    store.discard({name.format(folder=tmp_path)})
    assert (tmp_path / "victim").exists()
    assert (run / "victim").exists()
    assert (run / "samples" / "victim").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_links_pipes_and_devices_are_no_samples(kind: str, run: Path, tmp_path: Path) -> None:
    path = run / "samples" / "sample-00000002-chain-000.safetensors"
    path.rename(tmp_path / "moved")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "moved" if kind == "link" else "/dev/zero")
    message = "it is not a regular file" if kind == "pipe" else "it is a link, and links are not followed"
    with pytest.raises(ValueError, match=message):
        list(Posterior.load(run / "samples"))
    with pytest.warns(UserWarning, match=f"1 of 6 samples .*{message}"):
        assert len(Posterior.load(run / "samples", skip_damaged=True)) == 5


@pytest.mark.parametrize("changed", ["record", "manifest", "temporary"])
def test_a_resumed_run_deletes_and_overwrites_nothing_else(changed: str, run: Path, tmp_path: Path) -> None:
    """Through `Trainer.fit(ckpt_path=…)`: the checkpoint or the folder names or links a file of the user's."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    checkpoint = torch.load(run / corpus.CHECKPOINT)
    (state,) = (s for key, s in checkpoint["callbacks"].items() if key.startswith("SampleCollector"))
    state["path"] = str(run / "samples")
    if changed == "record":
        state["records"][0]["file"] = "../../victim"
    elif changed == "manifest":
        (run / "samples" / MANIFEST).rename(tmp_path / "manifest")
        (run / "samples" / MANIFEST).symlink_to(tmp_path / "manifest")
    else:
        (run / "samples" / f".{MANIFEST}.tmp").symlink_to(victim)
    torch.save(checkpoint, run / corpus.CHECKPOINT)
    before = (tmp_path / "manifest").read_text() if changed == "manifest" else ""

    def resume() -> None:
        corpus.trainer(run, 8).fit(corpus.module(), small_run.loader(), ckpt_path=run / corpus.CHECKPOINT)

    if changed == "temporary":
        resume()
        assert len(DiskStore(run / "samples")) == 8
    else:
        with pytest.raises(ValueError, match=r"not the name of a sample's file|it is a link"):
            resume()
    assert victim.read_text() == "mine"
    assert changed != "manifest" or (tmp_path / "manifest").read_text() == before


def resume_from(run: Path, changed: Any) -> None:
    """Resume with a changed state of the collector."""
    checkpoint = torch.load(run / corpus.CHECKPOINT)
    (key,) = (key for key in checkpoint["callbacks"] if key.startswith("SampleCollector"))
    checkpoint["callbacks"][key] = changed(checkpoint["callbacks"][key])
    torch.save(checkpoint, run / corpus.CHECKPOINT)
    trainer = quiet_trainer(max_steps=8, callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector()])
    trainer.fit(corpus.module(), small_run.loader(), ckpt_path=run / corpus.CHECKPOINT)


@pytest.mark.parametrize("named", ["nothing", "None", "another"])
def test_a_checkpoint_chooses_no_store(named: str, run: Path, sound: Path, tmp_path: Path) -> None:
    """It names another run's folder, with no sample to be found there, and the folder's run not or wrongly."""
    other = Path(shutil.copytree(sound, tmp_path / "other")) / "samples"
    change_line(other, 0, run="abcd")
    shutil.rmtree(run / "samples")
    before = (other / MANIFEST).read_bytes()

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        state |= {"path": str(other), "count": 0, "records": []}
        if named != "another":
            state["run"] = None
        if named == "nothing":
            del state["run"]
        return state

    message = r"other.*samples of another run than the checkpoint's.*dirpath"
    if named != "another":
        message = "entry on its samples is damaged: run is missing or has a wrong type"
    with pytest.raises(ValueError, match=message):
        resume_from(run, changed)
    assert (other / MANIFEST).read_bytes() == before
    assert not (other.parent / "samples-1").exists()


def test_a_checkpoint_records_a_sample_once(run: Path) -> None:
    before = (run / "samples" / MANIFEST).read_bytes()
    with pytest.raises(ValueError, match=r"recorded twice: step 2, chain 0, draw 0"):
        resume_from(run, lambda state: state | {"path": str(run / "samples"), "records": state["records"] * 2})
    assert (run / "samples" / MANIFEST).read_bytes() == before


def test_a_checkpoint_does_not_change_an_energy(run: Path) -> None:
    def changed(state: dict[str, Any]) -> dict[str, Any]:
        state["records"][1]["energy"] = -1e9
        return state | {"path": str(run / "samples")}

    with pytest.raises(ValueError, match=r"chain-001.*energy -1000000000\.0.*resume from another"):
        resume_from(run, changed)


def test_a_manifest_records_a_sample_once(run: Path) -> None:
    path = run / "samples" / MANIFEST
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[2]]) + "\n")
    with pytest.raises(ValueError, match=r"line 8 of .* is damaged"):
        Posterior.load(run / "samples")
    with pytest.warns(UserWarning, match=r"damaged"):
        assert len(Posterior.load(run / "samples", skip_damaged=True)) == 6


@pytest.mark.parametrize("count", [2 * 10**8, 10**18])
def test_a_number_of_chains_takes_no_memory(count: int, run: Path) -> None:
    description = DiskStore(run / "samples").model_description
    description["arguments"]["num_chains"] = count
    change_line(run / "samples", 0, model=description)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    posterior = Posterior.load(run / "samples")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    with pytest.raises(RuntimeError, match=rf"num_chains={count}, more than .*model="):
        posterior.predict(torch.zeros(1, 2))


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE")
def test_a_checkpoint_is_not_unpickled(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch unpickles unless it is told not to, as with Lightning 2.5."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    checkpoint = torch.load(run / corpus.CHECKPOINT, weights_only=True)
    checkpoint["extra"] = Payload(tmp_path / "ran")
    torch.save(checkpoint, run / corpus.CHECKPOINT)
    with pytest.raises(ValueError, match=r"contains more than tensors and plain data.*weights_only=False"):
        corpus.trainer(run, 8).fit(corpus.module(), small_run.loader(), ckpt_path=run / corpus.CHECKPOINT)
    assert not (tmp_path / "ran").exists()


# -- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_report_follows_no_links(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = tmp_path / "victim"
    victim.write_text("secret")
    for name in ("config.yaml", "report.html"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    (run / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(run / "pipe.png")
    (run / "samples").rename(tmp_path / "elsewhere")
    (run / "samples").symlink_to(tmp_path / "elsewhere")
    (run / "hparams.yaml").write_text("\n".join(["a: &a [1, 2]", *(f"{b}: &{b} [*{a}, *{a}, *{a}]" for a, b in PAIRS)]))
    report([str(run)])
    assert victim.read_text() == "secret"
    page = (run / "report.html").read_text()
    assert not (run / "report.html").is_symlink()
    assert "secret" not in page
    for name in ("config.yaml", "zero.png", "pipe.png", "samples"):
        assert name in page.split("<h2>Run</h2>")[0], "the page says what was not read"


PAIRS = list(zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True))
"""Each name refers three times to the one before: 3^20 numbers."""


# -- the cost of a limit ----------------------------------------------------------------------------------------------


def test_a_limit_costs_the_same_for_any_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's lines are written a bounded number of times for each sample, and only the newest are kept."""
    written: list[int] = []

    def write(said: manifest.Manifest) -> bytes:
        written.append(len(said.records))
        return write_manifest(said)

    monkeypatch.setattr(manifest, "write_manifest", write)
    limit, total = 200, 400
    store = DiskStore.create(tmp_path / "s")
    for step in range(total):
        store.append(PosteriorSample(step, 0, 0, 0.0, parameters={"w": torch.zeros(1)}))
        store.discard(store.keep_newest(limit))
        assert len(store) == min(limit, step + 1)
    assert sum(written) <= 21 * total
    assert limit <= len(DiskStore(tmp_path / "s")) <= limit + limit // 20
    store.discard(store.trim())
    again = DiskStore(tmp_path / "s")
    assert [record.step for record in again.records] == list(range(total - limit, total))
    assert len(list((tmp_path / "s").glob("sample-*"))) == limit
    assert len(list(again)) == limit


def test_a_fit_keeps_the_newest_samples(tmp_path: Path) -> None:
    module = small_run.module(net=nn.Linear(2, 2), num_chains=2)
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(tmp_path / "s", max_samples=40)]
    quiet_trainer(max_steps=30, callbacks=callbacks).fit(module, small_run.loader())
    store = DiskStore(tmp_path / "s")
    assert [(r.step, r.chain) for r in store.records] == [(step, chain) for step in range(11, 31) for chain in (0, 1)]
    assert len(list((tmp_path / "s").glob("sample-*"))) == 40
