"""The plan of a run: what it reaches and costs, and what it is called, before its first step.

`recursion.py` has the exact second moments of linear sampler steps, `plan.py` the result.
"""

from lightning_sgmcmc.planning.controls import Blocks, ChainControls, blocks_of
from lightning_sgmcmc.planning.kind import WANTED, RunKind
from lightning_sgmcmc.planning.make import PlanInputs, make_plan
from lightning_sgmcmc.planning.plan import RunPlan, TensorPlan
from lightning_sgmcmc.planning.reach import Reached, TensorFacts, reach
from lightning_sgmcmc.planning.recursion import LinearRule, StageMoments, draws_of_mean, stage_moments
from lightning_sgmcmc.planning.rules import linear_rule

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
