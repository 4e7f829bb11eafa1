"""How the samplers' benchmark talks to a peer: lines of JSON on stdin and stdout, arrays in files. NumPy only.

A peer keeps its chains between two blocks of steps, so that blocks of ours and of the peers can take turns.
"""

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

INNER_STEPS = 8
"""Steps of blackjax's SGHMC between two draws of its momenta, near its default of 10; divides what is kept."""


@dataclass(frozen=True)
class Case:
    """A sampler on a problem, in the units of the potential U: both peers take its gradient at a temperature of 1.

    Attributes:
        problem: "Gaussian" or "linear regression".
        sampler: our name of it.
        step: ε of SGLD, θ ← θ - ε·∇U + √(2ε)·ξ, or h² of a sampler with a momentum, with the time step h.
        friction: η, the share of its momentum that a step takes; a peer's friction α per unit of time is η/h.
        batch: data in a batch of the regression.
        seed: of the peer's numbers.
        arrays: path of the problem's arrays (`.npz`).
    """

    problem: str
    sampler: str
    step: float
    friction: float
    batch: int
    seed: int
    arrays: str


Block = Callable[[int, int], NDArray[Any]]
"""Takes so many steps and returns the places (S, C, d) after each few."""


def serve(packages: Sequence[str], makers: Mapping[str, Callable[[Case, Any], Block]]) -> None:
    """Answer requests until stdin ends. Whatever a library prints goes to stderr.

    Args:
        packages: distributions whose versions the results name.
        makers: by our name of a sampler: what starts its chains from a case and its arrays.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    block: Block | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if request["do"] == "describe":
                answer["versions"] = {name: importlib.metadata.version(name) for name in packages}
                answer["samplers"] = list(makers)
            elif request["do"] == "start":
                case = Case(**request["case"])
                block = makers[case.sampler](case, np.load(case.arrays))
            else:
                assert block is not None
                start = time.process_time()
                places = block(request["steps"], request["every"])
                answer["seconds"] = time.process_time() - start
                np.save(request["file"], places)
        except Exception as error:  # the driver shows it in the row's place
            traceback.print_exc()
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)
