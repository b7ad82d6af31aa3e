"""Bodies for tests of the proof itself: the references, good or spoilt, and some that never return. Run as a module it
is a worker that has them in place of the real ones."""

from __future__ import annotations

import os
import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mcjax.errors import KernelRefused
from mcjax.kernels.decode.reference import decode as decode_reference
from mcjax.kernels.kv_pack.reference import kv_pack as kv_pack_reference
from mcjax.kernels.kv_pack.reference import kv_unpack as kv_unpack_reference
from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill.reference import prefill as prefill_reference
from mcjax.kernels.proof import cells, worker


def _reference(kernel):
    def body(*arguments, target, interpret=None, **options):
        assert target.interpret
        return kernel(*arguments, **options)

    return body


prefill, decode = _reference(prefill_reference), _reference(decode_reference)
kv_pack, kv_unpack = _reference(kv_pack_reference), _reference(kv_unpack_reference)


def off_by_a_little(*arguments, target, **options):
    """One number of a result is wrong by a fiftieth."""
    out, logs = decode_reference(*arguments, **options)
    return out.at[0, 0, 0, 0].add(0.02 * jnp.nanmax(jnp.abs(arguments[1].data))), logs


def leaves_a_row(*arguments, target, **options):
    """A padded row holds what was there before."""
    out, logs = decode_reference(*arguments, **options)
    return out.at[-1].set(jnp.nan), logs


def writes_elsewhere(*arguments, target, **options):
    """A page of nobody is cleared."""
    out, pages = prefill_reference(*arguments, **options)
    return out, KVPages(jnp.nan_to_num(pages.data), pages.scales)


def drops_a_head(*arguments, target, **options):
    """Blocks with the heads in another order."""
    blocks = kv_pack_reference(*arguments, **options)
    return type(blocks)(blocks.data[..., ::-1, :], blocks.scales)


def refuses(*arguments, target, **options):
    raise KernelRefused("prefill", "no such page", "take pages of 64 tokens")


def crashes(*arguments, target, **options):
    print("this goes to standard output, and must not be taken for an answer", flush=True)
    os.write(2, b"LLVM ERROR: out of registers\n")
    os.abort()


def sleeps(*arguments, target, **options):
    time.sleep(3600)


def too_large(pages, slots, *, target, **options):
    """A block that no VMEM holds."""

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    shape = (1 << 14, 1 << 13)
    rows = jnp.broadcast_to(slots[:1].astype(jnp.float32), shape)
    return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32))(rows)


BODIES = {
    "prefill-tpu": "proof_bodies:prefill",
    "prefill-gpu": "proof_bodies:writes_elsewhere",
    "prefill-gpu_mosaic": "proof_bodies:refuses",
    "decode-tpu": "proof_bodies:decode",
    "decode-gpu": "proof_bodies:off_by_a_little",
    "kv_pack-tpu": "proof_bodies:kv_pack",
    "kv_pack-gpu": "proof_bodies:drops_a_head",
    "kv_unpack-tpu": "proof_bodies:kv_unpack",
    "kv_unpack-gpu": "proof_bodies:crashes",
}


def use() -> None:
    """Has these bodies in place of the real ones, in this process."""
    cells.BODIES.update(BODIES)


if __name__ == "__main__":
    use()
    worker.main()
