"""Fits on loaders as users make them: N, the energy of an epoch, and the energies of all data, against U by hand."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior, ResumableLoader
from lightning_sgmcmc.batches import CyclicOrder, SymmetricOrder
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.rows import (
    ALL,
    PRIOR,
    ROWS,
    STD,
    WITH_HELD_OUT,
    Constant,
    Energies,
    Stream,
    energy,
    fit,
    module,
    pairs,
    targets,
)
from tests.support.trainers import quiet_trainer


class Own(Sampler[int]):
    """A sampler of one's own, in an order that is neither torch's."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(self.count), key=lambda i: (i % 7, i)))


def by_length() -> list[list[int]]:
    return [list(range(0, 60)), list(range(60, 95)), list(range(95, 105))]


RANDOM = {"shuffled", "subset at random", "subset in batches at random", "part of a source", "datamodule", "resumable"}
LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(ALL, batch_size=100),
    "in order, small": lambda: DataLoader(ALL, batch_size=20),
    "shuffled": lambda: DataLoader(ALL, batch_size=20, shuffle=True),
    "by length": lambda: DataLoader(ALL, batch_sampler=by_length()),
    "own sampler": lambda: DataLoader(ALL, batch_size=20, sampler=Own(ROWS)),
    "own sampler in batches": lambda: DataLoader(ALL, batch_sampler=BatchSampler(Own(ROWS), 25, False)),
    "subset": lambda: DataLoader(Subset(WITH_HELD_OUT, range(ROWS)), batch_size=20),
    "subset at random": lambda: DataLoader(WITH_HELD_OUT, 20, sampler=SubsetRandomSampler(range(ROWS))),
    "subset in batches at random": lambda: DataLoader(
        WITH_HELD_OUT, batch_sampler=BatchSampler(SubsetRandomSampler(range(ROWS)), 20, False)
    ),
    "first rows": lambda: DataLoader(WITH_HELD_OUT, 20, sampler=SequentialSampler(range(ROWS))),
    "part of a source": lambda: DataLoader(WITH_HELD_OUT, 20, sampler=RandomSampler(range(ROWS))),
    "no collation": lambda: DataLoader(
        ALL, batch_size=None, sampler=BatchSampler(SequentialSampler(range(ROWS)), 25, False)
    ),
    "datamodule": lambda: DatasetDataModule(ALL, batch_size=20),
    "resumable": lambda: ResumableLoader(ALL, 50),
    "cyclic": lambda: ResumableLoader(ALL, 50, order=CyclicOrder),
    "symmetric": lambda: ResumableLoader(ALL, 50, order=SymmetricOrder),
}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_is_worth_all_data(name: str, options: dict[str, Any]) -> None:
    """N, an epoch's mean energy, the energy of all data: those of the rows that the loader has, to rounding."""
    if name in ("cyclic", "symmetric") and options:
        pytest.skip("refused: a step's batches must come again together")
    model = module()
    seen = fit(model, LOADERS[name](), **options)
    wanted = energy(model.net.mean.detach(), targets())
    assert model.num_data == ROWS
    for epoch in range(2):
        found = seen.of_epoch(epoch, by_size=name in RANDOM)
        torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-9, atol=0)
    if name not in ("no collation",):
        assert seen.full is not None
        torch.testing.assert_close(seen.full, torch.full_like(seen.full, wanted), rtol=1e-9, atol=0)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["in order", "by length", "subset in batches at random"])
def test_an_epoch_of_several_chains(name: str, execution: Any) -> None:
    model = module(num_chains=2, chain_execution=execution)
    seen = fit(model, LOADERS[name](), accumulate_grad_batches=2)
    for chain in range(2):
        with model.at_chain(chain):
            wanted = energy(model.net.mean.detach(), targets())
        assert abs(float(seen.of_epoch(1, name in RANDOM)[chain]) - wanted) < 1e-9 * abs(wanted)


