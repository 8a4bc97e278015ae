"""The errors a user of windlass can meet.

WindlassError            every error below; the command line prints it as one line, exit code 2
  UsageError             an argument, a prompt or a position that cannot be honoured
  PolicyError            a policy broke its contract, or could not be found or loaded
  UnsupportedModel       the model cannot work with a cache of un-rotated keys; says why
  PromptCacheError       a prompt-cache file that is damaged, foreign or too new
  RecordingError         a recording of a cache that is damaged or too new

WindlassWarning          what a user may want to know; the command line prints it as a note
"""


class WindlassError(Exception):
    """Any error that a user can mend."""


class UsageError(WindlassError, ValueError):
    """An argument, a prompt or a position that cannot be honoured."""


class PolicyError(WindlassError):
    """A policy that is unknown, does not load, or breaks its contract."""


class UnsupportedModel(WindlassError):
    """A model that cannot work with a cache of un-rotated keys."""


class PromptCacheError(WindlassError):
    """A prompt-cache file that is damaged, was made by another model, or is too new."""


class RecordingError(WindlassError):
    """A recording of a cache that is damaged, too new, or none at all."""


class WindlassWarning(UserWarning):
    """What a user may want to know, though all goes on."""
