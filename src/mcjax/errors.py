"""Typed errors. Each names what it is about; whoever waits for a thing gets one of these, within a bound."""

from __future__ import annotations

from collections.abc import Iterable


class McjaxError(Exception):
    """Base of every error that mcjax raises on purpose."""


class UserError(McjaxError):
    """Something the user can fix; shown as one message, without a traceback."""


class ConfigError(UserError):
    """A config value that cannot work. Names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, problem: str, allowed: Iterable[object] = ()):
        choices = ", ".join(str(choice) for choice in allowed)
        message = f"{key}={value}: {problem}" + (f"; allowed: {choices}" if choices else "")
        super().__init__(message)
        self.key = key
        self.value = value


class TraceError(UserError):
    """A trace line that cannot be read. Names the file, the line and the field."""

    def __init__(self, path: str, line: int, field: str, problem: str):
        super().__init__(f"{path}, line {line}, field {field!r}: {problem}")
        self.path = path
        self.line = line
        self.field = field


class MissingExtra(UserError):
    """An optional dependency that is not installed. Names the extra that brings it."""

    def __init__(self, package: str, extra: str):
        super().__init__(f"{package} is not installed; `pip install 'mcjax[{extra}]'` brings it")


class KernelRefused(UserError):
    """A kernel that has no body for what it was asked. Names the kernel, what does not fit, and the way out."""

    def __init__(self, kernel: str, problem: str, fix: str):
        super().__init__(f"kernel {kernel}: {problem}; {fix}")
        self.kernel = kernel


class CompileFailed(McjaxError):
    """A program that the compiler of an accelerator did not take. Names the accelerator and what stood in the way.

    `cause`: the memory that is too small ("vmem", "smem", "hbm", "shared"), "unsupported" for what cannot be
    lowered, or "compiler" for anything else.
    """

    def __init__(self, target: str, cause: str, problem: str):
        super().__init__(f"{target}, {cause}: {problem}")
        self.target = target
        self.cause = cause


class ChatTemplateError(UserError):
    """A chat template that cannot be read, or that refuses a conversation."""


class RunError(UserError):
    """A run directory that cannot be used (unfinished, of another version, damaged)."""


class StoreError(UserError):
    """A directory of blocks that cannot be used: of another model, layout or version, in use, or damaged."""


class VerificationError(McjaxError):
    """A run that was asked to prove something and did not."""


class RequestError(McjaxError):
    """A request that ended without its tokens."""

    def __init__(self, request_id: int, problem: str):
        super().__init__(f"request {request_id}: {problem}")
        self.request_id = request_id


class Rejected(RequestError):
    """Refused by admission. `retry_after_s` is a hint for the client (HTTP 429)."""

    def __init__(self, request_id: int, reason: str, retry_after_s: float):
        super().__init__(request_id, f"rejected, {reason}")
        self.reason = reason
        self.retry_after_s = retry_after_s


class RequestTooLarge(RequestError):
    """Needs more blocks or pages than a whole instance or pool has: no waiting would help."""


class LossyOnly(RequestError):
    """Its blocks could rest only where their numbers are rounded, and it does not accept that."""

    def __init__(self, request_id: int, where: str):
        fix = "let requests accept it (workload.accepts_lossy=true), or store host memory as computed"
        super().__init__(request_id, f"does not accept lossy blocks, and host memory rounds them {where}; {fix}")


class UnsupportedSampling(RequestError):
    """Asks for more than a sampler here can give. Names the parameter and the most that goes."""


class RequestFailed(RequestError):
    """Every attempt to serve the request failed; names the last cause."""


class RecordMismatch(RequestError):
    """A completion record that does not describe what the decode instance was given."""


class BrokenOutput(RequestError):
    """The request's own numbers came to nothing (no finite logit): another attempt would not help."""

    def __init__(self, request_id: int, why: str):
        super().__init__(request_id, f"its output broke off: {why}")
        self.why = why


class ExecutorFailed(McjaxError):
    """A step plan that raised. The message carries the type and text of what it was.

    `lost_pages`: the device's pages are gone with it, and so is everything on the instance; else only the sequences of
    that plan are concerned.
    """

    def __init__(self, problem: str, lost_pages: bool = False):
        super().__init__(problem)
        self.lost_pages = lost_pages


class InstanceDown(McjaxError):
    """The instance died, or its heartbeat is overdue."""

    def __init__(self, instance: str):
        super().__init__(f"instance {instance} is down")
        self.instance = instance


class Preempted(RequestError):
    """Its pages were needed by somebody who came earlier: it is computed again. That is nobody's failure."""

    def __init__(self, request_id: int, instance: str):
        super().__init__(request_id, f"made room on {instance}")


class PoolFull(McjaxError):
    """A pool cannot make room: what it holds is pinned, leased or reserved. The conductor decides what then."""

    def __init__(self, node: str, needed: int, free: int, pending: bool = False, own: bool = False):
        more = ", more are being saved" if pending else ""
        where = " within the tenant's share" if own else ""
        super().__init__(f"pool {node}: {needed} blocks needed, {free} can be freed{where}{more}")
        self.node = node
        self.own = own
        """Whether it is its own share that the tenant has used up: others may find room."""
        self.pending = pending
        """Whether there will be room as soon as what is to leave has been saved in the tier below."""


class LeaseLost(McjaxError):
    """A lease ran out before its holder was done; what it protected may be gone."""

    def __init__(self, node: str, request_id: int):
        super().__init__(f"pool {node}: the lease of request {request_id} ran out")


class TransferError(McjaxError):
    """A copy that did not arrive. `request_id` and `first_block` say whose."""

    def __init__(self, problem: str, request_id: int = -1, first_block: int = -1):
        super().__init__(f"transfer for request {request_id}, block {first_block}: {problem}")
        self.problem = problem
        self.request_id = request_id
        self.first_block = first_block


class StaleRegion(TransferError):
    """The region's generation changed: its slots belong to something else now, and no byte was delivered."""


class BlockCorrupt(TransferError):
    """Bytes whose checksum is not the one recorded."""


class Unencodable(TransferError):
    """A block with numbers that the target's encoding has no place for (NaN or infinity among others). It stays where
    it is; another attempt would not help."""


class TierUnavailable(TransferError):
    """A tier's device cannot be used now (full, failing, far too slow). Its blocks count as not there."""


class PeerLost(TransferError):
    """The other side's process or connection is gone; what it had not answered did not arrive, or nobody knows."""


class AccessRefused(TransferError):
    """The other side does not let its memory be touched so: unknown key, bytes outside the region, not writable."""


class HandshakeRefused(TransferError):
    """Two endpoints that do not talk to each other: another secret, another version, another kind."""


class TransferTimeout(TransferError):
    """Not there by its deadline."""


class TransferCancelled(TransferError):
    """Given up by whoever asked for it."""


class LayoutMismatch(TransferError):
    """Blocks of one layout for a place of another between which there is no conversion."""


class TransportUnavailable(UserError):
    """A transport that cannot work on this machine. Says what is missing, and what brings it."""

    def __init__(self, transport: str, problem: str, fix: str):
        super().__init__(f"transport {transport}: {problem}; {fix}")
        self.transport = transport


class DeadlineExceeded(McjaxError):
    """`aio.within` gave up waiting."""


class Deadlock(McjaxError):
    """Virtual time cannot advance: nothing is ready, no timer is set, and somebody still waits. Lists who, for what."""


class IntegrityError(McjaxError):
    """An invariant of a pool, store or allocator does not hold."""
