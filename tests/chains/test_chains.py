"""Several chains in one process: each is, bit for bit, the chain that it would be alone."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGLD,
    SGNHT,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    LaplacePrior,
    pSGLD,
)
from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder, OrderSpec
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.samplers import noise
from tests.support.comparisons import assert_same, check_law
from tests.support.problems import CHAINS, ConjugateRegression, Data, Decoded, Net, data
from tests.support.recorders import Draws, Each
from tests.support.trainers import OneOfMany, fit_chains, quiet_trainer, seeded


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({}, {}),
        ({"sampler": SGLD}, {"gradient_clip_val": 0.3}),
        ({"sampler": pSGLD, "lr": 0.001}, {"accumulate_grad_batches": 3}),
        ({"sampler": SGNHT}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        ({"prior": LaplacePrior(0.5)}, {"precision": "bf16-mixed"}),
    ],
)
def test_each_chain_is_bit_for_bit_the_chain_alone(options: dict[str, Any], trainer: dict[str, Any]) -> None:
    together = fit_chains(seeded(lambda: Net(CHAINS, **options)), **trainer)
    for chain in range(CHAINS):
        alone = fit_chains(seeded(lambda: Net(1, **options)), strategy=OneOfMany(chain, CHAINS), **trainer)
        assert_same(alone, [sample for sample in together if sample.chain == chain])


class Skipping(Net):
    """A network that leaves a parameter out for a fourth of the batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if int(1e4 * x.abs().sum()) % 4 else self.net(x)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("make", [Net, Skipping])
def test_large_chains_save_memory_and_make_the_same_steps(
    make: Any, accumulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their noise is drawn in blocks, and each gradient goes to the rows as it arrives."""
    right = fit_chains(seeded(lambda: make(CHAINS)), accumulate_grad_batches=accumulated)
    monkeypatch.setattr(noise, "WHOLE", 300)
    monkeypatch.setattr(noise, "ON_CPU", 32 * CHAINS)
    received = []
    receive = StackedChains.receive
    monkeypatch.setattr(StackedChains, "receive", lambda self, flat: received.append(flat) or receive(self, flat))
    assert_same(right, fit_chains(seeded(lambda: make(CHAINS)), accumulate_grad_batches=accumulated))
    assert any(flat is not None for flat in received) == (accumulated == 1)


def test_chains_differ_in_start_batches_and_noise() -> None:
    look = Each("on_train_batch_start", lambda trainer, module, batch, batch_idx: batch)
    fit_chains(seeded(lambda: Net(CHAINS)), 10, [look])
    seen = look.seen
    assert all(isinstance(batch, ChainBatches) and len(batch) == CHAINS for batch in seen)
    assert not torch.equal(seen[0][0][0], seen[0][1][0])
    samples = fit_chains(seeded(lambda: Net(CHAINS, lr=0.0)), 10)
    for name in ("net.0.weight", "net.4.weight"):
        starts = torch.stack([sample.parameters[name] for sample in samples])
        assert float((starts[0] - starts[1]).abs().min()) > 0
    torch.testing.assert_close(samples[0].parameters, dict(seeded(Net).named_parameters()))


def test_chains_start_alike_where_that_is_asked_for() -> None:
    samples = fit_chains(seeded(lambda: Net(CHAINS, lr=0.0, chain_start="same")), 10)
    for sample in samples[1:]:
        assert all(torch.equal(t, samples[0].parameters[n]) for n, t in sample.parameters.items())


def test_a_network_that_was_handed_over_is_started_by_its_layers() -> None:
    """The start of each chain has the layer's own law: uniform in ±1/√fan_in; frozen parameters are the same."""
    net = nn.Sequential(nn.Linear(400, 50), nn.Linear(50, 3), nn.BatchNorm1d(3))
    net[1].weight.requires_grad_(False)
    net[2].requires_grad_(False)
    net[2].running_mean.fill_(7.0)
    module = BayesianModule(net=net, likelihood=Categorical(), num_chains=CHAINS, seed=1)
    frozen = net[1].weight.clone()
    module.configure_model()
    assert net[0].weight.shape == (CHAINS, 50, 400)
    for chain in range(CHAINS):
        with module.at_chain(chain):
            assert torch.equal(net[1].weight, frozen)
            assert net[2].running_mean.tolist() == [7.0] * 3  # of a part that was trained before
            assert net[0].weight.shape == (50, 400)
            largest = float(net[0].weight.detach().abs().max())
        assert 0.99 / 20 < largest <= 1 / 20  # one of 20,000 is nearly always so large
    assert not torch.equal(net[0].weight[1], net[0].weight[2])


def test_a_parameter_without_reset_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    module = BayesianModule(net=Scaled(), likelihood=Categorical(), num_chains=2, seed=1)
    with pytest.warns(UserWarning, match=r"start with the same 'net\.scale': Scaled has no reset_parameters"):
        module.configure_model()


def test_a_network_that_holds_another_modules_chains_is_named() -> None:
    net: Any = nn.Linear(3, 1)
    examples = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=10)

    def fit(num_chains: int, module: Any = None) -> Any:
        module = (
            BayesianModule(net, Gaussian(1.0), lr=1e-3, num_chains=num_chains, seed=0) if module is None else module
        )
        every = SamplingSchedule(burn_in_epochs=0, every_n_epochs=1)
        quiet_trainer(max_epochs=1, callbacks=[every, SampleCollector(in_memory=True)]).fit(module, examples)
        return module

    module = fit(2)
    for again in (1, 2):
        with pytest.raises(ValueError, match=r"'net.weight' holds the states of 2 chains of another module's fit"):
            fit(again)
    fit(2, module)  # the same module goes on
    net = next(module.posterior.networks())  # and one of its networks begins another run
    assert fit(3).chains.stacked.num_chains == 3


