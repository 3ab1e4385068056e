"""Findings of doctor: lines with a mark, and their output as text or JSON."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """One line of doctor's output."""

    subject: str
    state: str
    mark: Literal["ok", "FAIL", "warn", ""] = ""
    """The mark before the line; empty: the line only informs."""

    group: Literal["", "packages", "seams"] = ""
    """Group whose findings without a fault share a line on the terminal; JSON has each."""


def _in_groups(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, but only one summary for each group."""
    told = set()
    for finding in findings:
        if not finding.group or finding.mark == "FAIL":
            yield finding
        elif finding.group not in told:
            told.add(finding.group)
            mine = [each for each in findings if each.group == finding.group and each.mark != "FAIL"]
            names = textwrap.fill(
                ", ".join(f"{each.subject} {each.state}" for each in mine), 88, break_on_hyphens=False
            )
            seams = f"{len(mine)} functions of Megatron to wrap are as expected (--json lists them)"
            yield Finding(finding.group, seams if finding.group == "seams" else names, finding.mark)


@dataclass
class Diagnosis:
    """The whole output of doctor, the verdict first."""

    verdict: Finding
    exit_code: int = 0
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers that `--json` adds to the lines."""

    def lines(self) -> Iterable[str]:
        """Yield the lines for the terminal."""
        shown = [self.verdict, *_in_groups(self.findings)]
        width = max(len(finding.subject) for finding in shown)
        for finding in shown:
            first, *rest = finding.state.splitlines() or [""]
            yield f"{finding.mark:<4} {finding.subject:<{width}}  {first}".rstrip()
            yield from (f"{'':<4} {'':<{width}}  {line}" for line in rest)

    def as_json(self) -> str:
        return json.dumps(
            {
                "ok": self.exit_code == 0,
                "exit_code": self.exit_code,
                "verdict": self.verdict.state,
                "findings": [asdict(finding) for finding in self.findings],
                **self.facts,
            },
            indent=2,
        )
