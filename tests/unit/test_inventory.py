"""Which cards the node has, whatever the rounds list, lose, renumber or replace."""

from __future__ import annotations

from dataclasses import replace

from qgpu_exporter import inventory
from qgpu_exporter.inventory import IndexChange, Inventory
from qgpu_exporter.model import (
    Card,
    CardFailure,
    CardIdentity,
    CardReading,
    CardTotals,
    Memory,
    MigSlice,
    ReaderError,
    Reading,
    Totals,
)

A = "GPU-5a000000-0000-4000-8000-00000000000a"
B = "GPU-5a000000-0000-4000-8000-00000000000b"
C = "GPU-5a000000-0000-4000-8000-00000000000c"


def answered(index: int, uuid: str) -> CardReading:
    identity = CardIdentity(
        index, uuid, minor=index, pci_bus_id=f"00000000:{uuid[-1].upper()}B:00.0"
    )
    return CardReading(identity, memory=Memory(1000, 10), mig_compute_slices=7)


def reading(*parts: CardReading | CardFailure) -> Reading:
    return Reading(
        1.0,
        cards=tuple(part for part in parts if isinstance(part, CardReading)),
        failures=tuple(part for part in parts if isinstance(part, CardFailure)),
    )


def after(*rounds: Reading) -> Inventory:
    state = Inventory()
    for one in rounds:
        state = inventory.fold(state, one)
    return state


def listed(*rounds: Reading) -> list[tuple[int, str, str | None, bool]]:
    """(index, uuid, reason, has a reading) of each card after these rounds."""
    cards = inventory.cards(after(*rounds), rounds[-1], Totals())
    assert cards is not None
    return [
        (card.identity.index, card.identity.uuid, card.down_reason, card.reading is not None)
        for card in cards
    ]


def test_nothing_is_known_before_the_first_round() -> None:
    assert inventory.cards(Inventory(), None, Totals()) is None
    failed = Reading(1.0, error=ReaderError("library_not_found", "no library"))
    assert inventory.cards(after(failed), failed, Totals()) is None


def test_node_without_cards_is_known_to_have_none() -> None:
    assert inventory.cards(after(reading()), reading(), Totals()) == ()


def test_cards_are_joined_with_reading_and_totals() -> None:
    round_ = reading(answered(1, B), answered(0, A))
    totals = Totals({B: CardTotals(last_xid=31)})
    cards = inventory.cards(after(round_), round_, totals)
    assert cards == (
        Card(answered(0, A).identity, answered(0, A), None, 1000, 7, CardTotals()),
        Card(answered(1, B).identity, answered(1, B), None, 1000, 7, CardTotals(last_xid=31)),
    )


def test_failing_card_keeps_its_identity_and_capacity() -> None:
    rounds = (
        reading(answered(0, A), answered(1, B)),
        reading(answered(0, A), CardFailure(1, "lost")),
    )
    cards = inventory.cards(after(*rounds), rounds[-1], Totals())
    assert cards is not None
    assert cards[1] == Card(answered(1, B).identity, None, "lost", 1000, 7)


def test_reading_without_memory_keeps_the_capacity() -> None:
    rounds = (reading(answered(0, A)), reading(CardReading(CardIdentity(0, A))))
    cards = inventory.cards(after(*rounds), rounds[-1], Totals())
    assert cards is not None
    assert cards[0].memory_total_bytes == 1000
    assert cards[0].mig_compute_slices is None
    assert cards[0].identity == answered(0, A).identity


def test_card_that_never_answered_has_an_index_alone() -> None:
    assert listed(reading(CardFailure(0, "timeout"))) == [(0, "", "timeout", False)]
    assert listed(reading(CardFailure(0, "timeout")), reading()) == []
    assert inventory.uuids(after(reading(CardFailure(0, "timeout")))) == frozenset()


def test_card_that_is_not_listed_is_missing_until_it_is_back() -> None:
    both = reading(answered(0, A), answered(1, B))
    only = reading(answered(0, A))
    assert listed(both, only, only) == [(0, A, None, True), (1, B, "missing", False)]
    assert inventory.uuids(after(both, only)) == {A, B}
    assert listed(both, only, both) == [(0, A, None, True), (1, B, None, True)]