def test_fresh_batches_are_of_the_loaders_rows() -> None:
    """A batch of all rows has the energy of the rows, also where the data set has others."""
    for sampler in ({"sampler": SubsetRandomSampler(range(ROWS))}, {"sampler": RandomSampler(range(ROWS))}):
        model = module()
        seen = fit(model, DataLoader(WITH_HELD_OUT, 400, **sampler))
        assert seen.fresh is not None
        assert abs(float(seen.fresh) / energy(model.net.mean.detach(), targets()) - 1) < 1e-9


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_short_last_batch(workers: int) -> None:
    """Its first epoch shows the batches' sizes, so the second is worth all data."""
    model = module(num_data=ROWS)
    seen = fit(model, DataLoader(Stream(ALL), batch_size=40, num_workers=workers))
    assert abs(float(seen.of_epoch(1, False)) / energy(model.net.mean.detach(), targets()) - 1) < 1e-9


# -- what the likelihood counts ---------------------------------------------------------------------------------------


class Graphs(Dataset[Any]):
    """Twelve graphs of different size, whose nodes are the data."""

    sizes = (1, 30, 4, 9, 2, 17, 6, 3, 12, 8, 5, 8)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Tensor:
        first = sum(self.sizes[:index])
        return targets()[first : first + self.sizes[index]]


class OfNodes(BayesianModule):
    """Its likelihood counts every node."""

    def log_likelihood(self, batch: Any) -> Tensor:
        assert self.likelihood is not None
        return self.likelihood.log_prob(self.net(batch), batch)


def nodes(**options: Any) -> OfNodes:
    found = OfNodes(
        net=Constant(),
        likelihood=Gaussian(std=STD),
        prior=GaussianPrior(std=PRIOR),
        lr=1e-30,
        temperature=0.0,
        **options,
    )
    return found.double()


def graphs(batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Graphs(), batch_size, collate_fn=torch.cat, **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"drop_last": True}], ids=["shuffled", "in order", "drop"])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_nodes_of_graphs_are_the_data(batch_size: int, options: dict[str, Any]) -> None:
    model = nodes(num_data=ROWS)
    seen = fit(model, graphs(batch_size, **options), accumulate_grad_batches=2)
    wanted = energy(model.net.mean.detach(), targets())
    found = seen.of_epoch(1, by_size=False)
    torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-9, atol=0)


