"""Typed refusals of the engine at start; knows no transport."""

from __future__ import annotations

from specsplit.core.errors import SpecsplitError


class UnsupportedModel(SpecsplitError):
    """The model has a part that this engine cannot run exactly; the message names it."""

    code = "unsupported_model"
    grpc_status = "FAILED_PRECONDITION"


class ModelLoadError(SpecsplitError):
    """The model cannot be found or read."""

    code = "model_load_failed"
    grpc_status = "FAILED_PRECONDITION"
