"""EWSG under a trainer: it takes whole batches as candidates and chooses one by the law of eq. (4), in every layout."""

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    BayesianModule,
    ContourRules,
    Gaussian,
    Posterior,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    ReplicaExchange,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.priors import FlatPrior
from lightning_sgmcmc.samplers import Sampler
from tests.support.comparisons import assert_same, differences
from tests.support.problems import CHAINS, Data, Even, Net, Plain
from tests.support.recorders import SaveEverywhere
from tests.support.trainers import SETTINGS, OneOfMany, fit_chains, fit_in_layout, quiet_trainer, resumable_run, seeded

Underdamped = partial(UnderdampedLangevin, friction=5.0)


class Gradients(SamplerCallback):
    """Notes the gradients of every step as the sampler sees them, and those of every batch."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.batches: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.batches.append(flat(pl_module))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps.append(flat(pl_module))


def flat(module: Any) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in module.parameters()])


# -- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [SGHMC, SGLD, pSGLD, UnderdampedLangevin])
def test_without_proposals_it_is_the_plain_sampler(sampler: Any) -> None:
    lr = 0.001 if sampler in (pSGLD, UnderdampedLangevin) else 0.05
    plain = fit_chains(seeded(lambda: Net(2, sampler=sampler, lr=lr)), accumulate_grad_batches=2)
    assert_same(
        plain, fit_chains(seeded(lambda: Net(2, sampler=sampler, lr=lr)), 20, [EWSG(0)], accumulate_grad_batches=2)
    )


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_takes_one_of_its_batches(accumulated: int) -> None:
    """Each step's gradient is one of the M+1 candidates', or with accumulation the mean of one's micro-batches."""
    seen, proposals = Gradients(), 2
    # In front of EWSG, so it sees what EWSG gets; behind it, what EWSG leaves.
    after = Gradients()
    module = seeded(lambda: Net(sampler=SGHMC))
    fit_chains(module, 10, [seen, EWSG(proposals), after], accumulate_grad_batches=accumulated)
    each, chosen = (proposals + 1) * accumulated, []
    batches = iter(seen.batches)
    per_epoch, step = 8, 0
    while step < 10:
        window = [list(itertools.islice(batches, n)) for n in lengths(per_epoch, each)]
        for part in window:
            if step == 10:
                break
            # p.grad holds what has been accumulated of the candidate, over Lightning's divisor, the window.
            ends = [*range(accumulated - 1, len(part), accumulated)]
            ends += [len(part) - 1] if len(part) % accumulated else []
            candidates = [part[end] * len(part) / (end % accumulated + 1) for end in ends]
            same = [torch.allclose(after.steps[step], c, rtol=1e-5, atol=1e-7) for c in candidates]
            assert sum(same) == 1, (step, same)
            chosen.append(same.index(True))
            step += 1
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("chains", [1, 2])
def test_an_epochs_short_last_batch_competes_with_none(chains: int) -> None:
    """The last 5 of 45 data have the only gradient, which a choice among all candidates takes nearly always."""
    x, y = torch.ones(45, 1), torch.zeros(45, 1)
    y[40:] = 1000.0
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    options: dict[str, Any] = {"num_chains": chains, "chain_start": "same", "prior": FlatPrior(), "seed": 0}
    module = BayesianModule(net=net, likelihood=Gaussian(), sampler=SGLD, lr=0.01, **options)
    loader = DataLoader(TensorDataset(x, y), 20)
    quiet_trainer(max_epochs=1, callbacks=[EWSG(2), SamplingSchedule(every_n_steps=1)]).fit(module, loader)
    assert net.weight.abs().max() < 0.1, "noise of 0.02, against a gradient of 10"


