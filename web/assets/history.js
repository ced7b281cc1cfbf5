// The history: a plot over time, and a slider to go back.

import uPlot from "./vendor/uPlot.esm.min.js";
import { age, ask, byId, clock, color } from "./format.js";

/** Maximum number of points in the browser; the server has its own limit. */
const MAX_POINTS = 7200;
const HEIGHT = 150;
/** Width of the labels of the axis of ages, up to `16 h 40 min`. It is fixed: if it grew with the labels, the plot would
    move, and uPlot would cut off labels that change while it determines the width. */
const AGES_WIDTH = 84;

/** The distances between the labels of the axis of operations: there is no half of one. */
const COUNTS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));

/** @type {object[]} */
let points = [];
/** @type {?uPlot} */
let plot = null;
/** Shows the snapshot with this number; for null, the live one. */
let go = () => {};
/** The number of the displayed snapshot; null for the newest one. @type {?number} */
let shown = null;

/** Makes the plot anew, in the colors of the theme. */
function build() {
  plot?.destroy();
  const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui" };
  plot = new uPlot({
    width: Math.max(200, byId("history-plot").clientWidth), height: HEIGHT, legend: { show: false },
    tzDate: (s) => uPlot.tzDate(new Date(s * 1e3), "Etc/UTC"),
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: true }, s: { range: (_, __, most) => [0, Math.max(1, most)] }, n: { range: (_, __, most) => [0, Math.max(1, most)] } },
    axes: [{ ...axis, size: 26, space: 90, incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200], values: (_, ticks) => ticks.map((s) => clock(s * 1e9)) }, { ...axis, scale: "s", size: AGES_WIDTH, values: (_, ticks) => ticks.map((v) => (v === 0 ? "0" : age(v * 1e3))) },
      { ...axis, scale: "n", side: 1, size: 40, incrs: COUNTS, grid: { show: false } }],
    series: [{}, { scale: "s", stroke: color("--bad"), width: 2, label: "oldest pending" },
      { scale: "n", stroke: color("--busy"), width: 1, dash: [4, 3], label: "in flight" }],
    hooks: { draw: [mark] },
  }, columns(), byId("history-plot"));
  plot.over.addEventListener("click", () => {
    const index = plot.cursor.idx;
    if (index != null) go(points[index].number);
  });
}

/** Marks the displayed snapshot with a line. @param {uPlot} chart */
function mark(chart) {
  const point = points.find((p) => p.number === shown);
  if (!point) return;
  const x = chart.valToPos(point.at_ns / 1e9, "x", true);
  chart.ctx.fillStyle = color("--text");
  chart.ctx.fillRect(x - 1, chart.bbox.top, 2, chart.bbox.height);
}

const columns = () => [points.map((p) => p.at_ns / 1e9), points.map((p) => p.oldest_ms / 1e3), points.map((p) => p.in_flight)];

function paint() {
  plot?.setData(columns());
  const slider = byId("history-slider");
  slider.max = String(Math.max(0, points.length - 1));
  const index = shown == null ? points.length - 1 : points.findIndex((p) => p.number === shown);
  slider.value = String(Math.max(0, index));
  const point = points[Math.max(0, index)];
  slider.setAttribute("aria-valuetext", point ? `${point.verdict}, ${clock(point.at_ns)} UTC` : "no snapshot");
}

/** Sets up the plot and the slider, and loads the points that the server keeps.
 * @param {(number: ?number) => void} goTo shows the snapshot with this number; for null, the live one */
export async function prepareHistory(goTo) {
  go = goTo;
  build();
  byId("history-slider").addEventListener("input", (event) => {
    const point = points[Number(event.target.value)];
    if (point) go(point === points.at(-1) ? null : point.number);
  });
  new ResizeObserver(() => plot?.setSize({ width: Math.max(200, byId("history-plot").clientWidth), height: HEIGHT })).observe(byId("history-plot"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  const past = await ask("history");
  const newer = points.filter((p) => p.number > (past.points.at(-1)?.number ?? 0));
  points = [...past.points, ...newer];
  paint();
}

/** Adds a new snapshot. @param {object} status @param {object} report */
export function remember(status, report) {
  if (points.at(-1)?.number >= status.number) return;
  const pending = report.in_flight.filter((i) => i.state !== "failed");
  points.push({
    number: status.number, at_ns: status.judged_at_ns, verdict: report.verdict, in_flight: pending.length,
    oldest_ms: Math.max(0, ...pending.map((i) => i.age_ms ?? 0)),
  });
  if (points.length > MAX_POINTS) points.shift();
  paint();
}

/** Marks the snapshot with this number; for null, the newest one. @param {?number} number */
export function showing(number) { shown = number; paint(); }

/** Goes `by` snapshots forward or, if negative, back. @param {number} by */
export function step(by) {
  const here = shown == null ? points.length - 1 : points.findIndex((p) => p.number === shown);
  const there = Math.max(0, Math.min(points.length - 1, here + by));
  if (points[there]) go(there === points.length - 1 ? null : points[there].number);
}

export const repaintHistory = build;
