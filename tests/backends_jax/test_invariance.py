"""`numerics=invariant`: a sequence's tokens and KV bits depend on its tokens only. Bitwise, nothing is close enough."""

from __future__ import annotations

import numpy as np
import pytest

from mcjax.engine.base import Kind, StepPlan
from mcjax.types import Sampling

PAGES = list(range(16))
OTHER_PAGES = [39, 3, 22, 17, 8, 30, 1, 12, 25, 6, 33, 19, 14, 27, 36, 10]


def test_chunk_boundaries_and_page_numbers_change_nothing(lab):
    prompt = lab.prompt(1, 90)

    async def main():
        results = []
        for cuts, pages in [
            ((), PAGES),
            ((8,), PAGES),
            ((1, 2, 3, 50), OTHER_PAGES),
            (range(7, 90, 7), OTHER_PAGES[::-1]),
        ]:
            executor = lab.executor(f"e{len(results)}")
            token = await lab.prefill(executor, prompt, pages, cuts)
            tokens = [token, *await lab.decode(executor, token, 90, pages, 30)]
            results.append((tokens, await lab.kv(executor, pages, 119)))
        return results

    (tokens, kv), *others = lab.run(main)
    assert not np.isnan(kv.view(np.float32)).any()
    assert len(set(tokens)) > 10
    for other_tokens, other_kv in others:
        assert other_tokens == tokens
        np.testing.assert_array_equal(other_kv, kv)


@pytest.mark.parametrize("device", [0, 3])
def test_a_prefix_reused_at_any_block_boundary_gives_the_same_rest(lab, device):
    """Blocks that one executor computed are carried to another, which computes the rest: also with one token left."""
    prompt = lab.prompt(2, 81)

    async def main():
        source = lab.executor("source")
        whole = await lab.prefill(source, prompt, PAGES)
        kv = await lab.kv(source, PAGES, 81)
        blocks = await source.on_thread(lambda: source.read_pages(PAGES))
        outcomes = []
        for boundary in range(8, 81, 8):
            target = lab.executor(f"target{boundary}", device)
            reused = boundary // 8
            await target.on_thread(lambda t=target, n=reused: t.write_pages(OTHER_PAGES[:n], blocks[:n]))
            token = await lab.prefill(target, prompt, OTHER_PAGES, start=boundary)
            outcomes.append((token, await lab.kv(target, OTHER_PAGES, 81)))
        return whole, kv, outcomes

    whole, kv, outcomes = lab.run(main)
    assert len(outcomes) == 10
    for token, other in outcomes:
        assert token == whole
        np.testing.assert_array_equal(other, kv)


def test_a_fully_cached_prompt_recomputes_its_last_token_only(lab):
    prompt = lab.prompt(3, 64)

    async def main():
        executor = lab.executor()
        token = await lab.prefill(executor, prompt, PAGES)
        before = await lab.kv(executor, PAGES, 64)
        again = await lab.prefill(executor, prompt, PAGES, start=63)
        return token, again, before, await lab.kv(executor, PAGES, 64)

    token, again, before, after = lab.run(main)
    assert again == token
    np.testing.assert_array_equal(after, before)


def test_batch_slot_and_batch_mates_change_nothing(lab):
    """The same sequence decodes alone, and in every slot of a full batch of others, greedy and sampled."""
    prompt = lab.prompt(4, 21)
    pages = [0, 1, 2, 3, 4, 5]
    spare = [(13, list(range(6, 14))), (25, list(range(14, 20))), (135, list(range(20, 40)))]

    async def main():
        executor = lab.executor()
        results = []
        for sampling in (Sampling(), Sampling(temperature=1.3, seed=2**40 + 5)):
            first = await lab.prefill(executor, prompt, pages, sampling=sampling)
            alone = await lab.decode(executor, first, 21, pages, 20, sampling=sampling)
            kv = await lab.kv(executor, pages, 41)
            for slot in range(4):
                await lab.prefill(executor, prompt, pages, sampling=sampling)
                items = []
                for length, mate_pages in spare:
                    other = lab.prompt(100 + length + slot, length)
                    token = await lab.prefill(executor, other, mate_pages)
                    items.append(lab.item(Kind.DECODE, [token], len(other), mate_pages))
                items.insert(slot, lab.item(Kind.DECODE, [first], 21, pages, sampling=sampling))
                progress = await executor.run(StepPlan(items), 20)
                results.append((alone, progress.tokens[slot].tolist(), kv, await lab.kv(executor, pages, 41)))
        return results

    results = lab.run(main)
    assert results[0][0] != results[-1][0], "temperature changes nothing"
    for alone, together, kv, other_kv in results:
        assert together == alone
        np.testing.assert_array_equal(other_kv, kv)


