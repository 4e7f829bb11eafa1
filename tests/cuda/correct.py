"""What a fit on the device must do beyond its steps, as functions that assert: run in its own process by `cases.py`."""

import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, ContourRules, Gaussian, callbacks, compiling
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.chains import compiled_step, traced
from lightning_sgmcmc.chains.execution import graphs_kept
from lightning_sgmcmc.datamodules import DatasetDataModule, DigitsDataModule
from lightning_sgmcmc.fit import block_runs
from tests.cuda.case import ORDINARY, Case, build, fit, loaders
from tests.cuda.drawn import samples_are_the_chains_states
from tests.cuda.stand_in import StandIn
from tests.cuda.trainer import StandInStrategy, stand_in_trainer

SMALL = Case(blocks=1, usual=False, precision="32-true", augment=False)


def _state(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def _largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def _resumes(device: StandIn, case: Case) -> None:
    """A run that is resumed after five of its ten steps ends where the uninterrupted one does."""
    case = dataclasses.replace(case, schedule="sampling", steps=10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = fit(device, case, folder / "whole")
        first = fit(device, dataclasses.replace(case, steps=5), folder / "first")
        first.trainer.save_checkpoint(folder / "half.ckpt")
        last = fit(device, case, folder / "first", resumed=folder / "half.ckpt")
    assert last.trainer.global_step == case.steps
    assert last.steps[2]["waits"].total() == 0, last.steps[2]["waits"]
    assert _largest_difference(_state(whole.module), _state(last.module)) == 0


def resumes_with_an_lr_for_each_chain(device: StandIn) -> None:
    _resumes(device, dataclasses.replace(SMALL, lr_each=True))


def resumes_with_contour_and_all_callbacks(device: StandIn) -> None:
    _resumes(device, dataclasses.replace(SMALL, interacting=True, usual=True, clip=1.0))


def resumes_replica_exchange(device: StandIn) -> None:
    _resumes(device, dataclasses.replace(SMALL, replica_exchange=True))


def resumes_a_metropolis_test(device: StandIn) -> None:
    _resumes(device, dataclasses.replace(SMALL, sampler="GGMC", metropolis=5))


def starts_on_the_device_are_drawn_by_chain(device: StandIn) -> None:
    """Parameters that are made on the device start from a stream of (seed, chain), whatever was drawn before."""
    starts = []
    for seed in (1, 2):
        module = build(SMALL)
        module.net.to("cuda")  # type: ignore[union-attr]
        torch.cuda.manual_seed(seed)
        torch.manual_seed(seed)
        state = torch.cuda.get_rng_state()
        module.configure_model()
        assert torch.equal(torch.cuda.get_rng_state(), state)
        starts.append(_state(module))
    assert _largest_difference(*starts) == 0
    weight = starts[0]["net.0.weight"]
    assert len({float(chain.sum()) for chain in weight}) == SMALL.chains


def batches_of_the_host_move_as_one_stack(device: StandIn) -> None:
    """Inputs and targets of all chains go to the device in one copy each, from pinned memory, with the default that
    compiles; a datamodule's batch of one chain does too."""
    case = dataclasses.replace(SMALL, resident=False, compile="auto")
    with tempfile.TemporaryDirectory() as name:
        step = fit(device, case, Path(name)).steps[ORDINARY - 1]
    copies = {line: count for line, count in step["transfers"].items() if "to the device" in line}
    assert sum(copies.values()) == 2, copies
    assert all("from pinned memory" in line for line in copies), copies
    assert step["graphs"].total() == 2
    batch, data = (torch.ones(2, 3), torch.ones(2)), DigitsDataModule()
    device.record.clear()
    moved = data.transfer_batch_to_device(batch, torch.device("cuda", 0), 0)
    assert all(part.is_cuda for part in moved)
    assert all("from pinned memory" in line for line in device.record.clear()["transfers"])


def loop_and_vmap_agree(device: StandIn) -> None:
    """Chains in a loop and at once, compiled or not, end in the same state up to rounding."""
    found = {}
    for execution in ("loop", "vmap"):
        for compiled in (False, True):
            case = dataclasses.replace(
                SMALL, execution=execution, compile=compiled, schedule="sampling", steps=5, sampler="SGLD"
            )
            with tempfile.TemporaryDirectory() as folder:
                found[execution, compiled] = _state(fit(device, case, Path(folder)).module)
    reference = found.pop(("loop", False))
    for settings, state in found.items():
        assert _largest_difference(reference, state) < 1e-4, settings


def frees_its_graphs(device: StandIn) -> None:
    """A fit frees its graphs' memory at the end; one without graphs leaves other compiled code alone."""
    short = dataclasses.replace(SMALL, schedule="sampling", steps=5, chains=2)
    for compiled, resets in ((False, 0), (True, 1)):
        with tempfile.TemporaryDirectory() as folder:
            fit(device, dataclasses.replace(short, compile=compiled), Path(folder))
        assert device.graphs.resets == resets
        assert not device.graphs.used
    with graphs_kept():
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                fit(device, short, Path(folder))
        assert device.graphs.resets == 1
        assert device.graphs.used
    assert device.graphs.resets == 2


SAME: dict[str, dict[str, Any]] = {
    "SGLD": {"sampler": "SGLD", "clip": 1.0},
    "pSGLD": {"sampler": "pSGLD", "extra": {"lr": 1e-7}},  # its preconditioner magnifies rounding
    "SGHMC": {"sampler": "SGHMC", "clip": 1.0, "accumulate": 2},
    "SGNHT": {"sampler": "SGNHT", "lr_each": True},
    "UnderdampedLangevin": {"sampler": "UnderdampedLangevin"},
    "pSGHMC": {"sampler": "pSGHMC"},
    "own contour": {"contour": True, "lr_each": True},
    "interacting contour": {"interacting": True, "clip": 1.0},
    "one chain": {"chains": 1, "clip": 1.0},
    "one chain, contour": {"chains": 1, "contour": True},
    "replica exchange": {"replica_exchange": True},
    "GGMC, tested": {"sampler": "GGMC", "metropolis": 5},
    "EWSG": {"ewsg": 1, "sampler": "UnderdampedLangevin"},
    "scalar parameters": {"scalar": True},
}
"""Fits whose states on the CPU and on the device are compared."""


def the_device_makes_the_steps_of_the_cpu(device: StandIn) -> None:
    """Rows, fused kernels and graphs make the same noisy steps as the CPU's loop over chains, up to rounding.

    The stand-in's generators draw a CPU generator's numbers, so the noise is the same.
    """
    wrong = {}
    for name, settings in SAME.items():
        case = dataclasses.replace(SMALL, schedule="sampling", steps=5, **settings)
        states = []
        for on_cpu in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                states.append(_state(fit(device, dataclasses.replace(case, on_cpu=on_cpu), Path(folder)).module))
        difference = _largest_difference(*states)
        if not difference < 2e-4:
            wrong[name] = difference
    assert wrong == {}


ACTING: dict[str, Callable[[], list[pl.Callback]]] = {
    "EWSG": lambda: [callbacks.EWSG(1)],
    "ControlVariates": lambda: [callbacks.ControlVariates()],
    "ContourGradient": lambda: [callbacks.ContourGradient(ContourRules(0.75), 100, first_edge=1e2, width=20.0)],
}
"""Callbacks that act in steps that are made at once."""


def steps_in_blocks_are_the_loops(device: StandIn) -> None:
    """Steps made at once, of data in the host's memory, are those of Lightning's loop."""
    _check_blocks("none", list, epochs=9)


def steps_in_blocks_with_callbacks_are_the_loops(device: StandIn) -> None:
    """So are those in which a callback acts."""
    for name, acting in ACTING.items():
        _check_blocks(name, acting, epochs=24)


def _check_blocks(name: str, acting: Callable[[], list[pl.Callback]], epochs: int) -> None:
    """Raise unless a fit in blocks is that without them; a replay is a call here."""

    def called(run: Callable[[], None], generators: Any) -> Callable[[], None]:
        run()
        return run

    def plain(part: Any) -> type:
        return Tensor if isinstance(part, Tensor) else type(part)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 3, generator=generator)
    data = TensorDataset(x, x[:, :1].sin())
    states, counts = [], []
    for fewest in (10**9, 0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        module = BayesianModule(net, Gaussian(0.3), sampler=SGHMC, lr=1e-3, num_chains=2, seed=1)
        own = [SamplingSchedule(burn_in_epochs=epochs // 3, every_n_epochs=2), *acting()]
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = stand_in_trainer("32-true", max_epochs=epochs, callbacks=own, enable_model_summary=False, **quiet)
        with (
            mock.patch.object(block_runs, "FEWEST", fewest),
            mock.patch.object(block_runs, "SingleDeviceStrategy", StandInStrategy),
            mock.patch.object(compiled_step, "captured", called),
            mock.patch.object(traced, "type", plain, create=True),  # the stand-in's tensors are of another class
        ):
            trainer.fit(module, datamodule=DatasetDataModule(data, batch_size=20))
        states.append(_state(module))
        counts.append(module.chains.counters.compiled_steps)
    assert counts[0] == 0 < counts[1], (name, counts)
    assert _largest_difference(*states) < 1e-4, name


def an_error_within_a_step_is_not_in_its_checkpoint(device: StandIn) -> None:
    """The statistics of a step that an error ends are those before it, in the checkpoint that Lightning then writes."""

    class Fails(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                raise ValueError("a mistake")

    counts = []
    for compiled in (False, True):
        module = build(dataclasses.replace(SMALL, compile=compiled))
        train, _ = loaders(SMALL)
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [SamplingSchedule(every_n_steps=5), pl.callbacks.OnExceptionCheckpoint(folder), Fails()]
            options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = stand_in_trainer("32-true", max_steps=5, callbacks=callbacks, **options)
            with suppress(ValueError):
                trainer.fit(module, train)
            saved = torch.load(Path(folder) / "on_exception.ckpt", weights_only=False)["state_dict"]
        counts += [int(t.max()) for name, t in saved.items() if "batches_tracked" in name]
    assert set(counts) == {2}, counts


def a_short_fit_is_compiled_by_choice_alone(device: StandIn) -> None:
    """Compilation takes longer than a short fit saves by it."""
    short = dataclasses.replace(SMALL, schedule="sampling", steps=5, chains=2)
    for compiled, worth, graphs in (("auto", 5_000, 0), ("auto", 5, 2), (True, 5_000, 2)):
        with mock.patch.object(compiling, "WORTH_ON_CUDA", worth), tempfile.TemporaryDirectory() as folder:
            step = fit(device, dataclasses.replace(short, compile=compiled), Path(folder)).steps[3]
        assert step["graphs"].total() == graphs, (compiled, worth)


CHECKS: dict[str, Callable[[StandIn], Any]] = {
    check.__name__: check
    for check in (
        starts_on_the_device_are_drawn_by_chain,
        batches_of_the_host_move_as_one_stack,
        loop_and_vmap_agree,
        the_device_makes_the_steps_of_the_cpu,
        frees_its_graphs,
        resumes_with_an_lr_for_each_chain,
        resumes_with_contour_and_all_callbacks,
        resumes_replica_exchange,
        resumes_a_metropolis_test,
        samples_are_the_chains_states,
        an_error_within_a_step_is_not_in_its_checkpoint,
        steps_in_blocks_are_the_loops,
        steps_in_blocks_with_callbacks_are_the_loops,
        a_short_fit_is_compiled_by_choice_alone,
    )
}
