"""The plan of a run: what it reaches and costs, and what it is called, before its first step.

`recursion.py` has the exact second moments of linear sampler steps, `plan.py` the result.
"""

from lightning_sgmcmc.planning.plan import WANTED, PlanInputs, RunKind, RunPlan, TensorPlan, make_plan
from lightning_sgmcmc.planning.reach import Blocks, ChainControls, Reached, TensorFacts, blocks_of, linear_rule, reach
from lightning_sgmcmc.planning.recursion import LinearRule, StageMoments, draws_of_mean, stage_moments

__all__ = [
    "WANTED",
    "Blocks",
    "ChainControls",
    "LinearRule",
    "PlanInputs",
    "Reached",
    "RunKind",
    "RunPlan",
    "StageMoments",
    "TensorFacts",
    "TensorPlan",
    "blocks_of",
    "draws_of_mean",
    "linear_rule",
    "make_plan",
    "reach",
    "stage_moments",
]
