"""Contextual bandit on UCI Mushroom: Thompson sampling by pSGLD, pCSGLD and pICSGLD (ICSGLD, Figure 4).

An agent sees 20 mushrooms a round and eats or leaves each. An edible one yields 5, a poisonous one -35 or 5 with even
odds, leaving yields 0. A network with two layers of 100 predicts both rewards from the 117 one-hot attributes (the
paper states 22 inputs). The agent takes the action with the larger prediction. The table has the cumulative regret of
these decisions: the oracle's expected reward less that of the action. Random actions cost 4.91 each. The first 1,024
random pulls (quick: 256) are not counted.

Outcomes go into a `StreamDataModule` of 4,096 data. An epoch is a round, and a run is one fit of 4 chains, each with
batches of its own. N is the number of data in the buffer, so the posterior is that of the last 4,096 outcomes. The
authors' program multiplies the mean loss by 4,096 also while the buffer holds fewer; from round 154 on both agree.

`full` is the paper's setting: 2,000 rounds of 16 steps (64 for the single chain of pCSGLD), batch 512, 5 runs, step
sizes and temperatures of Table 2, weight decay 0.01, m = 100, Δu = 10, ζ = 20, ω = 0.03 (pCSGLD: 0.006). The paper's ε
is lr = 4096·ε for SGD. With RMSprop it is lr = 512·ε and λ = 0.001·512/4096, since the program's preconditioner
averages the gradient of the sum divided by the batch size. As in the program the energy is the data's alone, the
contour begins after a tenth of the run, and predictions are weighted by π(J)^ζ + 0.001. EpsGreedy has RMSprop as in
Table 2; the program's commands have plain SGD. `quick` has 200 rounds of 8 steps, batch 64, a buffer of 1,024, and step
sizes 10 times as large with RMSprop and twice without (at 10 times SGD diverges).

The paper's agents are greedy for the average of 4 networks. "one chain decides" is ours: Thompson sampling, where a
random chain decides about each mushroom. Dropout averages 5 random networks of each chain. The paper's curves
(Figure 4) have this order: pICSGLD lowest, pCSGLD slightly below pSGLD, ConstSGD and Dropout clearly above, EpsGreedy.

Measured (quick, seed 0, ± standard error over 5 runs): cumulative regret pICSGLD 1105 ± 120, pSGLD 1119 ± 120, pCSGLD
1130 ± 150, pSGLD with one chain that decides 1159 ± 86, EpsGreedy 1254 ± 150, Dropout 1295 ± 57, ConstSGD 1306 ± 100;
random actions 19,600. In pairs of runs, pICSGLD has 14 ± 25 less than pSGLD and 25 ± 90 less than pCSGLD, and pSGLD
187 ± 86 less than ConstSGD: with 4 degrees of freedom none is significant. pICSGLD is lowest, as in the paper, but
EpsGreedy, RMSprop without noise, is not the worst. Energies lie above the last edge of 990 nats, where κ = 1, until the
random pulls have left the buffer (round 50 to 75), and two thirds of the regret arise before. Later κ hardly differs
from 1 either (by 0.03 in the mean over a run, pCSGLD 0.08). The contour acted little: this is no evidence for it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, ContourRules, DecayingStepSize, GaussianPrior
from lightning_sgmcmc.callbacks import ContourGradient
from lightning_sgmcmc.datamodules import MushroomDataModule, StreamDataModule
from lightning_sgmcmc.figures.canvas import legend_below, panels, save_figure, series
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.figures import INTERVAL, draw_band
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.records import Recording
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, resumed_fit, silence_lightning
from lightning_sgmcmc.samplers import SGLD, pSGLD
from lightning_sgmcmc.seeding import derive_seed

EAT, HIDDEN = 1, 100
GAIN, LOSS = 5.0, -35.0
PRIOR_STD, TEMPERATURE = 0.01**-0.5, 0.3
ALPHA, REGULARISER = 0.99, 1e-3
ZETA, BINS, WIDTH = 20.0, 100, 10.0
LEAST_WEIGHT = 1e-3
PAPER_BATCH, PAPER_DATA = 512, 4096


@dataclass(frozen=True)
class Settings:
    """Settings that differ between quick and full.

    Attributes:
        first: random pulls before the first round.
        capacity: data that the buffer holds.
        batch: data per batch.
        observations: mushrooms of a round.
        steps: steps of each chain in a round; four times as many for a single chain.
        rounds: rounds of a run.
        repeats: runs of each agent.
        faster: factors of the step sizes without and with a preconditioner.
    """

    first: int
    capacity: int
    batch: int
    observations: int
    steps: int
    rounds: int
    repeats: int
    faster: tuple[float, float]

    @property
    def work(self) -> float:
        """The steps of all runs of an agent, where a batch of 64 costs little more than a step."""
        return self.repeats * self.rounds * self.steps * (1 + self.batch / 256)


@dataclass(frozen=True)
class Agent:
    """How an agent learns and acts.

    Attributes:
        step: the paper's ε, of the sum of all data.
        temperature: τ.
        preconditioned: pSGLD instead of SGLD.
        omega: step size of the contour's learning, None without a contour.
        chains: chains that learn; the average of their predictions decides.
        dropout: probability.
        epsilon: probability of a random action.
        decay: factor of the step size each round.
        draws_chain: a random chain decides instead of the average, for each mushroom its own.
    """

    step: float
    temperature: float = 0.0
    preconditioned: bool = False
    omega: float | None = None
    chains: int = 4
    dropout: float = 0.0
    epsilon: float = 0.0
    decay: float = 1.0
    draws_chain: bool = False


AGENTS = {
    "EpsGreedy x P4": Agent(5e-7, preconditioned=True, epsilon=0.003, decay=0.999),
    "ConstSGD x P4": Agent(1e-6),
    "Dropout x P4": Agent(1e-6, dropout=0.5),
    "pCSGLD x T4": Agent(5e-8, TEMPERATURE, preconditioned=True, omega=0.006, chains=1),
    "pSGLD x P4": Agent(3e-7, TEMPERATURE, preconditioned=True),
    "pICSGLD x P4": Agent(3e-7, TEMPERATURE, preconditioned=True, omega=0.03),
    "pSGLD x P4, one chain decides": Agent(3e-7, TEMPERATURE, preconditioned=True, draws_chain=True),
}


PAIRS = (("pICSGLD x P4", "pSGLD x P4"), ("pICSGLD x P4", "pCSGLD x T4"), ("pSGLD x P4", "ConstSGD x P4"))


class Outcome(NamedTuple):
    """A run of an agent.

    Attributes:
        regret: cumulative expected regret after each round, shape (rounds,).
        multiplier: mean |κ - 1| of each round, shape (rounds,).
        energy: N times the squared error at each round's last step, mean over chains, shape (rounds,).
    """

    regret: Tensor
    multiplier: Tensor
    energy: Tensor


class RewardModel(BayesianModule):
    """A network that predicts the rewards of leaving and of eating a mushroom.

    A batch is (x, outcome), with the action and its reward in the outcome's columns.
    """

    def log_likelihood(self, batch: Any) -> Tensor:
        x, outcome = batch
        predicted = self(x).gather(1, outcome[:, :1].long())
        # A Gaussian of variance 1/2 without its constant, which would only move the energy bins.
        return -(predicted - outcome[:, 1:]).square().squeeze(1)


class Player(Recording, pl.Callback):
    """Eats or leaves the mushrooms of each round, and appends the outcomes to the stream.

    Args:
        agent: how it acts.
        setting: mushrooms of a round.
        inputs: all mushrooms, shape (n, d).
        edible: whether each is edible, shape (n,).
        seed: of mushrooms, rewards and random actions.
    """

    recorded = ("regrets", "multipliers", "energies", "_kappa", "generator")

    def __init__(self, agent: Agent, setting: Settings, inputs: Tensor, edible: Tensor, seed: int) -> None:
        self.agent, self.setting = agent, setting
        self.inputs, self.edible = inputs, edible
        self.generator = torch.Generator().manual_seed(derive_seed(seed, "mushrooms"))
        self.regrets: list[float] = []
        self.multipliers: list[float] = []
        self.energies: list[float] = []
        self._kappa: list[Tensor] = []

    def begin(self, stream: StreamDataModule) -> None:
        """Eat or leave the first mushrooms at random."""
        chosen = self._draw(self.setting.first)
        actions = torch.randint(2, (self.setting.first,), generator=self.generator)
        stream.append(self.inputs[chosen], self._outcome(chosen, actions))

    def _draw(self, count: int) -> Tensor:
        return torch.randint(len(self.inputs), (count,), generator=self.generator)

    def _outcome(self, chosen: Tensor, actions: Tensor) -> Tensor:
        """Return the actions and their rewards."""
        lucky = torch.rand(len(chosen), generator=self.generator) < 0.5
        eaten = torch.where(self.edible[chosen] | lucky, GAIN, LOSS)
        return torch.stack([actions.float(), torch.where(actions == EAT, eaten, 0.0)], 1)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        chosen = self._draw(self.setting.observations)
        actions = self._act(pl_module, self.inputs[chosen])
        stream: Any = trainer.datamodule  # type: ignore[attr-defined]
        stream.append(self.inputs[chosen], self._outcome(chosen, actions))
        self.regrets.append(expected_regret(actions, self.edible[chosen]))
        decayed = self.agent.decay**trainer.current_epoch
        pl_module.sampler.set_control("lr", step_size(self.agent, self.setting) * decayed)

    @torch.no_grad()
    def _act(self, module: Any, x: Tensor) -> Tensor:
        """Return the actions of the largest predicted reward, and random ones with probability ε."""
        agent, predictions = self.agent, []
        copies = 5 if agent.dropout else 1
        for chain in range(module.num_chains):
            with module.at_chain(chain):
                predictions.append(module(x.repeat(copies, 1)).unflatten(0, (copies, -1)).mean(0))
        rewards = torch.stack(predictions)
        if agent.draws_chain:
            chains = torch.randint(len(rewards), (len(x),), generator=self.generator)
            best = rewards[chains, torch.arange(len(x))].argmax(-1)
        else:
            weights = module.chains.tags.log_weight.exp() + LEAST_WEIGHT
            best = torch.einsum("c,cna->na", (weights / weights.sum()).float(), rewards).argmax(-1)
        explore = torch.rand(len(x), generator=self.generator) < agent.epsilon
        return torch.where(explore, torch.randint(2, (len(x),), generator=self.generator), best)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        kappa = pl_module.sampler.param_groups[0]["gradient_multiplier"]
        self._kappa.append(torch.as_tensor(kappa, dtype=torch.float64).sub(1).abs().mean())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        observed = pl_module.chains.observed
        self.energies.append(float((observed.energy + observed.log_prior).mean()))
        self.multipliers.append(float(torch.stack(self._kappa).mean()))
        self._kappa = []

    def outcome(self) -> Outcome:
        """Return the run's record."""
        return Outcome(
            torch.tensor(self.regrets).cumsum(0), torch.tensor(self.multipliers), torch.tensor(self.energies)
        )


