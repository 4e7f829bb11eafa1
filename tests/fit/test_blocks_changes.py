"""A fit in blocks is that without them for whoever acts in it: changes within the fit, hooks, timers, loggers, data."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, Annealing, BayesianModule, Gaussian, PolynomialDecay, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    ChainHealth,
    CyclicalSchedule,
    PosteriorDashboard,
    ReplicaExchange,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.fit.single_steps import SingleSteps
from tests.fit.test_blocks import Run, network, x, y


class Within(pl.Callback):
    """Calls a function of trainer and module before an epoch, which is one whose steps blocks do not compare."""

    def __init__(self, change: Callable[[Any, Any], Any], epoch: int = 30) -> None:
        self._change, self._epoch = change, epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self._epoch:
            self._change(trainer, pl_module)


class Weighed(BayesianModule):
    weight = 1.0

    def log_likelihood(self, batch: Any) -> Tensor:
        return super().log_likelihood(batch) * self.weight


def other_memory(trainer: Any, module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "clipping": lambda trainer, module: setattr(trainer, "gradient_clip_val", 0.05),
    "accumulation": lambda trainer, module: setattr(trainer, "accumulate_grad_batches", 2),
    "dropout": lambda trainer, module: setattr(module.net[0], "p", 0.3),
    "a number of the module": lambda trainer, module: setattr(module, "weight", 0.5),
    "the weights' memory": other_memory,
}


@pytest.mark.by_default("a number of the module-2", "dropout-2", "accumulation-2")
@pytest.mark.parametrize("chains", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("change", CHANGES)
def test_what_users_change_within_a_fit_has_its_effect(
    change: str, chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(form: str | None, *callbacks: pl.Callback) -> Run:
        net = nn.Sequential(nn.Dropout(0.0), network())
        module = Weighed(net, Gaussian(0.3), lr=1e-3, num_chains=chains, seed=3)
        return Run(form, monkeypatch, *callbacks, module=module, epochs=36)

    mine, theirs = (run(form, Within(CHANGES[change])) for form in ("traced", None))
    assert mine.hidden > 100
    mine.check_like(theirs)
    unchanged = run("traced").samples
    assert not torch.equal(unchanged[-1][3], mine.samples[-1][3])
    torch.testing.assert_close(unchanged[20][3], mine.samples[20][3], rtol=1e-4, atol=1e-5)


def counting_hook(counts: list[int], kind: str) -> Callable[[Any, Any], Any]:
    """Return what adds a hook that counts its calls."""
    adds: dict[str, Callable[[Any, Any], Any]] = {
        "forward": lambda trainer, module: module.net[0].register_forward_hook(lambda *args: counts.append(1)),
        "sampler": lambda trainer, module: trainer.optimizers[0].register_step_post_hook(lambda *a: counts.append(1)),
        "parameter": lambda trainer, module: module.net[0].weight.register_hook(lambda grad: counts.append(1)),
        "callback": lambda trainer, module: trainer.callbacks.append(
            pl.callbacks.LambdaCallback(on_train_batch_end=lambda *args: counts.append(1))
        ),
    }
    return adds[kind]


@pytest.mark.by_default("forward-0", "sampler-15", "parameter-0", "callback-15")
@pytest.mark.parametrize("epoch", [0, 15])
@pytest.mark.parametrize("kind", ["forward", "sampler", "parameter", "callback"])
def test_a_hook_that_comes_within_a_fit_is_called(kind: str, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that a callback or a logger registers when training starts."""
    runs, calls = [], []
    for form in ("traced", None):
        counts: list[int] = []
        runs.append(Run(form, monkeypatch, Within(counting_hook(counts, kind), epoch), chains=1, epochs=20))
        calls.append(len(counts))
    assert calls[0] == calls[1] > 0
    assert (runs[0].hidden > 0) == (epoch > 0 or kind == "sampler")
    runs[0].check_like(runs[1])


def test_a_parameter_that_is_replaced_within_a_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(trainer: Any, module: Any) -> None:
        module.net[0].weight = nn.Parameter(module.net[0].weight.detach() * 0.5)

    with pytest.raises(RuntimeError, match=r"'net\.0\.weight' was replaced .* by parameter\.copy_\(…\)"):
        Run("traced", monkeypatch, Within(replace, 10))


