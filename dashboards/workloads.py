"""Workloads: what namespaces, pods and containers asked for, use, and leave idle."""

from __future__ import annotations

from dashboards.panels import BY_CONTAINER, CARD, NODE, NOTHING, POD, Column, Page, Query, top

_NAMESPACE = 'cluster=~"$cluster",namespace=~"$namespace"'
_POD = f'{NODE},namespace=~"$namespace",pod=~"$pod"'
_RULES = "No efficiency rules are loaded, or no container holds a share with a guarantee"
_NO_USE = f"{NOTHING}, or no card of it tells what processes use"
_SHARES = ("qgpu-shares", ("node", "gpu"))
_NAMESPACES = ("qgpu-workloads", ("namespace",))
_PODS = ("qgpu-workloads", ("namespace", "pod"))


def _sum(metric: str, by: str) -> str:
    return f"sum by ({by}) (max {BY_CONTAINER} ({metric}{{{POD}}}))"


def build() -> Page:
    """The dashboard from namespaces down to containers."""
    page = Page("qgpu-workloads", "Requested against used, by namespace, pod and container.")
    _now(page)
    _namespaces(page)
    _pods(page)
    _contradictions(page)
    return page


def _now(page: Page) -> None:
    page.row("Now")
    page.number(
        "Pods with a GPU",
        "Pods that hold a card, a share or a slice.",
        "none",
        f"count(count by (cluster, namespace, pod) (node_gpu_allocation_info{{{POD}}}))"
        f" or 0 * count(node_gpu_cards{{{NODE}}})",
    )
    page.number(
        "Core requested",
        "Guaranteed shares, in percent of a card.",
        "percent",
        f"sum(max {BY_CONTAINER} (node_gpu_core_request{{{POD}}}))",
        empty=f"{NOTHING}, or nobody holds a guaranteed share",
    )
    page.number(
        "Core used",
        "By containers, in percent of a card.",
        "percent",
        f"sum(max {BY_CONTAINER} (node_gpu_core_usage{{{POD}}}))",
        empty=_NO_USE,
    )
    page.number(
        "Memory requested",
        "Guaranteed shares.",
        "bytes",
        f"sum(max {BY_CONTAINER} (node_gpu_memory_request_bytes{{{POD}}}))",
        empty=f"{NOTHING}, or nobody holds a guaranteed share",
    )
    page.number(
        "Memory used",
        "By containers.",
        "bytes",
        f"sum(max {BY_CONTAINER} (node_gpu_memory_usage_bytes{{{POD}}}))",
        empty=_NO_USE,
    )
    page.number(
        "Pods without a card yet",
        "They ask for a share and no card is written down.",
        "none",
        f"sum(max by (cluster, node) (node_gpu_pods_unassigned{{{NODE}}}))",
        empty=f"{NOTHING}, or the API server is not asked",
    )


def _namespaces(page: Page) -> None:
    page.row("Namespaces")
    by = "cluster, namespace"
    page.graph(
        "Core by namespace",
        "Requested (guaranteed shares) and used, in percent of a card; the ten largest of each.",
        "percent",
        Query(top(_sum("node_gpu_core_request", by)), "{{namespace}} requested"),
        Query(top(_sum("node_gpu_core_usage", by)), "{{namespace}} used"),
        goes_to=_NAMESPACES,
        empty=f"{NOTHING}, or no container holds a card",
    )
    page.graph(
        "Memory by namespace",
        "Requested (guaranteed shares) and used; the ten largest of each.",
        "bytes",
        Query(top(_sum("node_gpu_memory_request_bytes", by)), "{{namespace}} requested"),
        Query(top(_sum("node_gpu_memory_usage_bytes", by)), "{{namespace}} used"),
        goes_to=_NAMESPACES,
        empty=f"{NOTHING}, or no container holds a card",
    )
    page.table(
        "Efficiency over the chosen time",
        "Means of used over means of requested, where both are known; and the card hours that were "
        "reserved and idle, as seconds of a whole card.",
        [
            Column("cluster", "cluster"),
            Column("namespace", "namespace"),
            Column("Value #A", "core requested", "percent"),
            Column("Value #B", "core used of it", "percentunit"),
            Column("Value #C", "memory used of it", "percentunit"),
            Column("Value #D", "idle in the last hour", "s"),
        ],
        f"avg_over_time(namespace:node_gpu_core_request:percent{{{_NAMESPACE}}}[$__range])",
        f"avg_over_time(namespace:node_gpu_core_usage:percent{{{_NAMESPACE}}}[$__range])"
        f" / avg_over_time(namespace:node_gpu_core_request:percent{{{_NAMESPACE}}}[$__range])",
        f"avg_over_time(namespace:node_gpu_memory_usage:bytes{{{_NAMESPACE}}}[$__range])"
        f" / avg_over_time(namespace:node_gpu_memory_request:bytes{{{_NAMESPACE}}}[$__range])",
        f"namespace:node_gpu_core_request_idle:seconds1h{{{_NAMESPACE}}}",
        width=12,
        empty=_RULES,
        sort=("core used of it",),
        goes_to=_NAMESPACES,
    )
    page.graph(
        "Idle reservations",
        "Seconds of a whole card that were reserved and idle within an "
        "hour, by namespace: 3600 s (1 hour) is one card. The ten largest.",
        "s",
        Query(
            top(f"namespace:node_gpu_core_request_idle:seconds1h{{{_NAMESPACE}}}"), "{{namespace}}"
        ),
        goes_to=_NAMESPACES,
        empty=f"{_RULES}; or none is idle",
    )


