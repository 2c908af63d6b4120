"""Every exception ftckpt raises on purpose. Catch ``FtckptError`` to catch them all.

::

    FtckptError
    ├── StoreError (OSError)            the store said no; ``retryable`` says whether again can help
    │   ├── ObjectNotFound (FileNotFoundError)
    │   ├── AlreadyExists (FileExistsError)
    │   ├── BucketNotFound (FileNotFoundError)
    │   ├── AccessDenied (PermissionError)
    │   │   └── CredentialsExpired                  retryable
    │   ├── StoreFull
    │   ├── StoreUnavailable (ConnectionError)      retryable
    │   ├── StoreTimeout (TimeoutError)             retryable
    │   ├── StoreGone (TimeoutError)
    │   └── UnsafeStore                             creates are not exclusive there
    ├── RunError
    │   ├── RunNotFound (FileNotFoundError)
    │   ├── NoCommit (LookupError)
    │   ├── StepNotFound (LookupError)
    │   ├── UnknownFormat (ValueError)
    │   ├── NotSameRun (FileExistsError)
    │   └── CommandNotFound (FileNotFoundError)
    ├── CorruptError (ValueError)       bytes that are not what a record says they are
    │   ├── RecordCorrupt
    │   ├── ChunkCorrupt
    │   └── ObjectDamaged               absent, or of another size than stated
    ├── StateError                      the trainer's state cannot be saved, or does not fit
    │   ├── UnsupportedValue (TypeError)
    │   ├── StateMismatch (ValueError)
    │   ├── WorldSizeMismatch (ValueError)
    │   ├── NotEnoughMemory (MemoryError)
    │   └── RestoreIncomplete (RuntimeError)
    ├── ForeignError (ValueError)       a checkpoint of another format
    │   ├── ForeignDamaged              cut off, incomplete, or at odds with itself
    │   ├── ForeignUnsafe               reading it would run code, or make objects of unknown classes
    │   ├── NotRepresentable            what one side holds has no form on the other
    │   └── DestinationTaken (FileExistsError)
    ├── SaveError (RuntimeError)        a step did not become readable; training may go on
    │   ├── SaveFailed
    │   │   └── PacksGone                           what earlier steps wrote is no longer there
    │   ├── SaveAborted
    │   ├── Diverged
    │   └── TooManyFailedSaves
    ├── Fenced (RuntimeError)           a newer attempt owns the run
    ├── AttemptTaken (FileExistsError)  somebody else claimed that attempt
    ├── AttemptWentBack (RuntimeError)  an attempt's progress is lost; a new attempt is needed
    ├── GcStopped (RuntimeError)        the collector could not read what it keeps
    ├── SettingsError (ValueError)
    │   └── SettingsDiffer              ranks were given different settings
    ├── NotEntered (RuntimeError)       a session was used outside of its ``with``
    ├── ExtraMissing (ImportError)      an optional package is not installed
    └── MembershipError (RuntimeError)

A message says what was being done, to what, what was found, what is still safe and what to do
next, one thought a line. The same facts are attributes.
"""

from __future__ import annotations


class FtckptError(Exception):
    """Base of everything ftckpt raises on purpose.

    ``facts`` holds what the message was made from; every fact is an attribute too.
    """

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> object:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        return self.message


class StoreError(FtckptError, OSError):
    """A store call failed. Facts: ``op``, ``key``, ``uri``. Nothing else was changed."""

    retryable: bool = False


class ObjectNotFound(StoreError, FileNotFoundError):
    """No object has that key."""


class AlreadyExists(StoreError, FileExistsError):
    """``create`` met an object under its key; it was left alone."""


class BucketNotFound(StoreError, FileNotFoundError):
    """The bucket (or the folder that should hold the run) does not exist."""


class AccessDenied(StoreError, PermissionError):
    """Credentials are absent, wrong or not enough, or the folder is read-only."""


class CredentialsExpired(AccessDenied):
    """Credentials that worked ran out, and whoever gives them has no others yet."""

    retryable = True


class StoreFull(StoreError):
    """No space, or a quota is used up."""


class StoreUnavailable(StoreError, ConnectionError):
    """Not reachable, throttling, or an error of the server's own."""

    retryable = True


class StoreTimeout(StoreError, TimeoutError):
    """No answer in time. The call may or may not have taken effect."""

    retryable = True


class StoreGone(StoreError, TimeoutError):
    """Nothing answered for as long as a save may wait: it is given up. Fact: ``silent_s``."""


class UnsafeStore(StoreError):
    """The probe saw two creators of one key succeed: a commit there proves nothing."""


class RunError(FtckptError):
    """Something about a run as a whole."""


