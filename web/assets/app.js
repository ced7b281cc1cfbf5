// The page: draws the snapshots of one event stream into plain elements.

import { address, age, ask, byId, clock } from "./format.js";
import { drawGraph } from "./graph.js";
import { prepareHistory, remember, repaintHistory, showing, step } from "./history.js";
import { listJobs, showOwn } from "./jobs.js";
import { drawMatrix, prepareMatrix } from "./matrix.js";
import { chooseMetric, describe, drawRanks, walk } from "./ranks.js";
import { refreshReducers } from "./reducers.js";
import { drawGroups, drawInFlight, drawSources, drawStacks, drawStragglers, namer } from "./tables.js";
import { openInPerfetto, paint as paintTimeline, prepareTimeline, refresh as refreshTimeline } from "./timeline.js";
import { prepareUpload } from "./upload.js";
import { asText, drawFindings, drawVerdict, overText, remains, since, unknownSize } from "./verdict.js";

/** @typedef {{status: object, report: object, focus: ?object}} Picture */

/** The id of the upload whose report the page shows; null if it shows a job. @type {?string} */
const upload = location.pathname.startsWith("/reports/") ? location.pathname.split("/")[2] : null;

const state = {
  /** @type {?Picture} the newest snapshot */ live: null,
  /** @type {?Picture} the snapshot on display */ shown: null,
  connected: upload != null,
  paused: false,
  problemsOnly: false,
  filter: "",
  /** @type {?object} indices of the matching rows, and the number of their snapshot */ selected: null,
  /** @type {?number} */ rank: null,
  /** @type {?object} group whose matrix is shown */ group: null,
  /** @type {?number} when the newest snapshot arrived, ms */ received: null,
};

/** Whether a row matches the filter. While the newest answer is for another snapshot, every row counts as a match. */
const passes = (section, index) => {
  const selected = state.selected;
  return !selected || selected.number !== state.shown?.status.number || selected[section].has(index);
};

// Drawing ------------------------------------------------------------------------------------------

let queued = false;
/** Draws the displayed snapshot at the next frame.
 * @param {boolean} [asked] whether an input of the user requires it; then the section under the pointer is drawn too */
function draw(asked = false) {
  forced ||= asked;
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    if (state.shown) drawNow(state.shown);
    forced = false;
  });
}

/** Draws a section, unless the pointer is inside it: what the user is about to click must not move. The
 * verdict is always drawn. @param {string} id @param {() => void} drawPart */
function unlessHeld(id, drawPart) {
  const section = byId(id).closest("section");
  const held = !forced && section.matches(":hover");
  section.classList.toggle("held", held);
  if (!held) drawPart();
}

/** Whether the next drawing includes the section under the pointer. */
let forced = false;

/** How large the job is and how far, as in the title of rcomm-top: `64 ranks / 8 hosts  step 213`.
 * @param {object} report @param {object} status */
function sizeOf({ ranks }, { ranks: known }) {
  const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const hosts = new Set(ranks.map(({ host }) => host).filter(Boolean)).size;
  const step = ranks.reduce((most, rank) => Math.max(most, rank.step ?? -1), -1);
  return [count(known, "rank") + (hosts > 0 ? ` / ${count(hosts, "host")}` : ""), ...(step >= 0 ? [`step ${step}`] : [])].join("  ");
}

/** @param {Picture} picture */
function drawNow(picture) {
  const { status, report, focus } = picture;
  const began = performance.now();
  byId("job").textContent = upload ? "uploaded dumps" : status.job;
  byId("size").textContent = sizeOf(report, status);
  unlessHeld("findings", () => drawFindings(picture, passes, copy));
  unlessHeld("flight", () => drawInFlight(report, passes, state.problemsOnly));
  unlessHeld("groups", () => drawGroups(report, passes, state.problemsOnly, openGroup));
  unlessHeld("stragglers", () => drawStragglers(report, passes));
  unlessHeld("sources", () => drawSources(status));
  unlessHeld("stacks", () => drawStacks(report));
  unlessHeld("ranks", () => drawRanks(report, status, passes, openRank));
  unlessHeld("graph", () => drawGraph(report));
  if (!state.group) unlessHeld("matrix", () => drawMatrix(focus, namer(report), report));
  if (state.rank != null) byId("rank-facts").replaceChildren(describe(report, state.rank));
  showAge();
  document.body.dataset.number = status.number;
  document.body.dataset.drawMs = (performance.now() - began).toFixed(1);
}

