"""The errors of this library, so that a program can tell a bad file from a bad plan.

A bad argument is a plain ``ValueError``, as everywhere in Python.
"""


class AnabranchError(Exception):
    """Base of every error that this library raises on purpose."""


class FileError(AnabranchError):
    """A file is missing, malformed, of another kind or version, or already there."""


class PlanError(AnabranchError):
    """A plan does not put every gradient of a trace into exactly one bucket."""


class NetworkError(AnabranchError):
    """A network has no cost for a collective, or cannot be carried to another world size."""


class DisagreementError(AnabranchError):
    """Ranks of one process group hold different models, settings or plans."""


class CollectiveError(AnabranchError):
    """A collective failed or timed out: another rank died, stalled or left this step."""


class UpdateError(AnabranchError):
    """The optimizer step of a bucket failed on this rank; other ranks that wait for the bucket fail, too."""


class MissingExtraError(AnabranchError, ModuleNotFoundError):
    """An optional library is not installed, or cannot be imported; the message says what to install."""


class LabError(AnabranchError):
    """The lab cannot start here, or could not run its program at all."""
