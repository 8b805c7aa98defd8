"""Checks of a model: it runs on made-up sequences in ways that must not change its results. See `check`."""

from regard.inspection.checks.check import Checked as Checked
from regard.inspection.checks.check import check as check
from regard.inspection.checks.finding import Finding as Finding

__all__ = ["Checked", "Finding", "check"]
