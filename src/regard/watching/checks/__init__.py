"""Checks: facts of the masks of watched calls, and trials that perturb inputs, with one kind of finding. `check` runs a
model on generated sequences, under changes without effect on a sound model."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.watching.checks.check_model import check as check
    from regard.watching.checks.finding import AuditQuestion as AuditQuestion
    from regard.watching.checks.finding import Checked as Checked
    from regard.watching.checks.finding import FaultyWeight as FaultyWeight
    from regard.watching.checks.finding import Finding as Finding
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
