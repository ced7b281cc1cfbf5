// The newest operations of each rank on a canvas. Only visible lanes are drawn, so that a thousand
// ranks scroll as easily as ten.

import { address, age, ask, byId, color, make } from "./format.js";

const LEFT = 92, TOP = 22;
/** Bounds of the height of a lane, px. Between them, the lanes share the height of the pane. */
const MIN_LANE_HEIGHT = 18, MAX_LANE_HEIGHT = 44;
let laneHeight = MIN_LANE_HEIGHT;
// Okabe and Ito's colors, with a darker yellow, beginning with the two with which rcomm-top begins: one for each
// operation and kind of group. More than seven share them, and differ by the text in and under them.
const COLORS = ["#009e73", "#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00", "#b3a100"];
/** The color of text on each of COLORS, with a contrast of at least 4.5. */
const INKS = ["#000000", "#ffffff", "#000000", "#000000", "#000000", "#000000", "#000000"];

/** The server's answer that is on display. @type {?object} */
let drawn = null;
let view = { from: 0, to: 1 };
let wanted = { seconds: 10, filter: "", upload: null };
let requesting = false;
/** Whether to send another request after the answer to the one that is on its way. */
let requestAgain = false;
/** Whether the user has zoomed or moved the view: new answers do not replace it until all is shown again. */
let userChoseView = false;

const canvas = () => byId("timeline-canvas");

/** The range to show first: from the oldest operation on, since the records of a fast job may not reach back as far as was
 * requested. A long wait at the end gets half of the width, so that the operations before it can be seen.
 * @param {?{length: number, lanes: object[]}} answer */
export function firstRange(answer) {
  const length = Math.max(1, answer?.length ?? 1);
  const slices = (answer?.lanes ?? []).flatMap((lane) => lane.slices);
  if (slices.length === 0) return { from: 0, to: length };
  const first = Math.max(0, slices.reduce((least, { start }) => Math.min(least, start), length));
  const last = slices.reduce((most, { start, length: took }) => Math.max(most, start + (took ?? 0)), first);
  // If the only operation has just begun, it has no length yet.
  const shown = Math.max(last - first, length / 100);
  const to = Math.min(length, Math.max(last + shown, 1));
  return { from: first > to / 4 ? Math.max(0, first - (to - first) / 50) : 0, to };
}

/** Requests the newest operations, unless the timeline is far out of view. Without a new setting, it requests nothing
 * either while the user looks at a part of it, or points at it. @param {object} [query] */
export async function refresh(query = {}) {
  Object.assign(wanted, query);
  if (wanted.past) {
    drawn = null;
    byId("timeline-note").textContent = "Only reports are kept for the past; operations are shown live and for uploads.";
    paint();
    return;
  }
  // The view that the user looks at is replaced only after its settings change.
  if (Object.keys(query).some((key) => key !== "past")) userChoseView = false;
  else if (drawn && (userChoseView || byId("timeline").matches(":hover"))) return;
  const place = byId("timeline").getBoundingClientRect();
  if (place.top > innerHeight + 400 || place.bottom < -400) return;
  if (requesting) { requestAgain = true; return; }
  requesting = true;
  try {
    drawn = await ask("timeline", { seconds: wanted.seconds, filter: wanted.filter, upload: wanted.upload });
    view = firstRange(drawn);
    addKinds();
    drawLegend();
    byId("timeline-note").textContent = drawn.omitted > 0 ? `${drawn.omitted} older operations not shown: narrow the filter` : "";
    paint();
  } catch (error) {
    byId("timeline-note").textContent = error.message;
  } finally {
    requesting = false;
    if (requestAgain) { requestAgain = false; setTimeout(refresh, 500); }
  }
}

/** The horizontal position of a time, px. @param {number} us @param {number} width of the canvas, px */
const x = (us, width) => LEFT + ((us - view.from) / (view.to - view.from)) * (width - LEFT - 8);

