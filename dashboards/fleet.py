"""The fleet: how much there is, how much is given away, used and stranded, and what is wrong."""

from __future__ import annotations

from dashboards.panels import (
    BY_CARD,
    BY_CONTAINER,
    CARD,
    CARD_LEGEND,
    NODE,
    NODE_LEGEND,
    NOTHING,
    Column,
    Page,
    Query,
    card,
    top,
)

_FIRING = f'alertname=~"Gpu.*|QgpuExporter.*",alertstate="firing",{NODE}'
_NO_RULES = "No capacity rules are loaded, or nothing scraped"
_SEVERITIES = {
    "critical": ("critical", "red"),
    "warning": ("warning", "orange"),
    "info": ("info", "blue"),
}
_LIVING = f"0 * count(node_gpu_cards{{{NODE}}})"


def _cards(expression: str) -> str:
    return f"sum({expression}) / 100"


def build() -> Page:
    """The dashboard that everything starts from."""
    page = Page("qgpu-fleet", "All GPU nodes: capacity, what is given away, used and stranded.")
    page.row("Now")
    nodes = f"max by (cluster, node) (%s{{{NODE}}})"
    page.number(
        "Nodes",
        "Nodes with at least one known card.",
        "none",
        f"count({nodes % 'node_gpu_cards'} > 0)",
    )
    page.number(
        "Cards", "Known cards, answering or not.", "none", f"sum({nodes % 'node_gpu_cards'})"
    )
    page.number(
        "Not answering",
        "Known cards that gave no readings in the last round.",
        "none",
        f"count({card('node_gpu_up')} == 0) or {_LIVING}",
        alarm=True,
    )
    page.number(
        "Critical alerts",
        "Firing alerts of the rules in alerts/. Zero only where exporters are scraped.",
        "none",
        f'count(ALERTS{{{_FIRING},severity="critical"}}) or {_LIVING}',
        alarm=True,
    )
    page.number(
        "Wholly free cards",
        "Answering cards that no container holds. From the recording rules.",
        "none",
        f"sum(node:node_gpu_wholly_free:count{{{NODE}}})",
        empty=_NO_RULES,
    )
    page.number(
        "Stranded core",
        "Core that is free on cards without memory left, in cards. From the recording rules.",
        "none",
        f"sum(node:node_gpu_core_stranded:percent{{{NODE}}}) / 100",
        empty=_NO_RULES,
    )
    page.row("Over time")
    page.graph(
        "Core: there, given away, used",
        "In cards: a card is 100 percent. Used is by containers, as the driver's process samples "
        "say; the rest of the cards' work is unattributed.",
        "none",
        Query(_cards(card("node_gpu_core_capacity")), "there"),
        Query(_cards(card("node_gpu_core_allocated")), "given away"),
        Query(
            _cards(f"max {BY_CONTAINER} (node_gpu_core_usage{{{CARD}}})"),
            "used by containers",
        ),
        Query(_cards(card("node_gpu_core_usage_unattributed")), "used, unattributed"),
        goes_to=None,
    )
    page.graph(
        "Memory: there, given away, used",
        "Sums over all cards of the selection.",
        "bytes",
        Query(f"sum({card('node_gpu_memory_capacity_bytes')})", "there"),
        Query(f"sum({card('node_gpu_memory_allocated_bytes')})", "given away"),
        Query(f"sum({card('node_gpu_memory_used_bytes')})", "used"),
        goes_to=None,
    )
    page.graph(
        "Core: free and stranded",
        "In cards: what is left to give away, and the part of it on cards without memory left.",
        "none",
        Query(f"sum(node:node_gpu_core_free:percent{{{NODE}}}) / 100", "free"),
        Query(f"sum(node:node_gpu_core_stranded:percent{{{NODE}}}) / 100", "stranded"),
        empty=_NO_RULES,
        goes_to=None,
    )
    page.graph(
        "Memory: free and stranded",
        "What is left to give away, and the part of it on cards without core left.",
        "bytes",
        Query(f"sum(node:node_gpu_memory_free:bytes{{{NODE}}})", "free"),
        Query(f"sum(node:node_gpu_memory_stranded:bytes{{{NODE}}})", "stranded"),
        empty=_NO_RULES,
        goes_to=None,
    )
    for what, title, unit in (
        ("core", "core", "percent"),
        ("memory", "memory", "bytes"),
    ):
        page.bars(
            f"Nodes with the most stranded {title}",
            "The ten with the most that is free and of no use, since the other is given away on "
            "the same card. Core in percent of a card.",
            unit,
            Query(f"topk(10, node:node_gpu_{what}_stranded:{unit}{{{NODE}}})", NODE_LEGEND),
            goes_to=("node",),
            empty=_NO_RULES,
        )
    page.row("What is wrong")
    page.table(
        "Firing alerts",
        "Alerts of the rules in alerts/, as Prometheus evaluates them.",
        [
            Column("severity", "severity", states=_SEVERITIES),
            Column("alertname", "alert"),
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("namespace", "namespace"),
            Column("pod", "pod"),
        ],
        f"max by (severity, alertname, cluster, node, gpu, namespace, pod) (ALERTS{{{_FIRING}}})",
        width=12,
        # By the alphabet critical is first, which is what matters.
        sort=("severity", "alert"),
        empty="No alert fires; or the rules are not loaded, or nothing scraped",
    )
    page.table(
        "Cards that do not answer",
        "And why.",
        [
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("reason", "reason"),
        ],
        f"max by (cluster, node, gpu, reason) (node_gpu_down_info{{{CARD}}})",
        width=12,
        empty="All known cards answer; or nothing scraped",
    )
    page.bars(
        "Least busy cards that somebody holds",
        "Mean part of the last five minutes in which a kernel ran, of cards with holders; not "
        "offered by cards in MIG mode.",
        "percentunit",
        Query(
            f"bottomk(10, max {BY_CARD} (rate(node_gpu_busy_seconds_total{{{CARD}}}[5m]))"
            f" and on (cluster, node, gpu) {card('node_gpu_containers')} > 0)",
            CARD_LEGEND,
        ),
        width=8,
    )
    page.bars(
        "Cards nearest to their own slowdown temperature",
        "Degrees that are left until the card slows itself down; its own limit, which differs by "
        "model.",
        "celsius",
        Query(
            f"bottomk(10, {card('node_gpu_temperature_slowdown_limit_celsius')}"
            f" - {card('node_gpu_temperature_celsius')})",
            CARD_LEGEND,
        ),
        width=8,
        states=((None, "red"), (1, "orange"), (5, "green")),
    )
    page.bars(
        "Cards with the most XIDs",
        "Errors that the driver reported in the chosen time, of whatever class; the card's own "
        "page tells which.",
        "none",
        Query(
            f"topk(10, round(sum {BY_CARD} (max by (cluster, node, gpu, xid)"
            f" (increase(node_gpu_xid_errors_total{{{CARD}}}[$__range])))) > 0)",
            CARD_LEGEND,
        ),
        width=8,
        states=((None, "orange"),),
        empty="No XID in the chosen time; or nothing scraped",
    )
    page.row("Inventory")
    page.table(
        "Node by node",
        "Cards, what is given away and what is used of them. An empty cell: not known.",
        [
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("Value #A", "cards"),
            Column("Value #B", "answering"),
            Column("Value #C", "core given away", "percent"),
            Column("Value #D", "core used", "percent"),
            Column("Value #E", "memory", "bytes"),
            Column("Value #F", "memory given away", "bytes"),
            Column("Value #G", "memory used", "bytes"),
            Column("driver_version", "driver"),
        ],
        nodes % "node_gpu_cards",
        nodes % "node_gpu_cards_answering",
        f"sum by (cluster, node) ({card('node_gpu_core_allocated')})",
        f"sum by (cluster, node) (max {BY_CONTAINER} (node_gpu_core_usage{{{CARD}}}))",
        f"sum by (cluster, node) ({card('node_gpu_memory_capacity_bytes')})",
        f"sum by (cluster, node) ({card('node_gpu_memory_allocated_bytes')})",
        f"sum by (cluster, node) ({card('node_gpu_memory_used_bytes')})",
        f"max by (cluster, node, driver_version) (node_gpu_driver_info{{{NODE}}})",
        width=16,
        height=9,
        cell="not known",
        sort=("cluster", "node"),
        goes_to=("qgpu-node", ("node",)),
    )
    page.table(
        "Models and drivers",
        "Cards by model and driver version.",
        [
            Column("cluster", "cluster"),
            Column("model", "model"),
            Column("driver_version", "driver"),
            Column("Value", "cards"),
        ],
        f"count by (cluster, model, driver_version) (max by (cluster, node, gpu, model)"
        f" (node_gpu_info{{{CARD}}}) * on (cluster, node) group_left (driver_version)"
        f" topk by (cluster, node) (1, max by (cluster, node, driver_version)"
        f" (node_gpu_driver_info{{{NODE}}})))",
        width=8,
        height=9,
        goes_to=None,
    )
    page.graph(
        "Power",
        "Sum over the cards, and the ten nodes that draw most.",
        "watt",
        Query(f"sum({card('node_gpu_power_watts')})", "all"),
        Query(top(f"sum by (cluster, node) ({card('node_gpu_power_watts')})"), NODE_LEGEND),
        Query(
            f"count({card('node_gpu_up')} == 1 unless on (cluster, node, gpu)"
            f" {card('node_gpu_power_watts')}) * NaN",
            "some cards: not offered by them",
        ),
        goes_to=("qgpu-node", ("node",)),
    )
    page.graph(
        "Offered by Kubernetes",
        "Allocatable amount of each GPU resource.",
        "none",
        Query(
            f"sum by (cluster, resource) (max by (cluster, node, resource)"
            f" (node_gpu_resource_allocatable{{{NODE}}}))",
            "{{cluster}} {{resource}}",
        ),
        empty=f"{NOTHING}, or the node is not in Kubernetes",
        goes_to=None,
    )
    return page