def test_shared_batches() -> None:
    """On request all chains see chain 0's batches; without noise, chains of one start then stay one chain."""
    options = {"chain_start": "same", "temperature": 0.0, "shared_batch": True}
    net = lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))  # noqa: E731
    torch.manual_seed(0)
    module = BayesianModule(net=net(), likelihood=Categorical(), lr=0.1, num_chains=2, seed=1, **options)  # type: ignore[arg-type]
    samples = fit_chains(module)
    assert all(torch.equal(t, samples[-2].parameters[n]) for n, t in samples[-1].parameters.items())


def test_a_plain_loader_gives_all_chains_its_batches_and_says_so() -> None:
    split = data(60, 0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(split.inputs, split.targets), 8, shuffle=True)
    trainer = quiet_trainer(max_steps=3)
    with pytest.warns(UserWarning, match="all chains of a process see the same batches"):
        trainer.fit(seeded(lambda: Net(2)), loader)


def test_a_loader_with_a_batch_for_each_chain_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    problem = ConjugateRegression()
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(problem.module(num_chains=2, num_data=problem.num_data), problem.chain_loader(8, 2))
    assert not [str(warning.message) for warning in recwarn if "same batches" in str(warning.message)]


@pytest.mark.parametrize("workers", [0, 2])
def test_items_that_are_decoded_one_by_one(workers: int) -> None:
    """Each chain's items and augmentation are those that it has alone, with workers too."""

    def batches(chains: tuple[int, ...], num_workers: int) -> list[Any]:
        loader = ResumableLoader(Decoded(data(60, 0), True), 8, seed=3, num_workers=num_workers)
        loader.adopt_chains(chains)
        found = list(loader)
        loader.close()
        return found

    together = batches((0, 2), workers)
    for place, chain in enumerate((0, 2)):
        for batch, alone in zip(together, batches((chain,), 0), strict=True):
            assert torch.equal(batch[place][0], alone[0])


