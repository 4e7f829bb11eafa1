"""Chains over processes (gloo): the same chains in every layout, checkpoints that go from one layout to another."""

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, SGLD, SGNHT, BayesianModule, Categorical, ChainStrategy, ContourRules, Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ContourGradient,
    ReplicaExchange,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.chains import strategy
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.strategy import SampleRows
from tests.support.comparisons import assert_equal_trees, assert_same
from tests.support.paths import REPOSITORY
from tests.support.problems import Data, Even, Net, Plain
from tests.support.recorders import Dump
from tests.support.trainers import fit_in_layout, quiet_trainer

STEPS = 20


def load(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


@pytest.mark.by_default("SGHMC")
@pytest.mark.parametrize("sampler", [SGHMC, SGNHT])
def test_the_same_chains_in_every_layout(tmp_path: Path, sampler: Any) -> None:
    """Four stacked chains, two processes with two, four with one: bit for bit the same draws, averages, checkpoints."""
    options = {"sampler": sampler}.items()
    whole, reference = fit_in_layout(tmp_path / "1x4", 4, 1, module_options=options)
    assert [sample.chain for sample in whole] == [0, 1, 2, 3] * 4
    metrics = {name: float(value) for name, value in reference.callback_metrics.items()}
    for ranks in (2, 4):
        samples, trainer = fit_in_layout(tmp_path / f"{ranks}", 4 // ranks, ranks, module_options=options)
        assert_same(whole, samples)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert found == pytest.approx(metrics, rel=1e-6)
        for part in ("state_dict", "optimizer_states", "loops"):
            expected, got = (load(tmp_path / where / "step=20.ckpt")[part] for where in ("1x4", f"{ranks}"))
            assert_equal_trees(expected, got)


@pytest.mark.by_default("first1")
@pytest.mark.parametrize(("first", "then"), [((1, 4), (4, 1)), ((4, 1), (1, 4)), ((2, 2), (1, 4)), ((1, 4), (2, 2))])
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path, first: tuple[int, int], then: tuple[int, int]) -> None:
    """Layouts are (stacked, ranks); dropout, BatchNorm, augmentation, and the running average are all gone on with."""
    whole, reference = fit_in_layout(tmp_path / "whole", 4, 1, steps=30)
    fit_in_layout(tmp_path / "run", *first, steps=10)
    samples, trainer = fit_in_layout(tmp_path / "run", *then, steps=30, ckpt_path=tmp_path / "run" / "step=10.ckpt")
    assert_same(whole, samples)
    assert float(trainer.callback_metrics["val/bma_nll"]) == pytest.approx(
        float(reference.callback_metrics["val/bma_nll"]), rel=1e-6
    )


@pytest.mark.by_default("2")
@pytest.mark.parametrize("stacked", [1, 2])
def test_groups_of_data_parallel_ranks(tmp_path: Path, stacked: int) -> None:
    """Two groups of two ranks with half the batch each have the draws of two processes with the whole, to rounding."""
    whole, _ = fit_in_layout(tmp_path / "whole", 2 * stacked, 1, model=Plain, datamodule=Even(16))
    groups, _ = fit_in_layout(tmp_path / "groups", stacked, 4, 2, model=Plain, datamodule=Even(8))
    assert [s.chain for s in groups] == [s.chain for s in whole]
    for one, other in zip(whole, groups, strict=True):
        torch.testing.assert_close(other.parameters, one.parameters, rtol=1e-4, atol=1e-5)
        assert other.energy == pytest.approx(one.energy, rel=1e-4)


@pytest.mark.slow
def test_accumulation_and_clipping_in_groups(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": Plain, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    whole, _ = fit_in_layout(tmp_path / "whole", 2, 1, datamodule=Even(16), **options)
    groups, _ = fit_in_layout(tmp_path / "groups", 1, 4, 2, datamodule=Even(8), **options)
    for one, other in zip(whole, groups, strict=True):
        torch.testing.assert_close(other.parameters, one.parameters, rtol=1e-4, atol=1e-5)


def test_plain_data_parallel_ranks_hold_one_set_of_stacked_chains(tmp_path: Path) -> None:
    """Under strategy="ddp" the chains of all ranks are the same ones."""
    whole, _ = fit_in_layout(tmp_path / "whole", 2, 1, model=Plain, datamodule=Even(16))
    collector = SampleCollector(tmp_path / "samples")
    trainer = quiet_trainer(
        max_steps=STEPS, devices=2, strategy="ddp_fork", callbacks=[SamplingSchedule(every_n_steps=5), collector]
    )
    torch.manual_seed(0)
    trainer.fit(Plain(2), datamodule=Even(8))
    for one, other in zip(whole, Posterior.load(tmp_path / "samples", model=Plain()).store, strict=True):
        assert one.chain == other.chain
        torch.testing.assert_close(other.parameters, one.parameters, rtol=1e-4, atol=1e-5)


def learned_contour(module: Any) -> dict[str, Any]:
    return module.contour.state._asdict()  # type: ignore[no-any-return]


def contour(**options: Any) -> ContourGradient:
    return ContourGradient(**{"rules": ContourRules(zeta=0.75), "num_bins": 30, "warm_up_steps": 4} | options)


@pytest.mark.by_default("options1")
@pytest.mark.parametrize(
    "options",
    [
        {"interacting": True},
        {"interacting": True, "exchange_every": 3},
        {"interacting": True, "rules": ContourRules(zeta=0.75, scheme="high-order", weighting="bin")},
        {},
    ],
)
def test_contours_are_the_same_in_every_layout(tmp_path: Path, options: dict[str, Any]) -> None:
    """π, a learned range, draws and weights: exactly the same, interacting (every step or not) and each on its own."""

    def run(stacked: int, ranks: int) -> tuple[list[PosteriorSample], list[dict[str, Any]]]:
        folder = tmp_path / f"{stacked}x{ranks}"
        samples, _ = fit_in_layout(
            folder, stacked, ranks, callbacks=[contour(**options), Dump(folder / "learned", learned_contour)]
        )
        return samples, Dump.read(folder / "learned")

    whole, (expected,) = run(4, 1)
    shape = (30,) if options else (4, 30)
    assert expected["log_vector"].shape == shape
    assert int(expected["visits"].sum()) == 4 * (15 if options.get("exchange_every") else 16)
    for stacked, ranks in ((2, 2), (1, 4)):
        samples, everywhere = run(stacked, ranks)
        assert_same(whole, samples)
        assert [s.log_weight for s in samples] == [s.log_weight for s in whole]
        assert [s.bin for s in samples] == [s.bin for s in whole]
        assert {s.comparable for s in (*samples, *whole)} == {bool(options)}
        for learned in everywhere:
            assert_equal_trees(learned, expected)


@pytest.mark.slow
def test_an_interacting_contour_in_groups(tmp_path: Path) -> None:
    """The groups' ranks learn the same π, and that of chains without groups to rounding."""
    learned = {}
    for name, layout, batch in (("whole", (2, 1), 16), ("groups", (1, 4, 2), 8)):
        callbacks = [contour(interacting=True), Dump(tmp_path / name / "learned", learned_contour)]
        fit_in_layout(tmp_path / name, *layout, model=Plain, datamodule=Even(batch), callbacks=callbacks)
        learned[name] = Dump.read(tmp_path / name / "learned")
    for one in learned["groups"]:
        assert torch.equal(one["log_vector"], learned["groups"][0]["log_vector"])
        torch.testing.assert_close(one["log_vector"], learned["whole"][0]["log_vector"], rtol=1e-4, atol=1e-4)


@pytest.mark.by_default("exchange")
@pytest.mark.parametrize("callbacks", ["exchange", "reduced"])
def test_chains_that_speak_to_each_other_go_on_in_another_layout(tmp_path: Path, callbacks: str) -> None:
    def make() -> list[pl.Callback]:
        if callbacks == "reduced":
            return [VarianceReducedEnergy(0, 1), contour()]
        return [ReplicaExchange([1.0, 2.0, 4.0, 8.0], [1.0, 1.2, 1.4, 1.6])]

    whole, _ = fit_in_layout(tmp_path / "whole", 4, 1, steps=30, callbacks=make())
    fit_in_layout(tmp_path / "run", 1, 4, steps=10, callbacks=make())
    checkpoint = tmp_path / "run" / "step=10.ckpt"
    samples, _ = fit_in_layout(tmp_path / "run", 2, 2, steps=30, callbacks=make(), ckpt_path=checkpoint)
    assert_same(whole, samples)
    assert [s.log_weight for s in samples] == [s.log_weight for s in whole]


def test_what_interacting_chains_send(tmp_path: Path) -> None:
    """One whole number a chain and step, 8 bytes, however large the network is."""

    class Count(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, ChainStrategy)
            gather = strategy.gather_groups
            self.sent: list[tuple[torch.dtype, int]] = []

            def counted(tensor: torch.Tensor) -> list[torch.Tensor]:
                self.sent.append((tensor.dtype, tensor.numel() * tensor.element_size()))
                return gather(tensor)

            strategy.gather_groups = counted  # type: ignore[method-assign]

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            torch.save(self.sent, tmp_path / f"sent{trainer.global_rank}.pt")

    for width in (4, 400):

        def model(num_chains: int = 1, width: int = width) -> BayesianModule:
            net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
            return BayesianModule(net=net, likelihood=Categorical(), num_chains=num_chains, lr=0.01, seed=1)

        learner = ContourGradient(ContourRules(zeta=0.75), first_edge=20.0, width=1.0, num_bins=50, interacting=True)
        trainer = quiet_trainer(
            max_steps=STEPS,
            devices=2,
            strategy=ChainStrategy(start_method="fork"),
            callbacks=[learner, Count()],
            log_every_n_steps=1000,
        )
        trainer.fit(model(3), datamodule=Data())
        for rank in range(2):
            sent = torch.load(tmp_path / f"sent{rank}.pt", weights_only=False)
            assert sent == [(torch.int64, 3 * 8)] * STEPS


@pytest.mark.parametrize("largest", [2**30, pytest.param(0, marks=pytest.mark.slow)])
def test_samples_travel_in_few_exchanges(largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the numbers and one for each dtype, floats and BatchNorm's counters, whatever chains and tensors there
    are; or one for each dtype and process, where the samples are large."""
    whole, _ = fit_in_layout(tmp_path / "whole", 4, 1, steps=5)
    monkeypatch.setattr(strategy, "LARGEST_GATHER", largest)
    calls: list[str] = []
    share = ChainStrategy.share_samples

    def shared(*args: Any) -> Any:
        for name in ("all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"):
            own = getattr(torch.distributed, name)
            counted = lambda *a, own=own, name=name, **k: (calls.append(name), own(*a, **k))[1]  # noqa: E731
            monkeypatch.setattr(torch.distributed, name, counted)
        samples = list(share(*args))
        (tmp_path / str(torch.distributed.get_rank())).write_text(" ".join(calls))
        return iter(samples)

    monkeypatch.setattr(ChainStrategy, "share_samples", shared)
    assert_same(whole, fit_in_layout(tmp_path / "ranks", 2, 2, steps=5)[0])
    expected = ["all_gather_object", *(["all_gather_into_tensor"] * 2 if largest else ["broadcast"] * 4)]
    assert [(tmp_path / rank).read_text().split() for rank in "01"] == [expected] * 2


def test_samples_stay_where_only_their_file_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a callback that reads them, a drawing sends numbers alone, and the store is that of one process."""
    gather = torch.distributed.all_gather_into_tensor

    def refused(into: torch.Tensor, own: torch.Tensor, *args: Any, **named: Any) -> Any:
        assert own.numel() < 10, "tensors of a sample"
        return gather(into, own, *args, **named)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", refused)
    found = []
    for ranks in (1, 2):
        trainer = quiet_trainer(
            max_steps=STEPS,
            devices=ranks,
            strategy=ChainStrategy(start_method="fork") if ranks > 1 else "auto",
            callbacks=[
                SamplingSchedule(every_n_steps=5),
                SampleCollector(tmp_path / f"{ranks}", every_n_samples=2, max_samples=3),
            ],
        )
        torch.manual_seed(0)
        trainer.fit(Net(4 // ranks), datamodule=Data())
        found.append(list(Posterior.load(tmp_path / f"{ranks}", model=Net()).store))
        assert len(list((tmp_path / f"{ranks}").glob("sample-*"))) == 3
    assert_same(*found)


def test_a_sample_survives_its_journey() -> None:
    """Every field comes back exactly with its type, and each sample owns its tensors."""
    samples = [
        PosteriorSample(
            step=2**40 + chain,
            cycle=1,
            chain=chain,
            energy=1 / 3,
            log_weight=-math.inf,
            parameters={"w": torch.randn(2, 3), "scalar": torch.randn(()), "half": torch.randn(2).bfloat16()},
            buffers={"count": torch.tensor(2**60 + chain), "none": torch.empty(0)},
            bin=None if chain else 4,
            comparable=chain == 0,
            scales={"w": torch.rand(())},
            draw=3,
        )
        for chain in range(3)
    ]
    form = SampleRows(samples[0])
    rows = form.pack(samples, torch.device("cpu"))
    assert [tuple(row.shape) for row in rows] == [(3, 8), (3, 2), (3, 1)]
    found = list(form.unpack(rows, samples))
    for sample, other in zip(samples, found, strict=True):
        assert_equal_trees(vars(other), vars(sample))
        assert [type(value) for value in vars(other).values()] == [type(value) for value in vars(sample).values()]
        own = {tensor.untyped_storage().data_ptr() for tensor in other.state.values()}
        assert not own & {row.untyped_storage().data_ptr() for row in rows if row.numel()}


def test_outside_of_a_fit_all_processes_share_the_data(tmp_path: Path) -> None:
    """Test metrics and predictions are those of one process, and no chain is overwritten by another."""
    fit_in_layout(tmp_path / "run", 1, 2)
    expected = {}
    for ranks in (1, 2):
        trainer = quiet_trainer(
            devices=ranks,
            strategy=ChainStrategy(start_method="fork") if ranks > 1 else "auto",
            callbacks=[SampleCollector(tmp_path / "run" / "samples"), BayesianModelAverage()],
        )
        (metrics,) = trainer.test(Net(), datamodule=Data(), verbose=False)
        expected[ranks] = metrics
    assert expected[2] == pytest.approx(expected[1], rel=1e-5)


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ranks_per_chain must be at least 1, got 0"):
        ChainStrategy(ranks_per_chain=0)
    with pytest.raises(Exception, match="ranks_per_chain=2 does not divide the 3 processes"):
        fit_in_layout(tmp_path, 1, 3, 2)
    with pytest.raises(Exception, match="sync_batchnorm=True pools the statistics of all processes"):
        fit_in_layout(tmp_path, 1, 2, sync_batchnorm=True)
    fit_in_layout(tmp_path / "run", 1, 2, steps=10)
    with pytest.raises(Exception, match="first axis: use as many chains as the checkpoint has"):
        fit_in_layout(tmp_path / "run", 2, 2, ckpt_path=tmp_path / "run" / "step=10.ckpt")


def test_a_step_that_one_process_leaves_out_is_left_out_by_all(tmp_path: Path) -> None:
    """Else the chains' schedules part, and the processes wait for each other for ever."""

    class Poisoned(Plain):
        def log_likelihood(self, batch: Any) -> torch.Tensor:
            bad = self.training and self.trainer.global_rank == 1 and self.trainer.global_step == 7
            return super().log_likelihood(batch) * (float("nan") if bad else 1.0)

    options = {"nonfinite_energy": "skip"}.items()
    samples, _ = fit_in_layout(tmp_path, 1, 2, model=Poisoned, datamodule=Even(8), module_options=options)
    assert [(s.step, s.chain) for s in samples] == [(5, 0), (5, 1), (10, 0), (10, 1), (15, 0), (15, 1)]


SCRIPT = """
    import os, signal, sys, time
    import pytorch_lightning as pl
    import torch
    from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
    from tests.support.problems import Data, Net

    torch.set_num_threads(1)
    resume = sys.argv[1] if len(sys.argv) > 1 else None

    class Kill(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if resume is None and trainer.global_rank == 2 and trainer.global_step == 25:
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = pl.Trainer(
        accelerator="cpu", devices=4, strategy="chains", max_steps=40, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            SamplingSchedule(every_n_steps=5), SampleCollector("samples"), Kill(),
            pl.callbacks.ModelCheckpoint("checkpoints", filename="{step}", every_n_train_steps=10, save_top_k=-1),
        ],
    )
    torch.manual_seed(0)
    trainer.fit(Net(), datamodule=Data(), ckpt_path=resume)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["chains_fork", "chains"])
def test_kill_9_of_one_rank_of_four(tmp_path: Path, strategy: str) -> None:
    """In mid-epoch: the run ends with an error, long before gloo's half hour, and continues exactly, for all chains.

    The default case continues with the four chains in one process, the slow one in four.
    """
    (tmp_path / "run.py").write_text(textwrap.dedent(SCRIPT).replace('"chains"', f'"{strategy}"'))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> int:
        command = [sys.executable, "run.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=300).returncode

    # The launcher of subprocesses kills the first rank if it finds another one dead before gloo tells that rank.
    assert run() not in ((0,) if strategy == "chains" else (0, -signal.SIGKILL))
    assert (tmp_path / "killed").exists()
    checkpoint = "checkpoints/step=20.ckpt"
    if strategy == "chains":
        assert run(checkpoint) == 0
    else:
        fit_in_layout(tmp_path, 4, 1, steps=40, ckpt_path=tmp_path / checkpoint)
    whole, _ = fit_in_layout(tmp_path / "whole", 4, 1, steps=40)
    assert_same(whole, list(Posterior.load(tmp_path / "samples", model=Net()).store))


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """Two "machines" with one process each, by torchrun's own environment."""
    script = SCRIPT.replace("devices=4", "devices=1, num_nodes=2").replace("global_rank == 2", "global_rank == 99")
    (tmp_path / "run.py").write_text(textwrap.dedent(script).replace("max_steps=40", "max_steps=20"))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    address = ["--master-addr=127.0.0.1", "--master-port=29571"]
    processes = [
        subprocess.Popen(
            [*launch, f"--node-rank={node}", *address, "run.py"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    whole, _ = fit_in_layout(tmp_path / "whole", 2, 1, steps=20)
    assert_same(whole, list(Posterior.load(tmp_path / "samples", model=Net()).store))


def test_the_strategy_by_its_name() -> None:
    trainer = quiet_trainer(max_steps=2, strategy="chains", devices=1)
    assert isinstance(trainer.strategy, ChainStrategy)
    module = Plain(sampler=SGLD)
    trainer.fit(module, datamodule=Data())
    assert module.sampler.step_count == 2
    trainer.validate(module, datamodule=Data(), verbose=False)
    assert not torch.distributed.is_initialized()
