"""What ``lrmoe balance --trace`` or ``--workload`` wrote, as its page shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe.evenness import max_over_mean
from lrmoe.report.loads import MAX_COUNTS, MAX_FRAMES
from lrmoe.report.run_folder import read_lines, read_object

Line = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Played:
    """A folder.

    Args:
        config, summary: of the files.
        records: ``policies`` of the summary, a policy and drop each.
        lines: of each record, in order, by (policy, drop); none of a policy that cannot run.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    lines: dict[tuple[str, float], list[Line]]

    @property
    def drops(self) -> list[float]:
        """Ascending; the first is 0."""
        return sorted({record["drop"] for record in self.records})

    @property
    def labels(self) -> list[str]:
        """The policies, in the order of the table."""
        return list(dict.fromkeys(record["policy"] for record in self.records))

    def of(self, label: str, drop: float) -> dict[str, Any]:
        """The record of a policy."""
        return next(record for record in self.records if (record["policy"], record["drop"]) == (label, drop))


def read_played(folder: Path) -> Played:
    """Reads a folder.

    Raises:
        ValueError: if a file is missing or malformed, or of another command.
    """
    config = read_object(folder / "config.json")
    if config.get("command") != "balance" or not (config.get("trace") or config.get("workload")):
        raise ValueError(f"{folder} is not of lrmoe balance with --trace or --workload")
    summary = read_object(folder / "summary.json")
    lines: dict[tuple[str, float], list[Line]] = {}
    path = folder / "metrics.jsonl"
    for number, line in read_lines(path):
        try:
            key = line["policy"], line["drop"]
            wrong = [name for name in ("rows", "kept") if not all(type(rows) is int for rows in line[name])]
            wrong += [name for name in ("step", "microbatch", "layer") if type(line[name]) is not int]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error} is missing or malformed") from None
        if wrong:
            raise ValueError(f"{path}, line {number}: {wrong[0]} must be counts")
        lines.setdefault(key, []).append(line)
    records = summary.get("policies")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records) or not records:
        raise ValueError(f"{folder / 'summary.json'}: policies must be a list of records")
    return Played(path=folder, config=config, summary=summary, records=records, lines=lines)


def frames(played: Played) -> dict[str, Any]:
    """What the bars are drawn from, JSON-able::

    {"frames": [[step, microbatch]],      # an even choice of them
     "all": int,                          # of how many
     "start": int,                        # the frame whose busiest rank at home is furthest above the mean
     "layers": [str], "drops": [float],
     "home": [[[int]]],                   # layer, frame, rank: rows with every expert at home; [] where not run
     "policies": [{"label": str,
                   "drops": [{"reason": str | None, "rows": [[[int]]], "kept": [[[int]]]}]}]}
    """
    base = played.lines.get((played.labels[0], 0.0)) or max(played.lines.values(), key=len, default=[])
    places = list(dict.fromkeys((line["step"], line["microbatch"]) for line in base))
    layers = sorted({line["layer"] for line in base})
    ranks = len(base[0]["rows"]) if base else 1
    a_frame = ranks * len(layers) * (1 + 2 * len(played.records))
    count = max(2, min(MAX_FRAMES, MAX_COUNTS // max(1, a_frame)))
    if len(places) > count:
        chosen = [places[round(i * (len(places) - 1) / (count - 1))] for i in range(count)]
    else:
        chosen = places

    def table(lines: list[Line], name: str) -> list[list[list[int]]]:
        found = {(line["layer"], line["step"], line["microbatch"]): line[name] for line in lines}
        return [[found.get((layer, *place), []) for place in chosen] for layer in layers]

    names = played.summary["shape"]["layers"]
    home = table(base, "rows")
    skews = [
        max((max_over_mean(layer[place]) or 0.0 for layer in home if layer[place]), default=0.0)
        for place in range(len(chosen))
    ]
    return {
        "frames": chosen,
        "all": len(places),
        "start": skews.index(max(skews)) if skews else 0,
        "layers": names if len(names) == len(layers) else [f"layer {layer}" for layer in layers],
        "drops": played.drops,
        "home": home,
        "policies": [
            {
                "label": label,
                "drops": [
                    {
                        "reason": played.of(label, drop)["reason"],
                        "rows": table(played.lines.get((label, drop), []), "rows"),
                        "kept": table(played.lines.get((label, drop), []), "kept"),
                    }
                    for drop in played.drops
                ],
            }
            for label in played.labels
        ],
    }