def lengths(per_epoch: int, each: int) -> list[int]:
    """Return how many batches the steps of an epoch take."""
    return [each] * (per_epoch // each) + ([per_epoch % each] if per_epoch % each else [])


class Held(SamplerCallback):
    """Keeps place and momentum as they are, and notes which datum each step's gradient is of."""

    def __init__(self, momentum: Tensor | None, gradients: Tensor) -> None:
        self.momentum = momentum
        self.gradients = gradients
        self.counts = torch.zeros(len(gradients))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            pl_module.net.weight.zero_()
        if self.momentum is not None:
            state = pl_module.sampler.state[pl_module.net.weight]
            state["momentum_buffer"] = self.momentum.clone()[None]
            pl_module.sampler.param_groups[0]["holds_velocity"] = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        distances = (self.gradients - pl_module.net.weight.grad[0]).norm(dim=1)
        self.counts[int(distances.argmin())] += 1


@pytest.mark.by_default("one")
@pytest.mark.parametrize(
    ("sampler", "lr", "guess"),
    [
        (SGLD, 0.5, "unchanged"),
        (SGHMC, 0.05, "unchanged"),
        (Underdamped, 0.2, "unchanged"),
        (Underdamped, 0.2, "one"),
    ],
)
def test_the_index_chain_has_its_law(sampler: Any, lr: float, guess: Any) -> None:
    """Six data, one a batch, drawn with replacement: the law after three proposals, from the chain's matrix.

    (`tests/subsampling/test_subsampling.py` shows that it tends to eq. (4).) Chi-square of 1,000 steps over six data; a
    false alarm has a chance of 1e-4 in each case.
    """
    x, y = torch.randn(6, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([0.4, -0.3, 1.0, 0.1, -1.2, 0.6])
    prior_free = torch.stack([-x[i] * y[i] for i in range(6)])  # at θ = 0 the prior's gradient is 0
    momentum = torch.tensor([0.3, -0.2]) * (1.0 if sampler is Underdamped else 0.05)
    module = BayesianModule(
        net=nn.Linear(2, 1, bias=False), likelihood=Gaussian(std=1.0), sampler=sampler, lr=lr, num_data=6, seed=2
    )
    if sampler is Underdamped:
        a, b, variance = lr * 5.0, lr * 6, 2 * 5.0 * lr
    else:
        a, b, variance = (0.1 if sampler is SGHMC else 0.0), lr, 2 * (0.1 if sampler is SGHMC else 1.0) * lr / 6
    place = torch.ones(2) if guess == "one" else a * momentum / variance**0.5
    log_weights = 0.5 * (place + b * prior_free / variance**0.5).square().sum(1)
    moves = (log_weights - log_weights[:, None]).exp().clamp(max=1) / 6
    moves += torch.diag(1 - moves.sum(1))
    law = torch.full((6,), 1 / 6) @ torch.linalg.matrix_power(moves, 3)
    assert float(law.max() / law.min()) > 1.5, "a law that differs from the uniform one"
    held = Held(None if sampler is SGLD else momentum, prior_free)
    dataset = TensorDataset(x, y[:, None])
    drawn = RandomSampler(dataset, replacement=True, num_samples=4000, generator=torch.Generator().manual_seed(3))
    trainer = quiet_trainer(max_steps=1000, callbacks=[EWSG(3, guess), held])
    trainer.fit(module, DataLoader(dataset, batch_size=1, sampler=drawn))
    assert float(held.counts.sum()) == 1000
    assert scipy.stats.chisquare(held.counts.numpy(), (law / law.sum() * 1000).numpy()).pvalue > 1e-4


def test_while_the_temperature_is_zero_it_is_accumulation() -> None:
    """In a cycle's exploration the mean gradient of all batches is taken, bit for bit; then batches are chosen."""
    schedule = partial(CyclicalSchedule, num_cycles=1, exploration=0.5, samples_per_cycle=1)

    def states(callbacks: list[Any], steps: int, **options: Any) -> Tensor:
        module = seeded(lambda: Net(2, sampler=SGHMC))
        trainer = quiet_trainer(max_steps=20, callbacks=[schedule(), *callbacks, Stop(steps)], **options)
        trainer.fit(module, datamodule=Data())
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    class Stop(pl.Callback):
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= self.steps

    assert torch.equal(states([], 10, accumulate_grad_batches=2), states([EWSG(1)], 10))
    assert not torch.equal(states([], 14, accumulate_grad_batches=2), states([EWSG(1)], 14))


def test_the_cost_is_counted_and_logged(tmp_path: Path) -> None:
    """60 data in batches of 8: a step of three candidates takes 24 data, the epoch's last one 12."""
    logger = pl.loggers.CSVLogger(tmp_path)
    module = seeded(lambda: Net(2))
    trainer = fit_with(module, [EWSG(2)], max_epochs=2, logger=logger, log_every_n_steps=2)
    assert trainer.global_step == 6
    assert module.gradient_evaluations == 120
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = lines[0].split(",")
    table = {c: [row.split(",")[i] for row in lines[1:]] for i, c in enumerate(columns)}
    evaluations = [float(v) for v in table["sampler/gradient_evaluations"] if v]
    assert evaluations == [48, 84, 120]
    assert [float(v) for v in table["sampler/data_passes"] if v] == pytest.approx([0.8, 1.4, 2.0], abs=1e-6)
    assert all(0 <= float(v) <= 1 for v in table["ewsg/acceptance"] if v)
    assert trainer.accumulate_grad_batches == 1, "the trainer is as it was"


def fit_with(module: BayesianModule, callbacks: list[Any], **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(callbacks=callbacks, **options)
    trainer.fit(module, datamodule=Even(8) if isinstance(module, Plain) else Data())
    return trainer


# -- chains, ranks, resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"sampler": SGLD}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        ({"sampler": SGNHT}, {"precision": "bf16-mixed"}),
    ],
)
def test_each_chain_chooses_for_itself(options: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Stacked chains are bit for bit the chains alone."""
    together = fit_chains(seeded(lambda: Net(CHAINS, **options)), 20, [EWSG(2)], **trainer)
    for chain in range(CHAINS):
        alone = fit_chains(
            seeded(lambda: Net(1, **options)), 20, [EWSG(2)], strategy=OneOfMany(chain, CHAINS), **trainer
        )
        assert_same(alone, [sample for sample in together if sample.chain == chain])


def test_all_chains_at_once_choose_the_same() -> None:
    loop = fit_chains(seeded(lambda: Plain(CHAINS)), 20, [EWSG(1)])
    vmapped = fit_chains(seeded(lambda: Plain(CHAINS, chain_execution="vmap")), 20, [EWSG(1)])
    for one, other in zip(loop, vmapped, strict=True):
        torch.testing.assert_close(other.parameters, one.parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.by_default("layout1")
@pytest.mark.parametrize("layout", [(1, 4, 2), (2, 2, 2), (2, 2, 1)])
def test_ranks_choose_together(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    """Ranks that share a chain compare the gradients of joint batches, and take the same one."""
    stacked, ranks, group = layout
    chains = stacked * ranks // group
    options: dict[str, Any] = {"model": Plain, "accumulate_grad_batches": 2}
    whole, _ = fit_in_layout(tmp_path / "whole", chains, 1, callbacks=[EWSG(1)], datamodule=Even(16), **options)
    spread, _ = fit_in_layout(
        tmp_path / "spread", stacked, ranks, group, callbacks=[EWSG(1)], datamodule=Even(16 // group), **options
    )
    for one, other in zip(whole, spread, strict=True):
        torch.testing.assert_close(other.parameters, one.parameters, rtol=1e-4, atol=1e-5)


def test_plain_data_parallel_ranks_choose_together(tmp_path: Path) -> None:
    whole, _ = fit_in_layout(tmp_path / "whole", 1, 1, callbacks=[EWSG(2)], model=Plain, datamodule=Even(16))
    collector = SampleCollector(tmp_path / "samples")
    trainer = quiet_trainer(
        max_steps=20,
        devices=2,
        strategy="ddp_fork",
        callbacks=[SamplingSchedule(every_n_steps=5), collector, EWSG(2)],
    )
    torch.manual_seed(0)
    trainer.fit(Plain(1), datamodule=Even(8))
    for one, other in zip(whole, Posterior.load(tmp_path / "samples", model=Plain()).store, strict=True):
        torch.testing.assert_close(other.parameters, one.parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.by_default("epochs")
@pytest.mark.parametrize("setting", ["epochs", "accumulation and validation in mid-window"])
def test_it_goes_on_exactly_from_any_batch(tmp_path: Path, setting: str) -> None:
    """Checkpoints between the candidates of a step, and between their micro-batches, hold what has been seen."""
    options = SETTINGS[setting] | {"log_every_n_steps": 3}
    if setting != "epochs":
        options |= {"accumulate_grad_batches": 2, "max_epochs": 5}
    whole = resumable_run(tmp_path / "whole", options, "memory", EWSG(1), SaveEverywhere(tmp_path))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))[::3]
    assert len(checkpoints) > 8
    bad = {}
    for checkpoint in checkpoints:
        folder = tmp_path / checkpoint.stem
        shutil.copytree(tmp_path / "whole" / "samples", folder / "samples")
        if found := differences(whole, resumable_run(folder, options, "memory", EWSG(1), ckpt_path=checkpoint)):
            bad[checkpoint.stem] = found[:3]
    assert not bad, bad


def test_the_count_goes_on_too(tmp_path: Path) -> None:
    save = pl.callbacks.ModelCheckpoint(tmp_path, filename="end", every_n_epochs=1)
    fit_with(seeded(Net), [EWSG(1), save], max_epochs=1, enable_checkpointing=True)
    module = seeded(Net)
    trainer = quiet_trainer(max_epochs=3, callbacks=[EWSG(1)])
    trainer.fit(module, datamodule=Data(), ckpt_path=tmp_path / "end.ckpt")
    assert module.gradient_evaluations == 180


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
    with pytest.raises(ValueError, match="num_proposals=1, this one 2"):
        trainer.fit(seeded(Net), datamodule=Data(), ckpt_path=tmp_path / "end.ckpt")