def test_new_card_under_an_old_index_replaces_the_old_one() -> None:
    rounds = (
        reading(answered(0, A), answered(1, B)),
        reading(answered(0, A), CardFailure(1, "lost", uuid=B)),
        reading(answered(0, A), answered(1, C)),
    )
    assert listed(*rounds) == [(0, A, None, True), (1, C, None, True)]
    assert after(*rounds).index_changes == 0
    assert inventory.uuids(after(*rounds)) == {A, C}


def test_replaced_card_takes_nothing_of_the_old_one() -> None:
    rounds = (reading(answered(0, A)), reading(CardReading(CardIdentity(0, C))))
    cards = inventory.cards(after(*rounds), rounds[-1], Totals())
    assert cards == (Card(CardIdentity(0, C), rounds[-1].cards[0]),)


def test_changed_index_is_counted_and_named() -> None:
    first = reading(answered(0, A), answered(1, B))
    second = reading(answered(0, B))
    state = after(first, second)
    assert listed(first, second) == [(0, B, None, True)]
    assert state.index_changes == 1
    assert state.changes == (IndexChange(B, 1, 0),)
    assert after(first, second, second).changes == ()
    assert after(first, second, first).index_changes == 2


def test_swapped_indices_are_two_changes() -> None:
    state = after(reading(answered(0, A), answered(1, B)), reading(answered(0, B), answered(1, A)))
    assert state.changes == (IndexChange(B, 1, 0), IndexChange(A, 0, 1))


def test_nameless_failure_is_not_a_card_that_was_found_elsewhere() -> None:
    rounds = (
        reading(answered(0, A), answered(1, B), answered(2, C)),
        reading(answered(0, B), CardFailure(1, "timeout")),
    )
    assert listed(*rounds) == [
        (0, B, None, True),
        (1, "", "timeout", False),
        (2, C, "missing", False),
    ]


def test_failure_that_names_its_card_under_another_index_moves_it() -> None:
    rounds = (
        reading(answered(0, A), answered(1, B)),
        reading(CardFailure(0, "lost", uuid=B)),
    )
    assert listed(*rounds) == [(0, B, "lost", False)]
    assert after(*rounds).index_changes == 1


def test_nameless_failure_does_not_take_a_named_ones_place() -> None:
    rounds = (
        reading(answered(0, A), answered(1, B)),
        reading(CardFailure(0, "timeout"), CardFailure(1, "timeout", uuid=A)),
    )
    assert listed(*rounds) == [(0, "", "timeout", False), (1, A, "timeout", False)]


def test_card_that_is_gone_leaves_its_places_to_the_one_that_has_them_now() -> None:
    place = "00000000:3B:00.0"
    first = CardReading(CardIdentity(0, A, minor=3, pci_bus_id=place))
    second = CardReading(CardIdentity(1, B, minor=3, pci_bus_id=place))
    known = after(reading(first), reading(second)).cards
    assert known is not None
    assert [card.identity for card in known.values()] == [CardIdentity(0, A), second.identity]


def test_failed_round_says_nothing_about_cards() -> None:
    good = reading(answered(0, A), CardFailure(1, "lost", uuid=B))
    failed = Reading(2.0, error=ReaderError("unknown_error", "no card answers"))
    assert listed(good, failed) == [(0, A, None, False), (1, B, None, False)]
    assert listed(good, failed, good) == [(0, A, None, True), (1, B, "lost", False)]


def test_reading_that_is_too_old_leaves_cards_without_reading_or_reason() -> None:
    cards = inventory.cards(after(reading(answered(0, A))), None, Totals())
    assert cards == (Card(answered(0, A).identity, None, None, 1000, 7),)


def test_reading_of_another_round_is_never_mixed_in() -> None:
    state = after(reading(answered(0, A)), reading(answered(0, B)))
    cards = inventory.cards(state, reading(answered(0, A)), Totals())
    assert cards == (Card(answered(0, B).identity, None, None, 1000, 7),)


def test_a_silent_card_s_slices_are_still_known_until_it_answers_without_them() -> None:
    piece = MigSlice(3, 0, "MIG-a", "2g.20gb")
    sliced = replace(answered(0, A), mig_slices=(piece,))
    silent = reading(CardFailure(0, "timeout"))

    def slices(*rounds: Reading) -> tuple[MigSlice, ...]:
        (card,) = inventory.cards(after(*rounds), rounds[-1], Totals()) or ()
        return card.last_mig_slices

    assert slices(reading(sliced), silent) == (piece,)
    assert slices(reading(sliced), silent, reading(answered(0, A))) == ()
