// Tables: operations in flight, groups, stragglers, sources, stacks.

import { age, byId, fillTable, label, labels, lag, make, percent, rankSet, ranksInWords, size } from "./format.js";

/** The order of names with numbers. */
const byName = new Intl.Collator("en", { numeric: true });

/** Maximum number of rows of a table; the filter finds the others. */
const MAX_ROWS = 200;

/** The rows that pass the filter: the first in the order of `compare`, which are shown, and the number of others.
 * @param {object[]} rows @param {string} section @param {(section: string, index: number) => boolean} passes
 * @param {(a: object, b: object) => number} compare */
function passing(rows, section, passes, compare) {
  const matching = rows.map((row, index) => [row, index]).filter(([, index]) => passes(section, index)).map(([row]) => row);
  matching.sort(compare);
  return { shown: matching.slice(0, MAX_ROWS), more: matching.length - MAX_ROWS };
}

/** Returns a function that names groups. If groups of different ranks share a label, the name has the ranks too; if groups
 * of the same ranks do, it has the group's own name.
 * @param {object} report */
export function namer(report) {
  const first = new Map();
  const [shared, sameRanks] = [new Set(), new Set()];
  for (const { group } of report.groups) {
    const [text, ranks] = [label(group), group.ranks.join()];
    const other = first.get(text);
    if (!other) first.set(text, { ranks, name: group.name });
    else if (other.ranks !== ranks) shared.add(text);
    else if (other.name !== group.name) sameRanks.add(text);
  }
  return (group) => {
    const text = label(group);
    if (sameRanks.has(text) && text !== group.name) return `${text}/${group.name}`;
    return shared.has(text) && group.ranks.length > 0 ? `${text} of ${rankSet(group.ranks, 4)}` : text;
  };
}

/** An age in a table. That of an overdue operation grows until the next snapshot; of the others, most end before.
 * @param {?number} ms @param {boolean} overdue */
const ageCell = (ms, overdue) => make("span", { "data-age": overdue ? ms ?? "" : "" }, age(ms));

/** Whether equal operations of groups with the same description have a row each. */
let unfolded = false;

/** How many ranks have joined an operation, and how many it needs, like `1/2`. One end records a message: the others are
 * there unless they are missing or unknown. @param {object} i */
function joined(i) {
  if (i.seq_kind !== "p2p_seq_id") return `${i.joined.length}/${i.group.ranks.length}`;
  const absent = i.missing.length + i.unknown.length;
  const expected = Math.max(2, 1 + absent);
  return `${expected - absent}/${expected}`;
}

/** Lists of operations that differ only in the group, where the groups have the same description. @param {object[]} rows */
function foldEqual(rows) {
  const folds = new Map();
  for (const [index, row] of rows.entries()) {
    const { desc } = row.group;
    const named = desc && desc !== "undefined" && !unfolded;
    const key = named ? [desc, row.op, row.seq, row.state, row.overdue, joined(row), row.missing.length].join(" ") : index;
    folds.set(key, [...(folds.get(key) ?? []), row]);
  }
  return [...folds.values()];
}

/** Draws the table of operations in flight. @param {object} report */
export function drawInFlight(report, passes, problemsOnly) {
  const name = namer(report);
  const isProblem = (i) => i.state === "failed" || i.overdue && !["running", "queued"].includes(i.state);
  const wanted = report.in_flight.filter((row, index) => passes("in_flight", index) && (!problemsOnly || isProblem(row)));
  const folds = foldEqual(wanted);
  const shown = folds.slice(0, MAX_ROWS);
  byId("flight-title").firstChild.textContent = report.in_flight.some((i) => i.state === "failed") ? "In flight or failed " : "In flight ";
  const button = byId("flight-fold");
  button.hidden = !unfolded && folds.length === wanted.length;
  button.textContent = unfolded ? "Fold equal rows" : `Show all ${wanted.length}`;
  button.onclick = () => { unfolded = !unfolded; drawInFlight(report, passes, problemsOnly); };
  fillTable(byId("flight"),
    ["age", "group", "seq", "operation", "bytes", "joined", "state", wanted.some((i) => i.error) ? "missing or error" : "missing"],
    shown.map((fold) => {
      const [i] = fold;
      // An operation that has failed grows no older.
      const oldest = i.state === "failed" ? null : fold.reduce((most, { age_ms: ms }) => (ms != null && (most == null || ms > most) ? ms : most), null);
      const sameError = i.error && fold.every((row) => row.error === i.error) ? i.error : "";
      // A member may be on its way to an operation that is not overdue.
      const yet = i.overdue || i.state === "failed" ? "" : " not yet";
      const missing = fold.length > 1 ? sameError || (i.missing.length > 0 ? `${i.missing.length} ${i.missing.length === 1 ? "rank" : "ranks"} of each${yet}` : "")
        : [i.error, i.missing.length > 0 ? ranksInWords(i.missing) + yet : "", i.unknown.length > 0 ? `(unknown: ${rankSet(i.unknown)})` : ""].filter(Boolean).join(" ");
      return [ageCell(oldest, i.overdue), fold.length > 1 ? `${labels(fold.map((row) => label(row.group)))} ×${fold.length}` : name(i.group),
        i.seq, i.op, i.least_bytes == null ? size(i.bytes) : `${size(i.least_bytes)} or ${size(i.bytes)}`, joined(i), i.state.replace("_", " "), missing];
    }), report.in_flight.length === 0 ? "Nothing is pending."
      : "No operation to show: the filter or “problems only” hides them.", folds.length - shown.length);
}

