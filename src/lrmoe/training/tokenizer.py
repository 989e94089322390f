"""Tokens of a text: bytes by default, or the tokenizer that a checkpoint folder brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# ByT5's ids: pad, end of text and unknown come before the 256 bytes.
BYTE_VOCAB_SIZE = 259


def byte_tokenizer() -> Any:
    """Transformers' ByT5 tokenizer without its sentinels: id = byte + 3, end of text = 1, 259 ids in all."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0)


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a checkpoint folder, or the byte tokenizer where the folder has none.

    Raises:
        ValueError: if it is broken, or has more ids than the model has embeddings.
    """
    from transformers import AutoTokenizer

    if (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # Whatever a broken file makes a tokenizer library raise.
            raise ValueError(f"the tokenizer in model={str(folder)!r} cannot be loaded: {error}") from error
    else:
        tokenizer = byte_tokenizer()
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids, the model only vocab_size={vocab_size}; put the model's own "
            f"tokenizer into model={str(folder)!r}"
        )
    return tokenizer


def encode(tokenizer: Any, documents: list[bytes]) -> Tensor:
    """One stream of token ids (n,), int32, with the end-of-text id between documents where the tokenizer has one.

    A byte tokenizer takes the bytes as they are: text that looks like a special token stays text.
    """
    from transformers import ByT5Tokenizer

    separator = torch.tensor([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], dtype=torch.int32)
    parts: list[Tensor] = []
    for document in documents:
        if isinstance(tokenizer, ByT5Tokenizer):
            ids = torch.frombuffer(bytearray(document), dtype=torch.uint8).int() + tokenizer.offset
        else:
            text = document.decode("utf-8", errors="strict")
            ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)
        parts += [separator, ids]
    return torch.cat(parts[1:]) if parts else torch.empty(0, dtype=torch.int32)
