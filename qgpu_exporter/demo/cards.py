"""What happens to the simulated cards: the scenario that the simulated reader follows."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec

from qgpu_exporter.demo.workloads import Work
from qgpu_exporter.model import ReaderError
from qgpu_exporter.reader.simulated import (
    CARD_COUNT,
    Scenario,
    SimulatedCard,
    SimulatedProcess,
    SimulatedXid,
)


class FakeCards:
    """Holds the scenario and writes `path` whole at each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scenario = Scenario()
        self._write()

    def start_process(self, pid: int, work: Work) -> None:
        """A process begins to use a card; on several cards it is started once for each."""
        process = SimulatedProcess(
            work.gpu, pid, work.memory_bytes, work.sm_ratio, gpu_instance=work.gpu_instance
        )
        self._change(replace(self.scenario, processes=(*self.scenario.processes, process)))

    def end_processes(self, pids: set[int]) -> None:
        """The processes use no card any more."""
        left = tuple(item for item in self.scenario.processes if item.pid not in pids)
        self._change(replace(self.scenario, processes=left))

    def lose(self, gpu: int) -> None:
        """The card falls off the bus, which the driver also tells as XID 79."""
        self._card(gpu, SimulatedCard(down="lost"))
        self.xid(gpu, 79)

    def hang(self, gpu: int, seconds: float) -> None:
        """The card answers no call for a time."""
        self._card(gpu, SimulatedCard(hang_seconds=seconds))

    def xid(self, gpu: int, xid: int) -> None:
        """The driver reports an error of the card."""
        _check(gpu)
        number = 1 + max((item.number for item in self.scenario.xids), default=0)
        event = SimulatedXid(number, gpu, xid)
        self._change(replace(self.scenario, xids=(*self.scenario.xids, event)))

    def fail_driver(self, reason: str) -> None:
        """No card answers, for a reason of `model.ReaderError`."""
        error = ReaderError(reason, f"the driver answers {reason} (simulated)")
        self._change(replace(self.scenario, error=error))

    def recover(self) -> None:
        """All cards and the driver are well again."""
        self._change(replace(self.scenario, cards={}, error=None))

    def _card(self, gpu: int, card: SimulatedCard) -> None:
        _check(gpu)
        self._change(replace(self.scenario, cards={**self.scenario.cards, gpu: card}))

    def _change(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._write()

    def _write(self) -> None:
        # Its reader sees the file before or the file after, never a half.
        draft = self.path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(self.scenario))
        os.replace(draft, self.path)


def _check(gpu: int) -> None:
    if not 0 <= gpu < CARD_COUNT:
        raise ValueError(f"no card {gpu}: the cards are 0 to {CARD_COUNT - 1}")
