// The wait-for graph: root causes are leftmost, and boxes wait for boxes to their left, except in a cycle. Ranks that
// wait in the same operation share a box.

import { byId, draw, make, rankSet, ranksInWords, sameGroup } from "./format.js";
import { namer } from "./tables.js";

// Three columns fit beside another pane in a window of 1,440 pixels.
const WIDTH = 200, HEIGHT = 52, GAP_X = 38, GAP_Y = 14, MAX_IN_COLUMN = 10;

/** Whether the newest operation of a rank failed, and none is pending. @param {object} rank its row in a report */
const hasFailed = (rank) => rank.failure != null && rank.pending === 0;

/** The ranks that failed in the operation of the first error, without those at fault: each as a wait for the latter. A rank
 * that left the operation and has failed in another one since is among them only if it had joined the former.
 * @param {object} report */
function failures({ findings, in_flight: inFlight, ranks }) {
  const cause = findings.find((f) => f.severity === "error" && f.caused_by == null);
  if (!cause?.group || cause.seq == null || cause.culprit_ranks.length === 0) return [];
  const { group, op, seq, seq_kind: kind, culprit_ranks: on } = cause;
  const instances = inFlight.filter((i) => i.state === "failed" && i.seq === seq && i.seq_kind === kind && sameGroup(i.group, group));
  const joined = new Set(instances.flatMap((i) => i.joined));
  for (const rank of on) joined.delete(rank);
  const failed = ranks.filter((row) => joined.has(row.rank) && hasFailed(row));
  return failed.map(({ rank }) => ({ rank, on, group, op: op ?? "operation", seq, seq_kind: kind }));
}

/** Groups waiting ranks into boxes; each box lists the boxes that it waits for. @param {object} report */
export function boxes(report) {
  const name = namer(report);
  const waits = report.waits.length > 0 ? report.waits : failures(report);
  const byOperation = new Map();
  const waiters = new Set(waits.map((wait) => wait.rank));
  const blamed = new Set(report.findings.filter((f) => f.severity === "error" && f.caused_by == null).flatMap((f) => f.culprit_ranks));
  for (const wait of waits) {
    // A rank at fault that waits, too, shares no box with ranks that wait in the same operation.
    const key = `${blamed.has(wait.rank)} ${wait.group.name} ${wait.group.ranks[0]} ${wait.seq_kind} ${wait.seq} ${wait.op}`;
    const box = byOperation.get(key) ?? { ranks: [], on: new Set(), title: `${wait.op} #${wait.seq}`, text: name(wait.group), kind: "waits" };
    box.ranks.push(wait.rank);
    for (const rank of wait.on) box.on.add(rank);
    byOperation.set(key, box);
  }
  const all = [...byOperation.values()];
  const roots = new Set(all.flatMap((box) => [...box.on]).filter((rank) => !waiters.has(rank)));
  for (const box of all) if (box.ranks.some((rank) => blamed.has(rank))) box.kind = "root";
  const lastCall = (number) => report.ranks.find((rank) => rank.rank === number)?.last_call ?? "no record";
  // A rank that is waited for is at fault only if a finding says so: it may itself have failed because of another. If
  // no finding names one of them, the ranks that do not wait are where the waiting begins.
  const named = [...roots].filter((rank) => blamed.has(rank));
  const causes = named.length > 0 ? named : [...roots];
  const others = [...roots].filter((rank) => !causes.includes(rank));
  const failed = new Set(report.ranks.filter(hasFailed).map((rank) => rank.rank));
  const title = named.length > 0 ? "at fault" : "waited for";
  for (const [kind, ranks] of [["waits", others], ["root", causes]]) {
    if (ranks.length === 0) continue;
    ranks.sort((a, b) => a - b);
    all.unshift({ ranks, on: new Set(), kind, title, text: ranks.length === 1 ? `last: ${lastCall(ranks[0]).replace(" on group ", " on ")}` : `${ranks.length} ranks` });
  }
  for (const box of all) box.ranks.sort((a, b) => a - b);
  for (const box of all) {
    if (box.kind !== "waits" || !box.ranks.every((rank) => failed.has(rank))) continue;
    box.failed = true;
    box.title = box.on.size === 0 ? "failed" : `${box.title} failed`;
  }
  const boxesOfRank = new Map();
  all.forEach((box, i) => box.ranks.forEach((rank) => boxesOfRank.set(rank, [...(boxesOfRank.get(rank) ?? []), i])));
  for (const box of all) box.before = [...new Set([...box.on].flatMap((rank) => boxesOfRank.get(rank) ?? []))];
  return all;
}

