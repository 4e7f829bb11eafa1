"""Checks of a sampler's arguments, and saved states."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_names, check_number, is_of_library, names_of

LARGEST_COUNT = 2**62
OF_THE_FIT = ("initial_lr", "name")
"""Entries of a group that only some fits have: a learning rate schedule's, and the pattern of its parameters."""
OF_ALL_GROUPS = ("num_data", "num_chains", "seed", "first_chain", "noise_ahead")
"""Arguments that hold for all groups of a sampler."""


def check_parameters(parameters: Sequence[Tensor], num_chains: int) -> None:
    """Raise for parameters that a sampler cannot update."""
    dtypes = {p.dtype for p in parameters}
    if dtypes & {torch.float16, torch.bfloat16}:
        raise ValueError(
            "parameters in half precision lose the injected noise to rounding: keep them in float32 (network.float(), "
            "or from_pretrained(…, dtype=torch.float32)) and use Trainer(precision='bf16-mixed') or '16-mixed' instead "
            "of 'bf16-true' or '16-true'"
        )
    if any(dtype.is_complex for dtype in dtypes):
        raise ValueError(
            f"parameters must be real numbers, got {sorted(map(str, dtypes))}: keep a complex one as two real numbers "
            "each (torch.view_as_real), and use torch.view_as_complex(self.weight) in forward"
        )
    if not dtypes <= {torch.float32, torch.float64} or len(dtypes) > 1:
        raise ValueError(f"parameters must all be float32 or all float64, got {sorted(map(str, dtypes))}")
    if len({p.device for p in parameters}) > 1:
        raise ValueError("parameters must all be on one device")
    if num_chains > 1 and any(p.dim() == 0 or p.shape[0] != num_chains for p in parameters):
        raise ValueError(f"with num_chains={num_chains} every parameter needs a leading axis of that size")


def check_group(rule: type, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for a parameter group with a wrong step size or temperature, or with an option that nothing reads."""
    for name in ("lr", "temperature"):
        value = group.get(name, defaults[name])
        if not isinstance(value, Tensor):
            check_number(name, value, optional=False)
    if of_all := [name for name in OF_ALL_GROUPS if name in group]:
        raise TypeError(f"{of_all[0]} is one for all groups of parameters: pass {rule.__name__}(…, {of_all[0]}=…)")
    if is_of_library(rule):  # a user's rule may read any
        known = [name for name in names_of(rule) if name not in OF_ALL_GROUPS]
        known += ["gradient_multiplier", "param_names", *OF_THE_FIT]
        check_names(f"a parameter group of {rule.__name__}", group, known)


def check_options(rule: type, options: Mapping[str, Any], num_data: int | None) -> None:
    """Raise for a group's options with which the rule cannot be constructed, as if they were those of all groups."""
    if is_of_library(rule):  # a user's rule may take others
        names = [name for name in names_of(rule) if name in options and name not in ("params", *OF_ALL_GROUPS)]
        taken = {name: options[name] for name in names if not isinstance(options[name], Tensor)}
        rule([torch.nn.Parameter(torch.zeros(1))], **taken, num_data=num_data, noise_ahead=False)


def checked_state(
    state: Mapping[str, Any], rule: str, num_chains: int, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the sampler's own part of a saved state."""
    if "sampler" not in state:
        raise ValueError(
            "this state is not a sampler's: it has no step counter and no noise generators, so "
            f"{rule} cannot continue from it"
        )
    _check_form(state, rule, groups)
    saved: dict[str, Any] = state["sampler"]
    if saved["rule"] != rule:
        raise ValueError(f"this state is a {saved['rule']}'s, so {rule} cannot continue from it")
    if saved["num_chains"] != num_chains:
        raise ValueError(f"the saved sampler has {saved['num_chains']} chains, this one has {num_chains}")
    theirs, ours = ([group.get("name") for group in each] for each in (state["param_groups"], groups))
    if theirs != ours:
        raise ValueError(
            f"the saved state's groups of parameters are {theirs}, this sampler's are {ours}: pass lr with the same "
            "name patterns, in the same order"
        )
    return saved


def _check_form(state: Mapping[str, Any], rule: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless a saved state's entries have the types of a sampler's."""
    own, their_groups = state["sampler"], state.get("param_groups")
    noise = own.get("noise") if isinstance(own, dict) else None
    generators = noise.get("generators") if isinstance(noise, dict) else None
    wrong = ""
    if not isinstance(own, dict) or not all(isinstance(own.get(name), int) for name in ("num_chains", "step_count")):
        wrong = "its counts"
    elif not isinstance(own.get("rule"), str) or not 0 <= own["step_count"] < LARGEST_COUNT:
        wrong = "its rule or its number of steps"
    elif not isinstance(generators, list) or not all(_is_generator(value) for value in generators):
        wrong = "the state of its noise"
    elif not isinstance(their_groups, list) or not all(isinstance(group, dict) for group in their_groups):
        wrong = "its groups of parameters"
    elif own["rule"] == rule:
        for theirs, ours in zip(their_groups, groups, strict=False):
            missing = [n for n in ours if n not in theirs and n not in OF_THE_FIT]
            names = [n for n, value in ours.items() if n != "params" and isinstance(value, int | float | Tensor)]
            odd = [n for n in names if n in theirs and not isinstance(theirs[n], int | float | Tensor)]
            wrong = f"{odd[0]}={str(theirs[odd[0]])[:40]!r}" if odd else missing[0] if missing else ""
            if wrong:
                break
    if wrong:
        raise ValueError(f"the saved state of the sampler is damaged in {wrong}: resume from another checkpoint")


def _is_generator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def torch_state(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return torch's part of a saved state, with the groups' tensors moved to the parameters' devices, as torch does
    not."""
    devices = [group["params"][0].device for group in groups]
    moved = [
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in group.items()}
        for group, device in zip(state["param_groups"], devices, strict=True)
    ]
    return {key: value for key, value in state.items() if key != "sampler"} | {"param_groups": moved}
