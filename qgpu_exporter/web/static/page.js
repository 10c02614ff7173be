// The status page: polls the node's JSON and keeps the page equal to it, without rebuilding it.
//
// Only textContent and CSSOM are used, so that no name of a pod can become markup and the page
// works under a strict Content-Security-Policy.
"use strict";

const POLL_MS = 2000;
const TIMEOUT_MS = 5000;
const OLD_SECONDS = 30;
const COLORS = 8;
const GIB = 2 ** 30;

const byId = (id) => document.getElementById(id);

const state = {
  shown: null, // the last document that had a snapshot
  latest: null, // the last document
  reached: null, // when it came, ms
  failedSince: null, // when the exporter stopped answering, ms
  failure: "",
  query: "",
  pod: null, // key of the pod whose rows are open
  opener: null,
};

// ------------------------------------------------------------------ text

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const percent = (value) => (value == null ? "–" : `${number(value, value > 0 && value < 1 ? 1 : 0)} %`);

function gib(bytes) {
  if (bytes == null) return "–";
  const value = bytes / GIB;
  return `${number(value, value < 10 && value > 0 ? 1 : 0)} GiB`;
}

/** What is used of what was asked for, the unit once: "10 of 12 GiB". */
function ofAsked(used, asked, show, unit) {
  if (asked == null) return used == null ? "" : `${show(used)} used`;
  return used == null ? `${show(asked)} req.` : `${show(used).replace(unit, "")} of ${show(asked)}`;
}

