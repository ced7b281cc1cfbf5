// The heat map: one cell per rank, one row per host. A cell has a glyph and a word, never color alone.

import { byId, lag, make, percent, rankSet, ranksInWords } from "./format.js";

const STATES = {
  root: ["!", "at fault"], unread: ["-", "no record"], silent: ["?", "silent"],
  waits: [".", "waits"], failed: ["x", "failed"], late: ["~", "late"], ok: ["#", "ok"],
};
/** What a cell's shade can show. The lower limits of the shades (`steps`) are those of rcomm-top. */
const METRICS = {
  lag: { valueOf: (r) => r.lag_p50_ms, steps: [0.2, 1, 4], format: lag, title: "median lag" },
  share: { valueOf: (r) => r.lag_share, steps: [0.01, 0.03, 0.1], format: percent, title: "share of the job's time lost because of the rank" },
  pending: { valueOf: (r) => r.pending, steps: [1, 4, 64], format: String, title: "pending" },
  lost: { valueOf: (r) => r.lost, steps: [1, 100, 10000], format: String, title: "records lost" },
};
const GLYPHS = [".", "o", "O", "@"];
/** With more ranks than this, cells are small, and hosts without a rank in trouble (`TROUBLE`) share one line. */
const MANY = 256;
/** The classes of cells that keep a host from being folded: states, and the upper steps of the other metrics. */
const TROUBLE = new Set(["root", "unread", "silent", "late", "heat2", "heat3"]);

/** @type {Map<number, HTMLElement>} */
const cells = new Map();
/** The rows of the hosts, each with its ranks. @type {{row: HTMLElement, ranks: number[]}[]} */
let rows = [];
let unfolded = false;
let layout = "";
let metric = "state";

/** Returns a function from a rank to its state, a key of `STATES`. The server says the states, by the same rule as
 * rcomm-top and the filter. @param {object} status */
function states(status) {
  const byRank = new Map();
  for (const [name, runs] of Object.entries(status.rank_states)) {
    for (const [first, last] of runs) for (let rank = first; rank <= last; rank += 1) byRank.set(rank, name);
  }
  return (rank) => byRank.get(rank.rank) ?? "ok";
}

/** Who is in a state, for the legend: the ranks in trouble by number, of the others how many. @param {string} state @param {number[]} ranks */
const who = (state, ranks) => (TROUBLE.has(state) ? ranksInWords(ranks) : `${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"}`);

/** Class, glyph and label of a cell. */
function look(rank, state) {
  const words = STATES[state][1];
  if (metric === "state") return [state, STATES[state][0], words];
  const { valueOf, steps, format, title } = METRICS[metric];
  const value = valueOf(rank);
  if (value == null) return ["unread", "?", `${title} unknown`];
  const step = steps.filter((bound) => value >= bound).length;
  return [`heat${step}`, GLYPHS[step], `${title} ${format(value)}`];
}

/** Rows of ranks, by host, in the order in which hosts first appear. */
function arrange(ranks, choose) {
  const hosts = new Map();
  for (const rank of ranks) {
    if (!hosts.has(rank.host)) hosts.set(rank.host, []);
    hosts.get(rank.host).push(rank);
  }
  cells.clear();
  rows = [...hosts].map(([host, members]) => ({ ranks: members.map((rank) => rank.rank), row: make("div", { class: "host" },
    make("span", { class: "name" }, host || "unknown host"),
    make("span", { class: "cells" }, ...members.map((rank) => {
      const cell = make("button", { tabindex: "-1", onclick: () => choose(rank.rank) });
      cells.set(rank.rank, cell);
      return cell;
    }))) }));
  rows[0]?.row.querySelector("button")?.setAttribute("tabindex", "0");
  byId("ranks").classList.toggle("many", ranks.length > MANY);
  byId("ranks").replaceChildren(...rows.map(({ row }) => row));
}

/** Marks the hosts in trouble: of many ranks they come first, and the other hosts are hidden behind one line.
 * @param {boolean} many */
