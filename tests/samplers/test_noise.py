"""The injected noise: streams by (seed, chain), the same bits whether drawn ahead or not."""

import warnings

import pytest
import torch

from lightning_sgmcmc.samplers import noise
from lightning_sgmcmc.samplers.noise import ChainNoise


def parameters(chains: int = 1) -> list[torch.Tensor]:
    shapes = ((7, 5), (5,), ())
    return [torch.zeros(shape if chains == 1 else (chains, *shape)) for shape in shapes]


def flat(views: list[torch.Tensor], chain: int | None = None) -> torch.Tensor:
    return torch.cat([(v if chain is None else v[chain]).flatten() for v in views]).clone()


@pytest.mark.parametrize("ahead", [False, True])
def test_drawing_ahead_changes_no_bit_and_survives_a_save_anywhere(ahead: bool) -> None:
    inline, other = (ChainNoise(parameters(), 1, seed=3, ahead=flag) for flag in (False, ahead))
    for step in range(12):
        assert torch.equal(flat(inline.draw()), flat(other.draw()))
        other.draw_ahead()
        if step % 3 == 0:
            state = other.state_dict(step)
            other = ChainNoise(parameters(), 1, seed=0, ahead=ahead)
            other.load_state_dict(state)


def test_a_chain_has_its_stream_wherever_it_runs() -> None:
    together = ChainNoise(parameters(3), 3, seed=5)
    alone = [ChainNoise(parameters(), 1, seed=5, first_chain=chain) for chain in range(3)]
    for _ in range(3):
        views = together.draw()
        for chain in range(3):
            assert torch.equal(flat(views, chain), flat(alone[chain].draw()))
    assert not torch.equal(flat(alone[0].draw()), flat(alone[1].draw()))


def test_another_gpu_is_named_on_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers differ by the multiprocessors, so the stream goes on with other bits; before, without a word."""
    earlier = ChainNoise(parameters(), 1, seed=3)
    earlier.draw()
    saved = earlier.state_dict(1) | {"model": "Tesla T4 with 40 multiprocessors"}
    monkeypatch.setattr(noise, "device_text", lambda device: "NVIDIA H100 with 132 multiprocessors")
    resumed = ChainNoise(parameters(), 1, seed=3)
    resumed.load_state_dict(saved)
    with pytest.warns(UserWarning, match="Tesla T4 with 40 .*H100 with 132 .*bit-identical"):
        resumed.draw()
    saved["model"] = "NVIDIA H100 with 132 multiprocessors"
    resumed.load_state_dict(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.draw()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_a_step_are_pieces_of_one_long_call(dtype: torch.dtype) -> None:
    """Multiples of 16 keep torch's numbers on a CPU, if the last piece has 16 at least."""
    for count in (64, 65, 79, 80, 81, 95, 96, 1000):
        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        whole = torch.empty(count, dtype=dtype).normal_(generator=generators[0])
        pieces = torch.empty(count, dtype=dtype)
        start = 0
        while start < count:
            stop = start + 48 if count - start - 48 >= noise.TOGETHER else count
            pieces[start:stop].normal_(generator=generators[1])
            start = stop
        assert torch.equal(whole, pieces)
        assert torch.equal(*(generator.get_state() for generator in generators))


def test_noise_is_standard_normal() -> None:
    """Mean and variance of 400,000 numbers within 5 standard errors: a false alarm has probability 1e-6."""
    views = ChainNoise([torch.zeros(400_000)], 1, seed=0, ahead=True).draw()
    assert abs(views[0].mean().item()) < 5 / 400_000**0.5
    assert abs(views[0].var().item() - 1) < 5 * (2 / 400_000) ** 0.5
