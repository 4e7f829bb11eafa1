"""Where the packages are: `callbacks/`, `datamodules/` and `recipes/` lie beside the package they are installed in.

Everything else about the distribution is in pyproject.toml, whose `packages.find` cannot express this.
"""

from setuptools import find_packages, setup

BESIDE = ("callbacks", "datamodules", "recipes")


def _packages_in(folder: str) -> list[str]:
    return [f"{folder}.{name}" for name in find_packages(folder)]


setup(
    packages=[
        *find_packages(include=["lightning_sgmcmc", "lightning_sgmcmc.*"]),
        *(f"lightning_sgmcmc.{name}" for beside in BESIDE for name in (beside, *_packages_in(beside))),
    ],
    package_dir={"lightning_sgmcmc": "lightning_sgmcmc"} | {f"lightning_sgmcmc.{name}": name for name in BESIDE},
)
