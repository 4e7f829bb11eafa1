"""Default generators of any accelerator are seeded, kept and restored, here of modules that stand in for torch's."""

from typing import Any

import pytest
import torch

from lightning_sgmcmc import seeding


class Module:
    """What `torch.mps` and `torch.xpu` offer; Apple's functions take no device."""

    def __init__(self, takes_device: bool, has_generators: bool) -> None:
        self.generator = torch.Generator()
        self.default_generators = (self.generator,) if has_generators else ()
        self.takes_device = takes_device

    def current_device(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        assert len(device) <= self.takes_device
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, *device: Any) -> None:
        assert len(device) <= self.takes_device
        self.generator.set_state(state)


@pytest.mark.parametrize(
    ("name", "module"),
    [("mps", Module(False, False)), ("xpu", Module(True, True)), ("cuda", Module(True, True)), ("cpu", None)],
)
@pytest.mark.parametrize("kept", [seeding.unchanged_generators, seeding.unchanged_torch_generators])
def test_draws_on_a_device_are_taken_back(kept: Any, name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.default_generator if module is None else module.generator
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device(name, 0)
    seeding.reseed(3, device)
    first = torch.rand(2, generator=own)
    with kept([device]):
        second = torch.rand(2, generator=own)
        seeding.reseed(3, device)
        assert torch.equal(torch.rand(2, generator=own), first)
    assert torch.equal(torch.rand(2, generator=own), second)
