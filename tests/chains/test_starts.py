"""Chains that start at given states: each at its own, in every layout, and nothing else is accepted."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import save_file

from lightning_sgmcmc import ChainStrategy, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.problems import Data, Net, Plain, network
from tests.support.trainers import quiet_trainer, seeded


def states(count: int) -> list[dict[str, torch.Tensor]]:
    made = []
    for seed in range(count):
        torch.manual_seed(100 + seed)
        made.append(Net().state_dict())
    return made


def begin(start: Any, chains: int = 3, **trainer: Any) -> Net:
    """Return the module after a fit that moves no parameter."""
    module = seeded(lambda: Net(chains, lr=0.0, temperature=0.0, chain_start=start))
    quiet_trainer(max_steps=1, **trainer).fit(module, datamodule=Data())
    return module


def is_at(module: Net, chain: int, state: dict[str, torch.Tensor]) -> bool:
    with module.at_chain(chain):
        return all(torch.equal(p, state[name]) for name, p in module.named_parameters())


class MakesTensorsElsewhere(pl.strategies.SingleDeviceStrategy):
    """As on a GPU, where Lightning makes tensors without a device of their own in the GPU's memory."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return torch.device("meta")


class Draws(Net):
    """A module whose constructor draws from a generator of the CPU's."""

    def __init__(self, chains: int = 1, **options: Any) -> None:
        super().__init__(chains, **options)
        self.register_buffer("drawn", torch.randn(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.filterwarnings("ignore:lr=0")
def test_starts_of_their_own_are_the_same_wherever_the_run_is() -> None:
    def starts(**trainer: Any) -> dict[str, torch.Tensor]:
        module = seeded(lambda: Draws(3, lr=0.0, temperature=0.0))
        quiet_trainer(max_steps=1, **trainer).fit(module, datamodule=Data())
        return dict(module.state_dict())

    here, elsewhere = starts(), starts(strategy=MakesTensorsElsewhere())
    assert [name for name, tensor in here.items() if not torch.equal(tensor, elsewhere[name])] == []


@pytest.mark.filterwarnings("ignore:lr=0")
def test_each_chain_starts_at_its_own_state_whatever_holds_it(tmp_path: Path) -> None:
    """State dicts, torch files, checkpoints and sample files; one chain alone takes the entry of its global index."""
    given = states(3)
    torch.save(given[1], tmp_path / "state.pt")
    tensors = {f"parameter.{n}": t for n, t in given[2].items() if "running" not in n and "batches" not in n}
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "sample.safetensors")
    module = begin([given[0], str(tmp_path / "state.pt"), tmp_path / "sample.safetensors"])
    assert [is_at(module, chain, given[chain]) for chain in range(3)] == [True] * 3

    trainer = quiet_trainer(max_steps=1)
    stacked = seeded(lambda: Net(3, lr=0.0, temperature=0.0, chain_start=given))
    trainer.fit(stacked, datamodule=Data())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    again = begin([tmp_path / "three.ckpt"] * 3)
    assert [is_at(again, chain, given[chain]) for chain in range(3)] == [True] * 3

    alone = begin([given[1]], 1)
    assert is_at(alone, 0, given[1])


@pytest.mark.filterwarnings("ignore:lr=0", "ignore:.*temperature=0")
def test_a_rank_takes_the_entries_of_its_chains_and_a_resumed_run_needs_none(tmp_path: Path) -> None:
    """Two ranks with a chain each; the checkpoint then continues without the files of the start."""
    given, paths = states(2), [tmp_path / "0.pt", tmp_path / "1.pt"]
    for state, path in zip(given, paths, strict=True):
        torch.save(state, path)

    def run(steps: int, start: Any, ckpt_path: Path | None = None) -> list[Any]:
        trainer = quiet_trainer(
            max_steps=steps,
            strategy=ChainStrategy(start_method="fork"),
            devices=2,
            enable_checkpointing=True,
            callbacks=[
                SamplingSchedule(every_n_steps=1),
                SampleCollector(tmp_path / "samples"),
                pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, enable_version_counter=False),
            ],
        )
        trainer.fit(
            seeded(lambda: Net(1, lr=0.0, temperature=0.0, chain_start=start)), datamodule=Data(), ckpt_path=ckpt_path
        )
        return list(Posterior.load(tmp_path / "samples", model=Net()).store)

    samples = run(1, paths)
    assert [sample.chain for sample in samples] == [0, 1]
    for sample in samples:
        assert all(torch.equal(t, given[sample.chain][name]) for name, t in sample.parameters.items())
    for path in paths:
        path.unlink()
    assert [sample.step for sample in run(2, paths, tmp_path / "step=1.ckpt")] == [1, 1, 2, 2]


WRONG = {
    "too few": (lambda s: s[:1], ValueError, "chain_start has 1 states, and the run has 2 chains"),
    "none": (lambda s: [], ValueError, "chain_start has no states"),
    "one, not a list": (lambda s: s[0], TypeError, "chain_start must be 'own', 'same' or a list with a state dict or"),
    "a number": (
        lambda s: [s[0], 3],
        TypeError,
        r"chain_start\[1\] must be a state dict or the path of a file, got a int",
    ),
    "no file": (lambda s: [s[0], "nowhere.pt"], FileNotFoundError, r"chain_start\[1\] = nowhere.pt does not exist"),
    "another network": (lambda s: [s[0], network().state_dict()], ValueError, r"chain_start\[1\] has no 'scale'"),
    "one name too many": (
        lambda s: [s[0] | {"net.9.weight": torch.zeros(2)}, s[1]],
        ValueError,
        r"chain_start\[0\] has 'net.9.weight', which the network has not",
    ),
    "another shape": (
        lambda s: [s[0], s[1] | {"net.0.bias": torch.zeros(7)}],
        ValueError,
        r"'net.0.bias' of shape \(7,\), and the network's is \(16,\)",
    ),
    "not finite": (
        lambda s: [s[0], s[1] | {"scale": torch.tensor(float("nan"))}],
        ValueError,
        r"chain_start\[1\] holds NaN or infinite numbers in 'scale'",
    ),
    "stacked otherwise": (
        lambda s: [{n: torch.stack([t] * 3) for n, t in s[0].items()}, s[1]],
        ValueError,
        r"chain_start\[0\] holds 3 stacked chains, and the run has 2",
    ),
}


@pytest.mark.parametrize(("change", "error", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_start_is_refused(change: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        begin(change(states(2)), 2)


def test_a_file_with_code_is_not_read(tmp_path: Path) -> None:
    torch.save(Net(), tmp_path / "module.pt")
    with pytest.raises(ValueError, match="cannot be read safely"):
        begin([tmp_path / "module.pt"], 1)


def test_a_networks_own_state_dict_fits_the_module_around_it() -> None:
    start = seeded(lambda: Plain(1)).net.state_dict()
    module = Plain(2, lr=0.0, temperature=0.0, chain_start=[start, start])
    quiet_trainer(max_steps=1).fit(module, datamodule=Data())
    with module.at_chain(1):
        assert all(torch.equal(p, start[n]) for n, p in module.net.named_parameters())