/** Draws the visible lanes. */
export function paint() {
  const pane = byId("timeline-pane");
  const lanes = drawn?.lanes ?? [];
  laneHeight = Math.max(MIN_LANE_HEIGHT, Math.min(MAX_LANE_HEIGHT, Math.floor((pane.clientHeight - TOP - 4) / Math.max(1, lanes.length))));
  byId("timeline-space").style.height = `${lanes.length * laneHeight + TOP}px`;
  const ratio = devicePixelRatio || 1;
  const width = pane.clientWidth, height = pane.clientHeight;
  const element = canvas();
  if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
    element.style.width = `${width}px`;
    element.style.height = `${height}px`;
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const [text, faint, line, bad] = ["--text", "--faint", "--line", "--bad"].map(color);
  context.fillStyle = faint;
  if (lanes.length === 0) { if (drawn) context.fillText("No operations to draw.", 8, 12); return; }
  const span = view.to - view.from;
  const tick = [1, 2, 5].flatMap((n) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].map((p) => n * p)).sort((a, b) => a - b).find((n) => span / n < Math.max(2, width / 110)) ?? span;
  context.fillText("UTC", 6, 9);
  const origin = Number(BigInt(drawn.origin_ns) / 1000n);
  for (let us = Math.ceil((origin + view.from) / tick) * tick - origin; us < view.to; us += tick) {
    const px = x(us, width);
    context.fillStyle = line;
    context.fillRect(px, 16, 1, height);
    context.fillStyle = faint;
    // A time that was cut at the edge would be another time.
    const time = timeOfDay(origin + us, tick);
    if (px + 3 + context.measureText(time).width <= width) context.fillText(time, px + 3, 9);
  }
  const first = Math.max(0, Math.floor((pane.scrollTop - TOP) / laneHeight));
  const last = Math.min(lanes.length, Math.ceil((pane.scrollTop + height) / laneHeight));
  for (let i = first; i < last; i += 1) {
    const lane = lanes[i];
    const y = TOP + i * laneHeight - pane.scrollTop;
    if (y < TOP - laneHeight) continue;
    context.fillStyle = text;
    context.fillText(`${lane.rank} ${lane.host}`, 6, y + laneHeight / 2, LEFT - 10);
    const dense = new Dense(lane, width);
    dense.draw(context, y, bad);
    for (const slice of lane.slices) {
      if (dense.holds(slice)) continue;
      const end = endOf(slice, lane);
      if (end < view.from || slice.start > view.to) continue;
      const left = Math.max(LEFT, x(slice.start, width)), right = Math.min(width - 8, x(end, width));
      const wide = Math.max(1, right - left);
      context.fillStyle = COLORS[kindOf(slice) % COLORS.length];
      // An operation without a recorded end is translucent; such a one, and one that has failed, has an outline.
      const outlined = slice.length == null || slice.state === "failed";
      context.globalAlpha = slice.length == null ? 0.25 : 1;
      context.fillRect(left, y + 3, wide, laneHeight - 6);
      context.globalAlpha = 1;
      if (outlined) {
        context.strokeStyle = bad;
        context.lineWidth = slice.length == null ? 1.5 : 3;
        context.strokeRect(left + 0.5, y + 2.5, Math.max(1, wide - 1), laneHeight - 5);
      }
      const call = `${drawn.ops[slice.op]} #${slice.seq}`;
      const fate = slice.state === "failed" ? " failed" : slice.length != null ? "" : lane.end != null ? " not ended" : " pending";
      const long = fate === " pending" && slice.graph_id == null ? ` ${describeState(slice, lane)}` : fate;
      // In a narrow bar, how long an operation has been pending says more than its kind.
      const waited = long.replace(" pending for ", "");
      const short = waited === long ? [`${call}${fate}`] : [`#${slice.seq}, ${waited}`, waited];
      const names = [`${call} ${drawn.groups[slice.group]}${long}`, `${call}${long}`, ...short];
      const goesOn = end > view.to;
      const name = wide > 40 ? names.find((text) => context.measureText(text).width <= wide - (goesOn ? 21 : 8)) : undefined;
      context.fillStyle = slice.length == null ? text : INKS[kindOf(slice) % INKS.length];
      if (name) context.fillText(name, left + 4, y + laneHeight / 2 + 0.5);
      // Without a sign, a bar that the edge cuts would seem to end there.
      if (goesOn && wide > 24) context.fillText("→", right - 13, y + laneHeight / 2 + 0.5);
    }
  }
}

