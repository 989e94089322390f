"""Which of a layer's rows are real and of which sequence: the tokens a module was called with, and in what layout a
layer's rows speak of them.

B sequences, S tokens each, T = B*S rows of a layer, D model width.
"""

from __future__ import annotations

import torch
from torch import Size, Tensor

# Why a mask that may be about a layer's rows is not used, as the user is told it.
SQUARE = "its rows are a batch of as many sequences as each has tokens, so that batch and sequence look the same"
FLAT = "its rows come flattened, batch and sequence in an order that cannot be seen"
STREAMS = "the call brought several streams of tokens, and the mask may be about another one"
SHAPE = "it is {mask}, and the tokens are {tokens}"


class Tokens:
    """The tokens of one call of a module.

    Attributes:
        shape: (B, S).
        mask_BS: bool, which of them are real; None for all.
        sequence_BS: int64, the number, below B * S, of the sequence that each belongs to.
        several: the call brought other tokens of the same shape, which the mask may speak of instead.
        doubt: why the mask that the call brought is none of these tokens; None where it is, or there is none.

    Args:
        device: of ``sequence_BS``.
        position_BS: of each token in its own sequence, where the call brought that: several sequences may be packed
            into a row, and each begins at 0.
    """

    __slots__ = ("doubt", "mask_BS", "sequence_BS", "several", "shape")

    def __init__(
        self,
        shape: tuple[int, int],
        mask_BS: Tensor | None,
        *,
        device: torch.device,
        position_BS: Tensor | None = None,
        several: bool = False,
        doubt: str | None = None,
    ) -> None:
        self.shape = shape
        self.doubt = doubt
        self.mask_BS = mask_BS
        self.several = several
        batch, length = shape
        if position_BS is None:
            sequence_B1 = torch.arange(batch, dtype=torch.int64, device=device).unsqueeze(-1)
            # Contiguous, so that the layers of a model keep one tensor for their backwards and not one each.
            self.sequence_BS = sequence_B1.expand(batch, length).contiguous()
        else:
            # A row begins one whatever its first token's position is: it may be cut out of a longer text.
            first_S = torch.arange(length, dtype=torch.int64, device=device) == 0
            begins_BS = (position_BS.to(device) == 0) | first_S
            self.sequence_BS = begins_BS.reshape(-1).cumsum(0).view(batch, length) - 1

    def real_rows(self, leading: Size, *, batch_major: bool) -> tuple[Tensor | None, str | None]:
        """The mask of a layer's rows, (T,) bool, or None where it says nothing about them; and, where that is because
        nobody can tell, why.

        Args:
            leading: the leading dimensions of the layer's input: (B, S), (S, B) of a sequence-first model, or (T,).
            batch_major: whether rows that come flattened are known to run through one sequence after the other.
        """
        if self.mask_BS is None:
            return None, self.doubt
        turned, doubt = self._turned(leading, batch_major)
        if self.several and not (turned is None and doubt is None):
            return None, STREAMS
        return (None if turned is None else _laid(self.mask_BS, turned)), doubt

    def row_sequences(self, leading: Size, *, batch_major: bool) -> Tensor | None:
        """The number of each row's sequence, (T,) int64, in [0, T); None where that cannot be seen. ``leading`` and
        ``batch_major`` as in :meth:`real_rows`."""
        turned, _ = self._turned(leading, batch_major)
        return None if turned is None else _laid(self.sequence_BS, turned)

    def _turned(self, leading: Size, batch_major: bool) -> tuple[bool | None, str | None]:
        """Whether the rows run through the batch first; None where they are none of these tokens, or where, for the
        reason that comes second, nobody can tell."""
        batch, length = self.shape
        straight = tuple(leading) == (batch, length)
        turned = tuple(leading) == (length, batch)
        flat = len(leading) == 1 and leading[0] == batch * length
        one = batch == 1 or length == 1
        if not (straight or turned or flat):
            return None, None
        if straight and turned and not one:
            return None, SQUARE
        if flat and not (batch_major or one):
            return None, FLAT
        return turned and not straight, None


def _laid(of_BS: Tensor, turned: bool) -> Tensor:
    return (of_BS.t() if turned else of_BS).reshape(-1)
