"""What a work completion's status says about the span, by the name that verbs give it.

| status | cause | what is done |
|---|---|---|
| `REM_ACCESS_ERR`, `REM_INV_REQ_ERR`, `REM_OP_ERR` | the peer's card refused | the peer is asked why, span by span |
| `LOC_PROT_ERR`, `LOC_ACCESS_ERR` | the own region is not registered (any more) | `AccessRefused` |
| `RETRY_EXC_ERR`, `RNR_RETRY_EXC_ERR`, `RESP_TIMEOUT_ERR` | the peer's card is silent | the same; else `PeerLost` |
| `WR_FLUSH_ERR` | another request broke the queue pair | tried again on the next one |
| any other | | `TransferError` with the name |
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from mcjax.errors import AccessRefused, PeerLost, TransferError


class Cause(Enum):
    """Why a request did not complete."""

    REMOTE = "the peer's card refused the request"
    LOCAL = "the own region is not registered with the card"
    SILENT = "the peer's card does not answer"
    FLUSHED = "another request broke the queue pair"
    OTHER = "the request failed"


_CAUSES = {
    "REM_ACCESS_ERR": Cause.REMOTE,
    "REM_INV_REQ_ERR": Cause.REMOTE,
    "REM_INV_RD_REQ_ERR": Cause.REMOTE,
    "REM_OP_ERR": Cause.REMOTE,
    "LOC_PROT_ERR": Cause.LOCAL,
    "LOC_ACCESS_ERR": Cause.LOCAL,
    "RETRY_EXC_ERR": Cause.SILENT,
    "RNR_RETRY_EXC_ERR": Cause.SILENT,
    "RESP_TIMEOUT_ERR": Cause.SILENT,
    "WR_FLUSH_ERR": Cause.FLUSHED,
}
_KINDS: dict[Cause, type[TransferError]] = {Cause.LOCAL: AccessRefused, Cause.SILENT: PeerLost}


def status_name(enums: Any, status: int) -> str:
    """`WR_FLUSH_ERR` and the like, from verbs' constants; the number where they have no name for it."""
    names = (name for name in dir(enums) if name.startswith("IBV_WC_") and name.endswith("_ERR"))
    return next((name.removeprefix("IBV_WC_") for name in names if int(getattr(enums, name)) == status), str(status))


def cause_of(name: str) -> Cause:
    return _CAUSES.get(name, Cause.OTHER)


def error_of(name: str) -> TransferError:
    """What whoever waits is told, unless the peer knows better."""
    cause = cause_of(name)
    return _KINDS.get(cause, TransferError)(f"{cause.value} ({name})")
