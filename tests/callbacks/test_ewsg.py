"""EWSG under a trainer: its choice, its law, its cost, and chains, ranks and resuming."""

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
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    BayesianModule,
    Gaussian,
    Posterior,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    CyclicalSchedule,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.callback import Place
from lightning_sgmcmc.priors import FlatPrior
from tests.support.comparisons import assert_same, differences
from tests.support.ewsg_fits import Gradients, Underdamped, fit_with
from tests.support.problems import CHAINS, Data, Even, IndependentBatches, Net, Plain
from tests.support.recorders import SaveEverywhere
from tests.support.trainers import SETTINGS, OneOfMany, fit_chains, fit_in_layout, quiet_trainer, resumable_run, seeded

# -- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [SGHMC, SGLD, pSGLD, UnderdampedLangevin])
def test_without_proposals_it_is_the_plain_sampler(sampler: Any) -> None:
    lr = 0.001 if sampler in (pSGLD, UnderdampedLangevin) else 0.05
    plain = fit_chains(seeded(lambda: Net(2, sampler=sampler, lr=lr)), accumulate_grad_batches=2)
    assert_same(
        plain, fit_chains(seeded(lambda: Net(2, sampler=sampler, lr=lr)), 20, [EWSG(0)], accumulate_grad_batches=2)
    )


class AtTheStart(Gradients):
    place = Place.FIRST_STAGE


class AtTheEnd(Gradients):
    place = Place.SUMMARY


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_takes_one_of_its_batches(accumulated: int) -> None:
    """Each step's gradient is one of the M+1 candidates', or with accumulation the mean of one's micro-batches."""
    seen, proposals = AtTheStart(), 2
    # In front of EWSG, so it sees what EWSG gets; behind it, what EWSG leaves.
    after = AtTheEnd()
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
            weight = pl_module.net.weight
            pl_module.sampler.state[weight]["momentum_buffer"] = self.momentum.expand_as(weight).clone()
            pl_module.sampler.param_groups[0]["holds_velocity"] = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        distances = (self.gradients - pl_module.net.weight.grad).norm(dim=-1)  # (chains, data)
        self.counts += torch.bincount(distances.argmin(1), minlength=len(self.counts))


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

    (`tests/subsampling/test_subsampling.py` shows that it tends to eq. (4).) Chi-square of 1,000 steps, 50 of each of
    20 independent chains, over six data; a false alarm has a chance of 1e-4 in each case.
    """
    x, y = torch.randn(6, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([0.4, -0.3, 1.0, 0.1, -1.2, 0.6])
    prior_free = torch.stack([-x[i] * y[i] for i in range(6)])  # at θ = 0 the prior's gradient is 0
    momentum = torch.tensor([0.3, -0.2]) * (1.0 if sampler is Underdamped else 0.05)
    module = BayesianModule(
        net=nn.Linear(2, 1, bias=False),
        likelihood=Gaussian(std=1.0),
        sampler=sampler,
        lr=lr,
        num_data=6,
        num_chains=20,
        seed=2,
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
    trainer = quiet_trainer(max_steps=50, callbacks=[EWSG(3, guess), held])
    trainer.fit(module, IndependentBatches(x, y[:, None], 1, chains=20, seed=3))
    assert float(held.counts.sum()) == 1000
    assert scipy.stats.chisquare(held.counts.numpy(), (law / law.sum() * 1000).numpy()).pvalue > 1e-4


def test_while_the_temperature_is_zero_it_is_accumulation() -> None:
    """In a cycle's exploration the mean gradient of all batches is taken, bit for bit (each has as many data); then
    batches are chosen."""
    schedule = partial(CyclicalSchedule, num_cycles=1, exploration=0.5, samples_per_cycle=1)

    def states(callbacks: list[Any], steps: int, **options: Any) -> Tensor:
        module = seeded(lambda: Net(2, sampler=SGHMC))
        trainer = quiet_trainer(max_steps=20, callbacks=[schedule(), *callbacks, Stop(steps)], **options)
        trainer.fit(module, datamodule=Even())
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
    checkpoints = sorted(tmp_path.glob("*.ckpt"))[::5]
    assert len(checkpoints) > 5
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
