"""Whatever rounds list, lose or renumber: no card is another's, and no event counts twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qgpu_exporter import inventory, totals
from qgpu_exporter.inventory import Inventory
from qgpu_exporter.model import (
    CardFailure,
    CardIdentity,
    CardReading,
    Memory,
    MigSlice,
    ProcessSample,
    ProcessWindow,
    ReaderError,
    Reading,
    Sample,
    SampleBuffer,
    Totals,
    Xid,
)

UUIDS = [f"GPU-5a000000-0000-4000-8000-00000000000{number}" for number in range(4)]
SLICES = (
    MigSlice(2, 0, None, None),
    MigSlice(2, 1, None, None),
    MigSlice(5, None, None, None),
    MigSlice(9, 0, None, None),
)


@st.composite
def rounds(draw: st.DrawFn) -> Reading:
    """A round as a driver can give it: each index once, each card under one index."""
    order = draw(st.permutations(UUIDS))[: draw(st.integers(0, 4))]
    cards: list[CardReading] = []
    failures: list[CardFailure] = []
    for index, uuid in enumerate(order):
        state = draw(st.sampled_from(["answers", "without memory", "lost", "nameless"]))
        if state in ("answers", "without memory"):
            memory = Memory(1000 + UUIDS.index(uuid), 0) if state == "answers" else None
            address = f"00000000:{index:02X}:00.0"
            cards.append(CardReading(CardIdentity(index, uuid, index, address), memory=memory))
        else:
            failures.append(CardFailure(index, "lost", "", uuid if state == "lost" else None))
    error = draw(st.sampled_from([None, None, None, ReaderError("error", "")]))
    if error is not None:
        return Reading(0.0, error=error)
    return Reading(0.0, cards=tuple(cards), failures=tuple(failures))


@given(st.lists(rounds(), min_size=1, max_size=8))
def test_an_index_has_one_card_and_a_card_one_index_and_nothing_of_another_s(
    history: list[Reading],
) -> None:
    known, total = Inventory(), Totals()
    for one in history:
        known = inventory.fold(known, one)
        total = totals.fold(total, one, known=inventory.uuids(known))
        cards = inventory.cards(known, one, total)
        if cards is None:
            continue
        named = [card.identity.uuid for card in cards if card.identity.uuid]
        assert len(set(named)) == len(named)
        assert [card.identity.index for card in cards] == sorted(known.cards or {})
        assert set(total.cards) <= set(named)
        listed = {card.identity.index: card for card in one.cards}
        for card in cards:
            assert card.reading == listed.get(card.identity.index)
            # The size tells which card it is.
            if card.memory_total_bytes is not None:
                assert UUIDS[card.memory_total_bytes - 1000] == card.identity.uuid
            if one.error is None:
                assert (card.down_reason is None) == (card.reading is not None)
        for place in ("minor", "pci_bus_id"):
            taken = [getattr(card.identity, place) for card in cards if card.reading]
            assert not [
                card
                for card in cards
                if card.reading is None and getattr(card.identity, place) in taken
            ]


@given(st.lists(rounds(), min_size=1, max_size=4))
def test_the_order_of_a_round_changes_nothing(history: list[Reading]) -> None:
    forwards, backwards = Inventory(), Inventory()
    for one in history:
        turned = replace(one, cards=one.cards[::-1], failures=one.failures[::-1])
        forwards, backwards = inventory.fold(forwards, one), inventory.fold(backwards, turned)
        assert forwards.cards == backwards.cards
        assert forwards.index_changes == backwards.index_changes


incidents = st.lists(
    st.tuples(
        st.sampled_from([13, 31, 94]),
        st.sampled_from([(None, None), (2, 0), (2, 1), (2, None), (9, 0)]),
        st.sampled_from(["driver", "kernel", "both", "both, the kernel without the instance"]),
    ),
    max_size=12,
)


@given(incidents, st.booleans())
def test_each_incident_counts_once_whoever_tells_it_first(
    told: list[tuple[int, tuple[int | None, int | None], str]], driver_first: bool
) -> None:
    """Incidents that are further apart than one's two reports, each told by one or by both."""
    card = CardReading(CardIdentity(0, UUIDS[0], pci_bus_id="00000000:3B:00.0"), mig_slices=SLICES)
    now = Reading(0.0, cards=(card,))
    state = totals.fold(Totals(), now)
    for number, (xid, (gi, ci), by) in enumerate(told):
        at = 100.0 * number
        driver = Xid(at, xid, UUIDS[0], None, gi, ci)
        kernel = Xid(at + 0.5, xid, None, "00000000:3B:00.0", gi, ci, "kmsg")
        if by.endswith("instance"):
            kernel = replace(kernel, gpu_instance=None, compute_instance=None)
        reports = {"driver": [driver], "kernel": [kernel]}.get(by, [driver, kernel])
        for report in reports if driver_first else reversed(reports):
            state = totals.fold_xids(state, [report], now)
    found = state.cards[UUIDS[0]]
    for code in (13, 31, 94):
        count = sum(xid == code for xid, _, _ in told)
        assert (found.xids[code].count if code in found.xids else 0) == count
        of_instances = sum(total.count for (xid, _), total in found.mig_xids.items() if xid == code)
        assert of_instances == sum(xid == code and gi is not None for xid, (gi, _), _ in told)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=5))
def test_a_clock_that_is_set_back_never_asks_for_a_time_to_come(jumps: list[float]) -> None:
    now, state = 1_700_000_000.0, Totals()
    for jump in jumps:
        now += jump * 60
        until = int(now * 1e6)
        card = CardReading(
            CardIdentity(0, UUIDS[0]),
            samples=(SampleBuffer("gpu", (Sample(until, 0.5),)),),
            process_window=ProcessWindow(until - 1_000_000, until, (ProcessSample(7, until),)),
        )
        state = totals.fold(state, Reading(now, cards=(card,)))
        (seen,) = totals.seen(state)
        latest = max(seen.samples_us["gpu"], seen.processes_us)
        assert latest <= (now + totals.REWIND_SECONDS) * 1e6
