"""The ``"replan"`` object of the ``"vpipe"`` block: a pipeline that balances itself while it trains."""

from typing import Literal

from ds_vpipe.config.keys import Settings, key


class Replan(Settings):
    """Times of checks of a pipeline's balance, and what follows."""

    every: int = key(
        0,
        "an int >= 0",
        "Updates between two checks of the balance; 0: never. At a check all ranks compare the same measurements and "
        "come to the same decision.",
        50,
        ge=0,
    )
    moves: Literal["live", "drain"] = key(
        "drain",
        '"live" or "drain"',
        "Way in which layers move: `drain` moves all of them at once in memory while nothing is in flight, for which "
        "micro-batches in flight are withdrawn and run again; "
        "`live` moves one after the other to a neighbouring stage while training goes on. What cannot move live moves "
        "in an empty pipeline, and a line says why.",
        "live",
    )
    threshold: float = key(
        0.03,
        "a number >= 0",
        "Layers move only if the planner expects more than this share of the time per micro-batch to be saved.",
        0.03,
        ge=0,
        allow_inf_nan=False,
    )
    max_staleness: int | None = key(
        None,
        "an int >= 1",
        "Updates by which a gradient may be late at most with depths that follow the times of passes "
        '(`"stage_to_depth_map": "auto"`). Default: those by which it is late at the start.',
        3,
        ge=1,
    )
    dry_run: bool = key(False, "true or false", "Log decisions only.", True)