def expected_regret(actions: Tensor, edible: Tensor) -> float:
    """Return the oracle's expected reward (5 for an edible mushroom, 0 for a poisonous one) less the actions'."""
    gain = torch.where(edible, GAIN, (GAIN + LOSS) / 2)
    return float((gain.clamp(min=0) - gain * (actions == EAT)).sum())


def step_size(agent: Agent, setting: Settings) -> float:
    """Return ε in units of the mean potential; with a preconditioner the program's gradient is N/batch of ours."""
    scale = PAPER_BATCH if agent.preconditioned else PAPER_DATA
    return agent.step * scale * setting.faster[agent.preconditioned]


def network(inputs: int, dropout: float) -> nn.Sequential:
    """Return the paper's network: two hidden layers of 100 and a reward for each action."""
    layers: list[nn.Module] = []
    for width in (inputs, HIDDEN):
        layers += [nn.Linear(width, HIDDEN), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 2))


def run(options: Options) -> list[Row]:
    """Run all agents, return the table."""
    setting = read_settings(Settings, options)
    require(MushroomDataModule(options.data_root))
    agents, repeats = options.chosen(AGENTS), options.repeated(setting.repeats)
    jobs = [(name, repeat) for name in agents for repeat in repeats]
    jobs.sort(key=lambda job: AGENTS[job[0]].chains)  # the longest first
    found = run_jobs(one, jobs, options, setting)
    return report({name: [found[name, repeat] for repeat in repeats] for name in agents}, options)


