"""The made-up cards of the demo: what they show, and what a scenario file changes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from qgpu_exporter.model import Process, ReaderError, Reading, ReadingRequest, SeenSamples
from qgpu_exporter.reader.simulated import (
    MIG_CARD,
    Scenario,
    SimulatedCard,
    SimulatedProcess,
    SimulatedSession,
    SimulatedXid,
    card_uuid,
    memory_total_bytes,
    slice_uuid,
)

MIB = 1 << 20
START = 1_800_000_000.0


class Node:
    """A session with a clock that is moved by hand, and its scenario file."""

    def __init__(self, directory: Path) -> None:
        self.now = START
        self.path = directory / "scenario.json"
        self.path.write_bytes(b"{}")
        self._writes = 0
        self.session = SimulatedSession(str(self.path), lambda: self.now)

    def play(self, scenario: Scenario) -> None:
        self.path.write_bytes(msgspec.json.encode(scenario))
        self._writes += 1
        # Two writes may fall into one tick of the file system's clock.
        os.utime(self.path, ns=(self._writes, self._writes))

    def read(self, *seen: SeenSamples) -> Reading:
        return self.session.read(ReadingRequest(seen))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_eight_cards_of_two_models(node: Node) -> None:
    reading = node.read()
    assert reading.failures == ()
    assert [card.identity.model for card in reading.cards] == ["NVIDIA L20"] * 4 + [
        "NVIDIA H100 80GB HBM3"
    ] * 4
    assert [card.identity.uuid for card in reading.cards] == [card_uuid(i) for i in range(8)]
    assert [card.mig_enabled for card in reading.cards] == [None] * 4 + [True, False, False, False]
    parts = [(part.gpu_instance, part.uuid) for part in reading.cards[MIG_CARD].mig_slices]
    assert parts == [(instance, slice_uuid(instance)) for instance in (2, 3, 9, 10)]
    for card in reading.cards:
        assert card.memory is not None
        assert card.memory.total_bytes == memory_total_bytes(card.identity.index)


def test_a_reading_survives_the_pipe(node: Node) -> None:
    reading = node.read()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reading), type=Reading) == reading


def test_processes_make_the_load_and_fill_the_memory(node: Node) -> None:
    node.play(
        Scenario(
            processes=(
                SimulatedProcess(gpu=1, pid=12, memory_bytes=512 * MIB, sm_ratio=0.5),
                SimulatedProcess(gpu=1, pid=11, memory_bytes=256 * MIB, sm_ratio=0.2),
                SimulatedProcess(gpu=MIG_CARD, pid=13, memory_bytes=MIB, gpu_instance=9),
            )
        )
    )
    cards = node.read().cards
    assert cards[1].memory is not None
    assert cards[1].memory.used_bytes == 768 * MIB
    ratio = cards[1].utilization.gpu_ratio
    assert ratio is not None
    assert 0.7 * 0.7 <= ratio <= 0.7
    assert cards[1].processes == (
        Process(11, 256 * MIB, kinds=("compute",)),
        Process(12, 512 * MIB, kinds=("compute",)),
    )
    assert cards[0].utilization.gpu_ratio == 0.0
    assert cards[0].processes == ()
    mig = cards[MIG_CARD]
    assert mig.utilization.gpu_ratio is None
    assert mig.process_window is None
    assert mig.processes == (Process(13, MIB, 9, 0, ("compute",)),)
    assert [part.memory and part.memory.used_bytes for part in mig.mig_slices] == [0, 0, MIB, 0]


def test_samples_continue_where_the_service_stands(node: Node) -> None:
    node.play(Scenario(cards={0: SimulatedCard(load_ratio=0.4)}))
    first = node.read().cards[0].samples[0].samples
    newest = first[-1].timestamp_us
    node.now += 5.0
    seen = SeenSamples(card_uuid(0), {"gpu": newest}, newest)
    card = node.read(seen).cards[0]
    stamps = [sample.timestamp_us for sample in card.samples[0].samples]
    assert stamps == [newest + tick * 500_000 for tick in range(1, 11)]
    assert {sample.ratio for sample in card.samples[0].samples} == {0.4}
    assert card.process_window is not None
    assert (card.process_window.since_us, card.process_window.until_us) == (
        newest,
        int(node.now * 1e6),
    )


def test_cumulative_readings_grow(node: Node) -> None:
    node.play(Scenario(cards={5: SimulatedCard(load_ratio=1.0)}))
    before = node.read().cards[5]
    node.now += 10.0
    after = node.read().cards[5]
    assert before.power.energy_joules is not None
    assert after.power.energy_joules is not None
    assert after.power.draw_watts is not None
    gained = after.power.energy_joules - before.power.energy_joules
    assert gained == pytest.approx(10 * after.power.draw_watts)
    assert before.pcie.transmitted_bytes is not None
    assert after.pcie.transmitted_bytes is not None
    assert after.pcie.transmitted_bytes.value > before.pcie.transmitted_bytes.value


def test_a_card_is_down_or_hangs_for_a_while(node: Node) -> None:
    node.play(Scenario(cards={2: SimulatedCard(down="lost"), 3: SimulatedCard(hang_seconds=20.0)}))
    reading = node.read()
    assert [(failure.index, failure.reason, failure.uuid) for failure in reading.failures] == [
        (2, "lost", card_uuid(2)),
        (3, "timeout", card_uuid(3)),
    ]
    assert len(reading.cards) == 6
    node.now += 20.0
    assert [failure.index for failure in node.read().failures] == [2]


def test_an_xid_is_told_once(node: Node) -> None:
    node.play(Scenario(xids=(SimulatedXid(1, gpu=0, xid=13),)))
    (event,) = node.read().events
    assert (event.xid, event.uuid, event.timestamp_seconds) == (13, card_uuid(0), START)
    assert node.read().events == ()
    node.play(
        Scenario(
            xids=(
                SimulatedXid(1, gpu=0, xid=13),
                SimulatedXid(2, gpu=MIG_CARD, xid=94, gpu_instance=9),
            )
        )
    )
    (event,) = node.read().events
    assert (event.xid, event.gpu_instance) == (94, 9)


def test_an_error_leaves_no_card(node: Node) -> None:
    error = ReaderError("driver_not_loaded", "simulated")
    node.play(Scenario(error=error))
    reading = node.read()
    assert (reading.cards, reading.error) == ((), error)
    node.play(Scenario())
    assert len(node.read().cards) == 8


def test_a_broken_scenario_changes_nothing_and_is_one_line(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.play(Scenario(cards={2: SimulatedCard(down="lost")}))
    assert len(node.read().failures) == 1
    node.path.write_bytes(b"{")
    for _ in range(3):
        assert len(node.read().failures) == 1
    assert len(caplog.records) == 1