/** The time of day in UTC, as exact as ticks at this distance need it: `14:03:27`, `14:03:27.500`.
 * @param {number} us since the epoch @param {number} tick µs */
export function timeOfDay(us, tick) {
  const text = new Date(us / 1e3).toISOString().slice(11, tick < 1e6 ? 23 : 19);
  return tick < 1e3 ? text + String(us % 1000).padStart(3, "0") : text;
}

/** When an operation ended, µs from the start of the timeline: without an end, when the record of its process ends, or now.
 * @param {object} slice @param {object} lane */
const endOf = (slice, lane) => (slice.length == null ? Math.max(slice.start, lane.end ?? drawn.length) : slice.start + slice.length);

/** The operations by kind of group. One keeps its place, and so its color, as long as the page is open; those of the same
 * answer are in the order of their names. @type {string[]} */
const kinds = [];
/** The indices in `kinds` of those of the answer on display, ascending. @type {number[]} */
let present = [];
/** The index in `kinds`, by operation and group; filled when it is first needed. @type {number[]} */
let kindsKnown = [];
const byName = new Intl.Collator("en", { numeric: true }).compare;

/** Maximum number of kinds that are named below the timeline; the rest is counted. */
const MAX_NAMED = 2 * COLORS.length;

/** The index of an operation's kind: the name of the operation with the name of its group, less the number at the end of
 * the latter. @param {object} slice */
const kindOf = (slice) => (kindsKnown[slice.op * drawn.groups.length + slice.group] ??= kinds.indexOf(kindName(slice)));

/** The name of an operation's kind. @param {object} slice */
function kindName(slice) {
  const group = (drawn.groups[slice.group] ?? "").replace(/ of [\d,+-]+$/, "");
  return `${drawn.ops[slice.op]} on ${group.replace(/[\d_/-]+$/, "") || group}`;
}

/** Notes the kinds of the answer on display, and adds those that are new. */
function addKinds() {
  kindsKnown = [];
  const one = new Map();
  for (const { slices } of drawn.lanes) for (const slice of slices) one.set(slice.op * drawn.groups.length + slice.group, slice);
  const names = new Set([...one.values()].map(kindName));
  kinds.push(...[...names].filter((name) => !kinds.includes(name)).sort(byName));
  present = kinds.flatMap((name, index) => (names.has(name) ? [index] : []));
}

/** Names the colors below the timeline. */
function drawLegend() {
  const shown = present.slice(0, MAX_NAMED).map((index) => {
    const key = make("span", { class: "swatch" });
    key.style.background = COLORS[index % COLORS.length];
    return make("span", { class: "kind" }, key, kinds[index]);
  });
  const more = present.length - shown.length;
  byId("timeline-kinds").replaceChildren(...shown, ...(more > 0 ? [make("span", { class: "kind" }, `and ${more} more`)] : []), "outlined: failed; pale and outlined: not ended; →: goes on");
}

/** Operations of a lane that are narrower than this many pixels are drawn together: as bars whose height is the share of
 * each pixel's time that the rank spent in them. Drawn one by one, each would take a whole pixel, and all of them would
 * look like one long operation. */
const NARROW = 2;

/** The narrow operations of one lane, by pixel. */
class Dense {
  /** @param {object} lane @param {number} width */
  constructor(lane, width) {
    this.perPixel = (view.to - view.from) / (width - LEFT - 8);
    /** @type {Map<number, {share: number, kind: number, longest: number, failed: boolean}>} */
    this.columns = new Map();
    for (const slice of lane.slices) if (this.holds(slice) && slice.start <= view.to && slice.start + slice.length >= view.from) this.add(slice, width);
  }

  /** Whether an operation is narrow. @param {object} slice */
  holds(slice) { return slice.length != null && slice.length < NARROW * this.perPixel; }