class Summed(BayesianModule):
    """Its log-likelihood is one number of shape (1,) for a batch."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return super().log_likelihood(batch).sum().reshape(1)


def dropping(batch: list[Any]) -> Any:
    """Leave out rows, as a collate function does with broken files."""
    kept = [row for row in batch if float(row[1]) < 9]
    return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])


class Declared(pl.LightningDataModule):
    num_data = 300

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(ALL, 20)


REFUSED: dict[str, tuple[Callable[[], tuple[BayesianModule, Any]], tuple[str, ...]]] = {
    "weights": (
        lambda: (module(num_data=ROWS), DataLoader(ALL, 20, sampler=WeightedRandomSampler([1.0, 2.0] * 50, 100))),
        ("WeightedRandomSampler", "shuffle=True"),
    ),
    "a part, by a sampler of one's own": (
        lambda: (module(), DataLoader(WITH_HELD_OUT, 20, sampler=Own(ROWS))),
        ("105 of 210 rows", "num_data=…", "Subset"),
    ),
    "more than the rows": (lambda: (module(num_data=200), DataLoader(ALL, 20)), ("num_data=200", "105")),
    "far fewer than the rows": (lambda: (module(num_data=20), DataLoader(ALL, 20)), ("num_data=20", "105")),
    "fewer than the rows": (lambda: (module(num_data=100), DataLoader(ALL, 20)), ("num_data=100", "105")),
    "a datamodule's": (lambda: (module(), Declared()), ("num_data=300", "105")),
    "nodes": (lambda: (nodes(), graphs(3)), ("35 data", "3 rows", "num_data=…")),
    "graphs for nodes": (lambda: (nodes(num_data=40), graphs(1, shuffle=True)), ("105", "num_data=40")),
    "one number": (
        lambda: (Summed(Constant(), Gaussian(std=STD)).double(), DataLoader(ALL, 20)),
        ("20 rows", "shape \\(1,\\)", "shape \\(n,\\)"),
    ),
    "rows left out": (lambda: (module(), DataLoader(ALL, 20, collate_fn=dropping)), ("data", "num_data=…")),
    "whole items": (
        lambda: (module(), DataLoader([(torch.zeros(5, 1), torch.zeros(5, 1))] * 7, batch_size=None)),
        ("batch_size=None", "num_data=…"),
    ),
    "workers": (
        lambda: (module(num_data=ROWS), DataLoader(Stream(ALL, divided=False), 20, num_workers=2)),
        ("2 workers", "same batch", "get_worker_info"),
    ),
    "workers in another order": (
        lambda: (module(num_data=ROWS), DataLoader(Shuffled(), 20, num_workers=2, drop_last=True)),
        ("200 data", "num_data=105", "2 workers"),
    ),
    "a stream": (lambda: (module(), DataLoader(Stream(ALL), 20)), ("no length", "num_data=…")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_the_user_can_know_is_asked(name: str) -> None:
    make, words = REFUSED[name]
    model, data = make()
    with pytest.raises(ValueError, match=".*".join(words[:1])) as error:
        fit(model, data)
    for word in words:
        assert word.replace("\\", "") in str(error.value)


@pytest.mark.parametrize("given", [100, 104])
def test_a_given_number_is_believed_where_rows_are_left_out(given: int) -> None:
    """A collate function that drops rows: the user knows how many remain."""
    kept = int((targets() < 9).sum())
    model = module(num_data=kept)
    fit(model, DataLoader(ALL, 20, collate_fn=dropping))
    assert model.num_data == kept


def test_the_seeds_of_samplers_are_left_alone() -> None:
    """Looking through a sampler of one's own draws nothing from it, nor from the default generators."""
    drawn: list[list[int]] = []

    class Recording(Sampler[int]):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(3)

        def __len__(self) -> int:
            return ROWS

        def __iter__(self) -> Iterator[int]:
            order = torch.randperm(ROWS, generator=self.generator).tolist()
            drawn.append(order)
            return iter(order)

    fit(module(), DataLoader(ALL, 20, sampler=Recording()), max_epochs=1)
    assert drawn[-1] == torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).tolist()


# -- streams, ranks ---------------------------------------------------------------------------------------------------


class Shuffled(IterableDataset[Any]):
    """A stream whose workers each deliver all data, in an order of their own."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(info.id if info else 0))
        return (ALL[index] for index in order.tolist())


class OfRank(Stream):
    """A stream of which each rank delivers a part, or all, for a fit of two forked ranks."""

    def __init__(self, parts: int) -> None:
        super().__init__(ALL)
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        own = torch.distributed.get_rank() if self.parts > 1 else 0
        return (ALL[index] for index in range(own, ROWS - ROWS % 2, self.parts))


@pytest.mark.parametrize(
    ("strategy", "parts", "words"),
    [
        ("ddp_fork", 1, ["2 ranks", "same first batch", "split_dataset_by_node"]),
        ("chains_fork", 2, ["52 data for each chain", "num_data=104", "split it by node"]),
        pytest.param("ddp_fork", 2, [], marks=pytest.mark.slow),
        pytest.param("chains_fork", 1, [], marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_chain_divide_a_stream_and_chains_do_not(strategy: str, parts: int, words: list[str]) -> None:
    trainer = quiet_trainer(max_epochs=2, devices=2, strategy=strategy)
    model, loader = module(num_data=ROWS - ROWS % 2), DataLoader(OfRank(parts), 10)
    if not words:
        trainer.fit(model, loader)
        return
    with pytest.raises(ProcessRaisedException) as error:
        trainer.fit(model, loader)
    for word in words:
        assert word in str(error.value)


class Uneven(Stream):
    """A stream of which the second rank delivers one batch more."""

    def __iter__(self) -> Iterator[Any]:
        own = torch.distributed.get_rank()
        return (ALL[index] for index in range(own, 40 + 21 * own, 2))


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("chains_fork", marks=pytest.mark.slow)])
def test_ranks_whose_streams_end_apart_raise(strategy: str) -> None:
    """Rather than wait for one another until the strategy's timeout."""
    trainer = quiet_trainer(max_epochs=2, devices=2, strategy=strategy)
    with pytest.raises(ProcessRaisedException, match="ends on some ranks after 2 batches, and others have more"):
        trainer.fit(module(num_data=50), DataLoader(Uneven(ALL), 10))


