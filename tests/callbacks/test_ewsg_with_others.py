"""EWSG with control variates, friction, contour and a guard, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    ContourRules,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    ReplicaExchange,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.samplers import Sampler
from tests.support.comparisons import assert_same, differences
from tests.support.ewsg_fits import Gradients, Underdamped, fit_with, flat
from tests.support.problems import Data, Even, Net, Plain
from tests.support.recorders import SaveEverywhere
from tests.support.trainers import fit_chains, quiet_trainer, seeded

# -- with control variates and friction ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(("chains", "accumulated"), [(1, 1), (2, 2)])
def test_candidates_are_corrected_by_control_variates(temperature: float, chains: int, accumulated: int) -> None:
    """At the snapshot itself (lr = 0) every candidate is the full gradient, and so is what a step takes."""
    seen = Gradients()
    module = seeded(lambda: Plain(chains, lr=0.0, sampler=Underdamped, temperature=temperature))
    fit_with(module, [ControlVariates(), EWSG(1), seen], max_epochs=1, accumulate_grad_batches=accumulated)
    module.zero_grad()
    if module.chains.stacked is not None:
        module.chains.stacked.clear_gradients()
    whole = Even(64)
    whole.setup("fit")
    batch = whole.splits[0].inputs, whole.splits[0].targets
    for chain in range(chains):
        with module.at_chain(chain):
            (-(module.log_likelihood(batch).mean() + module.log_prior() / 64)).backward()
            expected = flat(module) if chains == 1 else torch.cat([p.grad.flatten() for p in module.parameters()])
        for step in seen.steps:
            own = step if chains == 1 else of_chain(module, step, chain)
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def of_chain(module: BayesianModule, gradients: Tensor, chain: int) -> Tensor:
    """Return one chain's part of what `flat` returned."""
    pieces = gradients.split([p.numel() for p in module.parameters()])
    return torch.cat([piece.chunk(module.num_chains)[chain] for piece in pieces])


@pytest.mark.parametrize("other", [ControlVariates, CovarianceFriction])
def test_with_another_it_goes_on_exactly_between_candidates(tmp_path: Path, other: Any) -> None:
    """With `CovarianceFriction` it is EWSG-VR."""

    def end(ckpt_path: Path | None = None, *extra: pl.Callback) -> dict[str, Tensor]:
        module = seeded(lambda: Net(2, sampler=Underdamped, lr=0.002))
        trainer = quiet_trainer(
            max_epochs=3,
            callbacks=[SamplingSchedule(every_n_steps=2), other(), EWSG(2), *extra],
            enable_checkpointing=bool(extra),
        )
        trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
        return module.state_dict()

    whole = end(None, SaveEverywhere(tmp_path))
    for checkpoint in sorted(tmp_path.glob("*.ckpt"))[4:12:3]:
        assert not differences(whole, end(checkpoint)), checkpoint.stem


# -- with others, and misuse --------------------------------------------------------------------------------------


def contour() -> ContourGradient:
    return ContourGradient(ContourRules(zeta=0.5), first_edge=20.0, width=5.0, num_bins=30)


@pytest.mark.parametrize("other", [contour, lambda: ReplicaExchange([1.0, 2.0])])
def test_it_chooses_after_the_controls_are_set_in_any_order_of_callbacks(other: Any) -> None:
    samples = fit_chains(seeded(lambda: Net(2)), 20, [other(), EWSG(1)])
    assert samples
    assert_same(samples, fit_chains(seeded(lambda: Net(2)), 20, [EWSG(1), other()]))


def test_the_multiplier_of_the_step_counts() -> None:
    """With κ = 0 no gradient moves the chain, so all candidates weigh the same and every proposal is accepted."""

    class Still(SamplerCallback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.sampler.set_control("gradient_multiplier", 0.0)

    ewsg = EWSG(3)
    trainer = quiet_trainer(max_steps=10, callbacks=[Still(), ewsg])
    trainer.fit(seeded(Net), datamodule=Data())
    state = ewsg.state_dict()
    assert state["accepted"] == state["proposed"] > 0


def test_a_candidate_that_is_not_finite_is_no_way_around_the_guard() -> None:
    """Whichever batch is chosen, a NaN in one of them stops the run, or leaves the step out."""

    class Poison(SamplerCallback):
        def __init__(self, batch: int) -> None:
            self.left = batch

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.left -= 1
            if self.left == 0:
                batch[0].fill_(float("nan"))

    for place in (3, 4):
        with pytest.raises(RuntimeError, match="the run stops before step 2 of chain 0"):
            fit_with(seeded(Net), [Poison(place), EWSG(1)], max_steps=10)
        module = seeded(lambda: Net(nonfinite_energy="skip"))
        with pytest.warns(UserWarning, match="is skipped"):
            fit_with(module, [Poison(place), EWSG(1)], max_epochs=2)
        assert module.skipped_steps == 1
        assert all(bool(p.isfinite().all()) for p in module.parameters())


class Changing(Sampler):
    """A rule that says nothing of its law."""

    def update(self, group: Any, params: Any, grads: Any, noise: Any) -> None:
        self._add(params, grads, -group["lr"])


@pytest.mark.parametrize(
    ("sampler", "ewsg", "message"),
    [
        (pSGLD, EWSG(1), "pSGLD's depends on the gradient itself"),
        (Changing, EWSG(1), "use another sampler"),
        (SGLD, EWSG(1, "stopped"), "'stopped' concerns a momentum"),
        (SGLD, EWSG(9), "a step of EWSG needs 10 batches, but an epoch has 8"),
    ],
)
def test_what_cannot_be_done_is_refused(sampler: Any, ewsg: EWSG, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_with(seeded(lambda: Net(sampler=sampler)), [ewsg], max_epochs=1)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="num_proposals"):
        EWSG(-1)
    with pytest.raises(ValueError, match="guess must be"):
        EWSG(1, "past")  # type: ignore[arg-type]
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="GradientAccumulationScheduler"):
        fit_with(seeded(Net), [scheduler, EWSG(1)], max_epochs=1)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="bf16-mixed"):
        fit_with(seeded(Net), [EWSG(1)], max_epochs=1, plugins=plugin)


def test_another_number_of_proposals_cannot_go_on(tmp_path: Path) -> None:
    save = pl.callbacks.ModelCheckpoint(tmp_path, filename="end", every_n_epochs=1)
    fit_with(seeded(Net), [EWSG(1), save], max_epochs=1, enable_checkpointing=True)
    trainer = quiet_trainer(max_epochs=3, callbacks=[EWSG(2)])
    with pytest.raises(ValueError, match="num_proposals 1 there, 2 here"):
        trainer.fit(seeded(Net), datamodule=Data(), ckpt_path=tmp_path / "end.ckpt")
