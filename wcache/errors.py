# SPDX-License-Identifier: Apache-2.0
"""The one tree of errors, the same classes on both ends of the socket.

Every class has a stable wire `code`, an `exit_status` for the CLI and, where there is something to do, a `hint`.

    WcacheError
    |- ConfigError              the configuration file or an option is wrong            (2)
    |- NoSuchRank, NoSuchShard  what was asked for is not here                           (4)
    |- CheckpointError          a checkpoint that must not be loaded; `.fault` says why  (1)
    |- PlanError                a sharding plan that does not fit the checkpoint         (1)
    |- FingerprintError         a layout field that has no canonical form                (1)
    |- BackendError             a backend cannot work on this machine                    (1)
    |  `- DeviceMismatch        engine and shard sit on different devices
    |- SegmentError             a segment could not be made, sealed, mapped or trusted   (1)
    |  `- OutOfMemory           not enough free memory: needed, free, by whom
    |- ManifestError            a manifest that does not describe its segments           (1)
    |- StructureError           module and manifest do not agree; every difference named (1)
    |- TrainingRefused          a gradient arrived at a parameter that is shared         (1)
    |- Miss                     the cache does not have what was asked for; `.reason`    (1)
    |- ProtocolError            the peer broke the protocol                              (1)
    |  |- ConnectionClosed      end of file where a message was due
    |  `- FdLimit               descriptors were lost on the way: RLIMIT_NOFILE
    |- DeadlineExceeded         a wait ended; the message says for what and how long     (1)
    |- Unavailable              nobody answers at the socket                             (3)
    |- NotReady                 the rank is there, its weights are not (yet)             (3)
    |- Denied                   peer credentials or role forbid it                       (1)
    |- Busy                     leases, or another writer, stand in the way              (1)
    |- Draining                 no new attaches                                          (1)
    |- PublishError             a publication that was refused or broke off              (1)
    |- IntegrityError           resident bytes are not those that were committed         (1)
    |- LoaderError              the loader child failed; exit status and last words      (1)
    |- SystemdError             the service manager refused                              (1)
    `- InternalError            a defect on the other side; `.error_id` is in its journal (1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from wcache.model import CheckpointFault, Difference, MissReason

_BY_CODE: dict[str, type[WcacheError]] = {}


class WcacheError(Exception):
    """Base of every error wcache raises on purpose.

    `data` holds plain values that travel with the error and let the other end build the same instance.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.data: dict[str, Any] = dict(data or {})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _BY_CODE[cls.code] = cls

    def __str__(self) -> str:
        return self.message

    @classmethod
    def rebuild(cls, message: str, hint: str, data: Mapping[str, Any]) -> WcacheError:
        """Build the instance that was raised on the other end of a socket."""
        return cls(message, hint=hint, data=data)


class ConfigError(WcacheError):
    code = "config"
    exit_status = 2


class NoSuchRank(WcacheError):
    code = "no_such_rank"
    exit_status = 4


class NoSuchShard(WcacheError):
    code = "no_such_shard"
    exit_status = 4


class CheckpointError(WcacheError):
    """A checkpoint that must not be loaded. `fault` is the stable reason; the message names file and numbers."""

    code = "checkpoint"

    def __init__(self, fault: CheckpointFault, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, data={"fault": str(fault)})
        self.fault = fault

    @classmethod
    def rebuild(cls, message: str, hint: str, data: Mapping[str, Any]) -> WcacheError:
        from wcache.model import CheckpointFault

        return cls(CheckpointFault(data["fault"]), message, hint=hint)


class PlanError(WcacheError):
    code = "plan"


class FingerprintError(WcacheError):
    code = "fingerprint"


class BackendError(WcacheError):
    code = "backend"


class DeviceMismatch(BackendError):
    code = "device_mismatch"


class SegmentError(WcacheError):
    code = "segment"


class OutOfMemory(SegmentError):
    code = "out_of_memory"


class ManifestError(WcacheError):
    code = "manifest"


class StructureError(WcacheError):
    """Module and manifest do not agree. `differences` holds one sentence each, all of them."""

    code = "structure"

    def __init__(self, message: str, differences: Sequence[str] = (), *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, data={"differences": list(differences)})
        self.differences = tuple(differences)

    @classmethod
    def rebuild(cls, message: str, hint: str, data: Mapping[str, Any]) -> WcacheError:
        return cls(message, data["differences"], hint=hint)


class TrainingRefused(WcacheError):
    code = "training_refused"
    default_hint = 'load with mode="copy" to train: the weights are private then'


class Miss(WcacheError):
    """The cache does not have what was asked for.

    `reason` is typed and stable; `differences` names each field with the asked and the resident value.
    """

    code = "miss"

    def __init__(
        self, reason: MissReason, message: str, differences: Sequence[Difference] = (), *, hint: str | None = None
    ) -> None:
        wire = [[d.field, d.asked, d.resident] for d in differences]
        super().__init__(message, hint=hint, data={"reason": str(reason), "differences": wire})
        self.reason = reason
        self.differences = tuple(differences)

    @classmethod
    def rebuild(cls, message: str, hint: str, data: Mapping[str, Any]) -> WcacheError:
        from wcache.model import Difference, MissReason

        return cls(MissReason(data["reason"]), message, [Difference(*d) for d in data["differences"]], hint=hint)


class ProtocolError(WcacheError):
    code = "protocol"


class ConnectionClosed(ProtocolError):
    code = "connection_closed"


class FdLimit(ProtocolError):
    code = "fd_limit"
    default_hint = "raise the file descriptor limit (LimitNOFILE= in a unit, ulimit -n in a shell)"


class DeadlineExceeded(WcacheError):
    code = "deadline"


class Unavailable(WcacheError):
    code = "unavailable"
    exit_status = 3
    default_hint = "is the rank running?  wcache status; systemctl start wcache.target"


class NotReady(WcacheError):
    code = "not_ready"
    exit_status = 3


class Denied(WcacheError):
    code = "denied"
    default_hint = "allowed_uids and allowed_gids in wcache.toml say who may connect"


class Busy(WcacheError):
    code = "busy"


class Draining(WcacheError):
    code = "draining"


class PublishError(WcacheError):
    code = "publish"


class IntegrityError(WcacheError):
    code = "integrity"


class LoaderError(WcacheError):
    code = "loader"


class SystemdError(WcacheError):
    code = "systemd"


class InternalError(WcacheError):
    code = "internal"

    def __init__(self, message: str, error_id: str = "", *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, data={"error_id": error_id})
        self.error_id = error_id

    @classmethod
    def rebuild(cls, message: str, hint: str, data: Mapping[str, Any]) -> WcacheError:
        return cls(message, data.get("error_id", ""), hint=hint)


def from_wire(code: str, message: str, hint: str, data: Mapping[str, Any]) -> WcacheError:
    """The error that was raised on the other end; a code this version does not know becomes a ProtocolError."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return ProtocolError(f"{message} (unknown error code {code!r})", hint=hint)
    return cls.rebuild(message, hint, data)


def listed(items: Sequence[object], most: int = 5, separator: str = "; ") -> str:
    """For a message: the first few, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(str(item) for item in items[:most]) + more
