// One group's rank × sequence matrix; members with equal cells share a row.

import { byId, make, rankSet, sameGroup } from "./format.js";

/** The glyphs are those of the reports and of rcomm-top. */
const CELLS = {
  completed: ["C", "completed"], started: ["S", "started"], queued: ["Q", "queued"], never_issued: ["-", "never issued"],
  not_yet: ["-", "not yet issued"],
  mismatch: ["X", "mismatch"], failed: ["F", "failed"], lost: ["*", "lost from the ring"], no_record: ["?", "no record"],
};

let drawn;

/** Makes the pane as wide as whole columns: a number that is cut at its edge would be read as another one. */
function fit() {
  const pane = byId("matrix").querySelector(".scroll");
  if (!pane) return;
  pane.style.maxWidth = "";
  const [ranks, ...columns] = [...pane.querySelector("thead tr").cells].map((cell) => cell.getBoundingClientRect().width);
  let width = ranks;
  for (const column of columns.reverse()) {
    if (width > ranks && width + column > pane.clientWidth) { pane.style.maxWidth = `${width}px`; return; }
    width += column;
  }
}

/** Sets up the matrix; called once. */
export const prepareMatrix = () => new ResizeObserver(fit).observe(byId("matrix"));

/** Draws at most 64 rows of the matrix, unless it is the one on display.
 * @param {?object} focus @param {(group: object) => string} name @param {object} report of the same snapshot */
export function drawMatrix(focus, name, report) {
  const pending = focus ? report.in_flight.filter((i) => i.seq_kind === "collective_seq_id" && sameGroup(i.group, focus.group)) : [];
  // Members that have not issued an operation that is not overdue may be on their way.
  const early = new Set(pending.filter((i) => !i.overdue && i.state !== "failed").map((i) => i.seq));
  const errors = focus ? report.findings.filter((f) => f.severity === "error" && f.caused_by == null) : [];
  const blamed = new Set(errors.flatMap((f) => f.culprit_ranks));
  // A rank that a finding on a message accuses may look fine in the matrix, and another one not.
  const messages = errors.filter((f) => f.seq_kind === "p2p_seq_id" && f.group && sameGroup(f.group, focus.group))
    .map((f) => `${f.code} is about ${f.op == null ? "" : `${f.op} #${f.seq}, `}a message: messages have numbers of their own, and are not in the matrix`);
  const newest = focus && report.groups.find((g) => sameGroup(g.group, focus.group))?.last_seq;
  // The oldest collective that is pending or, if none is, that has failed; the report lists the oldest first.
  const unfinished = (pending.find((i) => i.state !== "failed") ?? pending[0])?.seq;
  const form = JSON.stringify([focus, [...early], newest, unfinished, [...blamed], messages]);
  if (form === drawn) return;
  drawn = form;
  byId("matrix-title").textContent = focus ? `Group ${name(focus.group)}: ${focus.group.ranks.length} ${focus.group.ranks.length === 1 ? "rank" : "ranks"}` : "Group";
  if (!focus || focus.seqs.length === 0) {
    const none = focus ? "No collective on this group was recorded." : "No group was recorded.";
    byId("matrix").replaceChildren(make("p", { class: "empty" }, none));
    return;
  }
  const seen = new Set();
  const head = make("tr", {}, make("th", { scope: "col" }, "ranks"),
    ...focus.seqs.map((seq, i) => make("th", { scope: "col", class: "seq", title: focus.ops[i] }, `${seq}`)));
  // The server puts ranks at fault in rows of their own.
  const isBlamed = (row) => row.ranks.some((rank) => blamed.has(rank));
  const shown = focus.rows.slice(0, 64);
  const rows = shown.map((row) => make("tr", {},
    make("th", { scope: "row", class: isBlamed(row) ? "fault" : null }, `${isBlamed(row) ? "! " : ""}${rankSet(row.ranks, 3)}`),
    ...row.cells.map((cell, i) => {
      const kind = cell === "never_issued" && early.has(focus.seqs[i]) ? "not_yet" : cell;
      const [glyph, words] = CELLS[kind];
      seen.add(kind);
      return make("td", { class: `cell ${kind}`, title: `#${focus.seqs[i]} ${focus.ops[i]}: ${words} on ${rankSet(row.ranks)}` }, glyph);
    })));
  const legend = [...Object.entries(CELLS).filter(([name]) => seen.has(name)).map(([, [glyph, words]]) => `${glyph} ${words}`),
    ...(shown.some(isBlamed) ? ["! at fault"] : [])].join("   ");
  const later = (newest ?? 0) - focus.seqs.at(-1);
  // The style sheet keeps the newest columns visible.
  const pane = make("div", { class: "scroll newest", tabindex: "0" }, make("table", { class: "matrix" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  byId("matrix").replaceChildren(
    pane,
    make("p", { class: "empty" }, `${legend}   ${later > 0 ? `${later} later not shown` : "newest on the right"}; point at a number for its operation`),
    ...messages.map((text) => make("p", { class: "empty" }, text)));
  fit();
  const at = focus.seqs.indexOf(unfinished);
  if (at < 0) return;
  // The first column does not move: the oldest unfinished collective may be under it, or left of it.
  const hidden = head.cells[0].getBoundingClientRect().right - head.cells[at + 1].getBoundingClientRect().left;
  if (hidden > 0) pane.scrollLeft -= hidden;
}