def report(outcomes: dict[str, list[Outcome]], options: Options) -> list[Row]:
    """Draw the regrets, return the table."""
    save_figure(picture(outcomes), options.out / "regret.png")
    ends = {name: [float(one.regret[-1]) for one in runs] for name, runs in outcomes.items()}
    rows = [mean_row(name, "cumulative regret", values) for name, values in ends.items()]
    for name, runs in outcomes.items():
        half = len(runs[0].regret) // 2
        late = [float(one.regret[-1] - one.regret[half - 1]) for one in runs]
        rows.append(mean_row(name, "regret in the second half", late))
    for better, worse in (pair for pair in PAIRS if set(pair) <= set(ends)):
        differences = [a - b for a, b in zip(ends[better], ends[worse], strict=True)]
        rows.append(mean_row(f"{better} - {worse}", "cumulative regret", differences))
    for name in (name for name in outcomes if AGENTS[name].omega is not None):
        distances = [float(one.multiplier.mean()) for one in outcomes[name]]
        rows.append(mean_row(name, "mean distance of κ from 1", distances))
    return rows


def picture(outcomes: dict[str, list[Outcome]]) -> Any:
    """Draw each agent's mean regret over runs with a band of its 95 % interval, and the energies."""
    figure, axes = panels(1, 2, 7.5, 3.6)
    for index, (name, runs) in enumerate(outcomes.items()):
        regret = torch.stack([one.regret for one in runs])
        draw_band(axes[0, 0], range(1, regret.shape[1] + 1), regret, index, name)
        middle = torch.stack([one.energy for one in runs]).median(0).values
        axes[0, 1].semilogy(range(1, len(middle) + 1), middle, **series(index, len(middle)))
    axes[0, 1].axhline(WIDTH * (BINS - 1), color="black", linestyle=":")
    axes[0, 0].set_ylabel(f"cumulative regret\n{INTERVAL}")
    axes[0, 1].set_ylabel("energy (nats); dotted: last edge")
    for panel in axes[0]:
        panel.set_xlabel("round")
    legend_below(figure, axes[0, 0])
    return figure


