// Drives the page in a headless Chromium. Arguments: folder of playwright-core, Chromium, URL of a job
// that gets stuck, rank at fault, folder of dumps, rank at fault in them, folder for pictures.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const [modules, browserPath, url, culprit, dumps, dumpCulprit, pictures] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "x.js"))("playwright-core");
const browser = await chromium.launch({
  executablePath: browserPath,
  args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, colorScheme: "light" });
const page = await context.newPage();
page.setDefaultTimeout(120000);
const complaints = [];
// The browser logs every failed request. The invalid filter is sent again for each snapshot.
let refused = 0;
// How far elements move without the user's input, as browsers measure it.
const watchShifts = () => {
  window.shifted = 0;
  new PerformanceObserver((list) => {
    for (const shift of list.getEntries()) if (!shift.hadRecentInput) window.shifted += shift.value;
  }).observe({ type: "layout-shift", buffered: true });
};
await page.addInitScript(watchShifts);
// What is written on canvases: in the history and the timeline.
const watchCanvases = () => {
  window.written = new Set();
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function write(text, ...rest) { window.written.add(String(text)); fillText.call(this, text, ...rest); };
};
await page.addInitScript(watchCanvases);
/** Whether the field of the filter is wide enough for its hint. */
const hintFits = () => {
  const field = document.getElementById("filter"), style = getComputedStyle(field);
  const context = document.createElement("canvas").getContext("2d");
  context.font = style.font;
  return context.measureText(field.placeholder).width + parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) <= field.clientWidth;
};
page.on("console", (message) => {
  if (!["error", "warning"].includes(message.type())) return;
  if (/400 \(Bad Request\)/.test(message.text()) && message.location().url.includes("filter=hots")) refused += 1;
  else complaints.push(message.text());
});
page.on("pageerror", (error) => complaints.push(error.stack ?? error.message));
page.on("request", (request) => { if (!request.url().startsWith(new URL(url).origin) && !request.url().startsWith("data:")) complaints.push(`requested another origin: ${request.url()}`); });
const printLine = (what) => process.stdout.write(`${what}\n`);
const number = () => page.evaluate(() => Number(document.body.dataset.number));
const text = (selector) => page.locator(selector).first().textContent();

// Live: snapshots arrive on their own, and the hang is reported with its rank.
await page.goto(url);
await page.waitForFunction(() => document.body.dataset.number);
assert.equal(new URL(page.url()).search, "", "the token is still in the address");
const first = await number();
await page.waitForFunction((then) => Number(document.body.dataset.number) > then, first);
printLine("live update: ok");
await page.waitForFunction(() => document.querySelector("#verdict .stuck"));
assert.match(await text("#verdict"), new RegExp(`rank ${culprit} never issued`));
assert.equal(await text("#graph .box.root .head"), `! rank ${culprit}`);
assert.match(await text("#graph .box.root title"), /^root cause: rank \d+: at fault; last: /);
assert.equal(await page.locator("#ranks .root").count(), 1);
assert.match(await text("#ranks-legend"), new RegExp(`^! at fault: rank ${culprit}   \\. waits: \\d+ ranks?(   |$)`));
assert.ok(await page.evaluate(hintFits), "the hint of the filter is cut");
assert.match(await text("#stragglers + p"), /^Lag: .* Share: /);
assert.match(await text("#size"), /^64 ranks \/ 8 hosts  step \d+$/);
assert.match(await page.locator("#ranks .root").getAttribute("title"), new RegExp(`^rank ${culprit}:`));
assert.ok(await page.locator("#matrix .never_issued").count() >= 1);
assert.ok(await page.locator("#flight tbody tr").count() >= 1);
assert.ok(await page.locator("#history-plot canvas").count() === 1);
printLine(`hang shown with rank ${culprit}: ok`);
const shifted = await page.evaluate(() => window.shifted);
assert.ok(shifted < 0.1, `the page moved by ${shifted} while it loaded and a job got stuck`);
printLine("layout shift: ok");
await page.screenshot({ path: join(pictures, "live.png") });
// The command to look further at the rank at fault, with a button that copies it.
await context.grantPermissions(["clipboard-read", "clipboard-write"]);
assert.match(await text("#findings .look"), new RegExp(`^Look at rank ${culprit}, on n\\d+: (gdb -p|py-spy dump --pid) `));
await page.locator("#findings .look button").click();
await page.waitForFunction(() => document.getElementById("copied").textContent === "copied");
assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^(gdb -p|py-spy dump --pid) \d+/);
// The section under the pointer would not be drawn anew.
await page.mouse.move(0, 0);
await page.waitForFunction(() => document.getElementById("copied").textContent === "");
printLine("look: ok");

