"""What the papers claim: papers/NAME/claims.toml, read and checked. claim_rules.py says what the rules mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean
from ..experiment.toml import read_toml
from .claim_checks import CLAIM_CHECKS
from .claim_rules import FIXED_SEEDS, RULE_TESTS, ClaimRule
from .papers import refuse_unknown_keys

KINDS = ("ordering", "trend", "value", "ablation", "cost", "robustness", "theory-not-testable")
CLAIM_SCALES = ("full", "reduced")  # scales at which claims are decided; smoke decides nothing
CLAIM_KEYS = (
    *("id", "where", "text", "experiments", "kind", "printed", "control"),
    *("rule", "beside", "needs", "implies", "default_reading"),
)
RULE_KEYS = sorted({"each", "let", "readings", *ClaimRule._fields} - {"cells"})


class Claim(NamedTuple):
    """One claim of a paper, in our words."""

    id: str
    where: str
    text: str
    experiments: tuple[str, ...]
    kind: str  # one of KINDS
    printed: str  # do the paper's own numbers support it: yes, no, n/a
    control: str  # what a sceptic would run
    rules: tuple[ClaimRule, ...]
    beside: tuple[ClaimRule, ...]  # controls and readings, reported beside the verdict
    needs: str  # of a claim without rules: what it would take
    implies: tuple[str, ...] = ()  # ids of claims whose comparisons are all among its own
    default_reading: str = ""  # whose verdict is the claim's; "": all readings must be decided

    def needs_reading(self, reading: str) -> bool:
        """Whether the claim is open while it is open in this reading."""
        return self.default_reading in ("", reading)

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales at which it is decided: claims about published numbers at full scale only."""
        about_numbers = self.kind == "value" or any(r.test == "printed" for r in self.rules)
        return CLAIM_SCALES[:1] if about_numbers else CLAIM_SCALES


def read_claims(folder: Path) -> list[Claim]:
    """The claims of the paper in this folder; none where it has no file of claims."""
    path = folder / "claims.toml"
    page = read_toml(path) if path.exists() else {}
    lists = page.get("lists", {})
    try:
        return [claim_from_table(table, lists) for table in page.get("claim", [])]
    except (ConfigError, TypeError, KeyError, ValueError) as e:
        raise ConfigError(f"{path}: {e}") from None


def claim_from_table(table: Mapping[str, Any], lists: Mapping[str, Any]) -> Claim:
    """The claim of one [[claim]]; `lists` are the file's named lists."""
    refuse_unknown_keys(table, CLAIM_KEYS, f"{table.get('id', 'a claim')}: ")
    if table["kind"] not in KINDS or table["printed"] not in ("yes", "no", "n/a"):
        raise ConfigError(f"{table['id']}: kind must be one of {', '.join(KINDS)}, printed yes, no or n/a; correct it.")
    rules = table.get("rule", [])
    if (rules == "needs") != ("needs" in table):
        raise ConfigError(
            f'{table["id"]}: rule = "needs" goes with needs = "…", which says what it would take; give both or neither.'
        )
    claim = Claim(
        id=table["id"],
        where=table["where"],
        text=table["text"],
        experiments=tuple(table["experiments"]),
        kind=table["kind"],
        printed=table["printed"],
        control=table.get("control", ""),
        rules=tuple(
            rule_from_table(each, lists, table["id"])
            for r in (rules if isinstance(rules, list) else [])
            for each in rule_readings(r, lists)
        ),
        beside=tuple(rule_from_table({"test": "report"} | r, lists, table["id"]) for r in table.get("beside", [])),
        needs=table.get("needs", ""),
        implies=tuple(table.get("implies", ())),
        default_reading=table.get("default_reading", ""),
    )
    readings = list(dict.fromkeys(rule.reading for rule in claim.rules))
    if claim.default_reading and (len(readings) < 2 or claim.default_reading != readings[0]):
        raise ConfigError(
            f"{claim.id}: default_reading = {claim.default_reading!r} is not the first of several readings; name "
            "that one, or leave it out."
        )
    return claim


def rule_readings(table: Mapping[str, Any], lists: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rule once for each of its `readings`, a table of names with what {variant} is in each; itself without."""
    readings = table.get("readings")
    if readings is None:
        return [dict(table)]
    variants: Mapping[str, str] = lists[readings] if isinstance(readings, str) else readings
    rest = {key: value for key, value in table.items() if key != "readings"}
    return [
        rest | {"reading": name, "let": table.get("let", {}) | {"variant": variant}}
        for name, variant in variants.items()
    ]


def rule_from_table(table: Mapping[str, Any], lists: Mapping[str, Any], owner: str) -> ClaimRule:
    """The rule of one [[claim.rule]] or [[claim.beside]]; `owner` is the claim's id, for error messages."""
    refuse_unknown_keys(table, RULE_KEYS, f"{owner}: ")
    test, function = table.get("test"), table.get("function")
    if test not in RULE_TESTS:
        raise ConfigError(f"{owner}: unknown test {test!r}; {did_you_mean(str(test), RULE_TESTS)}")
    if test == "custom" and function not in CLAIM_CHECKS:
        raise ConfigError(f"{owner}: unknown function {function!r}; {did_you_mean(str(function), CLAIM_CHECKS)}")
    if "seeds" in table and test in FIXED_SEEDS:
        raise ConfigError(f"{owner}: the test {test!r} has its own least number of seeds; leave `seeds` out.")
    spans, let = table.get("each", {}), table.get("let", {})
    cells = [
        dict(zip(span, values, strict=True)) | let
        for span in (spans if isinstance(spans, list) else [spans])
        for values in product(*(cell_values(name, v, lists) for name, v in span.items()))
    ]
    if test == "linear":
        steps = [v for cell in cells for name, v in cell.items() if name not in let]
        if len(steps) < 4 or len(steps) > len(cells) or not all(isinstance(v, int | float) for v in steps):
            raise ConfigError(
                f"{owner}: the test 'linear' has four or more numbers as cells; write each = {{ n = [1, 2, 4, 8] }}."
            )
    settings = {k: v for k, v in table.items() if k not in ("each", "let")}
    return ClaimRule(
        d=settings.pop("d", "{d}" if any("d" in cell for cell in cells) else ""),
        cells=tuple({k: str(v) for k, v in cell.items()} for cell in cells),
        hidden=(*let, "d"),
        **settings,
    )


def cell_values(name: str, values: Any, lists: Mapping[str, Any]) -> Sequence[Any]:
    """The values that a name takes over the cells; `d` is the expression of those cells, where rules mix several."""
    if name == "d":
        return [values]
    found: Sequence[Any] = lists[values] if isinstance(values, str) else values
    return found