function fold(many) {
  let hosts = 0, ranks = 0;
  for (const { row, ranks: members } of rows) {
    const inTrouble = members.some((rank) => cells.get(rank).className.split(" ").some((name) => TROUBLE.has(name)));
    if (row.classList.contains("trouble") !== inTrouble) row.classList.toggle("trouble", inTrouble);
    if (!inTrouble) { hosts += 1; ranks += members.length; }
  }
  const button = byId("ranks-fold");
  button.hidden = !many || hosts === 0;
  byId("ranks").classList.toggle("folded", many && !unfolded);
  // The text does not call these hosts healthy, since their ranks may wait or have failed.
  const what = `${hosts} more ${hosts === 1 ? "host" : "hosts"} (${ranks} ranks)`;
  const text = unfolded ? `Fold ${what}` : `Show ${what}`;
  if (button.textContent !== text) button.textContent = text;
  button.onclick = () => { unfolded = !unfolded; fold(many); };
}

/** Draws the heat map; `choose` is called for a clicked rank.
 * @param {object} report @param {object} status @param {(table: string, index: number) => boolean} passes the filter
 * @param {(rank: number) => void} choose */
export function drawRanks(report, status, passes, choose) {
  const shape = report.ranks.map((rank) => `${rank.rank}@${rank.host}`).join();
  if (shape !== layout) { arrange(report.ranks, choose); layout = shape; }
  const state = states(status);
  const ofState = {};
  report.ranks.forEach((rank, index) => {
    const cell = cells.get(rank.rank);
    const rankState = state(rank);
    (ofState[rankState] ??= []).push(rank.rank);
    const [kind, glyph, words] = look(rank, rankState);
    const shown = passes("ranks", index) ? kind : `${kind} dim`;
    // Only changed cells are written to the document, since every write costs layout.
    if (cell.className !== shown) cell.className = shown;
    if (cell.textContent !== glyph) cell.textContent = glyph;
    const title = `rank ${rank.rank}: ${words}; last call ${rank.last_call ?? "unknown"}`;
    if (cell.title !== title) { cell.title = title; cell.setAttribute("aria-label", title); }
  });
  fold(report.ranks.length > MANY);
  byId("ranks-legend").textContent = metric === "state"
    ? Object.entries(STATES).filter(([name]) => ofState[name]).map(([name, [glyph, words]]) => `${glyph} ${words}: ${who(name, ofState[name])}`).join("   ")
    : `${METRICS[metric].title}: ${GLYPHS.map((g, i) => `${g} ${i === 0 ? "<" : "≥"} ${METRICS[metric].format(METRICS[metric].steps[Math.max(0, i - 1)])}`).join("   ")}   ? unknown`;
}

/** Moves the focus within the map by arrow keys. @param {KeyboardEvent} event */
export function walk(event) {
  // A folded row cannot have the focus.
  const order = [...cells.values()].filter((cell) => cell.offsetParent);
  const here = order.indexOf(document.activeElement);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 }[event.key];
  if (here < 0 || !step) return;
  const next = order[Math.max(0, Math.min(order.length - 1, here + step))];
  order[here].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  event.preventDefault();
}

/** Sets the metric of the heat map, `state` or a key of `METRICS`; shown from the next drawing on. @param {string} name */
export function chooseMetric(name) { metric = name; }

/** Details of one rank. @param {object} report @param {number} number */
export function describe(report, number) {
  const rank = report.ranks.find((candidate) => candidate.rank === number);
  if (!rank) return make("p", { class: "empty" }, `Rank ${number} is not in this snapshot.`);
  const waits = report.waits.filter((wait) => wait.rank === number);
  const awaited = report.waits.filter((wait) => wait.on.includes(number));
  const facts = [
    ["host", rank.host || "unknown"], ["pid", rank.pid || "unknown"], ["phase", rank.phase ?? "unknown"],
    ["step", rank.step ?? "unknown"], ["last call", rank.last_call ?? "unknown"], ["pending", rank.pending],
    ...(rank.failure == null ? [] : [["failed", rank.failure || "with an error that is not recorded"]]),
    ["lost records", rank.lost], ["median lag", lag(rank.lag_p50_ms) || "unknown"],
    [rank.failure == null ? "waits" : "waited", waits.map((w) => `in ${w.op} #${w.seq} for ${rankSet(w.on)}`).join("; ") || "not waiting"],
    ["waiting for it", awaited.length === 0 ? "no rank" : awaited.length === 1 ? "1 rank" : `${awaited.length} ranks`],
  ];
  return make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}
