"""A warm start is torch's optimizer on every chain, and the sampler that follows begins in its stationary law."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_sgmcmc import SGHMC, SGLD, SGNHT, ContourRules, Patience, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    EWSG,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CyclicalSchedule,
    ReplicaExchange,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.warm_start import make_optimizer
from lightning_sgmcmc.seeding import derive_seed
from tests.support.comparisons import check_law
from tests.support.problems import PROBLEM, Data, Even, Net, Plain
from tests.support.recorders import Draws, Samples
from tests.support.trainers import OneOfMany, quiet_trainer, seeded

ADAMW = functools.partial(torch.optim.AdamW, weight_decay=0.0)


class Record(pl.Callback):
    """Stage, temperature and step size of every step."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.controls: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        group = pl_module.sampler.param_groups[0]
        self.stages.append(pl_module.chains.progress.stage)
        self.controls.append((float(group["lr"]), float(group["temperature"])))


class Stops(pl.Callback):
    """Ends the run after some steps, and lets a chain of a warm start stop after 8, as its early stopping does."""

    def __init__(self, steps: int, chain: int) -> None:
        self.steps, self.chain = steps, chain

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 8:
            optimizers = pl_module.sampler.stand_in
            optimizers._controls = lambda: ([chain for chain in range(3) if chain != self.chain], 1.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.steps


def by_hand(optimizer: Any, steps: int, chain: int, cosine: bool = False, accumulate: int = 1) -> list[Tensor]:
    """Return chain `chain`'s parameters after torch's own loop over the batches and the loss that the chain sees."""

    class Loop(pl.Callback):
        """Makes the loop's update where the sampler, at lr = 0 and τ = 0, makes none."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.own = optimizer(pl_module.parameters(), lr=0.01)
            self.step = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, sampler: Any) -> None:
            for group in self.own.param_groups:
                factor = (1 + math.cos(math.pi * self.step / steps)) / 2 if cosine else 1.0
                group["lr"] = 0.01 * factor
            self.own.step()
            self.step += 1

    module = seeded(lambda: Plain(1, lr=0.0, temperature=0.0))
    trainer = quiet_trainer(
        max_steps=steps, callbacks=[Loop()], accumulate_grad_batches=accumulate, strategy=OneOfMany(chain, 3)
    )
    trainer.fit(module, datamodule=Data())
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "reference", "options"),
    [
        (torch.optim.AdamW, ADAMW, {}),
        (torch.optim.NAdam, None, {}),
        (torch.optim.Adafactor, functools.partial(torch.optim.Adafactor, weight_decay=0.0), {}),
        (functools.partial(torch.optim.SGD, momentum=0.9), None, {"cosine": True, "accumulate": 2}),
    ],
    ids=["AdamW", "NAdam", "Adafactor", "SGD, cosine, accumulating"],
)
def test_a_warm_start_alone_is_torchs_optimizer_on_each_chain(optimizer: Any, reference: Any, options: Any) -> None:
    """Bit for bit, though AdamW's default decay is 0.01 and Adafactor mixes the elements of a tensor."""
    cosine, accumulate = options.get("cosine", False), options.get("accumulate", 1)
    schedule = "cosine" if cosine else "constant"
    module = seeded(lambda: Plain(3))
    start = WarmStart(optimizer, lr=0.01, steps=12, lr_schedule=schedule)
    quiet_trainer(max_steps=12, callbacks=[start], accumulate_grad_batches=accumulate).fit(module, datamodule=Data())
    for chain in range(3):
        with module.at_chain(chain):
            own = [p.detach().clone() for p in module.parameters()]
        expected = by_hand(reference or optimizer, 12, chain, cosine, accumulate)
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("optimizer", [functools.partial(torch.optim.AdamW, fused=True), torch.optim.RMSprop])
def test_chains_that_stop_or_go_on_in_another_fit_are_as_alone(optimizer: Any, tmp_path: Path) -> None:
    """Three chains, of which one has stopped after 8 steps, resumed after 4 and after 8 of 12; up to rounding."""
    path = tmp_path / "last.ckpt"
    for steps in (4, 8, 12):
        module = seeded(lambda: Plain(3))
        start = WarmStart(optimizer, lr=0.01, steps=12, lr_schedule="constant")
        trainer = quiet_trainer(max_steps=12, callbacks=[start, Stops(steps, 1)])
        trainer.fit(module, datamodule=Data(), ckpt_path=path if steps > 4 else None)
        trainer.save_checkpoint(path)
    expected = [by_hand(functools.partial(optimizer, weight_decay=0.0), 12, chain) for chain in (0, 2)]
    expected.insert(1, by_hand(functools.partial(optimizer, weight_decay=0.0), 8, 1))
    for chain in range(3):
        with module.at_chain(chain):
            for own, known in zip(module.parameters(), expected[chain], strict=True):
                torch.testing.assert_close(own.detach(), known, rtol=1e-5, atol=1e-7)


# -- momenta ----------------------------------------------------------------------------------------------------------

TAU, N, LR = 0.5, 60, 0.02
MOMENTA = {
    "SGHMC": (functools.partial(SGHMC, friction=0.2), TAU * LR / N / 0.9),
    "SGNHT": (functools.partial(SGNHT, friction=0.2), TAU * LR / N / 0.9),
    "Euler": (functools.partial(UnderdampedLangevin, friction=5.0), TAU / (1 - LR * 5 / 2)),
    "BAOAB": (functools.partial(UnderdampedLangevin, friction=5.0, integrator="baoab"), TAU),
    "OBABO": (functools.partial(UnderdampedLangevin, friction=5.0, integrator="obabo"), TAU),
    "UBU": (functools.partial(UnderdampedLangevin, friction=5.0, integrator="ubu"), TAU),
}


class Momenta(pl.Callback):
    """The momenta before the first step after `warm_steps`, when the callbacks have set its controls."""

    def __init__(self, warm_steps: int) -> None:
        self.warm_steps = warm_steps
        self.rows: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        sampler = pl_module.sampler
        if sampler.step_count == self.warm_steps:
            held = [sampler.state[p]["momentum_buffer"] for p in sampler.param_groups[0]["params"]]
            self.rows = list(torch.cat([m.reshape(len(m), -1) for m in held], 1))


@pytest.mark.parametrize(("sampler", "variance"), MOMENTA.values(), ids=MOMENTA.keys())
def test_momenta_begin_in_their_stationary_law(sampler: Any, variance: float) -> None:
    """They are the first normal numbers of each chain's generator, times the law's standard deviation."""
    module = seeded(lambda: Plain(2, sampler=sampler, lr=LR, temperature=TAU))
    found = Momenta(3)
    health = ChainHealth(warn=False)  # calls what is due before an update, before `found` looks
    quiet_trainer(max_steps=4, callbacks=[WarmStart(steps=3), health, found]).fit(module, datamodule=Data())
    for chain, row in enumerate(found.rows):
        generator = torch.Generator().manual_seed(derive_seed(5, "noise", chain))
        drawn = torch.randn(len(row) * module.sampler.draws, generator=generator)
        torch.testing.assert_close(row, math.sqrt(variance) * drawn[: len(row)])


def test_with_replica_exchange_each_chain_has_the_momenta_of_its_slot() -> None:
    module = seeded(lambda: Plain(2, sampler=MOMENTA["SGHMC"][0], lr=LR, temperature=TAU))
    found, exchange = Momenta(3), ReplicaExchange([1.0, 4.0], [1.0, 2.0], every_n_steps=100)
    quiet_trainer(max_steps=4, callbacks=[WarmStart(steps=3), exchange, found]).fit(module, datamodule=Data())
    for chain, row in enumerate(found.rows):
        generator = torch.Generator().manual_seed(derive_seed(5, "noise", chain))
        std = math.sqrt(MOMENTA["SGHMC"][1] * (1, 8)[chain])
        torch.testing.assert_close(row, std * torch.randn(len(row), generator=generator))


@pytest.mark.parametrize(
    ("sampler", "lr", "law"),
    [
        (SGHMC, 0.02, functools.partial(PROBLEM.sghmc_covariance, friction=0.1)),
        pytest.param(SGLD, 0.1, PROBLEM.sgld_covariance, marks=pytest.mark.slow),
    ],
    ids=["SGHMC", "SGLD"],
)
def test_draws_after_a_warm_start_have_the_exact_law(sampler: Any, lr: float, law: Any) -> None:
    """From a start 20 away. Errors and false alarms as in `test_conjugate_regression.py`: 3e-5 and 8e-5."""
    chains, batch = 40, 50
    module = PROBLEM.module(
        sampler=sampler, lr=lr, num_chains=chains, chain_start="same", chain_execution="vmap", num_data=200
    )
    with torch.no_grad():
        module.net.weight.add_(20.0)
    draws = Draws()
    callbacks = [
        WarmStart(torch.optim.Adam, lr=2.0, steps=20, lr_schedule="cosine"),
        SamplingSchedule(burn_in_steps=80, every_n_steps=2),
        draws,
    ]
    quiet_trainer(max_steps=250, callbacks=callbacks).fit(module, PROBLEM.chain_loader(batch, chains))
    check_law(draws.array(chains), law(lr, batch))


# -- the schedule afterwards ------------------------------------------------------------------------------------------


def test_the_schedule_counts_from_the_end_of_the_warm_start() -> None:
    """The controls and samples of a run without it, shifted; and no sampler's noise is drawn before."""

    def run(steps: int, *extra: pl.Callback) -> tuple[Record, list[int]]:
        record, samples = Record(), Samples()
        callbacks = [*extra, CyclicalSchedule(2, 0.5, 2), record, samples]  # WarmStart first, or
        callbacks = callbacks if len(extra) < 2 else [*callbacks[1:], callbacks[0]]
        module = seeded(lambda: Plain(2, temperature=0.5))
        quiet_trainer(max_steps=steps, callbacks=callbacks).fit(module, datamodule=Data())
        return record, [sample.step for sample in samples.samples]

    alone, drawn = run(20)
    for extra in ([WarmStart(steps=7)], [WarmStart(steps=7), ChainHealth(warn=False)]):  # first and last in the list
        warm, later = run(27, *extra)
        assert warm.stages == [Stage.WARM_START] * 7 + alone.stages
        assert warm.controls[7:] == alone.controls
        assert {temperature for _, temperature in warm.controls[:7]} == {0.0}
        assert later == [step + 7 for step in drawn]


class Validated(pl.Callback):
    """Each chain's state and loss at every validation, and its state at the sampler's first step."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.begin: tuple[int, Tensor] | None = None

    @staticmethod
    def flat(module: Any) -> Tensor:
        tensors = [*module.parameters(), *module.buffers()]
        return torch.cat([t.detach().reshape(module.num_chains, -1).double() for t in tensors], 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.states[pl_module.sampler.step_count] = self.flat(pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            seen = pl_module.chains.observed.validation
            self.losses[pl_module.sampler.step_count] = seen.total / seen.count

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.begin is None and pl_module.chains.progress.stage is not Stage.WARM_START:
            self.begin = (pl_module.sampler.step_count, self.flat(pl_module))


def test_each_chain_begins_at_its_best_validated_state() -> None:
    """With BatchNorm, whose statistics belong to the state, though chains that have stopped still see batches."""
    seen = Validated()
    module = seeded(lambda: Net(3))
    start = WarmStart(lr=0.3, steps=60, early_stopping=Patience(2))
    schedule = SamplingSchedule(every_n_steps=1)
    trainer = quiet_trainer(max_steps=80, val_check_interval=2, callbacks=[start, schedule, seen])
    trainer.fit(module, datamodule=Data())
    assert seen.begin is not None
    ended, state = seen.begin
    stops = []
    for chain in range(3):
        best, waited = None, 0
        for step, losses in seen.losses.items():
            if best is None or losses[chain] < seen.losses[best][chain]:
                best, waited = step, 0
            elif (waited := waited + 1) == 2:
                stops.append(step)
                break
        assert torch.equal(state[chain], seen.states[best][chain])
    assert ended == max(stops) < 60
    assert len(set(stops)) > 1, "they stop at different steps, so some wait"
    assert module.chains.progress.first_sample == ended + 1, "the schedule gets the steps that remain"


# -- with others ------------------------------------------------------------------------------------------------------


def test_what_concerns_sampling_waits_for_it() -> None:
    """Of 6 + 8 steps: a contour learns in 8, snapshots cost nothing in 6, exchange attempts 8, EWSG chooses in 8."""
    contour = ContourGradient(ContourRules(zeta=0.75), first_edge=20.0, width=2.0, num_bins=30)
    variates = ControlVariates(0, 100)
    module = seeded(lambda: Plain(2))
    trainer = quiet_trainer(
        max_steps=14, callbacks=[variates, contour, WarmStart(steps=6), SamplingSchedule(every_n_steps=2)]
    )
    trainer.fit(module, datamodule=Even(batch_size=16))
    assert contour.state_dict()["updates"] == 8
    assert module.gradient_evaluations == 6 * 16 + 64 + 8 * 2 * 16

    exchange, ewsg = ReplicaExchange([1.0, 2.0]), EWSG(1)
    trainer = quiet_trainer(max_steps=14, callbacks=[exchange, ewsg, WarmStart(steps=6)])
    trainer.fit(seeded(lambda: Plain(2)), datamodule=Even(batch_size=16))
    assert exchange.state_dict()["attempts"] == 8
    assert ewsg.state_dict()["proposed"] == 8 * 2


def test_a_contours_warm_up_follows_the_warm_start() -> None:
    contour = ContourGradient(ContourRules(zeta=0.75), num_bins=30, warm_up_steps=4)
    schedule = SamplingSchedule(burn_in_steps=4, every_n_steps=2)
    quiet_trainer(max_steps=20, callbacks=[contour, schedule, WarmStart(steps=6)]).fit(
        seeded(lambda: Plain(2)), datamodule=Data()
    )
    assert contour.state_dict()["updates"] == 10


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callbacks", "trainer", "sentence"),
    [
        (
            [WarmStart(steps=10), SamplingSchedule(every_n_steps=1)],
            {},
            "WarmStart takes 10 steps of a run of 10, which leaves none to SamplingSchedule: shorten it",
        ),
        (
            [WarmStart(steps=5, early_stopping=Patience())],
            {"limit_val_batches": 0},
            "WarmStart stops early by the validation data, and this run validates nothing",
        ),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_its_first_step(callbacks: Any, trainer: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        quiet_trainer(max_steps=10, callbacks=callbacks, **trainer).fit(Plain(2), datamodule=Data())


def test_a_checkpoint_of_a_run_with_another_beginning_is_refused(tmp_path: Path) -> None:
    def run(steps: int, ckpt_path: Path | None, *callbacks: pl.Callback) -> None:
        trainer = quiet_trainer(
            max_steps=steps, enable_checkpointing=True, callbacks=[SamplingSchedule(every_n_steps=1), *callbacks]
        )
        trainer.fit(seeded(lambda: Plain(2)), datamodule=Data(), ckpt_path=ckpt_path)

    def saving(name: str) -> pl.Callback:
        return pl.callbacks.ModelCheckpoint(tmp_path, name, every_n_train_steps=4, enable_version_counter=False)

    run(7, None, WarmStart(steps=6), saving("within"))
    run(4, None, saving("without"))
    with pytest.raises(ValueError, match="in the middle of a WarmStart of 6 steps, and this run has none: add the"):
        run(10, tmp_path / "within.ckpt")
    with pytest.raises(ValueError, match="has no WarmStart, and its chains have made 4 steps: remove WarmStart"):
        run(10, tmp_path / "without.ckpt", WarmStart(steps=6))


# -- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("torch.optim.AdamW", torch.optim.AdamW),
        ({"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}}, torch.optim.SGD),
    ],
    ids=["name", "partial"],
)
def test_a_configuration_names_the_optimizer(given: Any, kind: type) -> None:
    """The command line's partial holds AdamW's default decay of 0.01, even for SGD."""
    parser = ArgumentParser()
    parser.add_class_arguments(WarmStart, "warm_start")
    options = {"optimizer": given, "steps": 5, "early_stopping": {"validations": 2}}
    start = parser.instantiate_classes(parser.parse_object({"warm_start": options})).warm_start
    made = make_optimizer(start.optimizer, [torch.nn.Parameter(torch.zeros(2))], start.lr)
    assert type(made) is kind
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (1e-3, 0.0)
    assert start.early_stopping == Patience(2)
