"""Blocks of steps of torch's optimizers: a warm start or an ensemble is the one without blocks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian, NonFiniteEnergyError, Patience
from lightning_sgmcmc.callbacks import DeepEnsemble, SamplingSchedule, WarmStart
from lightning_sgmcmc.chains.listed_steps import ListedSteps
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.fit.test_blocks import DATA, Run, counted, network, x, y


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps that are listed, in the order of their blocks."""
    return counted(ListedSteps, monkeypatch)


@pytest.mark.by_default("AdamW-1", "optimizer1-3", "SGD-1")
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("optimizer", [AdamW, partial(AdamW, fused=True), torch.optim.SGD])
def test_an_ensemble(optimizer: Any, chains: int, monkeypatch: pytest.MonkeyPatch, listed: list[int]) -> None:
    """With a linear warm-up and a cosine, so that each step has its own lr, and an odd last batch."""

    def run(form: str | None) -> Run:
        schedule = DeepEnsemble(optimizer=optimizer, warm_up=0.3)
        module = BayesianModule(network(), Gaussian(0.3), lr=0.01, num_chains=chains, seed=3)
        data = DatasetDataModule(DATA, batch_size=20)
        made = Run(form, monkeypatch, schedule, module=module, data=data, epochs=20)
        assert len(made.samples) == chains
        return made

    with_blocks = run("traced")
    assert sum(listed) > 60
    with_blocks.check_like(run(None))


@pytest.mark.parametrize("chains", [1, 3])
def test_a_warm_start_and_what_follows(chains: int, monkeypatch: pytest.MonkeyPatch, listed: list[int]) -> None:
    """The sampler's first step, for which momenta are drawn, is the same; an early stop is at the same step."""

    def run(form: str | None) -> Run:
        callbacks = [
            WarmStart(lr=0.02, epochs=20, early_stopping=Patience(3)),
            SamplingSchedule(burn_in_epochs=2, every_n_steps=5),
        ]
        data = DatasetDataModule(DATA, val=TensorDataset(x[:20], y[:20] + 1.0), batch_size=20)
        module = BayesianModule(network(), Gaussian(0.3), lr=1e-3, num_chains=chains, seed=3)
        return Run(form, monkeypatch, *callbacks, module=module, data=data, epochs=30)

    with_blocks = run("traced")
    without = run(None)
    assert sum(listed) > 20
    assert with_blocks.module.chains.progress.warm_steps == without.module.chains.progress.warm_steps
    with_blocks.check_like(without)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_resumed_warm_start_goes_on_exactly(chains: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(**options: Any) -> Run:
        callbacks = [WarmStart(lr=0.02, steps=150), SamplingSchedule(burn_in_epochs=2, every_n_steps=5)]
        module = BayesianModule(network(), Gaussian(0.3), lr=1e-3, num_chains=chains, seed=3)
        data = DatasetDataModule(DATA, batch_size=20)
        return Run("traced", monkeypatch, *callbacks, *options.pop("others", ()), module=module, data=data, **options)

    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=100, save_top_k=-1)
    whole = run(epochs=30, enable_checkpointing=True, others=[keeper])
    resumed = run(epochs=30, ckpt_path=next(tmp_path.glob("*step=100.ckpt")))
    resumed.check_like(whole, exactly=True)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_step_that_is_not_finite_is_found(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizers' state is that before the block when its steps are made one by one."""
    spoiled = y.clone()
    spoiled[77] = 3e38

    def steps(form: str | None) -> tuple[int, list[torch.Tensor]]:
        module = BayesianModule(network(), Gaussian(0.3), lr=0.01, num_chains=chains, seed=3)
        data = DataLoader(TensorDataset(x, torch.cat([y] * 20)[: len(x)]), batch_size=20)

        class Spoil(pl.Callback):
            """Changes the data at the start of epoch 15, in place."""

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch == 15:
                    data.dataset.tensors[1].copy_(spoiled)

        start = WarmStart(AdamW, lr=0.01, steps=150)
        with pytest.raises(NonFiniteEnergyError, match="step") as caught:
            Run(form, monkeypatch, start, Spoil(), module=module, data=data, epochs=30)
        assert "inf" in str(caught.value)
        return module.sampler.step_count, [p.detach().clone() for p in module.parameters()]

    (count, mine), (without, theirs) = steps("traced"), steps(None)
    assert count == without == 15 * 7 + 3
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizes", [False, True])
def test_steps_that_an_error_cuts_short_are_not_made(optimizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that fails in its middle leaves parameters, momenta and optimizers as its first step found them."""

    class StoppedError(Exception):
        pass

    before: list[Any] = []
    run, made = ListedSteps.run, ListedSteps._made

    def state_of(steps: Any) -> list[torch.Tensor]:
        sampler = steps._sampler
        held = [t for state in sampler.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        own = (
            []
            if sampler.stand_in is None
            else [t for s in sampler.stand_in.state_dict(1)["state"].values() for t in s.values()]
        )
        return [t.clone() for t in (steps._flat.values, *held, *own)]

    def cut(self: Any, rows: Any, parts: Any, steady: Any, of_steps: Any, *others: Any) -> Any:
        made(self, rows, parts, steady, of_steps[: max(1, len(of_steps) // 2)], *others)
        raise StoppedError

    def spoiled(self: Any, *given: Any) -> Any:
        before.append((self, state_of(self)))
        return run(self, *given)

    monkeypatch.setattr(ListedSteps, "_made", cut)
    monkeypatch.setattr(ListedSteps, "run", spoiled)
    module = BayesianModule(network(), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3)
    schedule = DeepEnsemble(optimizer=AdamW) if optimizes else SamplingSchedule(burn_in_epochs=2, every_n_steps=50)
    with pytest.raises(StoppedError):
        Run("traced", monkeypatch, schedule, module=module, epochs=30)
    steps, expected = before[0]
    assert all(torch.equal(a, b) for a, b in zip(state_of(steps)[: len(expected)], expected, strict=False))
