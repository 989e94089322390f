"""Which of a layer's rows are real: the tokens a module was called with, and in what layout a mask speaks of them.

B sequences, S tokens each, T = B*S rows of a layer, D model width.
"""

from __future__ import annotations

from torch import Size, Tensor

# Why a mask that may be about a layer's rows is not used, as the user is told it.
SQUARE = "its rows are a batch of as many sequences as each has tokens, so that batch and sequence look the same"
FLAT = "its rows come flattened, batch and sequence in an order that cannot be seen"
STREAMS = "the call brought several streams of tokens, and the mask may be about another one"


class Tokens:
    """The tokens of one call of a module.

    Attributes:
        shape: (B, S).
        mask_BS: bool, which of them are real; None for all.
        several: the call brought other tokens of the same shape, which the mask may speak of instead.
    """

    __slots__ = ("mask_BS", "several", "shape")

    def __init__(self, shape: tuple[int, int], mask_BS: Tensor | None, *, several: bool = False) -> None:
        self.shape = shape
        self.mask_BS = mask_BS
        self.several = several

    def real_rows(self, leading: Size, *, batch_major: bool) -> tuple[Tensor | None, str | None]:
        """The mask of a layer's rows, (T,) bool, or None where it says nothing about them; and, where that is because
        nobody can tell, why.

        Args:
            leading: the leading dimensions of the layer's input: (B, S), (S, B) of a sequence-first model, or (T,).
            batch_major: whether rows that come flattened are known to run through one sequence after the other.
        """
        if self.mask_BS is None:
            return None, None
        batch, length = self.shape
        straight = tuple(leading) == (batch, length)
        turned = tuple(leading) == (length, batch)
        flat = len(leading) == 1 and leading[0] == batch * length
        one = batch == 1 or length == 1
        if not (straight or turned or flat):
            return None, None
        if self.several:
            return None, STREAMS
        if straight and turned and not one:
            return None, SQUARE
        if flat and not (batch_major or one):
            return None, FLAT
        return (self.mask_BS.t() if turned and not straight else self.mask_BS).reshape(-1), None
