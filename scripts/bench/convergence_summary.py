"""The table and the picture of docs/convergence.md, made of the runs of ``convergence.py`` in docs/data.

Runs of one file have the same text and schedule. So an arm is compared with the synchronous training of its own file,
the better one of AdamW and NAdam on average over the seeds, and never with losses of another file.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

from common import Curve, Row, draw, markdown, parser_of, read_rows
from convergence import RECOMMENDED, USUAL, Arm, choose, final_loss, paces, recommended, time_of, updates_to

DOCS = Path(__file__).parents[2] / "docs"
STAGES, DEEPEST, UPDATES = (4, 8, 16), 32, 3000
ADAMW, SOAP, DEEP = "convergence", "convergence_soap", "convergence_k32"
HEAD = ["M", "optimizer", "seeds", *(f"loss, K = {stages}" for stages in (*STAGES, DEEPEST))]
HEAD += [f"time, K = {stages}" for stages in STAGES]


@dataclass(frozen=True)
class Method:
    """A line of the table, or a curve; ``size`` is M, empty for synchronous training."""

    size: str
    title: str
    file: str
    way: str  # a method of convergence.py
    longer: float = 1.0  # updates, of T

    def arm(self, stages: int) -> Arm:
        """The arm with so many stages."""
        if not self.size:
            return Arm(1, 1, self.way, UPDATES)
        size = {"1": 1, "K/2": stages // 2, "K": stages}[self.size]
        way = recommended(stages, size) if self.way == RECOMMENDED else self.way
        return Arm(stages, size, way, round(self.longer * UPDATES))


PLAIN, BY_SOAP = Method("1", "AdamW", ADAMW, "none"), Method("1", "SOAP", SOAP, "soap")
LONGER = Method("1", "AdamW, settings below, 1.3 T updates", ADAMW, RECOMMENDED, 1.3)
SYNCHRONOUS = Method("", "SOAP, synchronous", SOAP, "soap")
UNSTASHED = 'NAdam, `"weight_sync": "none"`'
LINES = [
    SYNCHRONOUS,
    Method("", "Muon, synchronous", SOAP, "muon"),
    BY_SOAP,
    LONGER,
    Method("1", "AdamW, settings below", ADAMW, RECOMMENDED),
    Method("1", "NAdam, nothing else", ADAMW, "nadam"),
    PLAIN,
    Method("1", "Muon", SOAP, "muon"),
    Method("K/2", "NAdam", SOAP, "nadam"),
    Method("K/2", UNSTASHED, SOAP, "nadam+unstashed"),
    Method("K", "NAdam", ADAMW, "nadam"),
    Method("K", UNSTASHED, SOAP, "nadam+unstashed"),
    Method("K", "AdamW", ADAMW, "none"),
]
CURVES = [Method("", "AdamW, synchronous", ADAMW, "adamw"), SYNCHRONOUS, PLAIN, LONGER, BY_SOAP]


class Results:
    """What has been trained and measured."""

    def __init__(self, data: Path) -> None:
        self._chosen = {name: choose(read_rows(data / f"{name}.jsonl")) for name in (ADAMW, SOAP, DEEP)}
        self._paces = paces(data / "throughput_96ms.jsonl")

    def level(self, file: str) -> float:
        """Loss that the better one of synchronous AdamW and NAdam ends with."""
        found = [self._chosen[file].get(Arm(1, 1, way, UPDATES)) for way in USUAL]
        return min(_mean(rows) for rows in found if rows)

    def rows(self, method: Method, stages: int) -> list[Row]:
        """Runs of a method on so many stages, a seed each."""
        return self._chosen[DEEP if stages == DEEPEST else method.file].get(method.arm(stages), [])

    def gap(self, method: Method, stages: int) -> str:
        """How much above the level it ends."""
        rows = self.rows(method, stages)
        file = DEEP if stages == DEEPEST else method.file
        return f"{100 * (_mean(rows) / self.level(file) - 1):+.1f} %" if rows else ""

    def time(self, arm: Arm, updates: float) -> float:
        """Percentage that an arm's first updates take of the time in which DeepSpeed's engine makes T."""
        if arm.stages == 1:
            return 100 * updates / UPDATES
        return 100 * time_of(arm, updates, UPDATES, self._paces[arm.stages, arm.micro_batches])

    def time_to_level(self, method: Method, stages: int) -> str:
        """Mean time after which runs come down to the level, else how many do."""
        rows, arm = self.rows(method, stages), method.arm(stages)
        if not rows or (arm.stages > 1 and (stages, arm.micro_batches) not in self._paces):
            return ""
        found = [at for at in (updates_to(row, self.level(method.file)) for row in rows) if at is not None]
        every = len(found) == len(rows)
        return (
            f"{statistics.mean(self.time(arm, at) for at in found):.0f} %" if every else f"{len(found)} of {len(rows)}"
        )

    def table(self) -> str:
        """A line per method."""
        lines = []
        for method in LINES:
            seeds = sorted({len(rows) for stages in (*STAGES, DEEPEST) if (rows := self.rows(method, stages))})
            counts = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
            losses = [self.gap(method, stages) for stages in (*STAGES, DEEPEST)]
            times = [self.time_to_level(method, stages) for stages in STAGES]
            lines.append([method.size, method.title, counts, *losses, *times])
        return markdown(HEAD, lines)

    def panels(self) -> dict[str, list[Curve]]:
        """Loss, of the level, over time, a panel per number of stages."""
        found: dict[str, list[Curve]] = {}
        for stages in STAGES:
            curves = found[f"{stages} stages, M = 1"] = []
            for method in CURVES:
                level, arm = self.level(method.file), method.arm(stages)
                seeds = zip(*(row["curve"] for row in self.rows(method, stages)), strict=True)
                means = [(each[0][0], statistics.mean(loss for _, loss in each)) for each in seeds]
                points = [(self.time(arm, at), loss / level) for at, loss in means]
                curves.append(Curve(method.title, points, bold=method is BY_SOAP, dashed=not method.size))
        return found


def _mean(rows: list[Row]) -> float:
    return statistics.mean(map(final_loss, rows))


parser = parser_of(__doc__)
parser.add_argument("--plot", type=Path, default=DOCS / "images" / "convergence.svg")
parse = parser.parse_args


def main() -> None:
    """Print the table and draw."""
    plot, results = parse().plot, Results(DOCS / "data")
    print(results.table())
    plot.parent.mkdir(parents=True, exist_ok=True)
    draw(plot, results.panels(), "time, % of DeepSpeed's", "validation loss / synchronous end")


if __name__ == "__main__":
    main()
