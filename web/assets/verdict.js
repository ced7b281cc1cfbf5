// The top of the page: the verdict in one sentence, then every finding with its evidence.

import { age, ask, byId, clock, make, ranksInWords } from "./format.js";
import { namer } from "./tables.js";

/** The finding whose sentence is the verdict's; undefined if there is none. @param {object} report */
const headline = (report) => report.end && ["ended", "cancelled", "inconclusive"].includes(report.verdict)
  ? undefined : report.findings.find((finding) => finding.severity !== "note");

/** Whether a stuck job does not wait any more: see `Report::has_failed`. @param {object} report */
function hasFailed({ verdict, findings, ranks }) {
  const first = findings.find((finding) => finding.severity === "error" && finding.caused_by == null);
  return verdict === "stuck" && first?.code === "E150" && ranks.some((row) => row.failure != null)
    && ranks.every((row) => first.culprit_ranks.includes(row.rank) || (row.read && row.pending === 0));
}

/** The verdict as every view writes it. @param {object} report */
export function wordOf(report) {
  if (["healthy", "running"].includes(report.verdict) && headline(report)) return "warning";
  return hasFailed(report) ? "failed" : report.verdict;
}

/** Says how many operations are pending while none of them is overdue, as rcomm-top does. @param {object} report */
function pending({ in_flight, ranks }) {
  const count = in_flight.filter((instance) => instance.state !== "failed").length;
  if (count > 0) return `${count.toLocaleString("en")} ${count === 1 ? "operation" : "operations"} in flight, none overdue`;
  // The list of operations may leave out some that a rank still has.
  return ranks.some((row) => row.pending > 0) ? "nothing is overdue" : "no operation in flight, nothing overdue";
}

/** Says that the job may have more ranks than are known; empty if their number is known. @param {object} report */
export const unknownSize = ({ input }) => (input.may_have_more ? "no record states how many ranks the job has" : "");

/** Which attempt is over, as the verdict's sentence says: `over`, `attempt 1 over`, `attempt 2 has begun; attempt 1 over`.
 * @param {object} end */
export function overText({ attempt = 0, later_attempt: later }) {
  if (later != null) return `attempt ${later} has begun; attempt ${attempt} over`;
  return attempt > 0 ? `attempt ${attempt} over` : "over";
}

/** The sentence after the verdict's word. @param {object} report */
export function sentence(report) {
  const first = headline(report);
  if (first) return first.sentence;
  if (report.end) return report.end.sentence;
  const { ranks_read: some, ranks_expected: all } = report.input;
  const read = some < all ? `; ${some} of ${all} ranks read` : "";
  const silence = report.problems.find((problem) => problem.code === "N305");
  const calm = {
    healthy: `nothing recorded is pending or wrong${read}`,
    running: `${pending(report)}${read}`,
    inconclusive: `${silence?.sentence ?? "the records do not decide"}${read}`,
  };
  return calm[report.verdict] ?? report.verdict;
}

/** The verdict's sentence with its age as of `laterMs` after the report. @param {object} report @param {number} laterMs */
function sentenceAfter(report, laterMs) {
  const text = sentence(report), then = headline(report)?.age_ms;
  if (then == null || report.end) return text;
  const place = text.indexOf(` ${age(then)}`);
  return place < 0 ? text : text.slice(0, place + 1) + age(then + laterMs) + text.slice(place + 1 + age(then).length);
}

/** What was last announced to screen readers. */
let announced = "";

/** Draws the verdict, announces a new one to screen readers, and returns what it says.
 * @param {object} report @param {number} laterMs time since the report arrived; 0 unless the job is observed live */
export function drawVerdict(report, laterMs) {
  const text = sentenceAfter(report, laterMs);
  const line = byId("verdict-text").querySelector(".sentence");
  const word = line?.querySelector(".word");
  const said = wordOf(report);
  if (word?.textContent === said) { if (line.lastChild.data !== text) line.lastChild.data = text; } else {
    byId("verdict-text").replaceChildren(make("p", { class: "sentence" }, make("span", { class: `word ${said}` }, said), text));
    document.title = `${said}: rcomm`;
  }
  // Durations are left out: a longer wait alone is not announced again.
  const news = `${said}: ${sentence(report).replace(/[0-9.]+ (ms|s|min|h)\b/g, "")}`;
  if (news !== announced) { announced = news; byId("verdict-said").textContent = `${said}: ${sentence(report)}`; }
  return { word: said, sentence: text };
}

/** For how long and since when ranks wait. The duration goes up to `laterMs` after the report, unless the wait is over.
 * @param {object} report @param {?number} laterMs */
export function since(report, laterMs) {
  const began = headline(report)?.since;
  if (!began) return "";
  if (began.age_ms == null) return `since ${clock(began.at_ns)} UTC`;
  const duration = age(Math.max(0, began.age_ms + (began.until === "now" ? laterMs : 0)));
  if (began.until === "written") return `since ${clock(began.at_ns)} UTC, ${duration} before the files were written`;
  return `for ${duration}, since ${clock(began.at_ns)} UTC`;
}

/** What is left of the records of a job that is over. @param {{report: object, status: object}} picture */
export const remains = ({ report, status }) => (report.end && status.sources.find((source) => source.remains)?.remains) || "";

