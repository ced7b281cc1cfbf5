// The page: one event stream in, plain elements out. Text is only ever set as text, never as markup.

/** @typedef {{status: object, report: object}} Message */

/** Makes an element. @param {string} name @param {object} [attributes] @param {...(Node|string)} children */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** @param {string} id */
const at = (id) => document.getElementById(id);

/** 0-3, 7, 12-15 @param {number[]} ranks @param {number} [most] */
export function rankSet(ranks, most = 6) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const words = runs.slice(0, most).map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`));
  return words.join(", ") + (runs.length > most ? ", …" : "");
}

/** @param {?number} ms */
function age(ms) {
  if (ms == null) return "";
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 120e3) return `${(ms / 1e3).toFixed(ms < 10e3 ? 1 : 0)} s`;
  return `${Math.floor(ms / 60e3)} min`;
}

/** @param {number} n */
function size(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n < 10 && unit > 0 ? n.toFixed(1) : n.toFixed(0)} ${units[unit]}`;
}

/** @param {string[]} heads @param {(string|number)[][]} rows @param {string} empty */
function table(heads, rows, empty) {
  if (rows.length === 0) return make("p", { class: "empty" }, empty);
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) =>
    make("td", typeof cell === "number" ? { class: "number" } : {}, String(cell)))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function verdict(report) {
  const first = report.findings.find((finding) => finding.severity !== "note");
  const calm = {
    healthy: `nothing is wrong with ${report.input.ranks_read} ranks`,
    running: `${report.in_flight.length} operations are pending, none of them overdue`,
    inconclusive: "the records do not tell",
  };
  const sentence = first ? first.sentence : calm[report.verdict] ?? report.verdict;
  at("verdict").replaceChildren(make("p", { class: "sentence" },
    make("span", { class: `word ${report.verdict}` }, report.verdict), sentence));
}

function findings(report) {
  at("findings").replaceChildren(...report.findings.map((finding) => {
    const kind = finding.caused_by == null ? "" : " consequence";
    const article = make("article", { class: finding.severity + kind },
      make("p", { class: "code" }, `${finding.code} ${finding.name.replaceAll("_", " ")}`),
      make("p", {}, finding.sentence));
    if (finding.next) article.append(make("p", { class: "next" }, `Next: ${finding.next}`));
    const facts = [
      ...finding.evidence.map((e) => `rank ${e.rank}: ${e.op} #${e.seq} ${e.state} (record ${e.record_id})`),
      ...finding.ruled_out.map((text) => `ruled out: ${text}`),
      ...finding.frames.map((f) => `rank ${f.rank} ${f.when}: ${f.name} at ${f.filename}:${f.line}`),
    ];
    if (facts.length > 0) {
      article.append(make("details", {}, make("summary", {}, `Evidence (${facts.length})`),
        make("ul", {}, ...facts.map((text) => make("li", {}, text)))));
    }
    return article;
  }));
}

function tables({ status, report }) {
  at("flight").replaceChildren(table(
    ["age", "group", "seq", "operation", "bytes", "joined", "state", "missing"],
    report.in_flight.slice(0, 200).map((i) => [
      age(i.age_ms), i.group.desc || i.group.name, i.seq, i.op, size(i.bytes),
      `${i.joined.length}/${i.group.ranks.length}`, i.state.replace("_", "-"), rankSet(i.missing),
    ]), "Nothing is pending."));
  at("groups").replaceChildren(table(
    ["group", "name", "ranks", "read", "newest", "behind", "in flight", "oldest", "lag p50", "lag p99", "backend"],
    report.groups.slice(0, 500).map((g) => [
      g.group.desc, g.group.name, g.group.ranks.length, g.ranks_read, g.last_seq ?? "", (g.last_seq ?? 0) - (g.min_seq ?? 0),
      g.in_flight, age(g.oldest_ms), age(g.lag_p50_ms), age(g.lag_p99_ms), g.backend,
    ]), "No group was recorded."));
  at("sources").replaceChildren(table(
    ["source", "ranks", "last answer", "error"],
    status.sources.map((s) => [s.name, `${s.answered}/${s.known}`, s.silent_for_ms == null ? "never" : `${age(s.silent_for_ms)} ago`, s.error ?? ""]),
    "No source."));
}

function ranks(report) {
  const roots = new Set(report.findings.filter((f) => f.caused_by == null && f.severity === "error").flatMap((f) => f.culprit_ranks));
  const late = new Set(report.findings.filter((f) => f.code === "W220").flatMap((f) => f.culprit_ranks));
  const waiting = new Set(report.waits.map((wait) => wait.rank));
  const cells = report.ranks.map((rank) => {
    const [kind, glyph, word] = roots.has(rank.rank) ? ["root", "!", "at fault"]
      : !rank.read ? ["unread", "?", "no record"]
      : waiting.has(rank.rank) ? ["waits", "w", "waits"]
      : late.has(rank.rank) ? ["late", "~", "late"] : ["ok", "·", "ok"];
    const title = `rank ${rank.rank} ${rank.host}: ${word}; ${rank.pending} pending; last call ${rank.last_call ?? "unknown"}`;
    return make("span", { class: kind, title, "aria-label": title }, glyph);
  });
  at("ranks").replaceChildren(make("div", { class: "cells" }, ...cells),
    make("p", { class: "empty" }, "· ok   w waits   ! at fault   ~ late   ? no record"));
}

let judged = 0;
let connected = false;

/** @param {Message} message */
function show(message) {
  judged = message.status.judged_at_ns / 1e6;
  at("job").textContent = message.status.job;
  verdict(message.report);
  findings(message.report);
  tables(message);
  ranks(message.report);
}

function tell() {
  const line = at("age");
  const old = Date.now() - judged;
  line.textContent = !connected ? "connection lost, trying again" : judged ? `judged ${age(Math.max(0, old))} ago` : "";
  line.classList.toggle("stale", !connected);
}

const stream = new EventSource("/api/v1/events");
stream.addEventListener("open", () => { connected = true; tell(); });
stream.addEventListener("error", () => { connected = false; tell(); });
stream.addEventListener("report", (event) => { show(JSON.parse(event.data)); tell(); });
setInterval(tell, 1000);
