"""The bridge: from what a crash left in the journal to a legal history, exactly once."""

from holdfast.journal.recovered import CallState, Complete, Errored, Incomplete, RecoveredCall
from holdfast.recovery.doctor import doctor
from holdfast.recovery.findings import DoctorReport, Problem
from holdfast.recovery.pairing import (
    ensure_call_outputs_present,
    normalize,
    recover_from_crash,
    remove_orphan_outputs,
    trim,
    validate,
)
from holdfast.recovery.policy import RecoveryPolicy, Resolver
from holdfast.recovery.recover import RecoveryReport, classify, recover, settle
from holdfast.recovery.salvage import SalvageReport, salvage
from holdfast.recovery.settle import SettledStep
from holdfast.recovery.validation import MissingOutput, PairingSettings, ValidationReport

__all__ = [
    "CallState",
    "Complete",
    "DoctorReport",
    "Errored",
    "Incomplete",
    "MissingOutput",
    "PairingSettings",
    "Problem",
    "RecoveredCall",
    "RecoveryPolicy",
    "RecoveryReport",
    "Resolver",
    "SalvageReport",
    "SettledStep",
    "ValidationReport",
    "classify",
    "doctor",
    "ensure_call_outputs_present",
    "normalize",
    "recover",
    "recover_from_crash",
    "remove_orphan_outputs",
    "salvage",
    "settle",
    "trim",
    "validate",
]
