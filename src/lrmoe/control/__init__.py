"""What an attached model's layers are told as training moves along."""

from lrmoe.control.recalibrator import Recalibrator

__all__ = ["Recalibrator"]