def test_macro_steps_equal_single_steps_and_mixed_plans_equal_separate_ones(lab):
    prompt, other = lab.prompt(5, 30), lab.prompt(6, 17)
    pages, other_pages = [0, 1, 2, 3, 4, 5, 6, 7], [20, 21, 22, 23]

    async def main():
        executor = lab.executor()
        first = await lab.prefill(executor, prompt, pages)
        together = await lab.decode(executor, first, 30, pages, 12)
        token, singly, mixed = first, [], []
        for step in range(12):
            items = [lab.item(Kind.DECODE, [token], 30 + step, pages)]
            if step == 5:
                items.insert(0, lab.item(Kind.PREFILL, other, 0, other_pages))
            progress = await executor.run(StepPlan(items), 1)
            if step == 5:
                mixed = progress.tokens[0].tolist()
            token = int(progress.tokens[-1][0])
            singly.append(token)
        alone = await lab.prefill(executor, other, other_pages)
        return together, singly, mixed, alone

    together, singly, mixed, alone = lab.run(main)
    assert singly == together
    assert mixed == [alone]


def test_nan_in_free_pages_and_behind_the_end_changes_nothing(lab):
    """New pages are NaN already; here every page but the sequence's own is poisoned, and its tail too."""
    prompt = lab.prompt(7, 43)
    pages = [9, 2, 31, 16, 5, 24, 11, 38]

    async def main():
        executor = lab.executor()
        token = await lab.prefill(executor, prompt, pages)
        clean = await lab.decode(executor, token, 43, pages, 15)
        executor.poison([page for page in range(lab.geometry.pages) if page not in pages])
        executor.poison(pages[6:])  # positions 48.. are behind the end of a prompt of 43
        await executor.on_thread(
            lambda: executor.write_pages([40], np.full((1, lab.programs.page_bytes), 255, np.uint8))
        )
        again = await lab.prefill(executor, prompt, pages)
        return token, clean, again, await lab.decode(executor, again, 43, pages, 15)

    token, clean, again, dirty = lab.run(main)
    assert (again, dirty) == (token, clean)


def test_poison_reaches_what_is_still_read(lab):
    """The other way round: if a sequence's own page is poisoned, it shows. Otherwise the test above proves nothing."""

    async def main():
        executor = lab.executor()
        prompt = lab.prompt(8, 40)
        token = await lab.prefill(executor, prompt, PAGES)
        good = await lab.decode(executor, token, 40, PAGES, 10)
        executor.poison([PAGES[2]])
        await lab.decode(executor, token, 40, PAGES, 10)
        return good, (await lab.kv(executor, PAGES, 50)).view(np.float32)

    _, kv = lab.run(main)
    assert np.isnan(kv[:, :, 16:24]).all()
    assert np.isnan(kv[1:, :, 40:]).any()


def test_replaying_known_tokens_rebuilds_the_same_kv(lab):
    prompt = lab.prompt(9, 27)

    async def main():
        first, second = lab.executor("first"), lab.executor("second", 1)
        token = await lab.prefill(first, prompt, PAGES)
        produced = await lab.decode(first, token, 27, PAGES, 25)
        kv = await lab.kv(first, PAGES, 52)

        await lab.prefill(second, prompt, OTHER_PAGES)
        known = produced[:10]
        item = lab.item(Kind.DECODE, [token, *known], 27, OTHER_PAGES, forced=10)
        progress = await second.run(StepPlan([item]), 25)
        return produced, kv, progress.tokens[0].tolist(), await lab.kv(second, OTHER_PAGES, 52)

    produced, kv, replayed, other_kv = lab.run(main)
    assert replayed == produced
    np.testing.assert_array_equal(other_kv, kv)


def test_forced_tokens_stand_before_sampled_ones(lab):
    async def main():
        executor = lab.executor()
        prompt = lab.prompt(10, 20)
        token = await lab.prefill(executor, prompt, PAGES)
        free = await lab.decode(executor, token, 20, PAGES, 4)
        forced = [(value + 1) % 256 for value in free[:3]]
        item = lab.item(Kind.DECODE, [token, *forced], 20, PAGES, forced=3)
        return free, forced, (await executor.run(StepPlan([item]), 4)).tokens[0].tolist()

    free, forced, tokens = lab.run(main)
    assert tokens[:3] == forced
    assert tokens[3] != free[3]
