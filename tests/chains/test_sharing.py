"""A part of a network is sampled: what is not is one tensor for all chains, stored once, and unchanged in truth."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.starts import Holder, frozen_parts, shared_names
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import SHARED
from tests.support.comparisons import assert_equal_trees, assert_same
from tests.support.problems import Net
from tests.support.trainers import fit_in_layout, quiet_trainer

HEAD = {"sampled": ["*.4.*", "scale"]}


def trunk() -> nn.Sequential:
    """A trained part: BatchNorm with statistics, dropout."""
    net = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Dropout(0.3))
    net(torch.randn(64, 5))
    return net


def classifier() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(trunk(), nn.Linear(40, 3))


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(48, 5, generator=generator)
    return x, x[:, :3].argmax(1)


def fit(net: nn.Module, folder: Path, x: Tensor, y: Tensor, **options: Any) -> BayesianModule:
    """Fit in the data's order, since a shuffling loader has random numbers of its own."""
    chosen = {"likelihood": Categorical(), "sampler": SGHMC, "lr": 0.02, "num_chains": 3, "seed": 4} | options
    model = BayesianModule(net=net, **chosen)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_steps=3), SampleCollector(folder), BayesianModelAverage()]
    quiet_trainer(max_steps=12, callbacks=callbacks).fit(model, loader, loader)
    return model


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_head_on_a_frozen_trunk_has_the_draws_of_a_head_on_its_features(tmp_path: Path, execution: Any) -> None:
    """The law of a head alone is tested elsewhere; it has the same draws, so the frozen part adds nothing to them."""
    (x, y), net = inputs(), classifier()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        features = net[0].eval()(x)
    net.train()
    alone = fit(nn.Sequential(nn.Identity(), classifier()[1]), tmp_path / "alone", features, y)
    model = fit(net, tmp_path / "part", x, y, sampled=["1.*"], chain_execution=execution)
    assert model.posterior is not None
    assert alone.posterior is not None
    assert len(model.posterior) == 12
    for one, other in zip(model.posterior, alone.posterior, strict=True):
        torch.testing.assert_close(one.parameters, other.parameters, rtol=1e-4, atol=1e-6)
        assert one.energy == pytest.approx(other.energy, rel=1e-5)
    for name, tensor in model.net.state_dict().items():
        if name.startswith("0."):
            assert torch.equal(tensor, before[name]), name
        else:
            assert tensor.shape == (3, *before[name].shape)


def test_a_store_has_what_is_not_sampled_once(tmp_path: Path) -> None:
    (x, y), net = inputs(), classifier()
    model = fit(net, tmp_path, x, y, sampled=["1.*"])
    assert model.posterior is not None
    expected = model.posterior.predict(x).probabilities
    sampled = sum(tensor.nbytes for tensor in net[1].state_dict().values()) // 3
    for file in tmp_path.glob("sample-*"):
        assert file.stat().st_size < sampled + 600  # names and numbers
    other = classifier()
    for parameter in other.parameters():
        nn.init.constant_(parameter, 0.25)
    posterior = Posterior.load(tmp_path)
    for loaded in (posterior, posterior[:], posterior.in_memory(), Posterior.load(tmp_path, net=other)):
        torch.testing.assert_close(loaded.predict(x).probabilities, expected)
    assert all(bool((parameter == 0.25).all()) for parameter in other.parameters())
    assert posterior[0].shared["net.0.0.weight"] is posterior[1].shared["net.0.0.weight"]
    plain = classifier()
    plain.load_state_dict({k.removeprefix("net."): t for k, t in posterior[2].state.items() if k[:4] == "net."})
    first = posterior[2:3].predict(x).probabilities
    torch.testing.assert_close(plain.eval()(x).softmax(1), first)

    again = posterior.update_batch_norm(torch.utils.data.DataLoader(x, batch_size=16))
    assert torch.equal(again.predict(x).probabilities, posterior.predict(x).probabilities)

    content = (tmp_path / SHARED).read_bytes()
    (tmp_path / SHARED).write_bytes(content[:-4] + b"0000")
    with pytest.raises(ValueError, match=r"weights that were not sampled, is missing or damaged: its checksum differs"):
        Posterior.load(tmp_path).predict(x)
    with pytest.raises(ValueError, match=r"not sampled, is missing or damaged"):
        DiskStore(tmp_path)[0]


