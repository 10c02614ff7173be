"""Names what keeps the kubelet from answering, with the words that tell how to mend it."""

from __future__ import annotations

import os
import stat

import grpc

from qgpu_exporter.sources import SourceError

SocketIdentity = tuple[int, int]
"""(inode, ctime in nanoseconds): a restarted kubelet's socket may get the same inode again."""


def socket_identity(socket: str) -> SocketIdentity:
    """The identity of the socket file; raises `SourceError` where there is none.

    Reasons: `socket_missing`, `permission_denied`, `not_a_socket`, `socket_replaced`.
    """
    try:
        status = os.stat(socket)
    except PermissionError as error:
        raise permission_denied(socket) from error
    except OSError as error:
        raise SourceError(
            "socket_missing",
            f"{socket}: {error.strerror}; is the kubelet up, and its pod-resources directory"
            " mounted? Where the kubelet has another --root-dir, set --kubelet.socket",
        ) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise SourceError("not_a_socket", f"{socket} is no socket; correct --kubelet.socket")
    if status.st_nlink == 0:
        # Only a mounted file can be seen without a name.
        raise SourceError(
            "socket_replaced",
            f"{socket} is the socket of a kubelet that has ended: mount its directory, not the"
            " file, so that the socket of a restarted kubelet is found",
        )
    return status.st_ino, status.st_ctime_ns


def permission_denied(socket: str) -> SourceError:
    """The error of a socket that this process may not reach."""
    return SourceError(
        "permission_denied", f"{socket}: permission denied; run as root, whom the socket belongs to"
    )


def is_rate_limited(error: grpc.aio.AioRpcError) -> bool:
    """Whether the kubelet refused because of its limit of questions, which all clients share."""
    # A too large answer has the same code, so the text decides.
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not _is_too_large(error)


def _is_too_large(error: grpc.aio.AioRpcError) -> bool:
    return "larger than max" in (error.details() or "")


def from_rpc_error(
    error: grpc.aio.AioRpcError, socket: str, timeout_seconds: float, max_message_bytes: int
) -> SourceError:
    """What a failed call means.

    Reasons: `timeout`, `unimplemented`, `too_large`, `rate_limited`, `permission_denied`,
    `unavailable`, `error`.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return SourceError(
            "timeout",
            f"the kubelet did not answer within {timeout_seconds:g} s; see its log and load",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return SourceError(
            "unimplemented",
            "the kubelet does not serve the pod-resources API v1: it needs Kubernetes 1.20 or"
            " later; --kubelet.socket= (empty) turns this source off",
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _exhausted(error, max_message_bytes)
    if code is grpc.StatusCode.UNAVAILABLE:
        if "Permission denied" in details:
            return permission_denied(socket)
        return SourceError("unavailable", _unavailable(details, socket))
    return SourceError("error", f"the kubelet answered {code.name}: {details}")


def _exhausted(error: grpc.aio.AioRpcError, max_message_bytes: int) -> SourceError:
    if _is_too_large(error):
        return SourceError(
            "too_large",
            f"the kubelet's answer is larger than {max_message_bytes / (1 << 20):g} MiB: a device"
            " plugin or DRA driver of this node lists far too much",
        )
    return SourceError(
        "rate_limited",
        "the kubelet refuses because its pod-resources socket is asked more than 100 times a"
        " second, by all clients of this node together; find the one that asks too often",
    )


def _unavailable(details: str, socket: str) -> str:
    if "Connection refused" in details:
        return f"{socket}: connection refused; the kubelet is down or restarting"
    if "HTTP/2" in details:
        return f"{socket}: what listens there is not the kubelet; correct --kubelet.socket"
    return f"{socket}: the kubelet cannot be reached ({details.rpartition('error: ')[2]})"
