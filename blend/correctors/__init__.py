"""One file per published way to shift the reused rows that are not computed again."""

from blend.correctors.base import Choice, Correction, Corrector, Shift
from blend.correctors.mean_shift import MeanShift

__all__ = ["Choice", "Correction", "Corrector", "MeanShift", "Shift"]