/** The column of each box: its distance from a box that does not wait or, in a cycle, from a root cause or the first box. */
function columns(all) {
  const column = all.map((box) => (box.before.length === 0 ? 0 : -1));
  if (!column.includes(0) && all.length > 0) column[Math.max(0, all.findIndex((box) => box.kind === "root"))] = 0;
  for (let changed = true; changed;) {
    changed = false;
    all.forEach((box, i) => {
      const known = box.before.map((j) => column[j]).filter((c) => c >= 0);
      if (column[i] < 0 && known.length > 0) { column[i] = Math.min(...known) + 1; changed = true; }
    });
    // A cycle without an entry point begins with its first box.
    const left = column.indexOf(-1);
    if (!changed && left >= 0) { column[left] = 0; changed = true; }
  }
  return column;
}

/** How far an edge that goes back rises above the boxes, px. */
const ARC = 26;

/** The path of an edge between two boxes: to the left from side to side, to the right over the top, and within a column along
 * the right sides. @param {{x: number, y: number}} from @param {{x: number, y: number}} to @param {number} columns to the right */
export function edge(from, to, columns) {
  if (columns > 0) {
    // The edge leaves beside where another one may arrive.
    const [x1, x2] = [from.x + WIDTH * 0.6, to.x + WIDTH * 0.4];
    return `M${x1} ${from.y} C${x1} ${from.y - ARC} ${x2} ${to.y - ARC} ${x2} ${to.y}`;
  }
  const [x1, y1, x2, y2] = [from.x + (columns < 0 ? 0 : WIDTH), from.y + HEIGHT / 2, to.x + WIDTH, to.y + HEIGHT / 2];
  return `M${x1} ${y1} C${x1 + (columns < 0 ? -30 : 30)} ${y1} ${x2 + 30} ${y2} ${x2} ${y2}`;
}

const cut = (text, most = 33) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Draws the graph of a report, or says that no rank is blocked. @param {object} report */
export function drawGraph(report) {
  const all = boxes(report);
  if (all.length === 0) {
    byId("graph").replaceChildren(make("p", { class: "empty" }, "No blocked ranks."));
    return;
  }
  const column = columns(all);
  const height = [];
  // In a cycle, an edge goes back over the boxes.
  const top = all.some((box, i) => box.before.some((j) => column[j] > column[i])) ? 6 + ARC : 6;
  const place = all.map((_, i) => {
    const row = height[column[i]] ?? 0;
    height[column[i]] = row + 1;
    return { x: 6 + column[i] * (WIDTH + GAP_X), y: top + row * (HEIGHT + GAP_Y), shown: row < MAX_IN_COLUMN };
  });
  const rows = Math.min(MAX_IN_COLUMN + 1, Math.max(...height.filter(Boolean)));
  const totalWidth = height.length * (WIDTH + GAP_X) - GAP_X + 12, totalHeight = top + rows * (HEIGHT + GAP_Y) + 4;
  const svg = draw("svg", { width: totalWidth, height: totalHeight, viewBox: `0 0 ${totalWidth} ${totalHeight}`, role: "img", "aria-label": "wait-for graph" },
    draw("defs", {}, draw("marker", { id: "tip", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      draw("path", { d: "M0 0 L8 4 L0 8 z", class: "tip" }))));
  all.forEach((box, i) => {
    if (!place[i].shown) return;
    for (const j of box.before) {
      if (place[j].shown) svg.append(draw("path", { class: "edge", d: edge(place[i], place[j], column[j] - column[i]), "marker-end": "url(#tip)" }));
    }
  });
  all.forEach((box, i) => {
    if (!place[i].shown) return;
    const { x, y } = place[i];
    svg.append(draw("g", { class: `box ${box.kind}${box.failed ? " failed" : ""}` },
      draw("title", {}, `${box.kind === "root" ? "root cause: " : ""}${ranksInWords(box.ranks)}: ${box.title}${box.on.size > 0 ? " on " : "; "}${box.text}`),
      draw("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 4 }),
      draw("text", { x: x + 9, y: y + 18, class: "head" }, cut(`${box.kind === "root" ? "! " : ""}${box.ranks.length === 1 ? "rank" : `${box.ranks.length} ranks`} ${rankSet(box.ranks, 3)}`)),
      draw("text", { x: x + 9, y: y + 33 }, cut(box.title)), draw("text", { x: x + 9, y: y + 46 }, cut(box.text))));
  });
  height.forEach((count, c) => {
    if (count > MAX_IN_COLUMN) {
      svg.append(draw("text", { x: 6 + c * (WIDTH + GAP_X), y: totalHeight - HEIGHT / 2 }, `and ${count - MAX_IN_COLUMN} more boxes`));
    }
  });
  byId("graph").replaceChildren(make("div", { class: "scroll", tabindex: "0" }, svg));
}
