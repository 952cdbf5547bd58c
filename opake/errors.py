"""Every error and warning that opake raises, under one base class.

Each class also inherits the builtin it resembles, so ``except TypeError`` keeps working.
"""

from __future__ import annotations


class OpakeError(Exception):
    """Base of all errors raised by opake."""


class UnknownFlag(OpakeError, TypeError):
    """A keyword that is no flag."""


class InvalidArgument(OpakeError, ValueError):
    """An argument of the right type with a value that cannot be used."""


class InvalidType(OpakeError, TypeError):
    """An argument of a type or dtype that cannot be used."""


class InvalidBatch(OpakeError, ValueError):
    """A batch whose leaves are not tensors with one common leading dimension."""


class NotAModel(OpakeError, TypeError):
    """An object in which no model can be found."""


class UnsupportedModel(OpakeError, ValueError):
    """A model whose ``model_type`` belongs to no registered family."""


class UnsupportedAttention(OpakeError, ValueError):
    """An attention implementation that cannot run under functorch."""


class UnsupportedTransformers(OpakeError, ImportError):
    """Upstream symbols that are missing or changed; the message lists every mismatch."""


class PackedSequences(OpakeError, ValueError):
    """Position ids that pack several sequences into one row, under a functorch transform."""


class UnsupportedTransform(OpakeError, NotImplementedError):
    """A functorch transform that what it is applied to does not go through."""


class MissingTarget(OpakeError, AttributeError):
    """The attribute or key that a patch would replace does not exist."""


class UnpatchableTarget(OpakeError, TypeError):
    """A place that cannot be written raw, such as a builtin type or a property."""


class ForeignWrite(OpakeError, RuntimeError):
    """Somebody else wrote where a patch is live, or already owns what a patch needs."""


class AlreadyPatched(OpakeError, RuntimeError):
    """A set, model or process that is patched already, with a plan that differs."""


class RestoreError(OpakeError, RuntimeError):
    """One or more slots could not be restored; the message lists them all."""


class RestoreWarning(UserWarning):
    """Slots that somebody else wrote in the meantime and that were left as they are."""