/** Shows the age of the snapshot and the state of the connection. */
function showAge() {
  const line = byId("age");
  if (!state.shown) return;
  const { judged_at_ns: judged } = state.shown.status;
  const past = state.shown !== state.live && !upload;
  const passed = laterMs();
  const old = age(past ? Math.max(0, Date.now() - judged / 1e6) : passed);
  // A job that has ended is not judged again, so its last snapshot does not become stale.
  const over = state.shown.report.end != null;
  const stale = !upload && (past || state.paused || !state.connected || (passed > STALE_MS && !over));
  byId("light").className = upload || over ? "" : stale ? "stale" : "live";
  const later = past || upload ? 0 : passed;
  const said = drawVerdict(state.shown, later);
  showOwn(past || upload ? null : said);
  byId("since").textContent = [since(state.shown, later), remains(state.shown), unknownSize(state.shown.report)].filter(Boolean).join("; ");
  for (const cell of document.querySelectorAll("[data-age]")) {
    if (cell.dataset.age !== "" && !past && !upload && !over) cell.textContent = age(Number(cell.dataset.age) + passed);
  }
  line.textContent = upload ? "report on dumps"
    : past ? `history: ${clock(judged)} UTC, ${old} ago`
    : state.paused ? `paused, ${old} old` : !state.connected ? `connection lost; data ${old} old` : over ? `${overText(state.shown.report.end)} since ${clock(state.shown.report.end.at_ns)} UTC` : stale ? `stale: no update for ${old}` : `live, updated ${old} ago`;
  line.classList.toggle("stale", stale);
  byId("live").hidden = upload != null || !(past || state.paused);
}

/** Time without a snapshot after which the page is marked as stale. */
const STALE_MS = 10e3;

/** Milliseconds since the newest snapshot arrived, by the clock of the browser; 0 before the first. */
const laterMs = () => (state.received == null ? 0 : performance.now() - state.received);

function copyVerdict() {
  if (state.shown) copy(asText(state.shown, upload ? "" : state.shown.status.job));
}

/** Puts a text on the clipboard, and says so. @param {string} text */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    byId("copied").textContent = "copied";
  } catch {
    byId("copied").textContent = "the browser did not allow copying: select the text";
  }
  setTimeout(() => { byId("copied").textContent = ""; }, 3000);
}

// The displayed snapshot ---------------------------------------------------------------------------

/** Takes the newest snapshot, and shows it unless the page is paused. @param {Picture} picture */
function take(picture) {
  state.live = picture;
  state.received = performance.now();
  remember(picture.status, picture.report);
  if (!state.paused) show(picture);
}

/** Shows a snapshot; of the live one, also the operations, the reducers and the open group. @param {Picture} picture */
function show(picture) {
  state.shown = picture;
  draw();
  if (state.filter) select();
  if (picture === state.live) { refreshTimeline({ past: false }); refreshReducers({ upload, past: false }); }
  if (state.group && picture === state.live) openGroup(state.group);
}

/** Shows a past snapshot, or for null the live one. @param {?number} number */
async function go(number) {
  if (number == null) {
    state.paused = false;
    showing(null);
    if (state.live) show(state.live);
    return;
  }
  state.paused = true;
  state.group = null;
  showing(number);
  refreshTimeline({ past: true });
  refreshReducers({ upload, past: true });
  try {
    const picture = await ask("picture", { at: number });
    if (state.paused) show(picture);
  } catch (error) {
    byId("note").textContent = error.message;
  }
}

/** Pauses, or goes back to live. */
function pause() {
  if (state.paused) go(null);
  else { state.paused = true; showing(state.shown?.status.number ?? null); showAge(); }
}

// Filter -------------------------------------------------------------------------------------------

/** The number of the newest request; answers to older ones are ignored. */
let selecting = 0;
/** Requests which rows of the displayed snapshot match the filter, and draws the snapshot anew. */
async function select() {
  const turn = (selecting += 1);
  const error = byId("filter-error");
  if (!state.filter) { state.selected = null; error.textContent = ""; draw(true); return; }
  const number = state.shown?.status.number;
  const newest = state.shown === state.live;
  try {
    const found = await ask("select", { filter: state.filter, upload, at: newest ? null : number });
    if (turn !== selecting) return;
    state.selected = { number, ...Object.fromEntries(Object.entries(found).map(([name, indices]) => [name, new Set(indices)])) };
    error.textContent = "";
  } catch (problem) {
    if (turn !== selecting) return;
    error.textContent = problem.message;
  }
  draw();
}

function filter(text) {
  state.filter = text.trim();
  byId("filter").value = text;
  select();
  refreshTimeline({ filter: state.filter });
}

// Details ------------------------------------------------------------------------------------------

