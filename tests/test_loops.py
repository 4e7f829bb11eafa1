"""Sampling in loops of one's own: plain torch, Fabric, accelerate and transformers' trainer, against `trainer.fit`."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException, start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    BayesianModule,
    Categorical,
    Gaussian,
    HierarchicalPrior,
    Posterior,
    SampleWriter,
    pSGLD,
)
from lightning_sgmcmc.callbacks import AutoSampling, CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.schedule import Schedule
from tests.support.trainers import quiet_trainer

x = torch.randn(203, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
EPOCHS, STEPS = 6, 5


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loader() -> DataLoader[Any]:
    """Batches of which the last has 3 data."""
    return DataLoader(TensorDataset(x, y), batch_size=50)


def schedule() -> CyclicalSchedule:
    return CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=2)


def parts(**others: Any) -> tuple[nn.Module, SGHMC, SampleWriter]:
    net = make()
    sampler = SGHMC(net.parameters(), lr=0.05, num_data=len(x))
    given = {"schedule": schedule(), "steps": EPOCHS * STEPS, "steps_per_epoch": STEPS} | others
    return net, sampler, SampleWriter(net, Categorical(), 0.5, sampler=sampler, **given)


def plain(**others: Any) -> SampleWriter:
    net, sampler, writer = parts(**others)
    for _ in range(EPOCHS):
        one_epoch(net, sampler, writer)
    return writer


def one_epoch(net: nn.Module, sampler: SGHMC, writer: SampleWriter) -> None:
    for inputs, labels in loader():
        sampler.zero_grad()
        writer.loss(net(inputs), labels).backward()
        sampler.step()


def with_closures() -> SampleWriter:
    net, sampler, writer = parts()
    for _ in range(EPOCHS):
        for inputs, labels in loader():

            def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                sampler.zero_grad()
                loss = writer.loss(net(inputs), labels)
                loss.backward()
                return loss

            sampler.step(closure)
    return writer


def in_micro_batches() -> SampleWriter:
    net, sampler, writer = parts()
    for _ in range(EPOCHS):
        for inputs, labels in loader():
            sampler.zero_grad()
            # Halves of a batch; of the last batch's 3 data the whole, since a mean of means would weigh them unlike.
            halves = [slice(0, 25), slice(25, 50)] if len(labels) == 50 else [slice(0, 3)]
            for half in halves:
                (writer.loss(net(inputs[half]), labels[half]) / len(halves)).backward()
            sampler.step()
    return writer


def with_validation_and_skipped_steps() -> SampleWriter:
    """Losses without gradients, and steps that a loss scaler would leave out."""
    net, sampler, writer = parts()
    for epoch in range(EPOCHS):
        for inputs, labels in loader():
            for times in (2, 1) if epoch == 2 else (1,):
                sampler.zero_grad()
                writer.loss(net(inputs), labels).backward()
                if times == 1:
                    sampler.step()
        with torch.no_grad():
            writer.loss(net(x), y)
    return writer


def with_fabric() -> SampleWriter:
    net, sampler, writer = parts()
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, sampler)
    for _ in range(EPOCHS):
        for inputs, labels in fabric.setup_dataloaders(loader()):
            optimizer.zero_grad()
            fabric.backward(writer.loss(model(inputs), labels))
            optimizer.step()
    return writer


def with_accelerate() -> SampleWriter:
    accelerate = pytest.importorskip("accelerate")
    net, sampler, writer = parts()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(net, sampler, loader())
    for _ in range(EPOCHS):
        for inputs, labels in data:
            optimizer.zero_grad()
            accelerator.backward(writer.loss(model(inputs), labels))
            optimizer.step()
    return writer


def assert_samples_equal(ours: Posterior, theirs: Posterior) -> None:
    assert [(r.step, r.cycle, r.chain) for r in ours.records] == [(r.step, r.cycle, r.chain) for r in theirs.records]
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.parameters, other.parameters)
        assert own.energy == pytest.approx(other.energy, rel=1e-5)


@pytest.fixture(scope="module")
def fitted() -> Posterior:
    """The samples of Lightning's trainer."""
    module = BayesianModule(make(), Categorical(), 0.5, sampler=SGHMC, lr=0.05, seed=0)
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=[schedule(), SampleCollector(in_memory=True)])
    trainer.fit(module, loader())
    assert module.posterior is not None
    return module.posterior


@pytest.mark.parametrize(
    "loop", [plain, with_closures, in_micro_batches, with_validation_and_skipped_steps, with_fabric, with_accelerate]
)
def test_a_loop_has_the_samples_of_the_trainer(loop: Callable[[], SampleWriter], fitted: Posterior) -> None:
    writer = loop()
    assert_samples_equal(writer.posterior, fitted)
    torch.testing.assert_close(writer.posterior.predict(x[:5]).probabilities, fitted.predict(x[:5]).probabilities)


