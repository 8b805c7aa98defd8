"""Checks of a model: it runs on made-up sequences in ways that must not change its results. See `check`."""

from regard.inspection.audit.finding import Finding as Finding
from regard.probes.check import Checked as Checked
from regard.probes.check import check as check

__all__ = ["Checked", "Finding", "check"]