/** The verdict as text for the clipboard. @param {{report: object, status: object}} picture @param {string} job */
export function asText({ report, status }, job) {
  const first = headline(report);
  const lines = [`${wordOf(report).toUpperCase()} ${sentence(report)}`];
  if (job) lines.push(`job: ${job}`);
  const began = since(report, 0);
  if (began) lines.push(began);
  if (first) lines.push(...doubts(first).map((doubt) => doubt[0].toLowerCase() + doubt.slice(1)));
  if (first?.next) lines.push(`next: ${first.next}`);
  const left = remains({ report, status });
  if (left) lines.push(`records: ${left}`);
  if (unknownSize(report)) lines.push(unknownSize(report));
  for (const finding of report.findings.filter((it) => it !== first && it.severity !== "note").slice(0, 20)) {
    lines.push(`${finding.code} ${finding.name}: ${finding.sentence}`);
  }
  return `${lines.join("\n")}\n`;
}

/** A section that explains a code; its text is requested when it is first opened. @param {string} code */
function explanation(code) {
  const text = make("div", {}, make("p", {}, "…"));
  const details = make("details", { class: "explain" }, make("summary", {}, `What ${code} means`), text);
  details.addEventListener("toggle", async () => {
    if (!details.open || details.dataset.filled) return;
    details.dataset.filled = "true";
    try {
      const { meaning, causes, actions } = await ask("explain", { code });
      const list = (name, items) => [make("p", { class: "note" }, name), make("ul", {}, ...items.map((item) => make("li", {}, item)))];
      text.replaceChildren(make("p", {}, meaning), ...list("Usual causes", causes), ...list("What to do", actions));
    } catch (error) {
      delete details.dataset.filled;
      text.replaceChildren(make("p", {}, error.message));
    }
  });
  return details;
}

/** How sure a finding is: `, 97 % sure`; empty for a note. @param {object} finding */
const sure = ({ severity, confidence }) => (severity === "note" ? "" : `, ${Math.round(confidence * 100)} % sure`);

/** Why a finding may be wrong, and whom the records accuse as well, as in rcomm-fr's report. @param {object} finding */
function doubts({ alternatives = [], culprit_ranks: named, doubts = [] }) {
  const others = alternatives.filter((set) => set.join() !== named.join()).map(ranksInWords).join(", or ");
  const orElse = !others ? [] : named.length === 0 ? [`Or else: the records do not show which side is at fault: ${others}`]
    : [`Or else: the records allow as well: ${others}`];
  return [...orElse, ...doubts.map((doubt) => `Not sure: ${doubt}`)];
}

/** The element of a finding. @param {object} finding @param {boolean} isHeadline whether the headline already shows its sentence
 * @param {(group: object) => string} name names groups */
function article(finding, isHeadline, name) {
  const kind = finding.caused_by == null ? "" : " consequence";
  const element = make("article", { class: finding.severity + kind },
    make("p", { class: "code" }, `${finding.severity} ${finding.code} ${finding.name.replaceAll("_", " ")}${sure(finding)}`));
  if (!isHeadline) element.append(make("p", {}, finding.sentence));
  for (const doubt of doubts(finding)) element.append(make("p", { class: "doubt" }, doubt));
  if (finding.next) element.append(make("p", { class: "next" }, `Next: ${finding.next}`));
  const facts = [
    ...finding.evidence.map((e) =>
      `rank ${e.rank}: ${e.op} #${e.seq}${e.group ? ` on ${name(e.group)}` : ""} ${e.state} (record ${e.record_id})`),
    ...finding.ruled_out.map((text) => `ruled out: ${text}`),
    ...finding.frames.map((f) => `rank ${f.rank} ${f.when.replace("_", " ")}: ${f.name ? `${f.name} at ` : ""}${f.filename}:${f.line}`),
  ];
  const programs = finding.diff ?? [];
  if (facts.length + programs.length > 0) {
    element.append(make("details", {}, make("summary", {}, `Evidence (${facts.length + programs.length})`),
      make("ul", {}, ...facts.map((text) => make("li", {}, text))),
      ...(programs.length > 0 ? [make("pre", {}, programs.join("\n"))] : [])));
  }
  element.append(explanation(finding.code));
  return element;
}

/** Draws the findings that pass the filter, and the problems of the input.
 * @param {object} report @param {(section: string, index: number) => boolean} passes */
export function drawFindings(report, passes) {
  const shown = report.findings.filter((_, index) => passes("findings", index)).slice(0, 50);
  const before = new Map([...document.querySelectorAll("#findings details")].map((details) => [details.dataset.key, details]));
  const name = namer(report);
  const articles = shown.map((finding) => {
    const element = article(finding, finding === headline(report), name);
    for (const details of element.querySelectorAll("details")) {
      const key = `${details.className} ${finding.code} ${finding.culprit_ranks}`;
      const old = before.get(key);
      details.dataset.key = key;
      // A loaded explanation is reused; evidence may have changed.
      if (old?.className === "explain") details.replaceWith(old);
      else details.open = old?.open ?? false;
    }
    return element;
  });
  const notes = report.problems.length;
  const link = make("a", { href: "#problems" }, `${notes} ${notes === 1 ? "note" : "notes"} on the job and its records`);
  const none = make("p", { class: "empty" }, "No findings to show.", ...(notes > 0 ? [" ", link] : []));
  byId("findings").replaceChildren(...(articles.length > 0 ? articles : [none]));
  const problems = report.problems.slice(0, 100).map((problem) => make("li", {}, `${problem.code} ${problem.path}: ${problem.sentence}`));
  byId("problems").replaceChildren(...(problems.length > 0
    ? [make("details", {}, make("summary", {}, `Notes on the job and its records (${report.problems.length})`), make("ul", {}, ...problems))]
    : []));
}