def test_the_samples_have_the_posterior_with_its_prior() -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    targets = inputs @ torch.tensor([[1.0], [0.0], [-1.0]])
    net = nn.Linear(3, 1, bias=False)
    sampler = SGLD(net.parameters(), lr=0.05, num_data=40)
    every = SamplingSchedule(burn_in_steps=100, every_n_steps=4)
    writer = SampleWriter(net, Gaussian(std=1.0), 0.2, sampler=sampler, schedule=every, steps=4_100)
    for _ in range(writer.steps):
        sampler.zero_grad()
        writer.loss(net(inputs), targets).backward()
        sampler.step()
    drawn = torch.stack([sample.parameters["net.weight"][0] for sample in writer.posterior])
    precision = inputs.T @ inputs + torch.eye(3) / 0.2**2
    covariance = torch.linalg.inv(precision)
    mean, std = (covariance @ inputs.T @ targets)[:, 0], covariance.diagonal().sqrt()
    assert len(drawn) == 1_000
    # Draws are 4 steps apart and a relaxation takes about 12, so 1,000 are worth 160 or more.
    assert ((drawn.mean(0) - mean) / std).abs().max() < 0.3
    assert ((drawn.std(0) / std) - 1).abs().max() < 0.25


@pytest.mark.parametrize("folder", ["samples", None])
@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_samples_in_half_the_bytes(
    dtype: str, rounding: float, folder: str | None, fitted: Posterior, tmp_path: Path
) -> None:
    """The loop is not rounded, only what is stored: each sample is that of the trainer but for its own rounding."""
    found = plain(dirpath=folder and tmp_path / folder, dtype=dtype).posterior
    for own, other in zip(found, fitted, strict=True):
        for name, parameter in other.parameters.items():
            torch.testing.assert_close(own.parameters[name], parameter, rtol=1.01 * rounding, atol=1e-6)
        assert not torch.equal(own.parameters["net.0.weight"], other.parameters["net.0.weight"])
    assert found.store.narrow is not None


def test_a_loop_goes_on_in_its_dtype(tmp_path: Path) -> None:
    net, sampler, writer = parts(dirpath=tmp_path / "samples", dtype="bfloat16")
    for _ in range(4):
        one_epoch(net, sampler, writer)
    state = sampler.state_dict()
    writer.close()
    for dtype in (None, "bfloat16"):
        net, sampler, writer = parts(dirpath=tmp_path / "samples", dtype=dtype)
        sampler.load_state_dict(state)
        if dtype is None:
            with pytest.raises(ValueError, match=r"dtype=None differs .* 'bfloat16': pass dtype='bfloat16'"):
                one_epoch(net, sampler, writer)
            continue
        for _ in range(2):
            one_epoch(net, sampler, writer)
    assert len(Posterior.load(tmp_path / "samples", net=make())) == 4


