"""Shares of one card over time: stacked by container, with the unattributed rest."""

from __future__ import annotations

from dashboards.panels import (
    BY_CONTAINER,
    CARD,
    NOTHING,
    Column,
    Page,
    Query,
    card,
)

_NAME = "{{namespace}}/{{pod}} {{container}}"
_NO_USE = f"{NOTHING}, or this card does not tell what processes use"
_WORKLOADS = ("qgpu-workloads", ("namespace", "pod"))


def build() -> Page:
    """The dashboard of one card; `node` and `gpu` are exactly one."""
    page = Page(
        "qgpu-shares",
        "Who was given and who uses what of one card, over time.",
        single=frozenset({"node", "gpu"}),
        hidden=frozenset({"namespace", "pod"}),
    )
    page.row("Use")
    limit = "the whole card"
    core = page.graph(
        "Core used, by container",
        "In percent of the card, from the driver's samples of processes. Unattributed is what the "
        "card did beyond that; the samplers differ, so it is never scaled away.",
        "percent",
        Query(f"max {BY_CONTAINER} (node_gpu_core_usage{{{CARD}}})", _NAME),
        Query(card("node_gpu_core_usage_unattributed"), "unattributed"),
        Query(card("node_gpu_core_capacity"), limit),
        width=24,
        height=9,
        stacked=True,
        empty=_NO_USE,
        goes_to=_WORKLOADS,
    )
    page.line(core, limit)
    memory = page.graph(
        "Memory used, by container",
        "With the unattributed rest it is exactly the card's used memory.",
        "bytes",
        Query(f"max {BY_CONTAINER} (node_gpu_memory_usage_bytes{{{CARD}}})", _NAME),
        Query(card("node_gpu_memory_usage_unattributed_bytes"), "unattributed"),
        Query(card("node_gpu_memory_capacity_bytes"), limit),
        width=24,
        height=9,
        stacked=True,
        empty=_NO_USE,
        goes_to=_WORKLOADS,
    )
    page.line(memory, limit)
    page.row("Given away")
    given = f"{NOTHING}, or nobody holds a guaranteed share of this card"
    core = page.graph(
        "Core given away, by container",
        "Guaranteed shares, in percent of the card.",
        "percent",
        Query(f"max {BY_CONTAINER} (node_gpu_core_request{{{CARD}}})", _NAME),
        Query(card("node_gpu_core_capacity"), limit),
        stacked=True,
        empty=given,
        goes_to=_WORKLOADS,
    )
    page.line(core, limit)
    memory = page.graph(
        "Memory given away, by container",
        "Guaranteed shares.",
        "bytes",
        Query(f"max {BY_CONTAINER} (node_gpu_memory_request_bytes{{{CARD}}})", _NAME),
        Query(card("node_gpu_memory_capacity_bytes"), limit),
        stacked=True,
        empty=given,
        goes_to=_WORKLOADS,
    )
    page.line(memory, limit)
    page.table(
        "Holders now",
        "One row a container and device; on MIG the device is the slice.",
        [
            Column(name, name)
            for name in ("namespace", "pod", "container", "scheme", "resource", "device")
        ],
        "max by (cluster, node, gpu, namespace, pod, container, scheme, resource, device)"
        f" (node_gpu_allocation_info{{{CARD}}})",
        width=12,
        empty="Nobody holds this card; or nothing scraped",
        goes_to=_WORKLOADS,
    )
    page.table(
        "Users outside Kubernetes",
        "Processes of the host: part of the unattributed rest.",
        [
            Column("owner_kind", "kind"),
            Column("owner", "owner"),
            Column("Value #A", "processes"),
            Column("Value #B", "memory", "bytes"),
            Column("Value #C", "core", "percent"),
        ],
        *(
            f"max by (cluster, node, gpu, owner_kind, owner) (node_gpu_host_{name}{{{CARD}}})"
            for name in ("processes", "process_memory_usage_bytes", "process_core_usage")
        ),
        width=12,
        empty="None; or the card does not tell its processes, or nothing scraped",
    )
    page.row("Video")
    for what in ("encoder", "decoder"):
        page.graph(
            f"Video {what}s, by container",
            "In percent of the card.",
            "percent",
            Query(f"max {BY_CONTAINER} (node_gpu_{what}_usage{{{CARD}}})", _NAME),
            stacked=True,
            empty=_NO_USE,
            goes_to=_WORKLOADS,
        )
    return page