// The timeline is drawn: its pixels differ.
await page.locator("#timeline").scrollIntoViewIfNeeded();
await page.waitForFunction(() => {
  const canvas = document.getElementById("timeline-canvas");
  if (!canvas.width) return false;
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  return seen.size > 6;
});
// Each color is named.
assert.match(await text("#timeline-kinds .kind"), /^\S+ on \S+$/);
await page.screenshot({ path: join(pictures, "timeline.png") });
printLine("timeline: ok");

// The details of a rank, and the filter from there; then an invalid filter.
await page.evaluate(() => scrollTo(0, 0));
await page.locator("#ranks .root").click();
assert.match(await text("#rank"), /last call/);
await page.locator("#rank-filter").click();
await page.mouse.move(0, 0);
// Both in one query: a snapshot newer than the filter's answer shows all ranks until the next answer.
await page.waitForFunction(() => {
  const all = document.querySelectorAll("#ranks .cells button").length;
  return all > 1 && document.querySelectorAll("#ranks .dim").length === all - 1;
});
await page.locator("#filter").fill("hots:n07");
await page.waitForFunction(() => document.getElementById("filter-error").textContent.includes("unknown key"));
await page.keyboard.press("Escape");
await page.keyboard.press("Escape");
await page.waitForFunction(() => document.querySelectorAll("#ranks .dim").length === 0);
printLine("filter: ok");

// Keys: help, problems only, pause, step back in history, and return to live.
await page.keyboard.press("?");
assert.match(await text("#help"), /rank:/);
await page.keyboard.press("Escape");
await page.keyboard.press("z");
assert.equal(await page.locator("#problems-only").getAttribute("aria-pressed"), "true");
await page.keyboard.press("z");
await page.locator("#history-slider").evaluate((slider) => { slider.value = "0"; slider.dispatchEvent(new Event("input")); });
await page.waitForFunction(() => document.getElementById("age").textContent.startsWith("history"));
await page.waitForFunction(() => document.querySelector("#verdict .running, #verdict .healthy"));
const past = await number();
await page.keyboard.press(".");
await page.waitForFunction((then) => Number(document.body.dataset.number) > then, past);
assert.match(await text("#age"), /^history: \d\d:\d\d:\d\d UTC, /);
await page.screenshot({ path: join(pictures, "past.png") });
await page.keyboard.press("L");
await page.waitForFunction(() => document.querySelector("#verdict .stuck"));
printLine("scrub: ok");

// Dark theme, by the system's setting and by the key.
await page.emulateMedia({ colorScheme: "dark" });
const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
const dark = await background();
assert.ok(Math.max(...dark.match(/\d+/g).map(Number)) < 60, dark);
await page.screenshot({ path: join(pictures, "dark.png") });
await page.keyboard.press("t");
assert.notEqual(await background(), dark);
await page.keyboard.press("t");
assert.equal(await background(), dark);
await page.emulateMedia({ colorScheme: "light" });
await page.keyboard.press("t");
printLine("dark and light: ok");

// In a window 80 % narrower, only scrollable parts are wider than the page.
await page.setViewportSize({ width: 256, height: 700 });
await page.waitForTimeout(300);
const width = await page.evaluate(() => document.documentElement.scrollWidth);
assert.ok(width <= 260, `the page is ${width} wide in a window of 256`);
await page.setViewportSize({ width: 390, height: 844 });
await page.screenshot({ path: join(pictures, "phone.png") });
await page.setViewportSize({ width: 1280, height: 860 });
printLine("narrow window: ok");