class Epochs(Stream):
    """A stream whose order is a function of the epoch, as those of the datasets library."""

    epoch = -1
    seen: list[int] = []  # noqa: RUF012

    def set_epoch(self, epoch: int) -> None:
        self.seen.append(epoch)


def test_a_stream_is_told_the_epoch() -> None:
    stream = Epochs(ALL)
    stream.seen.clear()
    fit(module(num_data=ROWS), DataLoader(stream, 20), max_epochs=3)
    assert stream.seen == [0, 1, 2]


class Written(Energies):
    """Writes each rank's energies of the second epoch, and N."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        own = [(size, float(found)) for epoch, size, found in self.steps if epoch == 1]
        found = {"num_data": pl_module.num_data, "energies": own, "full": float(self.full)}
        found["mean"] = float(pl_module.net.mean)
        torch.save(found, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize(
    "options", [{}, {"sampler": "subset"}, {"shuffle": True}], ids=["in order", "subset", "shuffle"]
)
def test_two_ranks_share_the_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two data-parallel processes (gloo) without a seed, 106 rows in uneven steps of two batches.

    Lightning shuffles the data of several ranks in any case.
    """
    y = torch.cat([targets(), targets()[:1]])
    rows: Dataset[Any] = pairs(y)
    if options == {"sampler": "subset"}:
        rows, options = ConcatDataset([rows, ALL]), {"sampler": SubsetRandomSampler(range(106))}
    trainer = quiet_trainer(
        max_epochs=2,
        callbacks=[Written(tmp_path)],
        precision="64-true",
        strategy="ddp_fork",
        devices=2,
        accumulate_grad_batches=2,
    )
    trainer.fit(module(), DataLoader(rows, 20, **options))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    wanted = energy(torch.tensor(ranks[0]["mean"], dtype=torch.float64), y)
    total, weight = 0.0, 0.0
    for rank in ranks:
        assert rank["num_data"] == 106
        assert abs(rank["full"] / wanted - 1) < 1e-9
        for size, found in rank["energies"]:
            total, weight = total + size * found, weight + size
    assert abs(total / weight / wanted - 1) < 1e-9


@pytest.mark.parametrize("chains", [1, 2])
def test_the_loss_that_a_step_returns_is_the_batchs_mean(chains: int) -> None:
    """Whatever the batch weighs, so that losses compare: for a logger, or EarlyStopping."""
    losses: list[list[float]] = []

    class Logged(BayesianModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            losses[-1].append(loss.item())
            return loss

    for accumulated in (1, 4):
        losses.append([])
        options: dict[str, Any] = {"num_chains": chains, "chain_start": "same"}
        likelihood, prior = Gaussian(std=STD), GaussianPrior(std=PRIOR)
        model = Logged(Constant(), likelihood, prior, lr=1e-30, temperature=0.0, **options).double()
        fit(model, DataLoader(ALL, 20), max_epochs=1, accumulate_grad_batches=accumulated)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    mean, y = model.net.mean.detach().reshape(-1)[:1], targets()
    rest = energy(mean, y[:0])
    by_hand = [chains * ((energy(mean, part) - rest) / len(part) + rest / ROWS) for part in y.split(20)]
    assert losses[0] == pytest.approx(by_hand, rel=1e-9)


# -- targets that are not observed ------------------------------------------------------------------------------------


def with_gaps() -> Tensor:
    y = targets()
    y[::3] = torch.nan
    return y


class Rows(Dataset[Any]):
    """Pairs that do not lie in memory as tensors."""

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, dtype=torch.float64), self.y[index]