/** @param {number} rank */
function openRank(rank) {
  state.rank = rank;
  byId("rank-title").textContent = `Rank ${rank}`;
  if (state.shown) byId("rank-facts").replaceChildren(describe(state.shown.report, rank));
  if (!byId("rank").open) byId("rank").showModal();
}

/** Shows the matrix of a group, until another group or a past snapshot is shown. @param {object} group */
async function openGroup(group) {
  const again = state.group === group;
  state.group = group;
  try {
    const focus = await ask("matrix", { group: group.name, rank: group.ranks[0], columns: 32, upload });
    drawMatrix(focus, namer(state.shown.report), state.shown.report);
    if (!again) byId("matrix-title").scrollIntoView({ block: "nearest" });
  } catch (error) {
    byId("note").textContent = error.message;
  }
}

/** Toggles between dark and light, and remembers the choice in this browser. */
function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("rcomm-theme", root.dataset.theme);
  repaintHistory();
  paintTimeline();
}

// Keys ---------------------------------------------------------------------------------------------

const KEYS = {
  "/": () => byId("filter").focus(), "?": () => byId("help").showModal(), " ": pause, ",": () => step(-1), ".": () => step(1),
  "<": () => step(-10), ">": () => step(10), L: () => go(null), t: theme, y: copyVerdict,
  z: () => { state.problemsOnly = !state.problemsOnly; byId("problems-only").setAttribute("aria-pressed", state.problemsOnly); draw(true); },
  p: () => { location.href = address("perfetto", { upload }); },
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("#ranks")) walk(event);
  if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Escape" && state.filter) { filter(""); return; }
  if (event.key >= "1" && event.key <= "9") {
    document.querySelectorAll("main section > h2")[Number(event.key) - 1]?.scrollIntoView();
    return;
  }
  // The space bar presses a focused button.
  const act = KEYS[event.key];
  if (act && !(event.key === " " && event.target instanceof HTMLButtonElement)) { event.preventDefault(); act(); }
});

// Start -------------------------------------------------------------------------------------------

/** Returns the snapshot to which a delta leads from another. @param {Picture} picture @param {object} delta */
function withDelta(picture, { status, focus, set, rows }) {
  const report = { ...picture.report, ...set };
  for (const [section, indices] of Object.entries(rows)) {
    report[section] = picture.report[section].slice();
    for (const [index, row] of Object.entries(indices)) report[section][index] = row;
  }
  return { status, focus, report };
}

function listen() {
  const stream = new EventSource(address("events"));
  stream.addEventListener("open", () => { state.connected = true; showAge(); });
  stream.addEventListener("error", () => { state.connected = false; showAge(); });
  stream.addEventListener("picture", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("delta", (event) => {
    const delta = JSON.parse(event.data);
    if (state.live?.status.number === delta.base) take(withDelta(state.live, delta));
  });
}

const storedTheme = localStorage.getItem("rcomm-theme");
if (storedTheme === "dark" || storedTheme === "light") document.documentElement.dataset.theme = storedTheme;
prepareUpload();
prepareTimeline();
prepareMatrix();
let typing;
byId("filter").addEventListener("input", (event) => { clearTimeout(typing); typing = setTimeout(() => filter(event.target.value), 150); });
byId("metric").addEventListener("change", (event) => { chooseMetric(event.target.value); draw(true); });
byId("problems-only").addEventListener("click", KEYS.z);
byId("live").addEventListener("click", () => go(null));
byId("theme").addEventListener("click", theme);
byId("copy-verdict").addEventListener("click", copyVerdict);
// A section that was not drawn anew while the pointer was inside is drawn when the pointer leaves.
for (const section of document.querySelectorAll("section")) section.addEventListener("pointerleave", () => { if (section.classList.contains("held")) draw(); });
byId("show-help").addEventListener("click", KEYS["?"]);
byId("rank").addEventListener("close", () => { state.rank = null; });
byId("rank-filter").addEventListener("click", () => { const rank = state.rank; byId("rank").close(); filter(`rank:${rank}`); });
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}
byId("open-perfetto").addEventListener("click", () => openInPerfetto(upload));
byId("download-perfetto").href = address("perfetto", { upload });
ask("filter-keys").then((keys) => byId("filter-keys").append(...keys.flatMap(({ key, takes }) => {
  const [name, meaning] = [document.createElement("dt"), document.createElement("dd")];
  name.textContent = key;
  meaning.textContent = takes;
  return [name, meaning];
})));
setInterval(showAge, 1000);
if (upload) {
  document.body.classList.add("upload");
  refreshTimeline({ upload });
  ask("picture", { upload }).then((picture) => { state.live = picture; show(picture); }, (error) => {
    byId("verdict-text").textContent = error.message;
  });
} else {
  prepareHistory(go);
  listen();
  listJobs();
}
