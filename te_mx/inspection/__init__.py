"""What block-scaled formats would do to the values of a model: `te_mx.inspect` and its report."""

from te_mx.inspection.inspect import inspect
from te_mx.inspection.report import InspectionReport, Reading

__all__ = ["InspectionReport", "Reading", "inspect"]
