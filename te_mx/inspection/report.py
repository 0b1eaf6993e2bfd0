"""The report of te_mx.inspect: readings as tables, JSON and a picture."""

from __future__ import annotations

import json
import math
from os import PathLike
from pathlib import Path
from typing import Any

from te_mx.conversion.matrices import left_of
from te_mx.inspection.figure import draw
from te_mx.inspection.readings import Readings
from te_mx.inspection.summary import full_table, summary
from te_mx.layouts import aligning
from te_mx.runtime.arguments import shown


class InspectionReport(Readings):
    """What `te_mx.inspect` found: iterable over `Reading`, printable as a summary; ``report[name]``
    has the readings of one layer. `about` says what was run."""

    # -------------------------------------------------------------------------------------- tables
    def table(self) -> str:
        """SQNR in dB of every layer, role and format, of its two directions the lower one. A "!"
        stands behind that of a tensor which holds NaN or Inf."""
        return full_table(self)

    def __str__(self) -> str:
        return summary(self)

    __repr__ = __str__

    # --------------------------------------------------------------------------------------- files
    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Everything as JSON, also written to `path`. Numbers that are none are null; an SQNR of
        null has its reason in `note`, or is minus infinity. "te_mx" is the number of this form, 1.
        """
        about = self.about._replace(matrices=[])._asdict()
        del about["matrices"]
        about["loss"] = _number(about["loss"])
        rows = [{k: _number(v) for k, v in r._asdict().items()} for r in self.readings]
        content: dict[str, Any] = {"te_mx": 1, **about}
        content["tile_classes"] = aligning(self.about.alignment_spread).class_names
        content["left"] = [{"name": m.name, "kind": m.kind, "elements": m.elements}
                           for m in left_of(self.about.matrices)]  # fmt: skip
        text = json.dumps({**content, "readings": rows}, indent=1, allow_nan=False)
        if path is not None:
            _as_path(path).write_text(text + "\n")
        return text

    def to_png(self, path: str | PathLike[str]) -> None:
        """A picture: for each role a map of SQNR over layers and formats with the lowest of each
        format framed, shares of elements below, and Hopper's tile classes.

        Raises ImportError without matplotlib.
        """
        draw(self, _as_path(path))


def _as_path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path must be a str or a path, got {shown(path)}")
    return Path(path)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