def one(name: str, repeat: int, setting: Settings, options: Options) -> Outcome:
    """Run an agent once."""
    silence_lightning()
    seed = options.seed + repeat
    pl.seed_everything(seed, verbose=False)
    agent = AGENTS[name]
    inputs, edible = MushroomDataModule(options.data_root).table()
    steps = setting.steps * (4 if agent.chains == 1 else 1)
    stream = StreamDataModule(setting.batch, steps, setting.capacity)
    player = Player(agent, setting, inputs, edible, seed)
    player.begin(stream)
    adaptive = partial(pSGLD, alpha=ALPHA, eps=REGULARISER * PAPER_BATCH / PAPER_DATA)
    module = RewardModel(
        net=network(inputs.shape[1], agent.dropout),
        prior=GaussianPrior(PRIOR_STD),
        sampler=adaptive if agent.preconditioned else SGLD,
        lr=step_size(agent, setting),
        temperature=agent.temperature,
        num_chains=agent.chains,
    )
    learned = [contour(agent, steps * setting.rounds // 10)] if agent.omega is not None else []
    trainer = quiet_trainer(accelerator="cpu", max_epochs=setting.rounds, callbacks=[player, *learned])
    resumed_fit(trainer, module, stream)
    return player.outcome()


def contour(agent: Agent, warm_up_steps: int) -> ContourGradient:
    """Return the paper's contour: bins of 10 nats from 0, a constant ω."""
    return ContourGradient(
        ContourRules(ZETA, scheme="scalable", weighting="bin"),
        BINS,
        first_edge=WIDTH,
        width=WIDTH,
        step_size=DecayingStepSize(agent.omega or 0.0, exponent=0, offset=0),
        warm_up_steps=warm_up_steps,
        include_prior=False,
        interacting=agent.chains > 1,
    )
