"""Where calibrations lie: in the user's cache folder, beside the converted models, one file per model and recipe."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from blend.calibration import Calibration
from blend.correctors import Corrector
from blend.errors import BudgetError
from blend.hf.cache import cache_home
from blend.setup import Setup

__all__ = ["calibration_file", "calibration_key", "find_calibration", "keep_calibration", "require_calibration"]


def calibration_key(setup: Setup, corrector: Corrector | None) -> str:
    """sha256 (hex) of what a calibration holds for: model and tokenizer, adapter, background, prelude, corrector."""
    parts = (setup.fingerprint, setup.adapter, setup.background.digest, setup.prelude, repr(corrector))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def calibration_file(setup: Setup, corrector: Corrector | None) -> Path:
    """Where this Blender's calibration lies, or would."""
    return cache_home() / "calibrations" / f"{calibration_key(setup, corrector)[:24]}.json"


def find_calibration(setup: Setup, corrector: Corrector | None) -> Calibration | None:
    """This Blender's calibration, or None where there is none.

    Raises:
        BudgetError: the file cannot be used; the message names it.
    """
    file = calibration_file(setup, corrector)
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BudgetError(f"{file} cannot be read: {error}") from error
    try:
        return Calibration.from_json(text, calibration_key(setup, corrector))
    except BudgetError as error:
        raise BudgetError(f"{file} cannot be used: {error}; delete it, and run `kvblend calibrate MODEL`") from error


def require_calibration(setup: Setup, corrector: Corrector | None, target: str) -> Calibration:
    """This Blender's calibration, which ``target`` cannot do without.

    Raises:
        BudgetError: there is none, or it cannot be used.
    """
    found = find_calibration(setup, corrector)
    if found is None:
        raise BudgetError(
            f"{target} needs a calibration of this model, background, prelude and corrector, and there is none: run "
            "`kvblend calibrate MODEL`, a few minutes, once (where these are not the defaults, "
            "`eval.calibrating.run_calibrate` with your Blender)"
        )
    return found


def keep_calibration(setup: Setup, corrector: Corrector | None, calibration: Calibration) -> Path:
    """Puts a calibration where :func:`find_calibration` looks, whole or not at all; returns its file."""
    file = calibration_file(setup, corrector)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(calibration.as_json(), encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file
