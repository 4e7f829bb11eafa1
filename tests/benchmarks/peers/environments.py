"""The environments of the peers: one each, since their requirements need not agree, made and filled by uv."""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer:
    """A worker and what its environment holds; one without requirements runs in the driver's environment."""

    name: str
    script: str
    requirements: tuple[str, ...] = ()
    uses_torch: bool = True


PEERS = (
    Peer("reference", "worker_reference.py"),
    Peer("posteriors", "worker_posteriors.py", ("posteriors==0.1.3", "pytorch-lightning")),
    # Lightning comes with its extra "cpu"; its routines import scikit-learn and kornia, which other extras bring.
    Peer("torch-uncertainty", "worker_torch_uncertainty.py", ("torch-uncertainty[cpu,image]==0.13.0", "scikit-learn")),
    Peer("lightning-uq-box", "worker_uq_box.py", ("lightning-uq-box==0.2.0",)),
    Peer("blackjax", "worker_blackjax.py", ("blackjax==1.7.1",), uses_torch=False),
    Peer("ours", "ours.py"),
)


def default_folder() -> Path:
    """Return the folder of the environments in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lightning-sgmcmc-peers"


def prepare(peer: Peer, folder: Path) -> Path:
    """Make a peer's environment unless it is there; return its interpreter.

    Raises:
        subprocess.CalledProcessError: if uv cannot install it.
    """
    if not peer.requirements:
        return Path(sys.executable)
    environment = folder / peer.name
    interpreter = environment / "bin" / "python"
    requirements = list(peer.requirements)
    if peer.uses_torch:  # the same torch in all environments
        requirements.append("torch==" + importlib.metadata.version("torch").split("+")[0])
    stamp = environment / "requirements.txt"
    wanted = "\n".join([sys.version.split()[0], *requirements])
    if not (interpreter.exists() and stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {peer.name} ...", flush=True)
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)], check=True)
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(interpreter), *requirements], check=True)
        stamp.write_text(wanted)
    return interpreter