@pytest.mark.slow
def test_another_process_reads_the_samples(tmp_path: Path) -> None:
    writer = plain(dirpath=tmp_path / "samples")
    program = (
        "import torch; from lightning_sgmcmc import Posterior\n"
        "print(Posterior.load('samples').predict(torch.ones(1, 4)).probabilities.tolist())"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = writer.posterior.predict(torch.ones(1, 4)).probabilities
    torch.testing.assert_close(torch.tensor(eval(said.stdout.splitlines()[-1])), expected)


def test_a_folder_has_the_samples_of_one_loop(tmp_path: Path) -> None:
    first = plain(dirpath=tmp_path / "samples").posterior.in_memory()
    loaded = Posterior.load(tmp_path / "samples")
    torch.testing.assert_close(loaded.predict(x).probabilities, first.predict(x).probabilities)
    plain(dirpath=tmp_path / "samples")
    assert_samples_equal(Posterior.load(tmp_path / "samples-1"), Posterior.load(tmp_path / "samples"))


def test_a_cell_that_is_run_again_after_an_interrupt_begins_anew(tmp_path: Path) -> None:
    """The first writer is still in memory, as a notebook's last traceback holds it: it must not lock the folder, and
    must not go on there."""
    net, sampler, writer = parts(dirpath=tmp_path / "samples")
    one_epoch(net, sampler, writer)
    whole = plain(dirpath=tmp_path / "samples")
    assert len(whole.posterior) == 4
    with pytest.raises(RuntimeError, match=r"a later SampleWriter of this process writes to .*samples"):
        one_epoch(net, sampler, writer)


def test_a_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    net, sampler, writer = parts(dirpath=tmp_path / "samples")
    batches = [batch for _ in range(EPOCHS) for batch in loader()]
    for step, (inputs, labels) in enumerate(batches, 1):
        sampler.zero_grad()
        writer.loss(net(inputs), labels).backward()
        sampler.step()
        if step == 14:
            saved = {"net": net.state_dict(), "sampler": sampler.state_dict()}
            torch.save(saved, tmp_path / "loop.pt")
    whole = writer.posterior.in_memory()
    net, sampler, writer = parts(dirpath=tmp_path / "samples")
    saved = torch.load(tmp_path / "loop.pt")
    net.load_state_dict(saved["net"])
    sampler.load_state_dict(saved["sampler"])
    for inputs, labels in batches[14:]:
        sampler.zero_grad()
        writer.loss(net(inputs), labels).backward()
        sampler.step()
    for own, other in zip(writer.posterior, whole, strict=True):
        assert all(torch.equal(tensor, other.parameters[name]) for name, tensor in own.parameters.items())
    assert len(Posterior.load(tmp_path / "samples-1", net=make())) == 3  # drawn after step 14 by the first loop


class TestTransformers:
    """transformers' trainer, which has a scheduler and clips gradients by default."""

    def fit(self, every: Schedule, **arguments: Any) -> tuple[SampleWriter, Any]:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=8,
            num_labels=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        torch.manual_seed(0)
        net = transformers.BertForSequenceClassification(config)
        ids = torch.randint(0, 50, (41, 6))
        data = [{"input_ids": row, "labels": (row[0] > 25).long()} for row in ids]
        sampler = SGHMC(net.parameters(), lr=0.02, num_data=len(data))
        writer = SampleWriter(
            net, Categorical(), 0.5, sampler=sampler, schedule=every, steps=12, steps_per_epoch=6, dirpath="samples"
        )
        given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        trainer = transformers.Trainer(
            net,
            transformers.TrainingArguments("out", **(given | quiet | arguments)),
            train_dataset=data,
            optimizers=(sampler, None),
            compute_loss_func=writer.loss,
        )
        trainer.train()
        return writer, ids

    def test_a_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            writer, ids = self.fit(
                CyclicalSchedule(2, 0.5, 2),
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                dataloader_pin_memory=False,
            )
        assert len(writer.posterior) == 4
        assert writer.posterior.predict({"input_ids": ids[:3]}).probabilities.shape == (3, 2)
        assert len(Posterior.load("samples")) == 4

    def test_its_defaults_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.warns(UserWarning, match="lr_scheduler_type") as said:
            self.fit(SamplingSchedule(every_n_steps=2), max_grad_norm=0.01)
        assert any("max_grad_norm" in str(warning.message) for warning in said)
        with pytest.raises(ValueError, match=r"CyclicalSchedule.*lr_scheduler_type"):
            self.fit(CyclicalSchedule(2, 0.5, 2))


def test_the_loss_is_the_writers() -> None:
    net, sampler, _ = parts()
    nn.functional.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match=r"writer\.loss.*own_loss"):
        sampler.step()
    net, sampler, writer = parts(own_loss=True, schedule=SamplingSchedule(every_n_steps=1))
    nn.functional.cross_entropy(net(x), y).backward()
    sampler.step()
    assert len(writer.posterior) == 1


def test_a_wrong_number_of_data_is_named() -> None:
    net = make()
    sampler = SGHMC(net.parameters(), lr=0.05, num_data=50)
    writer = SampleWriter(net, Categorical(), sampler=sampler, schedule=schedule(), steps=30, steps_per_epoch=STEPS)
    with pytest.warns(UserWarning, match=r"203 data.*num_data=50"):
        one_epoch(net, sampler, writer)


def test_a_short_batch_without_the_length_of_an_epoch_is_named() -> None:
    net, sampler, writer = parts(steps_per_epoch=0)
    with pytest.warns(UserWarning, match="steps_per_epoch"):
        one_epoch(net, sampler, writer)


