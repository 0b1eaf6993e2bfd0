"""One line of a result, and how lines become a table."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Target:
    """What the project asks of a row. `lower_is_better` rows are times, the others are ratios."""

    must: float
    aim: float | None
    unit: str = "x"
    lower_is_better: bool = False

    def __str__(self) -> str:
        gap = "" if self.unit == "x" else " "
        marks = [self.must] if self.aim is None else [self.must, self.aim]
        return " / ".join(f"{mark:g}{gap}{self.unit}" for mark in marks)

    def verdict(self, value: float) -> str:
        """aim: reached the aim; ok: reached what it must; SHORT: did not."""
        sign = -1 if self.lower_is_better else 1
        if self.aim is not None and sign * value >= sign * self.aim:
            return "aim"
        return "ok" if sign * value >= sign * self.must else "SHORT"


NOT_SLOWER = Target(1.0, None)


@dataclass(frozen=True)
class Row:
    """`value` is what the target judges: ours over the peer, or an absolute time."""

    benchmark: str
    shape: str
    kernel: str
    us: float | None  # None where a row is about memory
    rate: str  # "812 GFLOP/s", "17.3 GB/s" or ""
    of_peak: float | None  # percent of the measured limit, None where there is none
    peer: str
    value: float
    target: Target | None = None
    peer_rate: str = ""  # what the peer reached, where that tells more

    def cells(self) -> list[str]:
        unit = self.target.unit if self.target else "x"
        if unit == "x":
            value = f"{self.value:.2f}x"
        else:
            value = f"{self.value:+.1f} %" if unit == "%" else f"{self.value:.4g} {unit}"
        judged = f"{self.target}, {self.target.verdict(self.value)}" if self.target else ""
        return [
            self.benchmark,
            self.shape,
            self.kernel,
            "" if self.us is None else f"{self.us:,.1f}",
            self.rate,
            "" if self.of_peak is None else f"{self.of_peak:.0f} %",
            value,
            f"{self.peer}, {self.peer_rate}" if self.peer_rate else self.peer,
            judged,
        ]

    def to_dict(self) -> dict:
        verdict = self.target.verdict(self.value) if self.target else None
        return {**asdict(self), "verdict": verdict}


HEADERS = ["benchmark", "M N K", "kernel", "us", "rate", "of peak", "ours", "against", "must / aim"]
WIDTHS = [17, 18, 20, 11, 14, 8, 9, 42, 0]
LEFT = {0, 1, 2, 7, 8}


def line(cells: list[str]) -> str:
    """One line of fixed columns, so that rows can be printed as they come."""
    padded = (
        cell.ljust(width) if i in LEFT else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    return "  ".join(padded).rstrip()


def markdown(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown_header() -> str:
    return markdown(HEADERS) + "\n" + "|" + "---|" * len(HEADERS)