// Dropping a folder of dumps leads to their report, at an address that stays valid.
const files = readdirSync(dumps).map((name) => [name, readFileSync(join(dumps, name)).toString("base64")]);
await page.evaluate((files) => {
  const transfer = new DataTransfer();
  for (const [name, content] of files) {
    const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
    transfer.items.add(new File([bytes], name));
  }
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}, files);
await page.waitForURL(/\/reports\/[0-9a-f]{32}$/);
await page.waitForFunction(() => document.body.dataset.number);
assert.match(await text("#verdict"), new RegExp(`rank ${dumpCulprit} never issued`));
await page.reload();
await page.waitForFunction(() => document.body.dataset.number);
assert.match(await text("#age"), /report on dumps/);
assert.equal(await page.locator("#findings .look").count(), 0, "a command for the process of a dump");
await page.screenshot({ path: join(pictures, "dumps.png") });
printLine("dropped dumps: ok");

// What a job of this test does not have, drawn from made-up reports: after the last picture and all checks of this
// page, since these rows replace its own.
// The names of groups that share a label have the ranks as well.
const texts = await page.evaluate(async () => {
  const { boxes } = await import("/assets/graph.js");
  const [one, other] = [[0, 1], [2, 3]].map((ranks) => ({ name: "tp", desc: "tp", ranks }));
  const waits = [{ rank: 0, on: [1], op: "all_reduce", seq: 6, seq_kind: "collective_seq_id", group: one }];
  return boxes({ groups: [{ group: one }, { group: other }], findings: [], ranks: [], waits }).map((box) => box.text);
});
assert.ok(texts.includes("tp of 0,1"), `${texts}`);
// Of more groups than a table has rows, those in trouble are shown.
const firstGroup = await page.evaluate(async () => {
  const { drawGroups } = await import("/assets/tables.js");
  const groups = Array.from({ length: 300 }, (_, index) => ({ group: { name: `pair_${index}`, desc: "", ranks: [index, index + 1] } }));
  const pending = { ...groups[299], overdue: true };
  drawGroups({ groups, in_flight: [pending], findings: [] }, () => true, false, () => {});
  return document.querySelector("#groups tbody tr").textContent;
});
assert.match(firstGroup, /^pair_299/);
// Of two ranks that are waited for, only the one that a finding names is at fault.
const heads = await page.evaluate(async () => {
  const { boxes } = await import("/assets/graph.js");
  const group = { name: "tp", desc: "tp", ranks: [0, 1, 2] };
  const waits = [{ rank: 0, on: [1, 2], op: "all_reduce", seq: 6, seq_kind: "collective_seq_id", group }];
  const ranks = [{ rank: 1, failure: "rank 2 is gone", pending: 0 }, { rank: 2, failure: null, pending: 1 }];
  const findings = [{ severity: "error", caused_by: null, culprit_ranks: [2] }];
  return boxes({ groups: [{ group }], findings, ranks, waits }).map((box) => `${box.kind} ${box.ranks}: ${box.title}`);
});
assert.deepEqual(heads, ["root 2: at fault", "waits 1: failed", "waits 0: all_reduce #6"]);
// A rank at fault that waits in the same operation as others has a box of its own.
const apart = await page.evaluate(async () => {
  const { boxes } = await import("/assets/graph.js");
  const group = { name: "pp", desc: "pp", ranks: [0, 1, 2, 3] };
  const barrier = (rank) => ({ rank, on: [3], op: "barrier", seq: 51, seq_kind: "collective_seq_id", group });
  const waits = [barrier(0), barrier(1), barrier(2), { rank: 3, on: [2], op: "recv", seq: 51, seq_kind: "p2p_seq_id", group }];
  const findings = [{ severity: "error", caused_by: null, culprit_ranks: [2] }];
  return boxes({ groups: [{ group }], findings, ranks: [], waits }).map((box) => `${box.kind} ${box.ranks}: ${box.title}`);
});
assert.deepEqual(apart, ["waits 0,1: barrier #51", "root 2: barrier #51", "waits 3: recv #51"]);
// A message is complete with two ranks, and operations that failed with the same error share it.
const rows = await page.evaluate(async () => {
  const { drawInFlight } = await import("/assets/tables.js");
  const row = (name, ranks) => ({ group: { name, desc: "pp", ranks }, op: "all_reduce", seq: 6, seq_kind: "collective_seq_id", state: "failed", joined: [ranks[0]], missing: [ranks[1]], unknown: [], bytes: 8, age_ms: 1, error: "rank 9 is gone" });
  const message = { ...row("pp_3", [4, 5, 6, 7]), op: "recv", seq_kind: "p2p_seq_id", state: "half_open", error: null, overdue: true };
  drawInFlight({ groups: [], in_flight: [row("pp_1", [0, 1]), row("pp_2", [2, 3]), message] }, () => true, false);
  return [...document.querySelectorAll("#flight tr")].map((tr) => [...tr.children].map((cell) => cell.textContent).slice(5).join(" "));
});
assert.deepEqual(rows, ["joined state missing or error", "1/2 failed rank 9 is gone", "1/2 half open rank 5"]);
const title = await page.evaluate(async () => {
  const { drawInFlight } = await import("/assets/tables.js");
  const failed = { group: { name: "tp", desc: "tp", ranks: [0, 1] }, op: "all_reduce", seq: 6, state: "failed", joined: [0], missing: [1], unknown: [], bytes: 8, age_ms: 1 };
  drawInFlight({ groups: [], in_flight: [failed] }, () => true, false);
  return document.querySelector("#flight-title").textContent;
});
assert.match(title, /^In flight or failed/);
// A group that a finding names comes before others in trouble, and only the ages of overdue operations grow.
const cells = await page.evaluate(async () => {
  const { drawGroups, drawInFlight } = await import("/assets/tables.js");
  const group = (name) => ({ name, desc: "", ranks: [0, 1] });
  const row = (name, overdue) => ({ group: group(name), op: "all_reduce", seq: 6, seq_kind: "collective_seq_id", state: "waiting", joined: [0], missing: [1], unknown: [], bytes: 262144, age_ms: 104, overdue });
  const report = { groups: ["a", "b"].map((name) => ({ group: group(name), oldest_ms: 104 })), in_flight: [row("a", false), { ...row("b", true), least_bytes: 131072 }],
    findings: [{ severity: "error", caused_by: null, group: group("b"), culprit_ranks: [1] }] };
  drawGroups(report, () => true, false, () => {});
  drawInFlight(report, () => true, false);
  const of = (selector, at) => [...document.querySelectorAll(selector)].map(at);
  return { first: document.querySelector("#groups tbody td").textContent, missing: of("#flight tbody tr", (tr) => tr.lastChild.textContent), sizes: of("#flight tbody tr", (tr) => tr.cells[4].textContent),
    ages: [of("#groups [data-age]", (it) => it.dataset.age), of("#flight [data-age]", (it) => it.dataset.age)] };
});
assert.deepEqual(cells, { first: "! b", missing: ["rank 1 not yet", "rank 1"], sizes: ["256 KiB", "128 KiB or 256 KiB"], ages: [["104", ""], ["", "104"]] });
// Whoever is missing of young operations that are listed together may be on the way, too.
const folded = await page.evaluate(async () => {
  const { drawInFlight } = await import("/assets/tables.js");
  const row = (ranks) => ({ group: { name: `tp_${ranks[0]}`, desc: "tp", ranks }, op: "all_reduce", seq: 6, seq_kind: "collective_seq_id", state: "waiting", joined: [ranks[0]], missing: [ranks[1]], unknown: [], bytes: 8, age_ms: 1, overdue: false });
  drawInFlight({ groups: [], in_flight: [row([0, 1]), row([2, 3])] }, () => true, false);
  return document.querySelector("#flight tbody td:last-child").textContent;
});
assert.equal(folded, "1 rank of each not yet");
// Of a source that has just answered, the page says no more than it knows.
const answered = await page.evaluate(async () => {
  const { drawSources } = await import("/assets/tables.js");
  drawSources({ sources: [200, 4000].map((ms) => ({ name: "rings", answered: 1, known: 1, silent_for_ms: ms })), silent_ranks: [] });
  return [...document.querySelectorAll("#sources tbody tr")].map((row) => row.cells[2].textContent);
});
assert.deepEqual(answered, ["less than 1 s before the update", "4.0 s before the update"]);
// The axis of operations counts whole ones, also if there is at most one.
const counts = await page.evaluate(async () => {
  const { prepareHistory, remember } = await import("/assets/history.js");
  const real = window.fetch;
  window.fetch = async () => new Response(JSON.stringify({ points: [] }));
  try { await prepareHistory(() => {}); } finally { window.fetch = real; }
  window.written.clear();
  for (const number of [1, 2]) remember({ number, judged_at_ns: 1.7e18 + number * 1e9 }, { verdict: "healthy", in_flight: [] });
  await new Promise((resolve) => { setTimeout(resolve, 200); });
  return [...window.written].filter((text) => /^[\d.]+$/.test(text));
});
assert.deepEqual(counts.sort(), ["0", "1"]);
// The age of a group is that of its oldest collective, which an overdue message does not let grow.
const beside = await page.evaluate(async () => {
  const { drawGroups } = await import("/assets/tables.js");
  const group = { name: "pp", desc: "pp", ranks: [0, 1] };
  const row = { group, state: "waiting", overdue: false, seq_kind: "collective_seq_id" };
  const message = { ...row, state: "half_open", overdue: true, seq_kind: "p2p_seq_id" };
  drawGroups({ groups: [{ group, in_flight: 1, oldest_ms: 104 }], in_flight: [message, row], findings: [] }, () => true, false, () => {});
  return [document.querySelector("#groups [data-age]").dataset.age, document.querySelector("#groups tbody tr").cells[5].textContent];
});
// The message is counted beside the collective, as in the list of operations.
assert.deepEqual(beside, ["", "2"]);
// Without a finding, the first notes are in its place.
const notes = await page.evaluate(async () => {
  const { drawFindings } = await import("/assets/verdict.js");
  const problems = [1, 2, 3].map((number) => ({ code: "N306", path: "", sentence: `note ${number}` }));
  drawFindings({ report: { findings: [], problems, groups: [] }, status: {} }, () => true, () => {});
  return [...document.querySelectorAll("#findings :is(a, article p:last-child)")].map((it) => it.textContent);
});
assert.deepEqual(notes, ["All 3 notes on the job and its records", "note 1", "note 2"]);
// The share of a rank has the color of trouble only if a finding calls the rank late.
const accused = await page.evaluate(async () => {
  const { drawStragglers } = await import("/assets/tables.js");
  const ranks = [0, 1].map((rank) => ({ rank, host: "n0", lag_p50_ms: 1, lag_share: 0.2 }));
  drawStragglers({ ranks, findings: [{ code: "W220", severity: "warning", culprit_ranks: [1] }] }, () => true);
  return [...document.querySelectorAll("#stragglers meter")].map((meter) => meter.hasAttribute("optimum"));
});
assert.deepEqual(accused, [false, true]);
const explained = await page.evaluate(async () => {
  const { drawStragglers } = await import("/assets/tables.js");
  const seen = () => getComputedStyle(document.querySelector("#stragglers + p")).visibility;
  const withTable = seen();
  drawStragglers({ ranks: [], findings: [] }, () => true);
  return [withTable, seen()];
});
assert.deepEqual(explained, ["visible", "hidden"]);
// A rank that has not issued a collective yet is not accused before that is overdue; columns that are left out are
// counted.
const classes = await page.evaluate(async () => {
  const { drawMatrix } = await import("/assets/matrix.js");
  const group = { name: "tp", desc: "tp", ranks: [0, 1] };
  const focus = { group, seqs: [6], ops: ["all_reduce"], rows: [{ ranks: [0], cells: ["started"] }, { ranks: [1], cells: ["never_issued"] }] };
  return [false, true].map((overdue) => {
    drawMatrix(focus, () => "tp", { findings: [], groups: [{ group, last_seq: 8 }], in_flight: [{ group, seq: 6, seq_kind: "collective_seq_id", state: "waiting", overdue }] });
    return [...document.querySelectorAll("#matrix .cell")].map((cell) => cell.className).join() + (/2 later not shown/.test(document.querySelector("#matrix").textContent) ? "" : "?");
  });
});
assert.deepEqual(classes, ["cell started,cell not_yet", "cell started,cell never_issued"]);
// A rank at fault is marked, and a finding on a message says that the matrix does not show it.
const marked = await page.evaluate(async () => {
  const { drawMatrix } = await import("/assets/matrix.js");
  const group = { name: "pp", desc: "pp", ranks: [0, 1] };
  const focus = { group, seqs: [6], ops: ["barrier"], rows: [{ ranks: [0], cells: ["started"] }, { ranks: [1], cells: ["never_issued"] }] };
  const finding = { severity: "error", caused_by: null, code: "E120", culprit_ranks: [0], group, op: "recv", seq: 6, seq_kind: "p2p_seq_id" };
  drawMatrix(focus, () => "pp", { findings: [finding], groups: [{ group, last_seq: 6 }], in_flight: [] });
  const heads = [...document.querySelectorAll("#matrix tbody th")].map((head) => head.textContent);
  return [...heads, ...[...document.querySelectorAll("#matrix > p")].map((line) => line.textContent.split(/ {3}|:/).at(-2))];
});
assert.deepEqual(marked, ["! 0", "1", "! at fault", "E120 is about recv #6, a message"]);
// The newest columns of a wide matrix are visible or, if the oldest unfinished collective is older, its column.
const visible = await page.evaluate(async () => {
  const { drawMatrix } = await import("/assets/matrix.js");
  const group = { name: "tp", desc: "tp", ranks: [0, 1] };
  const seqs = Array.from({ length: 200 }, (_, index) => 1000 + index);
  const focus = { group, seqs, ops: seqs.map(() => "all_reduce"), rows: [{ ranks: [0, 1], cells: seqs.map(() => "started") }] };
  return [1100, 1199].map((seq) => {
    drawMatrix(focus, () => "tp", { findings: [], groups: [{ group, last_seq: 1199 }], in_flight: [{ group, seq, seq_kind: "collective_seq_id", state: "running", overdue: true }] });
    const pane = document.querySelector("#matrix .scroll").getBoundingClientRect();
    const heads = [...document.querySelectorAll("#matrix thead th")].map((head) => head.getBoundingClientRect());
    return [1100, 1199].map((at) => heads[at - 999].left >= heads[0].right - 1 && heads[at - 999].right <= pane.right + 1);
  });
});
assert.deepEqual(visible, [[true, false], [false, true]]);
// Ranks that failed because of another are drawn, also if none waits any more.
const fallen = await page.evaluate(async () => {
  const { boxes } = await import("/assets/graph.js");
  // Ranks 2 and 3 have failed, too, but in other operations.
  const group = { name: "tp", desc: "tp", ranks: [0, 1, 2, 3] };
  const ranks = group.ranks.map((rank) => ({ rank, failure: "mismatch", pending: 0 }));
  const findings = [{ severity: "error", caused_by: null, culprit_ranks: [1], group, op: "all_reduce", seq: 6, seq_kind: "collective_seq_id" }];
  const failed = { group, seq: 6, seq_kind: "collective_seq_id", state: "failed", joined: [0, 1] };
  const elsewhere = [{ ...failed, seq: 5, joined: [2] }, { ...failed, group: { ...group, name: "dp" }, joined: [3] }];
  return boxes({ groups: [{ group }], findings, ranks, waits: [], in_flight: [failed, ...elsewhere] }).map((box) => `${box.kind} ${box.ranks} ${box.failed ?? false}: ${box.title}`);
});
assert.deepEqual(fallen, ["root 1 false: at fault", "waits 0 true: all_reduce #6 failed"]);
// A kind of operation keeps its color when others come and go, and an operation that failed has the color of failures.
await page.locator("#timeline").scrollIntoViewIfNeeded();
await page.mouse.move(0, 0);
const { failed, legends } = await page.evaluate(async () => {
  const { refresh } = await import("/assets/timeline.js");
  const { color } = await import("/assets/format.js");
  const real = window.fetch;
  const slice = (group, state) => ({ op: 0, group, seq: 6, start: 100, length: 800, state });
  const show = async (groups, state) => {
    const lanes = [{ rank: 0, host: "n0", end: null, slices: groups.map((_, index) => slice(index, state)) }];
    const answer = { origin_ns: "0", length: 1000, groups, ops: ["all_reduce"], lanes, omitted: 0 };
    let asked = 0;
    window.fetch = async (url) => {
      if (!String(url).includes("timeline")) return real(url);
      asked += 1;
      return new Response(JSON.stringify(answer));
    };
    // The page's own request, made when the timeline came into view, may be on its way: then this one is put off.
    for (const end = Date.now() + 60000; Date.now() < end;) {
      const before = asked;
      await refresh({ seconds: 10 });
      if (asked > before) break;
      await new Promise((resolve) => { setTimeout(resolve, 50); });
    }
    const kinds = [...document.querySelectorAll("#timeline-kinds .kind")];
    const swatch = kinds.find((kind) => kind.textContent.endsWith("on made_up"))?.querySelector(".swatch");
    return { color: swatch?.style.background, named: kinds.length };
  };
  const looksFailed = () => {
    const canvas = document.getElementById("timeline-canvas");
    // A browser may warn of more than one look at the pixels of the page's own canvas.
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const [r, g, b] = color("--bad").match(/\d+/g).map(Number);
    let failed = 0;
    for (let i = 0; i < data.length; i += 4) failed += data[i] === r && data[i + 1] === g && data[i + 2] === b;
    return failed > 100;
  };
  const many = (prefix) => [..."abcdefghij"].map((letter) => `${prefix}_${letter}`);
  try {
    const first = await show(["aside", "made_up"], "completed");
    const failed = [looksFailed()];
    const alone = await show(["made_up"], "failed");
    failed.push(looksFailed());
    return { failed, legends: [first, alone, await show(many("x"), "completed"), await show([...many("y"), "made_up"], "completed")] };
  } finally { window.fetch = real; }
});
assert.ok(legends[0].color, "the kind is named");
for (const again of [legends[1], legends[3]]) assert.equal(again.color, legends[0].color);
assert.deepEqual(failed, [false, true]);
// Only the kinds on display are named, also after many others.
assert.deepEqual(legends.map(({ named }) => named), [2, 1, 10, 11]);
printLine("made-up reports: ok");

