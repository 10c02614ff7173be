"""The node's cards and slices by every name that a scheme gives them: index, minor, UUID, place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qgpu_exporter.allocation.device_ids import DeviceId
from qgpu_exporter.model import Card, MigSlice


@dataclass(frozen=True, slots=True)
class Device:
    """A whole card, or one slice of it: what a container can hold."""

    card: Card
    slice: MigSlice | None = None

    @property
    def gpu(self) -> int:
        """The card's NVML index."""
        return self.card.identity.index

    @property
    def mig(self) -> str | None:
        """The name of the slice on its card."""
        return mig_name(self.card, self.slice) if self.slice is not None else None

    @property
    def uuid(self) -> str:
        """The canonical name: a UUID, or ``<card uuid>/<mig>`` for a slice that has none."""
        if self.slice is None:
            return self.card.identity.uuid
        return self.slice.uuid or f"{self.card.identity.uuid}/{self.mig}"

    @property
    def core_percent(self) -> float | None:
        """The device's compute in percent of its card."""
        if self.slice is None:
            return 100.0
        total = self.card.mig_compute_slices
        if not total or self.slice.compute_slices is None:
            return None
        return 100 * self.slice.compute_slices / total

    @property
    def memory_bytes(self) -> int | None:
        """The device's memory; a slice's is that of its GPU instance."""
        if self.slice is None:
            return self.card.memory_total_bytes
        return self.slice.memory.total_bytes if self.slice.memory is not None else None


def slices_of(card: Card) -> tuple[MigSlice, ...]:
    """The slices that the card had when it last answered; only names and sizes are of use."""
    return card.reading.mig_slices if card.reading is not None else card.last_mig_slices


def shares_gpu_instance(card: Card, slice_: MigSlice) -> bool:
    """Whether the slice's GPU instance, and so its memory, has other compute instances too."""
    siblings = [one for one in slices_of(card) if one.gpu_instance == slice_.gpu_instance]
    return len(siblings) > 1


def mig_name(card: Card, slice_: MigSlice) -> str:
    """``<gi>``, or ``<gi>/<ci>`` where the GPU instance has several compute instances."""
    if slice_.compute_instance is not None and shares_gpu_instance(card, slice_):
        return f"{slice_.gpu_instance}/{slice_.compute_instance}"
    return str(slice_.gpu_instance)


def _same_profile(one: str | None, other: str | None) -> bool:
    """Profiles differ in spelling: ``1g.10gb+me``, ``1g.10gb.me``; in DRA names without dots."""

    def letters(profile: str) -> str:
        return "".join(c for c in profile.lower().removeprefix("mig-") if c.isalnum())

    return one is not None and other is not None and letters(one) == letters(other)


class Cards:
    """Look-ups over the known cards; every one gives None or nothing for an unknown name."""

    def __init__(self, cards: Iterable[Card]) -> None:
        self.all = tuple(sorted(cards, key=lambda card: card.identity.index))
        self._by_index = {card.identity.index: Device(card) for card in self.all}
        # A card that has not answered since the start has no UUID yet.
        self._by_uuid = {
            card.identity.uuid.lower(): Device(card) for card in self.all if card.identity.uuid
        }
        self._by_minor: dict[int | None, Device] = {
            card.identity.minor: Device(card)
            for card in self.all
            if card.identity.minor is not None
        }
        self._slices = {
            slice_.uuid.lower(): Device(card, slice_)
            for card in self.all
            for slice_ in slices_of(card)
            if slice_.uuid is not None
        }

    @property
    def all_answer(self) -> bool:
        """Whether every known card gave a reading, so that an unknown slice is truly unknown."""
        return all(card.reading is not None for card in self.all)

    def by_index(self, index: int) -> Device | None:
        """The card with this NVML index."""
        return self._by_index.get(index)

    def by_minor(self, minor: int) -> Device | None:
        """The card behind /dev/nvidia<minor>."""
        return self._by_minor.get(minor)

    def by_uuid(self, uuid: str) -> Device | None:
        """The card or the slice with this UUID."""
        return self._by_uuid.get(uuid.lower()) or self._slices.get(uuid.lower())

    def by_id(self, device_id: DeviceId) -> tuple[Device, ...]:
        """What a parsed id names: one card, one slice, or all slices of one GPU instance."""
        if device_id.uuid is not None:
            device = self.by_uuid(device_id.uuid)
        else:
            device = self._by_minor.get(device_id.minor)
        if device is None or device_id.gpu_instance is None:
            return (device,) if device is not None else ()
        return tuple(
            Device(device.card, slice_)
            for slice_ in slices_of(device.card)
            if slice_.gpu_instance == device_id.gpu_instance
            and device_id.compute_instance in (None, slice_.compute_instance)
        )

    def by_placement(
        self, parent: Device, profile: str | None, placement_start: int | None
    ) -> tuple[Device, ...]:
        """The slices of a card with this profile; only the one that starts there, where the driver
        says where slices are placed."""
        matching = [s for s in slices_of(parent.card) if _same_profile(s.profile, profile)]
        placed = [
            s
            for s in matching
            if s.placement_start is not None and s.placement_start == placement_start
        ]
        unplaced = [s for s in matching if s.placement_start is None or placement_start is None]
        return tuple(Device(parent.card, s) for s in placed or unplaced)