def test_batches_of_a_stack_are_views_of_it() -> None:
    x, y = torch.randn(2, 4, 3), torch.arange(8).view(2, 4)
    batches = ChainBatches.of_stack((x, y), 2)
    assert torch.equal(batches[1][0], x[1])
    assert batches.stacked()[0] is x
    again = ChainBatches([(x[0], y[0]), (x[1], y[1])]).stacked()
    assert torch.equal(again[0], x)
    with pytest.raises(ValueError, match="a batch with a str in it cannot be stacked"):
        ChainBatches([("a",), ("b",)]).stacked()


def test_stacked_batches_of_data_on_an_accelerator() -> None:
    """There one call makes the batches of all chains, each with its own order of the data."""
    dataset = TensorBatches(torch.arange(60.0)[:, None], torch.arange(60))
    loader = ResumableLoader(dataset, 8, seed=3)
    loader.adopt_chains((0, 5))
    from lightning_sgmcmc.batches.loader import _SeededItems

    items = _SeededItems(dataset, list, 3, ["0/0", "5/0"])
    items._device = torch.device("meta")  # stands for one that is not the CPU
    orders = [BatchOrder(OrderSpec(60, 8, 3, chain)) for chain in (0, 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sgmcmc.batches.loader.reseed", lambda *args: None)
        batch = items.load_all(2, [order.indices(2) for order in orders])
    for place, order in enumerate(orders):
        assert torch.equal(batch[place][1], order.indices(2))
    assert batch.stacked()[0].shape == (2, 8, 1)


@pytest.mark.parametrize(
    "options", [{}, {"prior": LaplacePrior(1.0)}, {"prior": GaussianPrior({"*.bias": 3, "*": 0.5})}]
)
def test_vmap_is_the_loop_to_rounding(options: dict[str, Any]) -> None:
    """Gradients, BatchNorm's statistics and energies; without dropout, whose masks are drawn in another order."""

    def run(execution: str) -> list[PosteriorSample]:
        module = seeded(lambda: Net(CHAINS, chain_execution=execution, **options))
        module.net[3].p = 0.0
        return fit_chains(module, 10)

    for looped, vmapped in zip(run("loop"), run("vmap"), strict=True):
        assert vmapped.energy == pytest.approx(looped.energy, rel=1e-5)
        torch.testing.assert_close(vmapped.state, looped.state, rtol=1e-4, atol=1e-5)


def test_vmap_with_dropout_gives_chains_masks_of_their_own() -> None:
    module = seeded(lambda: Net(2, lr=0.0, chain_start="same", shared_batch=True, chain_execution="vmap"))
    samples = fit_chains(module, 10)
    assert samples[0].energy != samples[1].energy


def test_a_layer_that_vmap_cannot_run_is_named() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    net = nn.Sequential(nn.Linear(5, 3), Picky())
    module = BayesianModule(net=net, likelihood=Categorical(), num_chains=2, chain_execution="vmap")
    with pytest.raises(RuntimeError, match=r"cannot run 'net\.1' \(Picky\) for all chains at once .*'loop'"):
        fit_chains(module)


def test_a_prior_of_the_users_own_under_vmap() -> None:
    class Hierarchical(Net):
        def log_prior(self) -> Tensor:
            return sum((-(p.square()).sum() for p in self.parameters()), torch.zeros(()))

    def run(execution: str) -> list[float]:
        module = seeded(lambda: Hierarchical(2, chain_execution=execution))
        module.net[3].p = 0.0
        return [sample.energy for sample in fit_chains(module, 10)]

    assert run("vmap") == pytest.approx(run("loop"), rel=1e-5)


@pytest.mark.by_default("vmap")
@pytest.mark.parametrize(("chains", "execution"), [(1, "loop"), (2, "loop"), (2, "vmap")])
def test_compiled_networks(chains: int, execution: Any) -> None:
    """Compiled with full graphs, once, whatever the step size does; equal to rounding."""

    def run(compiled: bool) -> tuple[list[PosteriorSample], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = seeded(lambda: Net(chains, compile=compiled, chain_execution=execution))
        module.net[3].p = 0.0
        collector = SampleCollector(in_memory=True)
        schedule = CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=1)
        trainer = quiet_trainer(max_steps=14, callbacks=[schedule, collector])
        trainer.fit(module, datamodule=Data(batch_size=12))
        assert collector.posterior is not None
        assert not torch._dynamo.utils.counters["graph_break"]
        return list(collector.posterior.store), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    eager, _ = run(False)
    compiled, graphs = run(True)
    assert graphs == 1
    for one, other in zip(eager, compiled, strict=True):
        assert other.energy == pytest.approx(one.energy, rel=1e-4)
        torch.testing.assert_close(other.state, one.state, rtol=1e-3, atol=1e-4)


def test_gradients_that_a_cuda_graph_would_overwrite_are_added_up() -> None:
    """Stands in for a device: gradients in kept memory, over micro-batches, are those in fresh memory."""

    class Kept(Net):
        def on_train_start(self) -> None:
            assert self.chains.energies is not None
            self.chains.energies.replays = True

    def run(model: Any) -> list[PosteriorSample]:
        module = seeded(lambda: model(2, chain_execution="vmap"))
        return fit_chains(module, 10, accumulate_grad_batches=2)

    assert_same(run(Net), run(Kept))


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    def checkpoint() -> pl.Callback:
        return pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)

    def go_on(path: Path | None) -> list[PosteriorSample]:
        collector = SampleCollector(in_memory=True)
        trainer = quiet_trainer(
            max_steps=20,
            accumulate_grad_batches=2,
            enable_checkpointing=True,
            callbacks=[SamplingSchedule(every_n_steps=4), collector, BayesianModelAverage(), checkpoint()],
        )
        torch.manual_seed(1 if path else 0)
        trainer.fit(Net(CHAINS, seed=None if path else 5), datamodule=Data(), ckpt_path=path)
        assert collector.posterior is not None
        return list(collector.posterior.store)

    whole = go_on(None)
    assert_same(whole, go_on(tmp_path / "step=14.ckpt"))


def test_the_state_between_micro_batches_survives(tmp_path: Path) -> None:
    class Save(pl.callbacks.Checkpoint):  # these come after all others
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (
                trainer.global_step == 2
                and module.chains.accumulation.accumulating
                and not (tmp_path / "mid.ckpt").exists()
            ):
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    whole = fit_chains(seeded(lambda: Net(2)), 10, [Save()], accumulate_grad_batches=3, enable_checkpointing=True)
    collector = SampleCollector(in_memory=True)
    trainer = quiet_trainer(
        max_steps=10, callbacks=[SamplingSchedule(every_n_steps=10), collector], accumulate_grad_batches=3
    )
    trainer.fit(Net(2), datamodule=Data(), ckpt_path=tmp_path / "mid.ckpt")
    assert collector.posterior is not None
    assert_same(whole, list(collector.posterior.store))


def test_chains_with_temperatures_and_step_sizes_of_their_own() -> None:
    """Chains have the exact law of their own step size and temperature, by eight of each; false alarms as for one."""
    problem = ConjugateRegression()
    draws = Draws()
    settings, each = [(0.05, 1.0), (0.1, 4.0)], 8
    lrs, temperatures = zip(*settings * each, strict=True)
    module = problem.module(
        sampler=SGLD,
        lr=lrs,
        temperature=temperatures,
        num_chains=2 * each,
        chain_start="same",
        chain_execution="vmap",
        num_data=problem.num_data,
        seed=3,
    )
    trainer = quiet_trainer(max_steps=800, callbacks=[SamplingSchedule(burn_in_steps=200, every_n_steps=3), draws])
    trainer.fit(module, problem.chain_loader(50, 2 * each))
    by_chain = draws.array(2 * each).reshape(2 * each, -1, problem.outputs, problem.features)
    for chain, (lr, temperature) in enumerate(settings):
        found = by_chain[chain::2].reshape(-1, problem.outputs, problem.features)
        check_law(found, problem.sgld_covariance(lr, 50, temperature))
