"""Who uses which device through a resource claim, over all pods of the node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qgpu_exporter.model import ClaimDevice

DeviceKey = tuple[str, str, str]
"""(driver, pool, device): what names a device in a cluster."""
_Claim = tuple[str, str]
_Holder = tuple[str, str, str]


def device_key(claim: ClaimDevice) -> DeviceKey:
    """The device that a claim holds."""
    return claim.driver, claim.pool, claim.device


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """By device, the claims on it and the containers that hold it through each."""

    holders: Mapping[DeviceKey, Mapping[_Claim, frozenset[_Holder]]] = field(default_factory=dict)
    sizes: Mapping[_Claim, int] = field(default_factory=dict)
    """Devices of each claim."""

    @classmethod
    def of(cls, uses: Iterable[tuple[_Holder, ClaimDevice]]) -> ClaimUse:
        """The use of every claim, from ((namespace, pod, container), claim) of each container."""
        holders: dict[DeviceKey, dict[_Claim, set[_Holder]]] = {}
        devices: dict[_Claim, set[DeviceKey]] = defaultdict(set)
        for holder, one in uses:
            claim = (one.claim_namespace, one.claim_name)
            holders.setdefault(device_key(one), {}).setdefault(claim, set()).add(holder)
            devices[claim].add(device_key(one))
        return cls(
            {
                key: {claim: frozenset(held) for claim, held in claims.items()}
                for key, claims in holders.items()
            },
            {claim: len(held) for claim, held in devices.items()},
        )

    def is_shared(self, one: ClaimDevice) -> bool:
        """Whether a container has the device only beside others, so that no share is its own.

        A device is given to one claim; where a second one has it too and neither has a share id,
        the one of them that has more devices than the others is a monitor's, which is let in to
        look (``adminAccess``, which the kubelet does not show): it holds nothing, and the others
        are as if it were not there.
        """
        if one.share_id:
            return True
        claims = self.holders.get(device_key(one), {})
        by_size = sorted(claims, key=lambda claim: self.sizes[claim])
        monitor = None
        if len(by_size) > 1 and self.sizes[by_size[-1]] > self.sizes[by_size[-2]]:
            monitor = by_size[-1]
        if (one.claim_namespace, one.claim_name) == monitor:
            return True
        return len({h for claim, held in claims.items() if claim != monitor for h in held}) > 1