class RunNotFound(RunError, FileNotFoundError):
    """The address holds no run: mistyped, or never started."""


class NoCommit(RunError, LookupError):
    """The run exists but nothing in it is readable."""


class StepNotFound(RunError, LookupError):
    """The step asked for has no readable commit."""


class UnknownFormat(RunError, ValueError):
    """Written by a newer major format than this version reads."""


class NotSameRun(RunError, FileExistsError):
    """A copy or fork was to go where another run is, or where a copy went on by itself. Fact: ``key``."""


class CommandNotFound(RunError, FileNotFoundError):
    """The recorded command of the run is not there any more."""


class CorruptError(FtckptError, ValueError):
    """Bytes in the store are not what the record that names them says."""


class RecordCorrupt(CorruptError):
    """A record does not match its own digest, or does not decode."""


class ChunkCorrupt(CorruptError):
    """A chunk does not match its digest. No byte of it reached a tensor."""


class ObjectDamaged(CorruptError):
    """A needed object is absent or has another size than its record states."""


class StateError(FtckptError):
    """Something about the trainer's state."""


class UnsupportedValue(StateError, TypeError):
    """A leaf that cannot be saved faithfully. Fact: ``leaf``, its full name."""


class StateMismatch(StateError, ValueError):
    """Saved and live state differ in names, shapes, dtypes or groups. Nothing was changed."""


class WorldSizeMismatch(StateError, ValueError):
    """Per-rank state was saved by other ranks than those that restore it."""


class NotEnoughMemory(StateError, MemoryError):
    """What a step is said to hold takes more memory than there is. None of it was taken."""


class RestoreIncomplete(StateError, RuntimeError):
    """A restore failed after it had begun. Fact: ``components``, those partly overwritten."""


class ForeignError(FtckptError, ValueError):
    """Something about a checkpoint of another format."""


class ForeignDamaged(ForeignError):
    """It is cut off, lacks a part, or its parts say different things. Fact: ``file``."""


class ForeignUnsafe(ForeignError):
    """It names a class or function that is not on the list of its format. Nothing was run. Fact: ``named``."""


class NotRepresentable(ForeignError):
    """A dtype, a name or a value of one side has no form on the other. Nothing was written."""


class DestinationTaken(ForeignError, FileExistsError):
    """An export was to go where something else is. It was left alone."""


class SaveError(FtckptError, RuntimeError):
    """A step did not become readable. The last commit is untouched."""


class SaveFailed(SaveError):
    """This process could not write its share."""


class PacksGone(SaveFailed):
    """Packs that earlier steps wrote, and this one refers to, are absent or shorter. Fact: ``packs``, their keys."""


class SaveAborted(SaveError):
    """The step was given up by the participants and will never be readable."""


class Diverged(SaveError):
    """Replicas that must hold equal bytes do not. Fact: ``leaves``, the names that differ."""


class TooManyFailedSaves(SaveError):
    """``max_failed_saves`` saves in a row failed; training on would risk too much."""


class Fenced(FtckptError, RuntimeError):
    """A newer attempt owns the run; what this one writes is on no lineage."""


class AttemptTaken(FtckptError, FileExistsError):
    """Another process claimed this attempt first. Facts: ``attempt``, ``host``, ``nonce``."""


class AttemptWentBack(FtckptError, RuntimeError):
    """State would come from the store although this attempt already went further."""


class GcStopped(FtckptError, RuntimeError):
    """The collector could not read a record that it keeps, so it deleted nothing."""


class SettingsError(FtckptError, ValueError):
    """A setting has no meaning, or two settings contradict each other."""


class SettingsDiffer(SettingsError):
    """Ranks of one job were given different settings. Nothing was written."""


class NotEntered(FtckptError, RuntimeError):
    """A session was used before it was entered, after it was left, or in another process (a fork)."""


def in_another_process(what: str, theirs: int, ours: int) -> NotEntered:
    """``what`` was done by process ``theirs``, and is of no use in this one, forked from it."""
    return NotEntered(
        f"NotEntered: {what} by process {theirs}; this is process {ours}, forked from it\n"
        "  its threads are not here, so nothing would ever end; the run and the other process were left alone\n"
        "  save, wait and train in the process that entered the session",
        pid=theirs,
        here=ours,
    )


class ExtraMissing(FtckptError, ImportError):
    """An optional package is not installed. Fact: ``extra``, which brings it."""


class MembershipError(FtckptError, RuntimeError):
    """A replica group cannot take part."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its class when it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def in_words(error: FtckptError) -> str:
    """The message with the class in front, once."""
    kind = type(error).__name__
    return error.message if error.message.startswith(f"{kind}:") else f"{kind}: {error.message}"