// On a phone, too, nothing moves while the page loads, and the labels of ages in the history have room.
const phone = await (await browser.newContext({ viewport: { width: 390, height: 844 } })).newPage();
await phone.addInitScript(watchShifts);
await phone.addInitScript(watchCanvases);
await phone.goto(url);
await phone.waitForFunction(() => document.body.dataset.number && document.querySelector("#verdict .stuck"));
// uPlot once left labels cut that became longer while it looked for the width of their axis.
assert.equal(await phone.locator("#history-plot .u-over").evaluate((it) => it.offsetLeft), 84);
const onPhone = await phone.evaluate(() => window.shifted);
// Each cell of an operation in flight has its heading, since the head of the table has no room.
const headings = () => phone.evaluate(() => [...document.querySelector("#flight tbody tr").cells].map((cell) => [cell.dataset.label, getComputedStyle(cell, "::before").content !== "none", cell.offsetParent != null]));
assert.deepEqual((await headings()).map(([label]) => label), ["age", "group", "seq", "operation", "bytes", "joined", "state", "missing"]);
assert.ok((await headings()).every(([, named, visible]) => named && visible), `${await headings()}`);
assert.ok(await phone.evaluate(hintFits), "the hint of the filter is cut on a phone");
// More links than fit are announced by a shade, as wide tables are.
assert.ok(await phone.locator("#places").evaluate((it) => it.scrollWidth > it.clientWidth && getComputedStyle(it).backgroundImage !== "none"));
// A narrow bar says how long its operation has been pending, and that it goes on.
await phone.locator("#timeline").scrollIntoViewIfNeeded();
await phone.waitForFunction(() => window.written.has("→") && [...window.written].some((text) => /^#\d+, \d+( min|\.?\d* s)/.test(text)));
// No number in the head of a matrix is cut by the edge of the pane or by the ranks.
const cut = await phone.evaluate(async () => {
  const { drawMatrix } = await import("/assets/matrix.js");
  const group = { name: "tp", desc: "tp", ranks: [0, 1] };
  const seqs = Array.from({ length: 24 }, (_, index) => 990 + index);
  const focus = { group, seqs, ops: seqs.map(() => "all_reduce"), rows: [{ ranks: [0, 1], cells: seqs.map(() => "completed") }] };
  drawMatrix(focus, () => "tp", { findings: [], groups: [{ group, last_seq: 1013 }], in_flight: [] });
  const pane = document.querySelector("#matrix .scroll").getBoundingClientRect();
  const [ranks, ...heads] = [...document.querySelectorAll("#matrix thead th")].map((head) => head.getBoundingClientRect());
  const hidden = heads.filter(({ right }) => right <= ranks.right + 1);
  const whole = heads.filter(({ left, right }) => left >= ranks.right - 1 && right <= pane.right + 1);
  return { all: hidden.length + whole.length === heads.length, some: hidden.length > 0 && whole.length > 4 };
});
assert.deepEqual(cut, { all: true, some: true });
assert.ok(onPhone < 0.1, `the page moved by ${onPhone} on a phone`);
printLine("phone: ok");

assert.ok(refused > 0, "the browser did not log the invalid filter");
assert.deepEqual(complaints, [], "the browser complained");
printLine("no console error: ok");
await browser.close();
