"""Where the packages are: `callbacks/` and `datamodules/` lie beside the package that they are installed in.

Everything else about the distribution is in pyproject.toml, whose `packages.find` cannot express this.
"""

from setuptools import find_packages, setup

BESIDE = ("callbacks", "datamodules")

setup(
    packages=[
        *find_packages(include=["lightning_sgmcmc", "lightning_sgmcmc.*"]),
        *(f"lightning_sgmcmc.{name}" for name in BESIDE),
    ],
    package_dir={"lightning_sgmcmc": "lightning_sgmcmc"} | {f"lightning_sgmcmc.{name}": name for name in BESIDE},
)
