"""A step size from short runs: `propose_lr`, which `sgmcmc tune` calls.

Three things limit the step of a stochastic-gradient sampler. The exploration stages of a cyclical schedule run at the
full lr without noise, and must train. The mini-batch noise of the gradient adds lr·N·Var(g)/(2·η·τ) of the target's
temperature (η the friction, 1 for SGLD), which falls with the batch size. The finite step adds about lr·λ/(4 - 2η) of
it, with λ the curvature of the mean potential. All three appear within a few relaxation times of the sharp directions,
so short runs find them. They cannot find how long a chain needs to spread over the flat directions, N·(prior
variance)/lr steps.

MCLMC's momenta have a constant length, so nothing heats it. The variance of the energy error of its steps limits it.

`lightning_sgmcmc.tune.runs` shortens a run's schedule, `probes` finds a warmed-up state and judges step sizes from
there, and `proposal` chooses among them; `propose` does it all, and solves for the step size of MCLMC.
"""

from lightning_sgmcmc.tune.proposal import Limit, Probe, StepProposal
from lightning_sgmcmc.tune.propose import MIN_STEPS, propose_lr

__all__ = ["MIN_STEPS", "Limit", "Probe", "StepProposal", "propose_lr"]
