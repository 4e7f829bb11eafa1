"""Jobs of recipes for tests, in a module that a new process imports fast."""

import time

from lightning_sgmcmc.recipes.shared.options import Options


def square(number: int, power: float, options: Options) -> float:
    """Return a power, and note that this was computed; the job 3 fails while there is a file `broken`."""
    with (options.data_root / "computed").open("a") as file:
        file.write(f"{number} ")
    if number == 3 and (options.data_root / "broken").exists():
        raise ValueError("no square today")
    return float(number**power)


def slow(number: int, options: Options) -> float:
    """Take a twentieth of a second."""
    time.sleep(0.05)
    return square(number, 2.0, options)


def computed(options: Options) -> list[int]:
    """Return the numbers of the jobs that were computed."""
    return sorted(map(int, (options.data_root / "computed").read_text().split()))