  /** Adds an operation to the pixels that it covers. @param {object} slice @param {number} width */
  add(slice, width) {
    const left = x(slice.start, width), right = x(slice.start + slice.length, width);
    for (let px = Math.floor(left); px <= Math.floor(right); px += 1) {
      const covered = Math.min(right, px + 1) - Math.max(left, px);
      const column = this.columns.get(px) ?? { share: 0, kind: 0, longest: -1, failed: false };
      column.share += covered;
      column.failed ||= slice.state === "failed";
      if (slice.length > column.longest) { column.longest = slice.length; column.kind = kindOf(slice); }
      this.columns.set(px, column);
    }
  }

  /** Draws the bars. @param {CanvasRenderingContext2D} context @param {number} y the top of the lane
   * @param {string} bad the color of what has failed */
  draw(context, y, bad) {
    for (const [px, { share, kind, failed }] of this.columns) {
      if (px < LEFT) continue;
      // At least two pixels, so that no operation disappears.
      const high = Math.max(2, Math.min(1, share) * (laneHeight - 6));
      context.fillStyle = failed ? bad : COLORS[kind % COLORS.length];
      context.fillRect(px, y + laneHeight - 3 - high, 1, high);
    }
  }
}

/** Describes several operations under the pointer together. @param {object} lane @param {object[]} slices */
function describeTogether(lane, slices) {
  const from = Math.min(...slices.map((slice) => slice.start)), to = Math.max(...slices.map((slice) => slice.start + slice.length));
  const inside = slices.reduce((sum, slice) => sum + slice.length, 0) / Math.max(1, to - from);
  const names = [...new Set(slices.map((slice) => drawn.ops[slice.op]))].slice(0, 3).join(", ");
  return `rank ${lane.rank}: ${slices.length} operations (${names}) within ${age((to - from) / 1e3)}, ${Math.round(Math.min(1, inside) * 100)} % of it inside them; zoom in to see each`;
}

/** Describes the state of an operation. @param {object} slice @param {object} lane */
function describeState(slice, lane) {
  // An operation of a CUDA graph runs when the graph is launched; launches are not recorded.
  if (slice.graph_id != null) return `in graph ${slice.graph_id}`;
  if (slice.length != null) return `${slice.state} after ${age(slice.length / 1e3)}`;
  if (slice.state === "failed") return "failed; when is not recorded";
  return lane.end != null ? "not ended: its process is gone" : `pending for ${age((drawn.length - slice.start) / 1e3)}`;
}

