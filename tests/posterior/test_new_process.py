"""Stores that another program opens: what a run wrote is enough to predict, whatever the layout of its chains."""

import functools
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, ChainStrategy, Gaussian, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior.description import build, describe
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support import small_run
from tests.support.paths import REPOSITORY
from tests.support.trainers import quiet_trainer

CHAINS, STEPS = 3, 4
LOAD = """
    import sys, torch
    from lightning_sgmcmc import Posterior
    x = torch.load("x.pt")
    found = {}
    for name in sys.argv[1:]:
        shape = "image" if name == "vision" else "plane"
        found[name] = Posterior.load(name).predict(x[shape], return_samples=True).sample_probabilities
    assert "tests" not in sys.modules
    torch.save(found, "found.pt")
"""


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))


def changed_resnet() -> nn.Module:
    """As for small images: another first layer, no pooling, another number of classes."""
    net = torchvision.models.resnet18()
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    net.fc = nn.Linear(512, 2)
    return net


def small_vision_model() -> nn.Module:
    net = torchvision.models.shufflenet_v2_x0_5()
    net.fc = nn.Linear(1024, 2)
    return net


class Unwritten(nn.Module):
    """A network that does not store its argument, so that no store can describe it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def fit(folder: Path, module: BayesianModule, x: Tensor | None = None, **options: Any) -> Any:
    """Return the posterior; None after a fit in other processes."""
    x, y = (small_run.tensors()[0] if x is None else x), small_run.tensors()[1]
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(folder)]
    trainer = quiet_trainer(max_steps=STEPS, callbacks=callbacks, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, y[: len(x)]), 8))
    return module.posterior


RUNS: dict[str, dict[str, Any]] = {
    "loop": {"chain_execution": "loop", "lr": [0.01, 0.02, 0.03], "temperature": [1.0, 0.5, 2.0]},
    "vmap": {"chain_execution": "vmap", "net": nn.Linear(2, 2)},
    "compile": {"compile": True},
    "one": {"num_chains": 1},
    "compiled before": {"num_chains": 1, "net": torch.compile(normed(), backend="eager")},
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning", "error:.*cannot describe")
def test_stores_of_all_layouts_load_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++ compiler needed
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x = {"plane": torch.randn(5, 2, generator=torch.Generator().manual_seed(1)), "image": images}
    torch.save(x, tmp_path / "x.pt")
    expected = {}
    for name, options in RUNS.items():
        module = small_run.module(**({"net": normed(), "num_chains": CHAINS, "seed": 1} | options))
        posterior = fit(tmp_path / name, module)
        expected[name] = posterior.predict(x["plane"], return_samples=True).sample_probabilities
    module = small_run.module(net=normed(), seed=1)
    fit(tmp_path / "chains", module, devices=2, strategy=ChainStrategy(start_method="fork"))
    known = Posterior.load(tmp_path / "chains", model=small_run.module(net=normed()))
    expected["chains"] = known.predict(x["plane"], return_samples=True).sample_probabilities
    module = small_run.module(net=small_vision_model(), num_chains=2, seed=1)
    posterior = fit(tmp_path / "vision", module, images)
    expected["vision"] = posterior.predict(images, return_samples=True).sample_probabilities
    command = [sys.executable, "-c", textwrap.dedent(LOAD), *expected]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or the imports are compiled again in every run of the test
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    found = torch.load(tmp_path / "found.pt")
    counts = {"one": 2, "compiled before": 2, "chains": 4, "vision": 4}
    for name, probabilities in expected.items():
        assert probabilities is not None
        assert len(found[name]) == counts.get(name, 2 * CHAINS)
        assert torch.equal(found[name], probabilities), name


def test_a_network_that_is_not_described_is_passed(tmp_path: Path) -> None:
    """The warning comes at the start of the fit and says what to do; a bare network is enough to predict."""
    module = small_run.module(net=Unwritten(3), num_chains=2)
    with pytest.warns(UserWarning, match=r"Unwritten does not store its argument 'width'.*load\(path, net=…\)"):
        posterior = fit(tmp_path / "s", module)
    x = torch.randn(5, 2)
    expected = posterior.predict(x).probabilities
    for given in ({"net": Unwritten(3)}, {"model": Unwritten(3)}, {"model": small_run.module(net=Unwritten(3))}):
        found = Posterior.load(tmp_path / "s", **given)  # type: ignore[arg-type]
        assert torch.equal(found.predict(x).probabilities, expected)  # type: ignore[arg-type]
    without = Posterior.load(tmp_path / "s")
    assert len(list(without)) == 4
    with pytest.raises(RuntimeError, match=r"does not store its argument 'width'; use Posterior\.load\(path, net=…\)"):
        without.predict(x)
    with pytest.raises(ValueError, match=r"belong to another network than the model: 'net\.body\.0\.bias' has shape"):
        Posterior.load(tmp_path / "s", net=Unwritten(4))
    with pytest.raises(ValueError, match="pass either model=… or net=…"):
        Posterior.load(tmp_path / "s", net=Unwritten(3), model=module)


class Own(BayesianModule):
    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__(likelihood=Gaussian(), num_chains=2)
        self.net, self.width = net, width


def test_net_beside_other_arguments_and_without_a_place(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Unwritten does not store"):
        fit(tmp_path / "own", own := _regression(Own(Unwritten(3), 7)))
    found = Posterior.load(tmp_path / "own", net=Unwritten(3))
    assert isinstance(found.model, Own)
    assert found.model.width == 7
    assert own.posterior is not None
    x = torch.randn(5, 2)
    assert torch.equal(found.predict(x).mean, own.posterior.predict(x).mean)  # type: ignore[arg-type]
    DiskStore.create(tmp_path / "bare")
    with pytest.raises(ValueError, match="does not describe the likelihood; pass model=BayesianModule"):
        Posterior.load(tmp_path / "bare", net=nn.Linear(2, 2))


def _regression(module: Own) -> Own:
    module.output_and_target = lambda batch: (module(batch[0]), batch[0])  # type: ignore[method-assign, assignment]
    return module


@pytest.mark.slow
def test_torchvision_models_come_back_with_their_changes(tmp_path: Path) -> None:
    """Plain, with another head, and inside another network; a builder never downloads."""
    models = torchvision.models
    changed = models.mobilenet_v3_small()
    changed.classifier[3] = nn.Linear(1024, 3)
    nets = [changed_resnet(), changed, nn.Sequential(models.squeezenet1_1(num_classes=3), nn.Flatten())]
    for net in nets:
        twin = build(describe(net))
        assert repr(twin) == repr(net)
        twin.load_state_dict(net.state_dict())
    hostile = describe(nets[0]) | {"arguments": {"weights": "DEFAULT"}}
    with pytest.raises(ValueError, match="takes only"):
        build(hostile)


def test_a_compiled_module_is_the_module(tmp_path: Path) -> None:
    posterior = fit(tmp_path / "s", small_run.module())
    x = torch.zeros(1, 2)
    loaded = Posterior.load(tmp_path / "s", model=torch.compile(small_run.module(), backend="eager"))
    assert torch.equal(loaded.predict(x).probabilities, posterior.predict(x).probabilities)


def test_a_class_of_the_running_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Script(nn.Linear):
        pass

    Script.__module__, Script.__qualname__ = "__main__", "Script"
    monkeypatch.setattr(sys.modules["__main__"], "Script", Script, raising=False)
    with pytest.warns(UserWarning, match=r"in the running script.*net=…"):
        fit(tmp_path / "s", small_run.module(net=Script(2, 2)))
    assert Posterior.load(tmp_path / "s").predict(torch.zeros(1, 2)).probabilities is not None
    monkeypatch.delattr(sys.modules["__main__"], "Script")
    with pytest.raises(RuntimeError, match="Script was defined in the script that sampled"):
        Posterior.load(tmp_path / "s").predict(torch.zeros(1, 2))
    assert Posterior.load(tmp_path / "s", net=Script(2, 2)).predict(torch.zeros(1, 2)).probabilities is not None


def test_what_is_described_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(describe|running script).*")
        fit(tmp_path / "s", small_run.module(num_chains=2))


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Named(BayesianModule):
    def __init__(self, width: int, act: str = "Tanh") -> None:
        super().__init__(likelihood=Categorical(), lr=0.01, num_chains=2)
        self.body = nn.Sequential(nn.Linear(2, width), getattr(nn, act)(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Saved(Named):
    def __init__(self, width: int, note: str = "") -> None:
        super().__init__(width, act="ReLU")
        self.save_hyperparameters()


class Rest(BayesianModule):
    def __init__(self, width: int, net: nn.Module | None = None, **rest: Any) -> None:
        super().__init__(net or nn.Linear(2, 2), Categorical(), lr=0.02, **rest)
        self.width = width


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: Named(3, act="ReLU"), {}),
        (lambda: Named(3), {"width": 3}),
        (lambda: Saved(3, note="a"), {}),
        (lambda: Rest(3, num_chains=2, seed=5), {}),
        (lambda: Rest(3, net=Unwritten(3)), {"net": Unwritten(3)}),
        (lambda: small_run.module(net=normed(), num_chains=2), {"net": normed(), "likelihood": Categorical()}),
    ],
)
def test_load_from_checkpoint(make: Any, given: dict[str, Any], tmp_path: Path) -> None:
    """With and without `save_hyperparameters`: arguments that are plain data are in the checkpoint."""
    module = make()
    trainer = quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=2)])
    trainer.fit(module, small_run.loader())
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    found = type(module).load_from_checkpoint(tmp_path / "c.ckpt", **given)
    assert found.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    assert repr(found) == repr(module)
    assert (found.num_chains, found.lr) == (module.num_chains, module.lr)
    for name in ("width", "note"):
        assert getattr(found, name, None) == getattr(module, name, None)
        assert found.hparams.get(name) == module.hparams.get(name)
