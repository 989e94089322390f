"""A record is a tree of dicts, lists, plain values and tensors; a part is a folder of them, one file a case."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What follows from times, wherever it is printed: ratios of them, and sentences about them.
_TIMED = re.compile(
    r"TIME ?\(?[\d.]+ [x×]\)?|"
    r"[\d.]+ [mµ]s(TIME|[\d.]+ [mµ]s)|\d{4}-\d\d-\d\d ?\d\d:\d\d|[\d.]+ of (UltraEP|SYMI|fixed)[^|]*|"
    r"Expect little from any drop.*|experts' backward is.*|not faster here.*|are faster here.*"
)
_TIMED_KEYS = re.compile(r"_ratio|plan_ms|decide_ms|sent_bytes/engines|wall|minutes|over (fixed|UltraEP|SYMI)")


def write(folder: Path, case: str, make: Callable[[], Any]) -> None:
    """Makes the record of a case, unless the folder has it, and puts it there whole."""
    path = folder / f"{case}.pt"
    if path.exists():
        return
    print(f"{folder.name}: {case}", flush=True)
    record = make()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(record, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def compare(before: Path, after: Path, *, show: int) -> int:
    """Prints what differs between two parts; 0 where nothing does."""
    was, now = ({path.stem for path in folder.glob("*.pt")} for folder in (before, after))
    if not was:
        print(f"{before}: holds no records")
        return 1
    lacking = [f"{case}: only in {before}" for case in sorted(was - now)]
    lacking += [f"{case}: only in {after}" for case in sorted(now - was)]
    print(*lacking, sep="\n", end="\n" if lacking else "")
    different = 0
    for case in sorted(was & now):
        records = (torch.load(folder / f"{case}.pt", weights_only=False) for folder in (before, after))
        found = list(differences(*records))
        different += bool(found)
        for line in found[:show]:
            print(f"{before.name}/{case}: {line}")
        if len(found) > show:
            print(f"{before.name}/{case}: and {len(found) - show} more")
    equal = len(was & now) - different
    print(f"{before.name}: {equal} cases equal, {different} different, {len(lacking)} lacking")
    return int(bool(different or lacking))


def differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """Where two trees differ, with both values."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        yield from _tensors(before, after, at)
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{at}/{key}"
            if _TIMED_KEYS.search(place):
                continue
            if key not in after:
                yield f"{place}: gone, was {_short(before[key])}"
            elif key not in before:
                yield f"{place}: new, {_short(after[key])}"
            else:
                yield from differences(before[key], after[key], place)
    elif _is_words(before) and _is_words(after):
        was, now = (
            [settled for text in words if (settled := _TIMED.sub("TIME", text)) != "TIME"] for words in (before, after)
        )
        lines = difflib.unified_diff(was, now, n=0)
        yield from (f"{at}: {_short(line)}" for line in lines if line[:3] not in ("---", "+++") and line[:1] in "+-")
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if len(before) != len(after):
            yield f"{at}: {len(before)} entries, now {len(after)}"
        for number, pair in enumerate(zip(before, after, strict=False)):
            yield from differences(*pair, f"{at}[{number}]")
    elif not _same(before, after):
        yield f"{at}: {_short(before)}, now {_short(after)}"


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _tensors(before: Tensor, after: Tensor, at: str) -> Iterator[str]:
    if before.shape != after.shape or before.dtype != after.dtype:
        yield f"{at}: {tuple(before.shape)} {before.dtype}, now {tuple(after.shape)} {after.dtype}"
    elif not torch.equal(before.nan_to_num(), after.nan_to_num()) or not torch.equal(before.isnan(), after.isnan()):
        was, now = before.double().nan_to_num(), after.double().nan_to_num()
        off = (was - now).abs().max() / was.abs().max().clamp_min(1e-300)
        yield f"{at}: {int((was != now).sum())} of {was.numel()} elements differ, by {float(off):.1e} of the largest"


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, str) and isinstance(after, str):
        before, after = _TIMED.sub("TIME", before), _TIMED.sub("TIME", after)
    both_nan = isinstance(before, float) and isinstance(after, float) and math.isnan(before) and math.isnan(after)
    return both_nan or (type(before) is type(after) and bool(before == after))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
