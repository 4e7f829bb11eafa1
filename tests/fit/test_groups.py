"""gloo that cannot connect the ranks: the message names the variable that says by which network it goes."""

import os
import subprocess
import sys
import textwrap

import pytest

from lightning_sgmcmc.chains.layout import naming_the_network
from tests.support.paths import REPOSITORY

SCRIPT = """
    import torch.distributed as dist
    from lightning_sgmcmc.chains.layout import new_group

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)  # stands in for NCCL
    new_group(None, None, backend="gloo")
"""


@pytest.mark.slow
def test_a_wrong_interface_is_named() -> None:
    """Before: "Unable to find address for: no_such_network", or connectFullMesh and SO_ERROR between nodes."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "no_such_network", "PYTHONPATH": str(REPOSITORY)}
    setup = "import torch.testing._internal.distributed.fake_pg"
    command = [sys.executable, "-c", setup + textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    for word in ("GLOO_SOCKET_IFNAME='no_such_network'", "interface that all nodes reach", "MASTER_ADDR"):
        assert word in said, done.stderr[-2000:]


@pytest.mark.parametrize(
    "error",
    [
        "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "connect [127.0.1.1]:29381: Connection refused, SO_ERROR: Connection refused",
        "Unable to resolve hostname to a (local) address",
    ],
)
def test_gloos_own_words_are_known(error: str) -> None:
    with pytest.raises(RuntimeError, match="set GLOO_SOCKET_IFNAME"), naming_the_network():
        raise RuntimeError(error)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^the user's own mistake$"), naming_the_network():
        raise RuntimeError("the user's own mistake")
