"""Documents as tokens to train and to validate on, and the order of them.

Suffixes: N tokens of a stream, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lrmoe.training.documents import Documents
from lrmoe.training.tokenizer import encode, takes_bytes

_NAMED_SKIPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """Training and validation tokens, (N,) int32 each; they share no part of the text.

    ``tokenizer`` says what a token is; ``validation_is_training`` marks the memorising set-up, where both are the same
    tokens by intent.
    """

    documents: Documents
    train_N: Tensor
    validation_N: Tensor
    tokenizer: str
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
            "tokenizer": self.tokenizer,
            "validation_is_training": self.validation_is_training,
            "skipped": dict(reasons),
            "first_skipped": named,
            "sha256": digest.hexdigest(),
        }


def tokenize(documents: Documents, tokenizer: Any, *, seq: int, memorize_bytes: int | None = None) -> TokenText:
    """Splits documents into training and validation and encodes them.

    With ten documents or more, every tenth is validation; with fewer, or where that leaves less than one sequence,
    the last tenth of the whole text is (at least one sequence).

    Args:
        documents: from :func:`~lrmoe.training.documents.read_documents`.
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
                f"memorize_bytes={memorize_bytes} gives {train_N.numel()} tokens, one sequence has seq={seq}; give "
                "more bytes or shorter sequences"
            )
        return TokenText(
            documents=documents,
            train_N=train_N,
            validation_N=train_N,
            tokenizer=_name(tokenizer),
            validation_is_training=True,
        )
    train_N, validation_N = encode(tokenizer, train_texts), encode(tokenizer, validation_texts)
    if min(train_N.numel(), validation_N.numel()) < seq:
        whole_N = encode(tokenizer, documents.texts)
        total = whole_N.numel()
        if total < 2 * seq:
            raise ValueError(
                f"text={documents.source!r} has {total} tokens; one sequence of seq={seq} to train on and one to "
                f"validate on need {2 * seq}: give more text or shorter sequences"
            )
        cut = total - max(seq, total // 10)
        train_N, validation_N = whole_N[:cut], whole_N[cut:]
    return TokenText(
        documents=documents,
        train_N=train_N,
        validation_N=validation_N,
        tokenizer=_name(tokenizer),
        validation_is_training=False,
    )


def _name(tokenizer: Any) -> str:
    return f"{'bytes' if takes_bytes(tokenizer) else type(tokenizer).__name__}, {len(tokenizer)} ids"


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