function ago(seconds) {
  if (seconds == null) return "never";
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

const words = (text) => String(text).replaceAll("_", " ");

const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

// ------------------------------------------------------------------ DOM

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

function attribute(node, name, value) {
  if (value == null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function style(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

const rows = new WeakMap();

/** Make the children of `parent` those of `items`: what stays is changed in place, never replaced. */
function keyed(parent, items, key, create, update) {
  const before = rows.get(parent) ?? new Map();
  const now = new Map();
  for (const item of items) now.set(key(item), item);
  for (const [name, node] of before) {
    if (!now.has(name)) {
      node.remove();
      before.delete(name);
    }
  }
  let at = parent.firstElementChild;
  for (const [name, item] of now) {
    const node = before.get(name) ?? create(item);
    update(node, item);
    before.set(name, node);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  rows.set(parent, before);
}

// ------------------------------------------------------------------ the model

const podKey = (row) => `${row.namespace}/${row.pod}`;
const holderKey = (row) => `${row.namespace}/${row.pod}/${row.container}`;
const plus = (one, other) => (other == null ? one : (one ?? 0) + other);

/** Who holds or uses a card, one entry a container, in the order of the document. */
function holdersOf(card, node) {
  const found = new Map();
  const entry = (row) => {
    const key = holderKey(row);
    if (!found.has(key)) {
      found.set(key, {
        key,
        namespace: row.namespace,
        pod: row.pod,
        container: row.container,
        core: null,
        memory: null,
        greedy: null,
        coreUsed: null,
        memoryUsed: null,
        migs: [],
        allocated: true,
      });
    }
    return found.get(key);
  };
  for (const row of node.allocations ?? []) {
    if (row.gpu !== card.gpu) continue;
    const holder = entry(row);
    holder.core = plus(holder.core, row.core_percent);
    holder.memory = plus(holder.memory, row.memory_bytes);
    holder.greedy = plus(holder.greedy, row.greedy_core_percent);
    if (row.mig != null) holder.migs.push(row);
  }
  for (const row of node.usage?.containers ?? []) {
    if (row.gpu !== card.gpu) continue;
    const holder = entry(row);
    holder.coreUsed = row.core_percent;
    holder.memoryUsed = row.memory_bytes;
    holder.allocated = row.allocated !== false; // null: not known
  }
  return [...found.values()];
}

/** One color a pod, the least used one among those of its card, kept while the page is open. */
const colors = new Map();

function colorOf(pod, neighbors) {
  if (!colors.has(pod)) {
    const uses = new Array(COLORS).fill(0);
    for (const one of neighbors) if (colors.has(one)) uses[colors.get(one)] += 1;
    let best = 0;
    for (let index = 1; index < COLORS; index += 1) if (uses[index] < uses[best]) best = index;
    colors.set(pod, best);
  }
  return colors.get(pod);
}

function paint(node, color) {
  attribute(node, "data-color", color == null ? null : String(color));
}

const contains = (value, query) => value != null && String(value).toLowerCase().includes(query);

const holderMatches = (holder, query) => contains(holder.key, query);

const cardMatches = (card, query) =>
  [card.model, card.uuid, card.pci_bus_id, `card ${card.gpu}`].some((one) => contains(one, query));

// ------------------------------------------------------------------ a card

function newCard(card) {
  const node = make("article", "card");
  attribute(node, "aria-labelledby", `card-${card.gpu}`);
  const title = make("h3", "card-title");
  title.id = `card-${card.gpu}`;
  const index = make("span", "index");
  const model = make("span", "model");
  title.append(make("span", "unseen", "Card "), index, " ", model);
  const chips = make("ul", "chips");
  attribute(chips, "aria-label", "State");
  const slots = make("ul", "slots");
  attribute(slots, "aria-label", "MIG slices");
  const core = newMeter("Core");
  const memory = newMeter("Memory");
  const holders = make("ul", "holders");
  attribute(holders, "aria-label", "Containers");
  const facts = make("p", "facts");
  const reason = make("p", "reason");
  const nobody = make("p", "nobody");
  node.append(make("div", "card-head", title, chips), facts, reason, slots, core.node, memory.node, holders, nobody);
  node.parts = { index, model, chips, facts, reason, slots, core, memory, holders, nobody };
  return node;
}

function updateCard(node, { card, holders }) {
  const parts = node.parts;
  text(parts.index, String(card.gpu));
  text(parts.model, card.model ?? "unknown model");
  node.classList.toggle("down", !card.up);
  updateChips(parts.chips, chipsOf(card));
  text(parts.facts, factsOf(card));
  attribute(parts.facts, "title", card.uuid);
  const reason = card.up ? "" : (DOWN_REASONS[card.down_reason] ?? "");
  text(parts.reason, reason);
  parts.reason.hidden = reason === "";
  updateMeters(parts, card, holders);
  updateSlots(parts.slots, card, holders);
  const query = state.query;
  const all = !query || cardMatches(card, query);
  const listed = all ? holders : holders.filter((one) => holderMatches(one, query));
  keyed(parts.holders, listed, (one) => one.key, newHolder, updateHolder);
  parts.holders.hidden = listed.length === 0;
  parts.nobody.hidden = holders.length > 0;
  text(parts.nobody, nobodyLine());
}

function nobodyLine() {
  const node = state.shown;
  if (node.allocations == null) return "Who holds it is not known: no source of allocations is on.";
  if (!node.allocations_complete) return "Who holds it is not known now.";
  return "No container holds it.";
}

function factsOf(card) {
  const readings = card.readings;
  const facts = [];
  if (readings?.temperature_celsius != null) facts.push(`${number(readings.temperature_celsius)} °C`);
  if (readings?.power_watts != null) {
    const limit = readings.power_limit_watts;
    facts.push(`${number(readings.power_watts)}${limit == null ? "" : ` / ${number(limit)}`} W`);
  }
  if (readings?.gpu_utilization_ratio != null) {
    facts.push(`busy ${number(100 * readings.gpu_utilization_ratio)} %`);
  }
  if (card.pci_bus_id) facts.push(card.pci_bus_id);
  facts.push(card.uuid);
  return facts.join("  ·  ");
}

/** What a reason of `node_gpu_down_info` means, and what to do. */
const DOWN_REASONS = {
  timeout: "It has not answered in time. It is asked again once that call returns.",
  lost: "It does not answer on its bus any more: drain the node, then reset the card or reboot.",
  reset_required: "The driver wants it to be reset: drain the node, then reset the card.",
  unknown_error: "The driver knows no reason. Where nvidia-smi works on the host, make this container anew.",
  no_permission: "This process may not read it.",
  missing: "It was there before, and the driver does not list it any more.",
  error: "The driver answers with an error; the log of the exporter has its text.",
};

const QUIET_REASONS = new Set(["gpu_idle", "applications_clocks_setting", "sw_power_cap", "display_clock_setting"]);

/** What a person should know about a card at once: [key, text, severity, title]. */
function chipsOf(card) {
  const chips = [];
  if (card.up) chips.push(["state", "up", "good", "the last round read this card"]);
  else if (card.down_reason) chips.push(["state", `down: ${words(card.down_reason)}`, "bad", "no readings"]);
  else chips.push(["state", "no reading", "warn", "no card is read now"]);
  const readings = card.readings ?? {};
  if (readings.recovery_action && readings.recovery_action !== "none") {
    chips.push(["recovery", `needs ${words(readings.recovery_action)}`, "bad", "recovery action"]);
  }
  if (readings.row_remap_failure) chips.push(["remap", "row remap failed", "bad", ""]);
  if (readings.row_remap_pending) chips.push(["pending", "row remap pending", "warn", ""]);
  if (readings.pages_retired_pending) chips.push(["pages", "page retirement pending", "warn", ""]);
  if (readings.ecc_uncorrected_volatile > 0) {
    chips.push(["ecc", `ECC uncorrected ${readings.ecc_uncorrected_volatile}`, "bad", "since driver load"]);
  }
  for (const reason of readings.clock_event_reasons ?? []) {
    if (!QUIET_REASONS.has(reason)) chips.push([reason, words(reason), "warn", "clocks are held down"]);
  }
  if (readings.mig_pending != null && readings.mig_pending !== readings.mig_enabled) {
    chips.push(["mig", `MIG ${readings.mig_pending ? "on" : "off"} after a reset`, "warn", ""]);
  }
  if (isOver(card.allocated?.core_percent, 100)) chips.push(["core", "core over-committed", "warn", ""]);
  if (isOver(card.allocated?.memory_bytes, card.memory_total_bytes)) {
    chips.push(["memory", "memory over-committed", "warn", ""]);
  }
  for (const one of card.xids) chips.push(xidChip(one));
  return chips;
}

const isOver = (asked, whole) => asked != null && whole != null && asked > whole * 1.001;

// The classes that page: see xid_classes.yaml.
const XID_BAD = /^(reset_gpu|reboot|contact_support|workflow_.*)$/;
const XID_MEANINGLESS = new Set(["ignore", "unspecified", "unused"]);

function xidChip(one) {
  const where = one.mig == null ? "" : ` on MIG ${one.mig}`;
  const count = one.count > 1 ? ` ×${one.count}` : "";
  const age =
    one.last_timestamp_seconds == null
      ? ""
      : `, ${ago(state.shown.now_timestamp_seconds - one.last_timestamp_seconds)}`;
  const told = one.class != null && !XID_MEANINGLESS.has(one.class);
  const action = one.class?.startsWith("workflow_") ? "see NVIDIA's workflow" : words(one.class);
  const label = `XID ${one.xid}${count}${where}${told ? `: ${action}` : ""}${age}`;
  const severity = XID_BAD.test(one.class ?? "") ? "bad" : one.class === "ignore" ? null : "warn";
  return [`xid ${one.xid} ${one.mig}`, label, severity, "what NVIDIA's table of XIDs says to do"];
}

function updateChips(list, chips) {
  keyed(
    list,
    chips,
    (chip) => chip[0],
    () => make("li", "chip"),
    (node, [, label, severity, title]) => {
      text(node, label);
      attribute(node, "data-severity", severity);
      attribute(node, "title", title || null);
    },
  );
}

// ------------------------------------------------------------------ bars

function newMeter(label) {
  const bar = make("div", "bar");
  attribute(bar, "role", "img");
  const value = make("span", "value");
  const node = make("div", "meter", make("span", "meter-label", label), bar, value);
  return { node, bar, value };
}

function updateMeters(parts, card, holders) {
  const used = card.readings?.memory;
  const coreParts = holders.map((one) => ({ holder: one, asked: one.core, used: one.coreUsed }));
  const memoryParts = holders.map((one) => ({ holder: one, asked: one.memory, used: one.memoryUsed }));
  updateMeter(parts.core, "Core", coreParts, {
    whole: 100,
    other: card.unattributed?.core_percent,
    used: sum(holders.map((one) => one.coreUsed), card.unattributed?.core_percent),
    asked: card.allocated?.core_percent,
    show: percent,
  });
  updateMeter(parts.memory, "Memory", memoryParts, {
    whole: card.memory_total_bytes ?? used?.total_bytes ?? null,
    other: card.unattributed?.memory_bytes,
    used: used?.used_bytes ?? null,
    asked: card.allocated?.memory_bytes,
    show: gib,
  });
}

function sum(values, rest) {
  let total = rest ?? null;
  for (const value of values) total = plus(total, value);
  return total;
}

/** Lay the containers side by side, each as wide as the larger of its request and its use. */
function updateMeter(meter, label, parts, { whole, other, used, asked, show }) {
  const segments = parts
    .map((one) => ({ ...one, key: one.holder.key, size: Math.max(one.asked ?? 0, one.used ?? 0) }))
    .filter((one) => one.size > 0);
  if (other > 0) segments.push({ key: "/", holder: null, asked: null, used: other, size: other });
  const laid = segments.reduce((total, one) => total + one.size, 0);
  const scale = Math.max(whole ?? 0, laid);
  meter.node.hidden = scale === 0;
  if (scale === 0) return;
  keyed(meter.bar, segments, (one) => one.key, newSegment, (node, one) => {
    updateSegment(node, one, scale, show);
  });
  // A card that is all given out is crossed by what the driver itself uses: that is no news.
  const over = isOver(laid, whole && whole * 1.05);
  meter.bar.classList.toggle("over", over);
  attribute(meter.bar, "title", over ? "The line is where the card ends." : null);
  style(meter.bar, "--whole", over ? `${(100 * whole) / scale}%` : "100%");
  const amounts = [used == null ? "" : `${show(used)} used`, asked == null ? "" : `${show(asked)} req.`];
  text(meter.value, amounts.filter(Boolean).join(" · ") || "not known");
  const free = whole == null ? "" : `, ${show(Math.max(0, whole - laid))} free`;
  const rest = other > 0 ? `, ${show(other)} unattributed` : "";
  attribute(meter.bar, "aria-label", `${label}: ${show(used)} used, ${show(asked)} requested${rest}${free}`);
}

function newSegment() {
  const node = make("div", "segment");
  const request = make("div", "request");
  const fill = make("div", "fill");
  node.append(request, fill);
  node.parts = { request, fill };
  return node;
}

function updateSegment(node, one, scale, show) {
  style(node, "width", `${(100 * one.size) / scale}%`);
  style(node.parts.request, "width", `${(100 * (one.asked ?? 0)) / one.size}%`);
  style(node.parts.fill, "width", `${(100 * (one.used ?? 0)) / one.size}%`);
  node.parts.request.hidden = !one.asked;
  node.classList.toggle("other", one.holder == null);
  if (one.holder == null) {
    attribute(node, "title", `unattributed: ${show(one.used)}`);
    return;
  }
  node.pod = podKey(one.holder);
  paint(node, one.holder.color);
  attribute(node, "title", `${one.key}\nrequested ${show(one.asked)}, used ${show(one.used)}`);
  dim(node, one.holder);
}

/** Step back what the search or the open pod does not mean. */
function dim(node, holder) {
  const query = state.query;
  const off =
    (state.pod != null && podKey(holder) !== state.pod) ||
    (query && !holder.cardMatches && !holderMatches(holder, query));
  node.classList.toggle("dim", Boolean(off));
}

// ------------------------------------------------------------------ MIG slices

function updateSlots(list, card, holders) {
  const slices = card.readings?.mig_slices ?? [];
  list.hidden = slices.length === 0;
  if (slices.length === 0) {
    keyed(list, [], () => "", null, null);
    return;
  }
  const byInstance = new Map();
  for (const slice of slices) {
    if (!byInstance.has(slice.gpu_instance)) byInstance.set(slice.gpu_instance, []);
    byInstance.get(slice.gpu_instance).push(slice);
  }
  const span = (slice) => slice.memory_slices ?? slice.compute_slices ?? 1;
  const instances = [...byInstance.entries()].sort(
    ([one, [a]], [other, [b]]) => (a.placement_start ?? 99) - (b.placement_start ?? 99) || one - other,
  );
  const ends = instances.map(([, [first]]) => (first.placement_start ?? 0) + span(first));
  // Seven compute slices lie over eight memory slices; placements count the latter.
  const compute = card.mig_compute_slices ?? 0;
  const columns = Math.max(compute === 7 ? 8 : compute, ...ends);
  style(list, "--columns", String(columns));
  const shown = instances.flatMap(([, group]) =>
    group.map((slice, index) => ({ slice, index, of: group.length, span: span(group[0]), holders: holders.filter(
      (holder) => holder.migs.some((row) => holds(row, slice)),
    ) })),
  );
  keyed(list, shown, (one) => one.slice.device, newSlot, updateSlot);
}

function holds(row, slice) {
  if (row.uuid === slice.uuid || row.mig === slice.device) return true;
  return row.mig === String(slice.gpu_instance);
}

function newSlot() {
  const node = make("li", "slot");
  const fill = make("div", "slot-fill");
  const profile = make("span", "slot-profile");
  const holder = make("span", "slot-holder");
  node.append(fill, profile, holder);
  node.parts = { fill, profile, holder };
  return node;
}

function updateSlot(node, { slice, index, of, span, holders }) {
  const { fill, profile, holder } = node.parts;
  // The compute instances of one GPU instance lie below each other in its columns.
  const start = slice.placement_start;
  style(node, "grid-column", start == null ? `span ${span}` : `${start + 1} / span ${span}`);
  style(node, "grid-row", of > 1 ? String(index + 1) : "1");
  const memory = slice.memory;
  const used = memory?.total_bytes ? memory.used_bytes / memory.total_bytes : 0;
  style(fill, "width", `${100 * used}%`);
  text(profile, slice.profile ?? `instance ${slice.device}`);
  const held = holders.map((one) => one.pod);
  const free = held.length === 0 && state.shown.allocations_complete;
  let line = held.length > 0 ? held.join(", ") : free ? "free" : "not known";
  if (slice.compute_instance == null) line = "no compute instance";
  text(holder, line);
  node.classList.toggle("free", free);
  paint(node, holders[0]?.color);
  node.pod = holders.length > 0 ? podKey(holders[0]) : null;
  if (holders.length > 0) dim(node, holders[0]);
  else node.classList.remove("dim");
  const size = memory ? `\n${gib(memory.used_bytes)} of ${gib(memory.total_bytes)} used` : "";
  attribute(node, "title", `${slice.profile ?? ""} (${slice.device}): ${line}${size}`);
}

// ------------------------------------------------------------------ containers

function newHolder() {
  const button = make("button", "holder");
  button.type = "button";
  attribute(button, "aria-controls", "details");
  const swatch = make("span", "swatch");
  const namespace = make("span", "namespace");
  const pod = make("span", "pod");
  const container = make("span", "container");
  const core = make("span", "amount");
  const memory = make("span", "amount");
  const note = make("span", "note");
  button.append(swatch, make("span", "name", namespace, pod, container, note), make("span", "amounts", core, memory));
  const node = make("li", "", button);
  node.parts = { button, namespace, pod, container, core, memory, note };
  return node;
}

function updateHolder(node, holder) {
  const parts = node.parts;
  const key = podKey(holder);
  parts.button.pod = key;
  paint(parts.button, holder.color);
  text(parts.namespace, `${holder.namespace}/`);
  text(parts.pod, holder.pod);
  text(parts.container, ` ${holder.container}`);
  text(parts.core, ofAsked(holder.coreUsed, holder.core, percent, " %"));
  text(parts.memory, ofAsked(holder.memoryUsed, holder.memory, gib, " GiB"));
  let note = "";
  if (!holder.allocated) note = " without allocation";
  else if (holder.memory > 0 && holder.memoryUsed > holder.memory) note = " over its memory";
  else if (holder.greedy > 0) note = ` greedy ${percent(holder.greedy)}`;
  text(parts.note, note);
  attribute(parts.button, "aria-expanded", String(state.pod === key));
  attribute(
    parts.button,
    "title",
    `${holder.key}: core ${percent(holder.coreUsed)} used of ${percent(holder.core)}, ` +
      `memory ${gib(holder.memoryUsed)} used of ${gib(holder.memory)}`,
  );
  dim(node, holder);
}

// ------------------------------------------------------------------ a pod's rows

function openPod(key, opener) {
  state.pod = key;
  state.opener = opener;
  render();
  byId("details").focus();
}

function closePod() {
  if (state.pod == null) return;
  const opener = state.opener;
  state.pod = null;
  state.opener = null;
  render();
  if (opener?.isConnected) opener.focus();
}

function fact(list, name, value) {
  if (value == null || value === "") return;
  list.append(make("dt", "", name), make("dd", "", String(value)));
}

function renderDetails(node) {
  const panel = byId("details");
  panel.hidden = state.pod == null;
  document.body.classList.toggle("aside", state.pod != null);
  if (state.pod == null) return;
  text(byId("details-title"), state.pod);
  const allocations = (node.allocations ?? []).filter((row) => podKey(row) === state.pod);
  const usages = (node.usage?.containers ?? []).filter((row) => podKey(row) === state.pod);
  const pod = (node.pods ?? []).find((one) => `${one.namespace}/${one.name}` === state.pod);
  const signature = JSON.stringify([allocations, usages, pod]);
  const body = byId("details-body");
  // As it stands while nothing changes, so that a reader's place and selection stay.
  if (body.signature === signature) return;
  body.signature = signature;
  body.replaceChildren();
  if (allocations.length + usages.length === 0) {
    body.append(make("p", "gone", "This pod holds and uses no card any more."));
    return;
  }
  const facts = make("dl", "pod-facts");
  fact(facts, "Phase", pod && (pod.terminating ? `${pod.phase}, terminating` : pod.phase));
  fact(facts, "UID", pod?.uid ?? allocations[0]?.pod_uid);
  for (const [name, value] of Object.entries(pod?.labels ?? {})) fact(facts, name, value || "(empty)");
  if (facts.childElementCount > 0) body.append(facts);
  for (const row of allocations) body.append(detailRow(row, usages, pod));
  for (const row of usages) {
    const held = allocations.some((one) => one.gpu === row.gpu && one.container === row.container);
    if (!held) body.append(detailRow({ ...row, core_percent: null, memory_bytes: null }, usages, pod));
  }
}

function detailRow(row, usages, pod) {
  const usage = usages.find((one) => one.gpu === row.gpu && one.container === row.container);
  const place = row.mig == null ? `Card ${row.gpu}` : `Card ${row.gpu}, MIG ${row.mig}`;
  const container = pod?.containers.find((one) => one.name === row.container);
  const list = make("dl", "pod-facts");
  fact(list, "Container", [row.container, container?.kind, container?.state].filter(Boolean).join(", "));
  fact(list, "Core", `${percent(usage?.core_percent)} used, ${percent(row.core_percent)} requested`);
  if (row.greedy_core_percent != null) fact(list, "Greedy core", percent(row.greedy_core_percent));
  fact(list, "Memory", `${gib(usage?.memory_bytes)} used, ${gib(row.memory_bytes)} requested`);
  fact(list, "Processes", usage?.processes);
  if (row.scheme) fact(list, "Scheme", row.scheme + (row.exclusive ? ", exclusive" : ""));
  else fact(list, "Scheme", "none: it uses the card without an allocation");
  fact(list, "Resource", row.resource);
  fact(list, "Device", row.device);
  if (row.claim) fact(list, "Claim", `${row.claim.namespace}/${row.claim.name} (${row.claim.driver})`);
  return make("section", "detail-row", make("h3", "", place), list);
}

// ------------------------------------------------------------------ the rest of the page

function renderSummary(node, cards) {
  const up = cards.filter(({ card }) => card.up).length;
  const total = (value) => sum(cards.map(({ card }) => value(card)), null);
  const memory = total((card) => card.memory_total_bytes);
  const memoryUsed = total((card) => card.readings?.memory?.used_bytes);
  const memoryAsked = total((card) => card.allocated?.memory_bytes);
  const coreAsked = total((card) => card.allocated?.core_percent);
  const coreUsed = sum(
    cards.flatMap(({ card, holders }) => [card.unattributed?.core_percent, ...holders.map((one) => one.coreUsed)]),
    null,
  );
  const pods = new Set(cards.flatMap(({ holders }) => holders.map(podKey)));
  const containers = cards.reduce((count, { holders }) => count + holders.length, 0);
  const whole = 100 * cards.length;
  const share = (value) => (value == null || whole === 0 ? "–" : percent((100 * value) / whole));
  const driver = node.driver?.driver_version;
  const tiles = [
    ["Cards up", node.cards == null ? "–" : `${up} of ${cards.length}`, up < cards.length ? "bad" : ""],
    ["Core", `${share(coreUsed)} used`, "", `${share(coreAsked)} requested`],
    ["Memory", `${gib(memoryUsed)} used`, "", `${gib(memoryAsked)} requested of ${gib(memory)}`],
    ["Pods", String(pods.size), "", `${containers} ${containers === 1 ? "share" : "shares"} of cards`],
    ["Driver", driver ?? "–", "", node.driver?.cuda_version ? `CUDA ${node.driver.cuda_version}` : ""],
  ];
  keyed(
    byId("summary"),
    tiles,
    (tile) => tile[0],
    (tile) => {
      const value = make("p", "tile-value");
      const more = make("p", "tile-more");
      const made = make("div", "tile", make("p", "tile-name", tile[0]), value, more);
      made.parts = { value, more };
      return made;
    },
    (tileNode, [, value, severity, more]) => {
      text(tileNode.parts.value, value);
      text(tileNode.parts.more, more ?? "");
      attribute(tileNode, "data-severity", severity || null);
    },
  );
}

function renderSources(sources) {
  keyed(
    byId("sources"),
    sources,
    (one) => one.source,
    () => {
      const name = make("span", "source-name");
      const age = make("span", "source-age");
      const detail = make("span", "source-detail");
      const made = make("li", "source", make("span", "dot"), name, " ", age, " ", detail);
      made.parts = { name, age, detail };
      return made;
    },
    (made, one) => {
      const word = one.released ? "released" : one.up == null ? "no answer yet" : one.up ? "up" : "down";
      const age = one.last_success_timestamp_seconds == null ? "" : `, ${ago(one.age_seconds)}`;
      const severity = one.up ? "good" : one.up == null || one.released ? "warn" : "bad";
      attribute(made, "data-severity", severity);
      text(made.parts.name, one.source);
      text(made.parts.age, one.up ? word + age : `${word}${age && `, last answer${age.slice(1)}`}`);
      text(made.parts.detail, one.detail);
    },
  );
}

function renderProblems(node) {
  const lines = node.problems.map((one) => {
    const where = [one.namespace, one.pod, one.container].filter(Boolean).join("/");
    const card = one.gpu == null ? "" : ` on card ${one.gpu}`;
    return [words(one.kind), `${where}${card}${one.detail ? `: ${one.detail}` : ""}`];
  });
  for (const one of node.conflicts) {
    lines.push(["conflict", `card ${one.gpu}: ${one.containers} × ${words(one.kind)}`]);
  }
  for (const one of node.unassigned_pods) {
    lines.push(["waiting", `${one.namespace}/${one.pod} asks for a share and has no card yet`]);
  }
  byId("problems-section").hidden = lines.length === 0;
  keyed(
    byId("problems"),
    lines,
    (line) => line.join(" "),
    ([kind, rest]) => make("li", "", make("span", "chip", kind), " ", rest),
    () => {},
  );
}

const TELL_WHO_HOLDS = new Set(["podresources", "kubernetes"]);

/** What is wrong with what is shown, the most serious first; empty: nothing. */
function alertLine() {
  const node = state.latest;
  if (state.failedSince != null) {
    const what = node == null ? "" : " What is shown is from then.";
    return `The exporter does not answer since ${clock(state.failedSince)} (${state.failure}).${what}`;
  }
  if (node == null) return "";
  if (node.snapshot_stale || node.snapshot_age_seconds > OLD_SECONDS) {
    return `The data is stale: it was last updated ${ago(node.snapshot_age_seconds)}.`;
  }
  if (node.not_ready) return `Not ready: ${node.not_ready}.`;
  if (node.cards == null) return "No card has been read yet.";
  if (!node.driver?.up) {
    const source = node.sources.find((one) => one.source === "nvml");
    return `The cards are not read now${source?.detail ? `: ${source.detail}` : "."}`;
  }
  if (node.allocations != null && !node.allocations_complete) return incompleteLine(node);
  return "";
}

function incompleteLine(node) {
  const silent = node.sources.filter((one) => TELL_WHO_HOLDS.has(one.source) && !one.up);
  const why = silent.map((one) => `${one.source} ${one.up == null ? "has not answered yet" : "is down"}.`);
  const detail = silent.map((one) => one.detail).find(Boolean);
  const colon = why.length > 0 ? ": " : ".";
  return `Who holds the cards is not fully known${colon}${[...why, detail].filter(Boolean).join(" ")}`;
}

function renderState() {
  const line = alertLine();
  const alert = byId("alert");
  alert.hidden = line === "";
  text(alert, line);
  const old = state.failedSince != null || state.latest?.snapshot_stale === true;
  byId("main").classList.toggle("old", old);
  const place = byId("state");
  const down = (state.latest?.sources ?? []).filter((one) => one.up === false && !one.released);
  const lost = (state.latest?.cards ?? []).filter((card) => card.down_reason != null);
  const severity =
    state.failedSince != null ? "bad" : line || down.length + lost.length > 0 ? "warn" : "good";
  attribute(place, "data-severity", state.latest == null && !line ? null : severity);
  const word = stateWord();
  const troubles = word === "live" ? troublesOf(down, lost) : "";
  const age = word === "live" ? `, updated ${ago(state.latest.snapshot_age_seconds)}` : "";
  text(place, word + age + troubles);
  // Read out when it changes, and not each time that an age does.
  const announced = byId("announcement");
  if (announced.condition !== word + troubles) {
    announced.condition = word + troubles;
    text(announced, `${word}${troubles}. ${line}`.trim());
  }
}

function stateWord() {
  if (state.failedSince != null) return "unreachable";
  if (state.latest == null) return "connecting";
  if (state.latest.snapshot_stale) return "stale";
  if (state.latest.snapshot_timestamp_seconds == null) return "starting";
  return state.latest.driver?.up === false ? "cards not read" : "live";
}

function troublesOf(down, lost) {
  const cards = lost.length > 0 ? `, cards down: ${lost.map((card) => card.gpu).join(", ")}` : "";
  const failing = down.length > 0 ? `, down: ${down.map((one) => one.source).join(", ")}` : "";
  return cards + failing;
}

// ------------------------------------------------------------------ all of it

function render() {
  renderState();
  const node = state.shown;
  if (node == null) return;
  byId("main").hidden = false;
  byId("search-box").hidden = false;
  document.title = `${node.node} GPUs`;
  text(byId("node"), node.node);
  const { version, revision } = node.exporter;
  text(byId("version"), revision ? `${version} (${revision})` : version);
  const query = state.query;
  const cards = (node.cards ?? []).map((card) => {
    const holders = holdersOf(card, node);
    const neighbors = [...new Set(holders.map(podKey))];
    const matches = Boolean(query) && cardMatches(card, query);
    for (const holder of holders) {
      holder.color = colorOf(podKey(holder), neighbors);
      holder.cardMatches = matches;
    }
    return { card, holders };
  });
  renderSummary(node, cards);
  const shown = cards.filter(
    ({ card, holders }) =>
      !query || cardMatches(card, query) || holders.some((one) => holderMatches(one, query)),
  );
  keyed(byId("cards"), shown, ({ card }) => card.uuid, ({ card }) => newCard(card), updateCard);
  byId("no-match").hidden = shown.length > 0 || !query;
  renderProblems(node);
  renderSources(state.latest?.sources ?? node.sources);
  renderDetails(node);
}

async function poll() {
  try {
    const response = await fetch("api/v1/node", {
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    const node = await response.json();
    if (node.version !== 1) throw new Error("another version answers: load the page again");
    state.latest = node;
    if (node.node != null) state.shown = node;
    else if (state.shown == null && node.cards == null) showNothing(node);
    state.failedSince = null;
  } catch (error) {
    state.failedSince ??= Date.now();
    state.failure = error.name === "TimeoutError" ? "no answer in time" : error.message;
  }
  render();
}

/** Before the first snapshot: the sources alone, so that one sees what is waited for. */
function showNothing(node) {
  byId("main").hidden = false;
  renderSources(node.sources);
}

async function pollForever() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, POLL_MS);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

let wake = () => {};

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) wake();
});

document.addEventListener("click", (event) => {
  const target = event.target.closest(".holder, .segment, .slot");
  if (target?.pod == null) return;
  if (target.pod === state.pod) closePod();
  else openPod(target.pod, target);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") closePod();
  const typing = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId("search").focus();
  }
});

byId("details-close").addEventListener("click", closePod);
byId("search").addEventListener("input", (event) => {
  state.query = event.target.value.trim().toLowerCase();
  render();
});

pollForever();