def _pods(page: Page) -> None:
    page.row("Pods and containers")
    key = "cluster, node, gpu, namespace, pod, container"
    page.table(
        "Who holds what",
        "One row a container and card. `none`: no guaranteed share, or a use that the driver does "
        "not tell.",
        [
            Column(name, name)
            for name in ("cluster", "namespace", "pod", "container", "node", "gpu", "scheme")
        ]
        + [
            Column("Value #B", "core requested", "percent"),
            Column("Value #C", "core used", "percent"),
            Column("Value #D", "memory requested", "bytes"),
            Column("Value #E", "memory used", "bytes"),
            Column("Value #F", "processes"),
        ],
        f"max by ({key}, scheme) (node_gpu_allocation_info{{{POD}}})",
        *(
            f"max by ({key}) ({metric}{{{POD}}})"
            for metric in (
                "node_gpu_core_request",
                "node_gpu_core_usage",
                "node_gpu_memory_request_bytes",
                "node_gpu_memory_usage_bytes",
                "node_gpu_container_processes",
            )
        ),
        height=10,
        cell="none",
        sort=("namespace", "pod", "container"),
        empty="No container holds a card; or nothing scraped",
        goes_to=_SHARES,
    )
    name = "{{namespace}}/{{pod}} {{container}} on {{node}} GPU {{gpu}}"
    page.graph(
        "Core used, of requested",
        "100 % is all of the guaranteed share; above it, others left theirs. The ten that use "
        "least of it.",
        "percentunit",
        Query(
            top(
                f"max by ({key}) (node_gpu_core_usage{{{POD}}}) / (max by ({key})"
                f" (node_gpu_core_request{{{POD}}}) > 0)",
                lowest=True,
            ),
            name,
        ),
        goes_to=_SHARES,
        empty=f"{_NO_USE}, or nobody holds a guaranteed share",
    )
    page.graph(
        "Memory used, of requested",
        "Near 100 % the next allocation may fail. The ten that use most of it.",
        "percentunit",
        Query(
            top(
                f"max by ({key}) (node_gpu_memory_usage_bytes{{{POD}}}) / (max by ({key})"
                f" (node_gpu_memory_request_bytes{{{POD}}}) > 0)"
            ),
            name,
        ),
        goes_to=_SHARES,
        empty=f"{_NO_USE}, or nobody holds a guaranteed share",
    )
    page.graph(
        "Core used by pod",
        "Mean over the interval, from running totals. The ten that use most.",
        "percent",
        Query(
            top(
                f"sum by (cluster, namespace, pod) (max {BY_CONTAINER}"
                f" (rate(node_gpu_core_usage_seconds_total{{{POD}}}[$__rate_interval]))) * 100"
            ),
            "{{namespace}}/{{pod}}",
        ),
        goes_to=_PODS,
        empty=_NO_USE,
    )
    page.graph(
        "Efficiency of pods",
        "Core used of requested, of the ten least efficient. From the recording rules.",
        "percentunit",
        Query(
            top(f"pod:node_gpu_core_efficiency:ratio{{{_POD}}}", lowest=True),
            "{{namespace}}/{{pod}} on {{node}}",
        ),
        goes_to=_PODS,
        empty=_RULES,
    )


def _contradictions(page: Page) -> None:
    page.row("Contradictions")
    page.table(
        "Use without an allocation",
        "Containers that use a card and were not given it.",
        [Column(name, name) for name in ("cluster", "namespace", "pod", "container", "node", "gpu")]
        + [Column("Value", "memory", "bytes")],
        f"(max {BY_CONTAINER} (node_gpu_memory_usage_bytes{{{POD}}}) unless max {BY_CONTAINER}"
        f" (node_gpu_allocation_info{{{POD}}})) and on (cluster, node, gpu)"
        f" max by (cluster, node, gpu) (node_gpu_usage_without_allocation{{{CARD}}}) > 0",
        width=12,
        empty="None; or the cards do not tell their processes, or nothing scraped",
        goes_to=_SHARES,
    )
    page.table(
        "Conflicts and problems",
        "Present contradictions about allocations, by kind; /caches of the exporter names the "
        "pods. With a card: containers for which kubelet and annotation name different ones.",
        [
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("kind", "kind"),
            Column("Value", "how many"),
        ],
        f"max by (cluster, node, gpu, kind) (node_gpu_allocation_conflicts{{{CARD}}})"
        f" or max by (cluster, node, kind) (node_gpu_allocation_problems{{{NODE}}})",
        width=12,
        empty="None; or nothing scraped",
    )