/** Draws the table of groups; `open` is called for a clicked group. @param {object} report @param {(group: object) => void} open */
export function drawGroups(report, passes, problemsOnly, open) {
  const name = namer(report);
  // Groups may share a name: their first ranks distinguish them.
  const key = (group) => `${group.ranks[0]} ${group.name}`;
  // The report of a group counts its collectives only.
  const messages = new Map();
  for (const i of report.in_flight) {
    if (i.seq_kind === "p2p_seq_id" && i.state !== "failed") messages.set(key(i.group), (messages.get(key(i.group)) ?? 0) + 1);
  }
  const troubled = new Set(report.in_flight.filter((i) => i.overdue || i.state === "failed").map((i) => key(i.group)));
  const passesHere = (section, index) => passes(section, index) && (!problemsOnly || troubled.has(key(report.groups[index].group)));
  const blamed = new Set(report.findings.filter((f) => f.severity === "error" && f.caused_by == null && f.group).map((f) => key(f.group)));
  // The age is that of the oldest pending collective; messages are not counted.
  const overdue = new Set(report.in_flight.filter((i) => i.overdue && i.state !== "failed" && i.seq_kind === "collective_seq_id").map((i) => key(i.group)));
  // The groups that findings name come first, then others in trouble; tp_2 comes before tp_10.
  const order = (a, b) => blamed.has(key(b.group)) - blamed.has(key(a.group))
    || troubled.has(key(b.group)) - troubled.has(key(a.group))
    || byName.compare(name(a.group), name(b.group));
  const { shown, more } = passing(report.groups, "groups", passesHere, order);
  fillTable(byId("groups"),
    ["group", "ranks", "ranks read", "newest", "behind", "in flight", "oldest", "lag p50", "lag p99", "bus GB/s", "backend"],
    shown.map((g) => [
      make("button", { class: "link", "data-rank": g.group.ranks[0], onclick: () => open(g.group) }, blamed.has(key(g.group)) ? `! ${name(g.group)}` : name(g.group)),
      g.group.ranks.length, g.ranks_read, g.last_seq ?? "", (g.last_seq ?? 0) - (g.min_seq ?? 0), g.in_flight + (messages.get(key(g.group)) ?? 0),
      ageCell(g.oldest_ms, overdue.has(key(g.group))), lag(g.lag_p50_ms), lag(g.lag_p99_ms), g.busbw_gbs == null ? "" : g.busbw_gbs.toFixed(1), g.backend,
    ]), "No group to show: none is recorded, or the filter or “problems only” hides them.", more);
}

/** Draws the table of the twelve ranks with the largest shares of lost time. @param {object} report */
export function drawStragglers(report, passes) {
  const passesHere = (section, index) => passes(section, index) && report.ranks[index].lag_share != null;
  const { shown } = passing(report.ranks, "ranks", passesHere, (a, b) => b.lag_share - a.lag_share);
  const late = new Set(report.findings.filter((finding) => finding.code === "W220").flatMap((finding) => finding.culprit_ranks));
  fillTable(byId("stragglers"),
    ["rank", "host", "lag p50", "share of the job's time"],
    shown.slice(0, 12).map((r) => [r.rank, r.host, lag(r.lag_p50_ms), make("span", {}, make("span", { class: "share" }, percent(r.lag_share)),
      // Only the share of a rank that a finding calls late has the color of trouble.
      make("meter", { min: 0, max: 1, value: r.lag_share, ...(late.has(r.rank) ? { low: 0, high: 0, optimum: 0 } : {}),
        "aria-label": `rank ${r.rank}: ${percent(r.lag_share)} of the job's time` }))]),
    report.findings.some((finding) => finding.severity === "error") ? "Not judged: the job has an error."
      : "No share to show: too few collectives were measured on all their members, or the filter hides the ranks.");
}

/** Draws the table of sources, and names the silent ranks. @param {object} status */
export function drawSources(status) {
  fillTable(byId("sources"), ["source", "ranks", "last answer", "error"],
    status.sources.map((s) => [s.name, `${s.answered}/${s.known}`,
      s.silent_for_ms == null ? "never" : s.silent_for_ms < 1000 ? "less than 1 s before the update" : `${age(s.silent_for_ms)} before the update`, s.error ?? ""]), "No source.");
  const silent = status.silent_ranks;
  byId("silent").textContent = silent.length > 0 ? `${silent.length} silent: ${rankSet(silent)}` : "";
}

/** The element of a frame of the merged call stacks, with the frames that it called. @param {object} node @param {number} depth */
function frame(node, depth) {
  const text = [make("span", {}, `${node.name} `), make("span", { class: "faint" }, `${node.filename}:${node.line} `),
    make("span", { class: "ranks" }, ranksInWords(node.ranks))];
  if (node.children.length === 0) return make("div", { class: "frame leaf" }, ...text);
  return make("details", { class: "frame", open: depth < 8 }, make("summary", {}, ...text),
    ...node.children.map((child) => frame(child, depth + 1)));
}

/** The displayed stacks: the same object as long as they are unchanged. @type {?object} */
let stacks = null;

/** Draws the recorded call stacks, merged over the ranks. @param {object} report */
export function drawStacks(report) {
  if (report.stacks === stacks) return;
  stacks = report.stacks;
  byId("stacks").replaceChildren(...(report.stacks.length > 0
    ? report.stacks.map((node) => frame(node, 0))
    : [make("p", { class: "empty" }, "No stacks were recorded.")]));
}