def test_a_timer_ends_a_run_with_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(form: str | None) -> int:
        timer = pl.callbacks.Timer(timedelta(microseconds=1), interval="epoch")
        return Run(form, monkeypatch, timer).trainer.global_step

    assert steps("traced") == steps(None) == 7


def test_a_run_that_logs_no_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`log_every_n_steps=0` is Lightning's way to log epochs alone."""
    watched = PosteriorDashboard(figures=()), ReplicaExchange(temperatures=[1.0, 2.0], lrs=[1.0, 1.2])
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 0}
    runs = [Run(form, monkeypatch, *watched, **options) for form in ("traced", None)]
    assert runs[0].hidden > 0
    runs[0].check_like(runs[1])


class Jittered(TensorDataset):
    """Data that draw from torch's generator."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.randn_like(inputs), target


@pytest.mark.parametrize("chains", [1, 2])
def test_data_that_draw_numbers(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataLoader(Jittered(x, y), batch_size=20)
    mine, theirs = (Run(form, monkeypatch, data=data, chains=chains) for form in ("traced", None))
    assert mine.hidden > 0
    mine.check_like(theirs)


CONTROLLED: dict[str, Callable[[], dict[str, Any]]] = {
    "cycles": lambda: {"schedule": [CyclicalSchedule(num_cycles=2, exploration=0.4)]},
    "cycles with a short exploration": lambda: {"schedule": [CyclicalSchedule(num_cycles=3, exploration=0.1)]},
    "cycles after a warm start": lambda: {
        "schedule": [WarmStart(epochs=2), CyclicalSchedule(num_cycles=2, exploration=0.4)]
    },
    "a step size that decays": lambda: {
        "schedule": [SamplingSchedule(50, every_n_steps=10, lr_decay=PolynomialDecay(0.03, 10.0, 0.9))]
    },
    "a step size and a temperature by epochs": lambda: {
        "schedule": [
            SamplingSchedule(
                50, every_n_steps=10, lr_annealing=Annealing(1.3, 1), temperature_annealing=Annealing(1.2, 1)
            )
        ]
    },
    "cycles of another sampler": lambda: {
        "schedule": [CyclicalSchedule(num_cycles=2, exploration=0.4)],
        "sampler": UnderdampedLangevin,
    },
    "cycles of a step size for each chain": lambda: {
        "schedule": [CyclicalSchedule(num_cycles=2, exploration=0.4)],
        "lr": (1e-3, 5e-4),
    },
}


@pytest.mark.by_default("cycles]", "after a warm start", "a step size and")
@pytest.mark.parametrize("case", CONTROLLED)
def test_momenta_are_compared_with_the_controls_of_all_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two observations the momenta's variance follows the controls, and a stage ends with its last step."""
    single = []
    plain = SingleSteps.make_hidden
    monkeypatch.setattr(SingleSteps, "make_hidden", lambda self, *given: (single.append(1), plain(self, *given)))

    def run(form: str | None) -> Run:
        options = CONTROLLED[case]()
        sampler = {"sampler": options.get("sampler", SGHMC), "lr": options.get("lr", 1e-3)}
        module = BayesianModule(network(), Gaussian(0.3), num_chains=2, seed=3, **sampler)
        return Run(form, monkeypatch, *options["schedule"], ChainHealth(warn=False), module=module, epochs=40)

    mine = run("traced")
    assert len(single) < 0.5 * mine.hidden  # others are made many at once, those before a stage too
    theirs = run(None)
    health, other = mine.module.health, theirs.module.health
    assert health.observations == other.observations > 3
    for name, found in health.tensors.items():
        assert found.kinetic == pytest.approx(other.tensors[name].kinetic, rel=1e-2), name


class Thaws(pl.Callback):
    """Freezes a parameter in some epochs of burn-in."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net[0].bias.requires_grad_(not 12 <= trainer.current_epoch < 14)


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("form", ["traced", None])
def test_a_parameter_that_is_frozen_for_some_epochs_is_named(
    form: str | None, chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and several chains would move it."""
    schedule = SamplingSchedule(burn_in_epochs=16, every_n_steps=5)
    with pytest.raises(RuntimeError, match=r"'net\.0\.bias' was frozen during the run"):
        Run(form, monkeypatch, schedule, Thaws(), chains=chains, epochs=20)
