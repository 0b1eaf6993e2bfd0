"""Write te_mx/conformance/digests.json from the specification: where a case is added, never to make
a test pass. usage: python tests/conformance/digests.py"""

from __future__ import annotations

import json

from te_mx.conformance import cases
from te_mx.conformance.cases import INPUTS

made = {
    str(one): {name: cases.digest(*cases.specified(one, name)) for name in INPUTS}
    for one in cases.cases()
}
made["layouts"] = dict(cases.of_layouts())
cases._FILE.write_text(json.dumps(made, separators=(",", ":"), indent=0) + "\n")