def wrong(**changed: Any) -> SampleWriter:
    net = make()
    given: dict[str, Any] = {"net": net, "likelihood": Categorical(), "schedule": schedule(), "steps": 30}
    given |= {"sampler": SGHMC(net.parameters(), lr=0.1, num_data=len(x))} | changed
    return SampleWriter(**given)


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda: wrong(sampler=torch.optim.SGD(make().parameters(), lr=0.1)), TypeError, "sampler.*SGD"),
        (lambda: wrong(sampler=SGHMC(make().parameters(), lr=0.1, num_data=9)), ValueError, "sampler lacks"),
        (lambda: wrong(net=BayesianModule(make(), Categorical())), TypeError, "BayesianModule.*network"),
        (lambda: wrong(dtype="int8"), ValueError, "dtype"),
        (lambda: wrong(schedule=AutoSampling()), TypeError, "AutoSampling.*trainer"),
        (lambda: wrong(schedule="cyclical"), TypeError, "schedule"),
        (lambda: wrong(prior=HierarchicalPrior()), TypeError, "HierarchicalPrior"),
        (lambda: wrong(steps=3), ValueError, "sampling steps"),
        (lambda: wrong(schedule=SamplingSchedule(every_n_epochs=1)), ValueError, "steps"),
        (lambda: wrong(likelihood=Gaussian(std=0.1, learned=True)), ValueError, "likelihood.parameters"),
    ],
)
def test_what_it_refuses(make_it: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_it()


def test_samplers_that_it_refuses() -> None:
    net = make()
    for sampler, message in (
        (SGHMC(net.parameters(), lr=0.1, temperature=0.0), "num_data"),
        (pSGLD(net.parameters(), lr=0.1, num_data=9, adapt="burn-in"), "burn-in"),
    ):
        with pytest.raises(ValueError, match=message):
            SampleWriter(net, Categorical(), sampler=sampler, schedule=SamplingSchedule(every_n_steps=1), steps=9)


def test_a_double_network_is_not_rounded() -> None:
    net = make().double()
    sampler = SGHMC(net.parameters(), lr=0.1, num_data=9)
    with pytest.raises(ValueError, match=r"'net\.0\.weight' is torch\.float64"):
        SampleWriter(net, Categorical(), sampler=sampler, schedule=schedule(), steps=30, dtype="bfloat16")


def test_states_that_are_not_finite_are_no_samples() -> None:
    net, sampler, writer = parts(schedule=SamplingSchedule(every_n_steps=1))
    with torch.no_grad():
        next(net.parameters())[0, 0] = torch.nan
    writer.loss(net(x), y).backward()
    with pytest.raises(RuntimeError, match=r"net\.0\.weight"):
        sampler.step()


def loop_of_a_rank(rank: int, kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    alone = kind == "a chain each"
    net, sampler, writer = of_eighty(
        0 if kind == "one chain" else rank,
        dirpath=folder / (f"samples-of-{rank}" if alone else "samples"),
        chain=rank if alone else 0,
    )
    model = net if alone else DistributedDataParallel(net)
    inputs, labels = x[:80], y[:80]
    for step in range(20):
        rows = torch.arange(80)[step % 2 :: 2] if alone else torch.arange(80)[2 * (step % 2) + rank :: 4]
        sampler.zero_grad()
        writer.loss(model(inputs[rows]), labels[rows]).backward()
        sampler.step()
    torch.distributed.destroy_process_group()


def of_eighty(seed: int, **others: Any) -> tuple[nn.Module, SGHMC, SampleWriter]:
    """Return the parts of a loop of 20 steps over 80 data, two steps an epoch."""
    net = make()
    sampler = SGHMC(net.parameters(), lr=0.05, num_data=80, seed=seed)
    every = SamplingSchedule(every_n_steps=5)
    given: dict[str, Any] = {"sampler": sampler, "schedule": every, "steps": 20, "steps_per_epoch": 2} | others
    return net, sampler, SampleWriter(net, Categorical(), 0.5, **given)


def test_two_ranks_of_one_chain(tmp_path: Path) -> None:
    start_processes(loop_of_a_rank, ("one chain", tmp_path), 2, start_method="fork")
    net, sampler, writer = of_eighty(0)
    for step in range(20):
        rows = torch.arange(80).view(20, 4)[:, 2 * (step % 2) :][:, :2].reshape(-1)
        sampler.zero_grad()
        writer.loss(net(x[rows]), y[rows]).backward()
        sampler.step()
    for own, other in zip(Posterior.load(tmp_path / "samples"), writer.posterior, strict=True):
        torch.testing.assert_close(own.parameters, other.parameters)


def test_two_ranks_with_a_chain_each(tmp_path: Path) -> None:
    start_processes(loop_of_a_rank, ("a chain each", tmp_path), 2, start_method="fork")
    loaded = [Posterior.load(tmp_path / f"samples-of-{rank}") for rank in range(2)]
    assert [record.chain for one in loaded for record in one.records] == [0] * 4 + [1] * 4
    assert len(Posterior.merge(*loaded)) == 8


def test_two_ranks_of_one_chain_with_a_seed_each(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="one seed"):
        start_processes(loop_of_a_rank, ("a seed each", tmp_path), 2, start_method="fork")