SUBSET = SubsetRandomSampler(range(ROWS))
GAPS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(pairs(with_gaps()), 20),
    "shuffled": lambda: DataLoader(pairs(with_gaps()), 20, shuffle=True),
    "subset": lambda: DataLoader(
        ConcatDataset([pairs(with_gaps()), ALL]), 20, sampler=SubsetRandomSampler(range(ROWS))
    ),
    "datamodule": lambda: DatasetDataModule(pairs(with_gaps()), batch_size=20),
    "resumable": lambda: ResumableLoader(pairs(with_gaps()), 50),
    "not in memory": lambda: DataLoader(Rows(with_gaps()), 20, shuffle=True),
}


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("name", GAPS)
def test_targets_that_are_not_observed_are_no_data(name: str, chains: int) -> None:
    """N is the number of the observed ones, and an epoch is worth these."""
    observed = with_gaps()[~with_gaps().isnan()][:, None]
    options = {"num_data": len(observed)} if name == "not in memory" else {}
    model = module(num_chains=chains, chain_start="same", **options)
    seen = fit(model, GAPS[name](), accumulate_grad_batches=2)
    wanted = energy(model.net.mean.detach().reshape(-1)[:1], observed)
    assert model.num_data == len(observed)
    for found in (seen.of_epoch(0, False), seen.of_epoch(1, False), seen.full):
        assert found is not None
        torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-9, atol=0)


def test_unobserved_targets_that_are_not_in_memory_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"not observed.*\(105\): pass num_data=…"):
        fit(module(), DataLoader(Rows(with_gaps()), 20))


@pytest.mark.parametrize("at", [1, 2])
def test_a_stream_and_graphs_resume_with_their_weights(tmp_path: Path, at: int) -> None:
    """What earlier batches have shown is in the checkpoint, so a resumed run equals a whole one."""
    for make, data in (
        (lambda: module(num_data=ROWS), lambda: DataLoader(Stream(ALL), 40)),
        (lambda: nodes(num_data=ROWS), lambda: graphs(1)),
    ):
        whole = fit(make(), data(), max_epochs=3)
        saved = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", every_n_epochs=1)
        first = Energies()
        options = {"num_sanity_val_steps": 0, "precision": "64-true"}
        quiet_trainer(callbacks=[first, saved], max_epochs=at, enable_checkpointing=True, **options).fit(make(), data())
        rest, path = Energies(), saved.best_model_path or saved.last_model_path
        quiet_trainer(callbacks=[rest], max_epochs=3, **options).fit(make(), data(), ckpt_path=path, weights_only=False)
        for epoch in range(at, 3):
            assert torch.equal(whole.of_epoch(epoch, False), rest.of_epoch(epoch, False))


class Told(Stream):
    """A stream that says another length than it has."""

    def __init__(self, length: int) -> None:
        super().__init__(ALL)
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("length", "options", "is_named"),
    [
        (2 * ROWS, {"max_epochs": 2}, True),
        (ROWS, {"max_epochs": 2}, False),
        (2 * ROWS, {"max_steps": 2}, False),
        (ROWS, {"max_epochs": 2, "limit_train_batches": 2}, False),
        (ROWS, {"max_steps": 2}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:An epoch had (more|fewer) than", "ignore:Your `IterableDataset` has `__len__`")
def test_epochs_that_are_shorter_than_the_loader_says(length: int, options: dict[str, Any], is_named: bool) -> None:
    """Schedules and validation go by that length: the last samples would be missing without a word."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module(num_data=ROWS), DataLoader(Told(length), 20), **options)
    found = [str(one.message) for one in caught if "limit_train_batches says" in str(one.message)]
    assert len(found) == is_named
    assert all(f"An epoch had {-(-ROWS // 20)} batches" in one and str(-(-length // 20)) in one for one in found)