/** Describes the operation under the pointer. @param {PointerEvent} event */
function showTip(event) {
  if (!drawn) return;
  const box = canvas().getBoundingClientRect();
  const lane = drawn.lanes[Math.floor((event.clientY - box.top + byId("timeline-pane").scrollTop - TOP) / laneHeight)];
  const us = view.from + ((event.clientX - box.left - LEFT) / (box.width - LEFT - 8)) * (view.to - view.from);
  const perPixel = (view.to - view.from) / (box.width - LEFT - 8);
  const end = (slice) => endOf(slice, lane);
  const near = lane?.slices.filter((slice) => slice.start <= us + NARROW * perPixel && us - NARROW * perPixel <= end(slice)) ?? [];
  const narrow = near.filter((slice) => slice.length != null && slice.length < NARROW * perPixel);
  const slice = near.findLast((slice) => slice.start <= us && us <= end(slice)) ?? narrow.at(-1);
  const tip = byId("timeline-tip");
  tip.hidden = !slice;
  if (!slice) return;
  tip.textContent = narrow.length > 1 && narrow.length === near.length ? describeTogether(lane, narrow) : `rank ${lane.rank}: ${drawn.ops[slice.op]} #${slice.seq} on ${drawn.groups[slice.group]}, ${describeState(slice, lane)}`;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

/** The time under the pointer, µs. @param {PointerEvent} event */
function timeAt(event) {
  const box = canvas().getBoundingClientRect();
  const share = Math.max(0, Math.min(1, (event.clientX - box.left - LEFT) / (box.width - LEFT - 8)));
  return view.from + share * (view.to - view.from);
}

/** Marks the range over which the pointer is dragged, and zooms to it when the pointer goes up. */
function prepareDrag(pane) {
  let began = null;
  const range = byId("timeline-range");
  pane.addEventListener("pointerdown", (event) => {
    if (!drawn || event.button !== 0 || event.offsetX > pane.clientWidth) return;
    began = { us: timeAt(event), x: event.clientX };
  });
  pane.addEventListener("pointermove", (event) => {
    if (!began) return;
    const box = pane.getBoundingClientRect();
    const [from, to] = [began.x, event.clientX].sort((a, b) => a - b);
    range.hidden = to - from < 4;
    range.style.left = `${from - box.left}px`;
    range.style.width = `${to - from}px`;
  });
  addEventListener("pointerup", (event) => {
    if (!began) return;
    const [from, to] = [began.us, timeAt(event)].sort((a, b) => a - b);
    const far = Math.abs(event.clientX - began.x) >= 4;
    began = null;
    range.hidden = true;
    if (!far || to - from < 1) return;
    userChoseView = true;
    view = { from, to };
    paint();
  });
  pane.addEventListener("dblclick", showAll);
}

/** Shows the whole timeline, and lets new answers replace it again. */
function showAll() {
  userChoseView = false;
  view = firstRange(drawn);
  paint();
}

/** Multiplies the length of the range. @param {number} factor @param {number} [center] the point that does not move, 0..1 */
function zoom(factor, center = 0.5) {
  const span = view.to - view.from;
  const next = Math.min(drawn?.length ?? span, Math.max(10, span * factor));
  const from = Math.max(0, view.from + (span - next) * center);
  view = { from, to: from + next };
  userChoseView = next < (drawn?.length ?? next);
  paint();
}

/** Moves the range by a share of its length; earlier if negative. @param {number} share */
function pan(share) {
  const span = view.to - view.from;
  const from = Math.max(0, Math.min((drawn?.length ?? span) - span, view.from + span * share));
  view = { from, to: from + span };
  userChoseView = true;
  paint();
}

/** Sets up the handlers of the timeline; called once. */
export function prepareTimeline() {
  const pane = byId("timeline-pane");
  let queued = false;
  const paintSoon = () => { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; paint(); }); } };
  pane.addEventListener("scroll", paintSoon, { passive: true });
  new ResizeObserver(paintSoon).observe(pane);
  new IntersectionObserver((seen) => { if (seen.some((entry) => entry.isIntersecting)) refresh(); }).observe(byId("timeline"));
  pane.addEventListener("pointermove", showTip);
  pane.addEventListener("pointerleave", () => { byId("timeline-tip").hidden = true; });
  prepareDrag(pane);
  pane.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = canvas().getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left - LEFT) / (box.width - LEFT));
  }, { passive: false });
  pane.addEventListener("keydown", (event) => {
    const nearer = () => zoom(0.5), farther = () => zoom(2), earlier = () => pan(-0.2), later = () => pan(0.2);
    const act = { "+": nearer, w: nearer, "-": farther, s: farther, ArrowLeft: earlier, a: earlier, ArrowRight: later, d: later, 0: showAll }[event.key];
    if (act) { act(); event.preventDefault(); event.stopPropagation(); }
  });
  byId("timeline-seconds").addEventListener("change", (event) => refresh({ seconds: Number(event.target.value) }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintSoon);
}

/** Opens Perfetto's page, and sends it the trace once it answers. Unlike the download, this needs access to the internet.
 * @param {?string} upload */
export async function openInPerfetto(upload) {
  const origin = "https://ui.perfetto.dev";
  const page = open(origin);
  if (!page) { byId("timeline-note").textContent = "The browser blocked the window: download the trace instead."; return; }
  const answer = await fetch(address("perfetto", { upload }));
  const buffer = await answer.arrayBuffer();
  const ping = setInterval(() => page.postMessage("PING", origin), 100);
  const send = (event) => {
    if (event.origin !== origin || event.data !== "PONG") return;
    clearInterval(ping);
    removeEventListener("message", send);
    page.postMessage({ perfetto: { buffer, title: "rcomm", fileName: "rcomm-trace.json" } }, origin);
  };
  addEventListener("message", send);
  setTimeout(() => clearInterval(ping), 30e3);
}

