"""Text to train on: the Python standard library by default, a file or a folder on request.

Suffixes: N tokens of a stream, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lrmoe.training.tokenizer import encode

MAX_BYTES = 2**30
_LIBRARY_EXCLUDES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_NAMED_SKIPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """What was read. ``names`` are relative paths with ``/``, in the order of ``texts``; ``skipped`` says, for each
    path that was left out, why."""

    source: str
    names: list[str]
    texts: list[bytes]
    skipped: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """Training and validation tokens, (N,) int32 each; they share no part of the text.

    ``validation_is_training`` marks the memorising set-up, where both are the same tokens by intent.
    """

    documents: Documents
    train_N: Tensor
    validation_N: Tensor
    validation_is_training: bool

    def describe(self) -> dict[str, Any]:
        """Plain values for ``config.json``; ``sha256`` identifies the tokens."""
        reasons = Counter(self.documents.skipped.values())
        named = dict(list(self.documents.skipped.items())[:_NAMED_SKIPS])
        digest = hashlib.sha256()
        for part in (self.train_N, self.validation_N):
            digest.update(part.contiguous().numpy().tobytes())
            digest.update(b"/")
        return {
            "source": self.documents.source,
            "files": len(self.documents.texts),
            "bytes": sum(map(len, self.documents.texts)),
            "train_tokens": self.train_N.numel(),
            "validation_tokens": self.validation_N.numel(),
            "validation_is_training": self.validation_is_training,
            "skipped": dict(reasons),
            "first_skipped": named,
            "sha256": digest.hexdigest(),
        }


def read_documents(path: str | Path | None) -> Documents:
    """Reads a file, a folder (all files below it, sorted by relative path), or the standard library for None.

    A folder's files are skipped, with the reason kept, where they are empty, hidden, unreadable, not UTF-8 text, not
    regular files, seen before under another name, or symbolic links to folders; links to files are followed.

    Raises:
        ValueError: if the path is missing or is no file or folder, a file given by name is unusable, nothing is
            left, or there is more than 1 GiB.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        version = f"{sysconfig.get_python_version()}"
        return _read_folder(root, f"Python {version} standard library", is_library=True)
    if not str(path):
        raise ValueError("text='' names no file; leave it out for the Python standard library")
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ValueError(f"text={str(path)!r} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        return _read_folder(path, str(path), is_library=False)
    if not stat.S_ISREG(mode):
        raise ValueError(f"text={str(path)!r} is neither a file nor a folder")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(_too_large(str(path)))
    data, problem = _read_file(path)
    if problem == "empty":
        raise ValueError(f"text={str(path)!r} is empty; give a file with text in it")
    if problem:
        raise ValueError(f"text={str(path)!r} cannot be used: {problem}")
    return Documents(source=str(path), names=[path.name], texts=[data], skipped={})


def _read_folder(root: Path, source: str, *, is_library: bool) -> Documents:
    names: list[str] = []
    texts: list[bytes] = []
    skipped: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    total = 0
    for name, problem in sorted(_walk(root, is_library), key=lambda entry: os.fsencode(entry[0])):
        path = root / name
        data = b""
        if problem is None:
            try:
                status = path.stat()
            except OSError as error:
                problem = _reason(error)
            else:
                identity = (status.st_dev, status.st_ino)
                if not stat.S_ISREG(status.st_mode):
                    problem = "not a regular file"
                elif identity in seen:
                    problem = "the same file under another name"
                elif total + status.st_size > MAX_BYTES:
                    raise ValueError(_too_large(source))
                else:
                    seen.add(identity)
                    data, problem = _read_file(path)
        if problem is None:
            names.append(name)
            texts.append(data)
            total += len(data)
        else:
            skipped[name] = problem
    if not texts:
        first = "; ".join(f"{name!r}: {problem}" for name, problem in list(skipped.items())[:3])
        raise ValueError(f"text={source!r} holds no text ({first or 'no file in it'}); give a file or folder with text")
    return Documents(source=source, names=names, texts=texts, skipped=skipped)


def _walk(root: Path, is_library: bool) -> list[tuple[str, str | None]]:
    """Relative paths below ``root``, each with a reason to skip it or None. Never follows a link to a folder."""
    entries: list[tuple[str, str | None]] = []

    def failed(error: OSError) -> None:
        entries.append((Path(os.path.relpath(error.filename, root)).as_posix(), _reason(error)))

    for folder, subfolders, files in os.walk(root, onerror=failed):
        relative = Path(os.path.relpath(folder, root))
        # sysconfig's data files and the config folder hold paths of the machine that built Python.
        if is_library:
            subfolders[:] = [s for s in subfolders if s not in _LIBRARY_EXCLUDES and not s.startswith("config-")]
            files = [f for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
        for name in list(subfolders):
            problem = "hidden" if name.startswith(".") else None
            if problem is None and os.path.islink(os.path.join(folder, name)):
                problem = "symbolic link to a folder"
            if problem:
                subfolders.remove(name)
                entries.append(((relative / name).as_posix(), problem))
        entries += [((relative / f).as_posix(), "hidden" if f.startswith(".") else None) for f in files]
    return entries


def _read_file(path: Path) -> tuple[bytes, str | None]:
    try:
        data = path.read_bytes()
    except OSError as error:
        return b"", _reason(error)
    if not data:
        return b"", "empty"
    if b"\0" in data:
        return b"", "binary (holds a zero byte)"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return b"", "not UTF-8 text"
    return data, None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()


def _too_large(source: str) -> str:
    return f"text={source!r} is larger than {MAX_BYTES >> 30} GiB, which is held in memory; give a part of it"


def tokenize(documents: Documents, tokenizer: Any, *, seq: int, memorize_bytes: int | None = None) -> TokenText:
    """Splits documents into training and validation and encodes them.

    With ten documents or more, every tenth is validation; with fewer, or where that leaves less than one sequence,
    the last tenth of the whole text is (at least one sequence).

    Args:
        documents: from :func:`read_documents`.
        tokenizer: a Transformers tokenizer.
        seq: S, tokens per sequence.
        memorize_bytes: if set, the first so many bytes of the training part are both training and validation text.

    Raises:
        ValueError: if the text is too short, naming the lengths.
    """
    train_texts = [text for i, text in enumerate(documents.texts) if i % 10 != 9]
    validation_texts = documents.texts[9::10]
    if memorize_bytes is not None:
        train_N = encode(tokenizer, _first_bytes(train_texts, memorize_bytes, documents.source))
        if train_N.numel() < seq:
            raise ValueError(
                f"memorize_bytes={memorize_bytes} gives {train_N.numel()} tokens, one sequence has seq={seq}; raise "
                "memorize_bytes or lower seq"
            )
        return TokenText(documents=documents, train_N=train_N, validation_N=train_N, validation_is_training=True)
    train_N, validation_N = encode(tokenizer, train_texts), encode(tokenizer, validation_texts)
    if min(train_N.numel(), validation_N.numel()) < seq:
        whole_N = encode(tokenizer, documents.texts)
        total = whole_N.numel()
        if total < 2 * seq:
            raise ValueError(
                f"text={documents.source!r} has {total} tokens; one sequence of seq={seq} to train on and one to "
                f"validate on need {2 * seq}: give more text or lower seq"
            )
        cut = total - max(seq, total // 10)
        train_N, validation_N = whole_N[:cut], whole_N[cut:]
    return TokenText(documents=documents, train_N=train_N, validation_N=validation_N, validation_is_training=False)


def _first_bytes(texts: list[bytes], limit: int, source: str) -> list[bytes]:
    chosen: list[bytes] = []
    left = limit
    for text in texts:
        if left <= 0:
            break
        # A cut inside a character would leave bytes that no tokenizer but ours takes.
        chosen.append(text if len(text) <= left else text[:left].decode("utf-8", errors="ignore").encode())
        left -= len(text)
    if left > 0:
        raise ValueError(
            f"memorize_bytes={limit} is more than the {limit - left} bytes of training text in {source!r}; lower it"
        )
    return [text for text in chosen if text]


class TrainingOrder(Dataset[dict[str, Tensor]]):
    """Sequence after sequence of a whole run, in an order that depends on nothing but ``seed``.

    The stream is cut into sequences side by side (a remainder shorter than one is left over at its end) and walked in
    a fresh keyed permutation per pass. Item i is what the run trains on at position i, however it is batched,
    interrupted or compared.
    """

    def __init__(self, stream_N: Tensor, *, seq: int, length: int, seed: int) -> None:
        self._stream_N = stream_N
        self._seq = seq
        self._length = length
        sequences = stream_N.numel() // seq
        generator = torch.Generator(device="cpu").manual_seed(seed)
        passes = -(-length // sequences)
        order = [torch.randperm(sequences, generator=generator, dtype=torch.int64, device="cpu") for _ in range(passes)]
        self._order = torch.cat(order)[:length].to(torch.int32)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self._order[index]) * self._seq
        ids_S = self._stream_N[start : start + self._seq].long()
        return {"input_ids": ids_S, "labels": ids_S}


class ValidationSet(Dataset[dict[str, Tensor]]):
    """At most ``sequences`` sequences, spread evenly over the validation stream; the same in every run."""

    def __init__(self, stream_N: Tensor, *, seq: int, sequences: int) -> None:
        self._stream_N = stream_N
        self._seq = seq
        available = stream_N.numel() // seq
        count = min(sequences, available)
        self._starts = [i * available // count * seq for i in range(count)]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_S = self._stream_N[self._starts[index] : self._starts[index] + self._seq].long()
        return {"input_ids": ids_S, "labels": ids_S}
