"""Batches of any form: pairs, several inputs, dicts; in training, evaluation, prediction, and for several chains."""

import logging
import warnings
from typing import Any

import numpy as np
import pandas
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Gaussian, Posterior, ResumableLoader, TokenCategorical
from lightning_sgmcmc.batches.loader import padded_alike
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.trainers import quiet_trainer

COUNT, LENGTH = 32, 6


class Reader(nn.Module):
    """An LSTM that reads `lengths` tokens of each row; its forward takes no `idx` and no `text`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)
        self.seen: list[str] = []

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.lstm(self.embed(ids))[0]
        last = hidden.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, 5))[:, 0]
        return self.head(last)


class Pooled(nn.Module):
    """A network like `Reader` that vmap can run, whose labels are an option, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        assert labels is None, "the network's own loss is wasted work"
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (self.embed(input_ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Output(self.head(pooled))


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Rows(Dataset[Any]):
    """Token rows in one of the forms of a batch."""

    def __init__(self, form: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.form = form
        self.ids = torch.randint(10, (COUNT, LENGTH), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (COUNT,), generator=generator)
        self.labels = (self.ids[:, 0] > 4).long()
        self.mask = (torch.arange(LENGTH) < self.lengths[:, None]).long()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        if self.form == "tuple":
            return (self.ids[i], self.lengths[i]), self.labels[i]
        named = {"ids": self.ids[i], "lengths": self.lengths[i]}
        if self.form == "pair of a dict":
            return named, self.labels[i]
        return named | {"labels": self.labels[i], "idx": i, "text": "not a tensor"}


def fitted(net: nn.Module, data: pl.LightningDataModule | Any, **options: Any) -> tuple[BayesianModule, pl.Trainer]:
    torch.manual_seed(0)
    module = BayesianModule(net, Categorical(), lr=0.1, seed=0, **({"num_chains": 2} | options))
    collected = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True), BayesianModelAverage()]
    trainer = quiet_trainer(max_steps=4, callbacks=collected)
    trainer.fit(module, data)
    return module, trainer


def reader() -> Reader:
    torch.manual_seed(1)
    return Reader()


def pooled() -> Pooled:
    torch.manual_seed(1)
    return Pooled()


def test_several_inputs_by_place_and_by_name_are_one_run(caplog: pytest.LogCaptureFixture) -> None:
    """(ids, lengths), a dict in a pair and a dict with labels are the same data, so they give the same draws."""
    posteriors, dropped = [], []
    for form in ("tuple", "pair of a dict", "dict"):
        data = Rows(form)
        with caplog.at_level(logging.INFO, "pytorch_lightning"):
            caplog.clear()
            module, trainer = fitted(reader(), DatasetDataModule(data, data, data, batch_size=8))
        dropped.append([record.message for record in caplog.records if "does not accept" in record.message])
        assert module.posterior is not None
        posteriors.append(module.posterior)
        trainer.test(module, trainer.datamodule, verbose=False)
        predicted = trainer.predict(module, trainer.datamodule)
        own = module.posterior.predict({"ids": data.ids, "lengths": data.lengths}).probabilities
        assert torch.allclose(torch.cat([part.probabilities for part in predicted]), own, atol=1e-6)
        nll = module.evaluations["test"].bma["nll"]
        assert nll == pytest.approx(float(-own[torch.arange(COUNT), data.labels].log().mean()), rel=1e-4)
    assert not dropped[0]
    assert not dropped[1]
    assert dropped[2] == ["The network's forward does not accept 'idx', 'text' of the batches, so it is not passed."]
    for other in posteriors[1:]:
        for one, same in zip(posteriors[0], other, strict=True):
            assert all(torch.equal(tensor, same.state[name]) for name, tensor in one.state.items())
    data, posterior = Rows("tuple"), posteriors[0]
    whole = posterior.predict((data.ids, data.lengths)).probabilities  # forward needs both: no batch (x, y)
    for x in (
        {"ids": data.ids.numpy(), "lengths": data.lengths},
        ((data.ids, data.lengths), data.labels),
        [((data.ids, data.lengths), data.labels)],
        [[data.ids[:5], data.lengths[:5]], [data.ids[5:], data.lengths[5:]]],
        DataLoader(Rows("dict"), 5),
        DataLoader(Rows("pair of a dict"), 5),
        ResumableLoader(Rows("tuple"), COUNT, order=lambda spec: _InOrder()),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last loader may shuffle
            assert torch.allclose(posterior.predict(x).probabilities, whole, atol=1e-6)


class _InOrder:
    def indices(self, batch: int) -> Tensor:
        return torch.arange(COUNT)


class Texts(Rows):
    def __getitem__(self, i: int) -> Any:
        length = int(self.lengths[i])
        return {"input_ids": self.ids[i, :length], "labels": self.labels[i]}


def padded(rows: list[Any]) -> Any:
    """Pad to the batch's longest row, with tokens that would be seen without the mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), 9)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = row["input_ids"]
        mask[place, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([row["labels"] for row in rows])}


@pytest.mark.parametrize("batch_size", [2])
def test_padded_texts_of_chains_computed_at_once(batch_size: int) -> None:
    """Chains whose batches are padded to different lengths run at once, with the draws of the loop up to rounding."""
    data = DatasetDataModule(Texts(""), batch_size=batch_size, collate_fn=padded)
    found = [fitted(pooled(), data, chain_execution=how)[0].posterior for how in ("loop", "vmap")]
    for one, same in zip(*found, strict=True):  # type: ignore[call-overload]
        assert all(torch.allclose(tensor, same.state[name], atol=1e-5) for name, tensor in one.state.items())


def test_predictions_of_tokens_need_one_length() -> None:
    class Tagger(nn.Embedding):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids)

    rows = [(torch.ones(4, length, dtype=torch.int64), torch.zeros(4, length, dtype=torch.int64)) for length in (3, 3)]
    module = BayesianModule(Tagger(10, 2), TokenCategorical(), lr=0.1, num_data=8, seed=0)
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks)
    trainer.fit(module, DataLoader(TensorDataset(*map(torch.cat, zip(*rows, strict=True))), 4))
    assert module.posterior is not None
    assert module.posterior.predict([x for x, _ in rows]).probabilities.shape == (8, 3, 2)
    with pytest.raises(ValueError, match=r"different shapes, \(n, …\) with \(3, 2\) and \(5, 2\).*pad all batches"):
        module.posterior.predict([rows[0][0], torch.ones(2, 5, dtype=torch.int64)])


def test_padding_of_chains() -> None:
    short = {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2), "labels": torch.ones(1, 2)}
    long = {name: torch.ones(1, 3) for name in short}
    alike = padded_alike([(short, 0), (long, 1)], pad=7)
    assert alike[0][0]["input_ids"].tolist() == [[1, 1, 7]]
    assert alike[0][0]["attention_mask"].tolist() == [[1, 1, 0]]
    assert alike[0][0]["labels"].tolist() == [[1, 1, -100]]
    assert alike[1] == (long, 1)


def test_a_mask_is_not_cut_off_in_silence() -> None:
    data = Rows("")
    batches = [{"input_ids": data.ids, "attention_mask": data.mask, "labels": data.labels}]
    loader = DataLoader([{name: value[i] for name, value in batches[0].items()} for i in range(COUNT)], 8)
    module = fitted(pooled(), loader)[0]
    posterior = module.posterior
    assert posterior is not None
    masked = posterior.predict(batches).probabilities
    assert not torch.allclose(masked, posterior.predict(data.ids).probabilities, atol=1e-4)
    with pytest.raises(TypeError, match=r"could be a batch \(x, y\) or several batches.*predict\({'name': …}\)"):
        posterior.predict((data.ids, data.mask))
    with pytest.warns(UserWarning, match="takes the first of each pair as the inputs.*pass dicts"):
        posterior.predict([(data.ids, data.mask)])


def test_hooks_of_the_users_own() -> None:
    """`inputs_and_target` and `output_of` are used in training, evaluation and prediction."""

    class Weighted(BayesianModule):
        def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
            return batch["tokens"], batch["answer"]

        def output_of(self, inputs: Any) -> Any:
            return self.net(inputs, None).logits * 2

    data = Rows("")
    loader = DataLoader([{"tokens": i, "answer": y} for i, y in zip(data.ids, data.labels, strict=True)], 8)
    module = Weighted(pooled(), Categorical(), lr=0.1, num_chains=2, seed=0)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True), BayesianModelAverage()]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, loader)
    assert isinstance(module.posterior, Posterior)
    predicted = module.posterior.predict(loader).probabilities
    nll = float(-predicted[torch.arange(COUNT), data.labels].log().mean())
    assert module.evaluations["val"].bma["nll"] == pytest.approx(nll, rel=1e-4)
    assert torch.allclose(module.posterior.predict(data.ids).probabilities, predicted, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(2, 3)}, "needs its target as 'labels', 'label', 'target', 'y', and this one has 'x'"),
        (
            (torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)),
            r"should be a pair \(x, y\), got tuple of 3: nest several",
        ),
        ({"image": torch.zeros(2, 3), "y": torch.zeros(2)}, "forward needs 'input', and a dict batch has 'image'"),
    ],
)
def test_batches_that_cannot_be_taken_apart(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        BayesianModule(nn.Linear(3, 2), Categorical()).log_likelihood(batch)


class Graph(nn.Module):
    """A network of graphs in one batch: sums the nodes of each; edges and nodes have numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, graph: Any) -> Tensor:
        hidden = self.node(graph["x"]).relu()
        source, end = graph["edges"]
        hidden = hidden + torch.zeros_like(hidden).index_add(0, end, hidden[source])
        return self.head(hidden.new_zeros(len(graph["sizes"]), 8).index_add(0, graph["of"], hidden))


class NamedGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Graph()

    def forward(self, x: Tensor, edges: Tensor, of: Tensor, sizes: Tensor) -> Tensor:
        return self.net({"x": x, "edges": edges, "of": of, "sizes": sizes})


def joined(graphs: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
    sizes = torch.tensor([len(x) for x, *_ in graphs])
    first = (sizes.cumsum(0) - sizes).tolist()
    return {
        "x": torch.cat([x for x, *_ in graphs]),
        "edges": torch.cat([edges + start for (_, edges, _), start in zip(graphs, first, strict=True)], 1),
        "of": torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        "sizes": sizes,
        "y": torch.stack([y for *_, y in graphs]),
    }


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("network", [Graph, NamedGraph])
def test_graphs_in_a_dict(network: type[nn.Module], chains: int) -> None:
    """A dict reaches a forward of one argument whole, and others by name; graphs do not see one another."""
    draw = torch.Generator().manual_seed(0)
    graphs = []
    for size in torch.randint(2, 7, (24,), generator=draw).tolist():
        x = torch.randn(size, 4, generator=draw)
        graphs.append((x, torch.randint(size, (2, 2 * size), generator=draw), x.sum()))
    dataset: Any = graphs
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=8, collate_fn=joined)
    module = BayesianModule(network(), Gaussian(std=0.5), sampler=SGHMC, lr=1e-3, num_chains=chains)
    schedule = SamplingSchedule(burn_in_epochs=1, every_n_epochs=1)
    trainer = quiet_trainer(max_epochs=3, callbacks=[schedule, SampleCollector(in_memory=True), BayesianModelAverage()])
    trainer.fit(module, loader, loader)
    posterior = module.posterior
    assert posterior is not None
    assert len(posterior) == 2 * chains
    batch = joined(graphs[:10])
    together = posterior.predict(batch)
    assert together.mean.shape == (10, 1)
    alone = torch.cat([posterior.predict(joined([graph])).mean for graph in graphs[:10]])
    torch.testing.assert_close(alone, together.mean)
    inputs = {name: part for name, part in batch.items() if name != "y"}
    whole = posterior.ensemble()
    mean, std = whole(**inputs) if network is NamedGraph else whole(inputs)
    torch.testing.assert_close(mean, together.mean)
    torch.testing.assert_close(std, together.std)


def test_an_argument_named_like_a_target_is_an_input() -> None:
    class Conditional(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    module = BayesianModule(Conditional(), Categorical())
    batch = {"x": torch.zeros(2, 3), "y": torch.ones(2, 3), "label": torch.tensor([0, 1])}
    assert module.output_and_target(batch)[0].tolist() == torch.ones(2, 3).tolist()


def test_tables_of_pandas(tmp_path: Any) -> None:
    x = np.random.default_rng(0).normal(size=(COUNT, 3))
    y = torch.tensor(x[:, 0] > 0).long()
    module = fitted(nn.Linear(3, 2), DataLoader(torch.utils.data.TensorDataset(torch.tensor(x).float(), y), 8))[0]
    assert module.posterior is not None
    frame = pandas.DataFrame(x, columns=["a", "b", "c"])
    found = module.posterior.predict(frame).probabilities
    assert torch.equal(found, module.posterior.predict(torch.tensor(x).float()).probabilities)
    with pytest.raises(TypeError, match=r"x has the column 'c' of .*not numeric: encode it"):
        module.posterior.predict(frame.assign(c="red"))


def test_a_layer_that_vmap_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no vmapped LSTM: by "auto" its chains run one by one, also where others run at once."""
    monkeypatch.setattr(Chains, "execution", "auto")
    data = DatasetDataModule(Rows("tuple"), batch_size=8)
    found = fitted(reader(), data, num_chains=4)[0].posterior
    monkeypatch.undo()
    looped = fitted(reader(), data, num_chains=4)[0].posterior
    for one, same in zip(found or [], looped or [], strict=True):
        assert all(torch.allclose(tensor, same.state[name], atol=1e-6) for name, tensor in one.state.items())
    with pytest.raises(RuntimeError, match=r"torch.vmap cannot run 'net.lstm' \(LSTM\) .* pass chain_execution='loop'"):
        fitted(reader(), data, chain_execution="vmap")
