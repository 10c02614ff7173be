"""The fleet: how much there is, how much is given away, used and stranded, and what is wrong."""

from __future__ import annotations

from dashboards.panels import (
    BY_CARD,
    BY_CONTAINER,
    CARD,
    NODE,
    NOTHING,
    Column,
    Page,
    Query,
    absent,
    card,
)

_FIRING = f'alertname=~"Gpu.*|QgpuExporter.*",alertstate="firing",{NODE}'
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
        empty="No capacity rules are loaded, or nothing scraped",
    )
    page.number(
        "Stranded core",
        "Core that is free on cards without memory left, in cards. From the recording rules.",
        "none",
        f"sum(node:node_gpu_core_stranded:percent{{{NODE}}}) / 100",
        empty="No capacity rules are loaded, or nothing scraped",
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
        "Free and stranded core by node",
        "Free core, and the part of it on cards without memory left, in percent of a card.",
        "percent",
        Query(f"node:node_gpu_core_free:percent{{{NODE}}}", "{{node}} free"),
        Query(f"node:node_gpu_core_stranded:percent{{{NODE}}}", "{{node}} stranded"),
        empty="No capacity rules are loaded, or nothing scraped",
        goes_to=("qgpu-node", ("node",)),
    )
    page.graph(
        "Free and stranded memory by node",
        "Free memory, and the part of it on cards without core left.",
        "bytes",
        Query(f"node:node_gpu_memory_free:bytes{{{NODE}}}", "{{node}} free"),
        Query(f"node:node_gpu_memory_stranded:bytes{{{NODE}}}", "{{node}} stranded"),
        empty="No capacity rules are loaded, or nothing scraped",
        goes_to=("qgpu-node", ("node",)),
    )
    page.row("What is wrong")
    page.table(
        "Firing alerts",
        "Alerts of the rules in alerts/, as Prometheus evaluates them. No rows: none fires, or the "
        "rules are not loaded.",
        [
            Column("severity", "severity"),
            Column("alertname", "alert"),
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("namespace", "namespace"),
            Column("pod", "pod"),
        ],
        f"max by (severity, alertname, cluster, node, gpu, namespace, pod) (ALERTS{{{_FIRING}}})",
        width=12,
        empty="-",
    )
    page.table(
        "Cards that do not answer",
        "And why. No rows: all known cards answer, or nothing is scraped.",
        [
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("reason", "reason"),
        ],
        f"max by (cluster, node, gpu, reason) (node_gpu_down_info{{{CARD}}})",
        width=12,
        empty="-",
    )
    page.bars(
        "Least busy cards that somebody holds",
        "Mean part of the last five minutes in which a kernel ran, of cards with holders; not "
        "offered by cards in MIG mode.",
        "percentunit",
        Query(
            f"bottomk(10, max {BY_CARD} (rate(node_gpu_busy_seconds_total{{{CARD}}}[5m]))"
            f" and on (cluster, node, gpu) {card('node_gpu_containers')} > 0)",
            "{{node}} GPU {{gpu}}",
        ),
    )
    page.bars(
        "Cards nearest to their own slowdown temperature",
        "Degrees that are left until the card slows itself down; its own limit, which differs by "
        "model.",
        "celsius",
        Query(
            f"bottomk(10, {card('node_gpu_temperature_slowdown_limit_celsius')}"
            f" - {card('node_gpu_temperature_celsius')})",
            "{{node}} GPU {{gpu}}",
        ),
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
        ],
        nodes % "node_gpu_cards",
        nodes % "node_gpu_cards_answering",
        f"sum by (cluster, node) ({card('node_gpu_core_allocated')})",
        f"sum by (cluster, node) (max {BY_CONTAINER} (node_gpu_core_usage{{{CARD}}}))",
        f"sum by (cluster, node) ({card('node_gpu_memory_capacity_bytes')})",
        f"sum by (cluster, node) ({card('node_gpu_memory_allocated_bytes')})",
        f"sum by (cluster, node) ({card('node_gpu_memory_used_bytes')})",
        width=16,
        height=9,
        empty="not known",
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
        f" max by (cluster, node, driver_version) (node_gpu_driver_info{{{NODE}}}))",
        width=8,
        height=9,
        empty="-",
        goes_to=None,
    )
    page.graph(
        "Power",
        "Sum over the cards, by node.",
        "watt",
        Query(f"sum by (cluster, node) ({card('node_gpu_power_watts')})", "{{node}}"),
        absent("node_gpu_power_watts"),
        goes_to=("qgpu-node", ("node",)),
    )
    page.graph(
        "Offered by Kubernetes",
        "Allocatable amount of each GPU resource.",
        "none",
        Query(
            f"sum by (cluster, resource) (max by (cluster, node, resource)"
            f" (node_gpu_resource_allocatable{{{NODE}}}))",
            "{{resource}}",
        ),
        empty=f"{NOTHING}, or the node is not in Kubernetes",
        goes_to=None,
    )
    return page
