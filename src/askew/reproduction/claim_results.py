"""Claims with what was found: a verdict, its grounds and, where it is open, what it still needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..core.text import count_text
from .bills import ClaimBill
from .claim_rules import (
    FAILS,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    UNTESTABLE,
    ClaimRule,
    Finding,
    combine_findings,
    reading_verdicts,
)
from .claims import Claim

VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE)
OPEN = {NOT_RUN, UNDECIDED}


class ClaimResult(NamedTuple):
    """A claim and what was found at each scale."""

    claim: Claim
    findings: dict[str, tuple[Finding, ...]]  # by scale, one for each rule
    beside: tuple[tuple[ClaimRule, Finding], ...]  # controls
    bill: ClaimBill | None  # what a verdict at full scale still needs, where it is open
    smaller: str = ""  # the settings of its smaller runs, where these decide
    refuted_by: str = ""  # the claim that it implies and that does not hold

    @property
    def scale(self) -> str:
        return deciding_scale(self.claim, self.findings)

    @property
    def readings(self) -> dict[str, str]:
        """The verdict in each reading of the paper, the default one first."""
        return reading_verdicts(self.claim.rules, self.findings[self.scale])

    @property
    def verdict(self) -> str:
        """One of VERDICTS; of several readings that of the first, for which some claims need all to be decided."""
        if not self.claim.rules:
            return UNTESTABLE if self.claim.kind == "theory-not-testable" else NOT_RUN
        return FAILS if self.refuted_by else joint_verdict(self.claim, self.readings)

    @property
    def if_corrected(self) -> str:
        """The verdict if exact p-values were corrected for the number of comparisons too."""
        if not self.claim.rules or self.refuted_by:
            return self.verdict
        found = [f._replace(verdict=f.if_corrected or f.verdict) for f in self.findings[self.scale]]
        return joint_verdict(self.claim, reading_verdicts(self.claim.rules, found))

    @property
    def is_decided(self) -> bool:
        return self.verdict in (HOLDS, FAILS)

    @property
    def is_reduced(self) -> bool:
        """Whether its verdict comes from smaller runs; what another claim refutes was refuted at full scale."""
        return self.scale == "reduced" and not self.refuted_by

    @property
    def has_open_reading(self) -> bool:
        """Whether it is decided, by its default reading, and open in another one."""
        return self.is_decided and not self.refuted_by and bool(OPEN.intersection(self.readings.values()))

    @property
    def is_reversed(self) -> bool:
        """Whether another reading has the opposite verdict."""
        return self.is_decided and not self.refuted_by and {HOLDS, FAILS} <= {*self.readings.values()}

    @property
    def seeds(self) -> int:
        """The fewest seeds of any cell that has some."""
        return min((c.n for f in self.findings[self.scale] for c in f.cells if c.n), default=0)

    @property
    def verdict_text(self) -> str:
        """The verdict as it is shown: "holds (reduced)", "undecided at 1 seed", "holds (literal); not run (prox)"."""
        seeds = f" at {count_text(self.seeds, 'seed')}" if self.verdict == UNDECIDED and self.seeds else ""
        scale = " (reduced)" if self.is_reduced else ""
        if self.claim.rules and len(self.readings) > 1 and not self.refuted_by:
            default = self.claim.default_reading
            titles = {default: f"{default}, the default"} if default else {}
            texts = [f"{verdict} ({titles.get(reading, reading)})" for reading, verdict in self.readings.items()]
            return "; ".join(texts) + scale
        return f"{self.verdict}{seeds}{scale}"

    @property
    def evidence(self) -> list[str]:
        """The grounds of the verdict, and what is missing."""
        bill = [self.bill_text] if self.bill_text else []
        return self.grounds + bill

    @property
    def bill_text(self) -> str:
        """What a verdict at full scale still needs; empty where it is not open."""
        return str(self.bill) if self.bill and not self.refuted_by else ""

    @property
    def grounds(self) -> list[str]:
        """What was found, rule by rule; then what was found at reduced scale beside a full one."""
        if not self.claim.rules:
            return [f"needs {self.claim.needs}"]
        rules, found = self.claim.rules, self.findings[self.scale]
        lines = [f"it implies {self.refuted_by}, which does not hold"] if self.refuted_by else []
        lines += [f"smaller runs: {self.smaller}"] if self.smaller else []
        lines += [finding_text(f, len(rules) > 1, rule.reading) for rule, f in zip(rules, found, strict=True)]
        reduced = self.findings.get("reduced", ()) if self.scale == "full" else ()
        if any(c.n for f in reduced for c in f.cells):
            lines.append(f"{combine_findings(reduced)} (reduced)")
        return [line for line in lines if line]

    @property
    def controls(self) -> list[str]:
        """The claim's controls, and what they found where they were run."""
        lines = [self.claim.control] if self.claim.control else []
        for rule, f in self.beside:
            found = f"{f.verdict}: {f.evidence}" if f.verdict and f.evidence else f.evidence or NOT_RUN
            lines.append(f"{rule.what}: {found}")
        return lines


def joint_verdict(claim: Claim, readings: Mapping[str, str]) -> str:
    """The verdict in the first reading; open while that in any reading is which the claim needs."""
    first = next(iter(readings.values()))
    is_open = any(verdict in OPEN for reading, verdict in readings.items() if claim.needs_reading(reading))
    return UNDECIDED if is_open and first in (HOLDS, FAILS) else first


def deciding_scale(claim: Claim, findings: Mapping[str, Sequence[Finding]]) -> str:
    """The scale that a verdict comes from: full, unless only reduced has results."""
    ran = (s for s, found in findings.items() if set(reading_verdicts(claim.rules, found).values()) != {NOT_RUN})
    return next(ran, next(iter(findings)))


def finding_text(f: Finding, several: bool, reading: str = "") -> str:
    """One rule's finding in a line; with its reading, and its verdict if it is one of several."""
    about = f"{reading}: " if reading else ""
    if not f.evidence:
        return f"{about}{f.verdict}" if several else ""
    test = f" ({f.test})" if f.test else ""
    return f"{about}{f'{f.verdict}: ' if several else ''}{f.evidence}{test}"


def imply_verdicts(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """The same results, where an open claim does not hold if one that it implies does not."""
    refuted = {r.claim.id: r for r in results if r.verdict == FAILS}
    found = list[ClaimResult]()
    for r in results:
        by = [id for id in r.claim.implies if id in refuted and refuted[id].scale == "full"]
        open_yet = r.verdict in OPEN
        found.append(r._replace(refuted_by=by[0]) if by and open_yet else r)
    return imply_verdicts(found) if [r.verdict for r in found] != [r.verdict for r in results] else found