def test_layouts_and_resuming(tmp_path: Path) -> None:
    """Two processes with two chains each draw as four stacked ones do, and either continues the other's checkpoint."""
    whole, _ = fit_in_layout(tmp_path / "1x4", 4, 1, module_options=HEAD.items())
    spread, _ = fit_in_layout(tmp_path / "2x2", 2, 2, module_options=HEAD.items())
    assert_same(whole, spread)
    assert set(whole[0].parameters) == {"scale", "net.4.weight"}
    states = [torch.load(tmp_path / n / "step=20.ckpt", weights_only=True)["state_dict"] for n in ("1x4", "2x2")]
    assert_equal_trees(*states)
    assert states[0]["net.0.weight"].shape == (16, 5)
    assert states[0]["net.1.running_mean"].abs().sum() == 0
    path = tmp_path / "2x2" / "step=10.ckpt"
    samples, _ = fit_in_layout(tmp_path / "2x2", 4, 1, ckpt_path=path, module_options=HEAD.items())
    assert_same(whole, samples)
    with pytest.raises(
        ValueError, match=r"samples other parameters: 'net.*' is sampled here, and not there; pass the same sampled"
    ):
        fit_in_layout(tmp_path / "2x2", 4, 1, ckpt_path=path)


class BeginsTwice(Net):
    """Begins again in the middle of a fit, as a later test of the same process does; processes draw other trunks."""

    def configure_model(self) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.chains.layout.total_chains == 1:
            self.net[0].bias.data += rank  # type: ignore[union-attr, operator]
        super().configure_model()

    def on_train_start(self) -> None:
        self.configure_model()


def test_processes_have_the_first_ones_frozen_part(tmp_path: Path) -> None:
    whole, _ = fit_in_layout(tmp_path / "1x2", 2, 1, module_options=HEAD.items())
    spread, _ = fit_in_layout(tmp_path / "2x1", 1, 2, model=BeginsTwice, module_options=HEAD.items())
    assert_same(whole, spread)


def test_dropout_of_frozen_parts_by_choice(tmp_path: Path) -> None:
    x, y = inputs()
    for dropout in (False, True):
        net, modes = classifier(), set()
        layers: Any = [*net[0].children()]
        parts = layers[1], layers[3], net[1]
        net.register_forward_pre_hook(
            lambda net, x, parts=parts, modes=modes: (
                modes.add(tuple(p.training for p in parts)) if net.training else None
            )
        )
        fit(net, tmp_path / str(dropout), x, y, sampled=["net.1.*"], frozen_dropout=dropout)
        assert modes == {(False, dropout, True)}
        assert all(part.training for part in parts)


def test_parts_and_names() -> None:
    net = classifier()
    assert shared_names(net) == frozenset()
    net[0].requires_grad_(False)
    assert [name for name, _ in frozen_parts(net)] == ["0"]
    assert shared_names(net) == {f"0.{name}" for name in net[0].state_dict()}
    net[0][0].bias.requires_grad_(True)
    assert [name for name, _ in frozen_parts(net)] == ["0.1"]


def test_what_cannot_be(tmp_path: Path) -> None:
    x, y = inputs()
    with pytest.raises(TypeError, match=r"sampled must be a list of name patterns, such as \['\*.fc.\*'\], got '1.\*'"):
        BayesianModule(net=classifier(), likelihood=Categorical(), sampled="1.*")
    with pytest.raises(ValueError, match=r"sampled: '\*.fc.\*' matches no parameter of BayesianModule \(it has net.0"):
        fit(classifier(), tmp_path / "a", x, y, sampled=["*.fc.*"])
    states = [classifier().state_dict() for _ in range(3)]
    states[2]["0.0.weight"] = states[2]["0.0.weight"] + 1
    with pytest.raises(ValueError, match=r"chain_start\[2\] has other values of 'net.0.0.weight' than the first chain"):
        fit(classifier(), tmp_path / "b", x, y, sampled=["1.*"], chain_start=states)
    model = fit(classifier(), tmp_path / "c", x, y, sampled=["1.*"])
    model.chains.sharing.sampled = None
    model.net[0].requires_grad_(True)  # type: ignore[union-attr]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    with pytest.raises(ValueError, match=r"'net.0.0.weight' requires gradients now, but it was frozen"):
        quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(model, loader)


def test_memory_of_chains_is_that_of_what_is_sampled() -> None:
    model = Net(4, **HEAD)
    model.configure_model()
    sizes = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    alone = {name: tensor.numel() for name, tensor in Net(1).state_dict().items()}
    for name, size in sizes.items():
        assert size == alone[name] * (4 if name in ("scale", "net.4.weight") else 1), name


def test_shared_tensors_take_the_place_of_others_and_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    own = module.weight
    same, other = own.detach().clone(), torch.ones(2, 2)
    holder, compared = Holder(module), []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(1) or equal(a, b))
    for tensor, found in ((same, own), (same, own), (other, other), (other, other)):
        with holder.holding({"weight": tensor}):
            assert module.weight is found
        assert module.weight is own
    assert len(compared) == 2
    with torch.no_grad():
        own += 1
    with holder.holding({"weight": same}):
        assert module.weight is same
    with torch.no_grad():
        same += 1
    with holder.holding({"weight": same}):
        assert module.weight is own
