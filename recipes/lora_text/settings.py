"""The settings of the recipe."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings of `lora_text.yaml`.

    Attributes:
        vocabulary, width, layers: of the network.
        length: words of a paragraph that are read.
        rank: of the adapters.
        trunk, train, test: paragraphs of each class.
        batch: paragraphs per batch.
        chains: of the samplers, and networks of the average.
        lr, sampler_lr, temperature: step size of AdamW and of SGHMC, and τ.
        trunk_steps, steps: of the trunk, and of each chain.
        samples: of each chain.
        rounds, timed: of the measured costs, and steps of each.
    """

    vocabulary: int
    width: int
    layers: int
    length: int
    rank: int
    trunk: int
    train: int
    test: int
    batch: int
    chains: int
    lr: float
    sampler_lr: float
    temperature: float
    trunk_steps: int
    steps: int
    samples: int
    rounds: int
    timed: int

    @property
    def work(self) -> float:
        """The steps of all fits, those of the trunk and of several chains counting several times."""
        return float(4 * self.trunk_steps + 3 * self.chains * self.steps + 4 * (self.rounds + 1) * (self.timed + 8))
