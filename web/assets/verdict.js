// The top of the page: the verdict in one sentence, then every finding with its evidence.

import { age, ask, byId, clock, make, ranksInWords, timeInSentence } from "./format.js";
import { namer } from "./tables.js";

/** The finding whose sentence is the verdict's; undefined if there is none. @param {{report: object, status: object}} picture */
const headline = ({ report, status }) => report.findings[status.lead];

/** Says that the job may have more ranks than are known; empty if their number is known. @param {object} report */
export const unknownSize = ({ input }) => (input.may_have_more ? "no record states how many ranks the job has" : "");

/** Which attempt is over, as the verdict's sentence says: `over`, `attempt 1 over`, `attempt 2 has begun; attempt 1 over`.
 * @param {object} end */
export function overText({ attempt = 0, later_attempt: later }) {
  if (later != null) return `attempt ${later} has begun; attempt ${attempt} over`;
  return attempt > 0 ? `attempt ${attempt} over` : "over";
}

/** The verdict's sentence with its age as of `laterMs` after the report.
 * @param {{report: object, status: object}} picture @param {number} laterMs */
export function sentenceAfter(picture, laterMs) {
  const { sentence } = picture.status, then = headline(picture)?.age_ms;
  if (then == null || picture.report.end) return sentence;
  // The same digits within another number or word are not the age.
  const place = new RegExp(`(?<![\\p{L}\\p{N}.])${timeInSentence(then).replaceAll(".", "\\.")}(?![\\p{L}\\p{N}])`, "u");
  return sentence.replace(place, timeInSentence(then + laterMs));
}

/** What was last announced to screen readers. */
let announced = "";

/** Draws the verdict, announces a new one to screen readers, and returns what it says.
 * @param {{report: object, status: object}} picture
 * @param {number} laterMs time since the report arrived; 0 unless the job is observed live */
export function drawVerdict(picture, laterMs) {
  const text = sentenceAfter(picture, laterMs);
  const line = byId("verdict-text").querySelector(".sentence");
  const word = line?.querySelector(".word");
  const { word: said, sentence } = picture.status;
  if (word?.textContent === said) { if (line.lastChild.data !== text) line.lastChild.data = text; } else {
    byId("verdict-text").replaceChildren(make("p", { class: "sentence" }, make("span", { class: `word ${said}` }, said), text));
    document.title = `${said}: rcomm`;
  }
  // Durations are left out: a longer wait alone is not announced again.
  const news = `${said}: ${sentence.replace(/[0-9.]+ (ms|s|min|h)\b/g, "")}`;
  if (news !== announced) { announced = news; byId("verdict-said").textContent = `${said}: ${sentence}`; }
  return { word: said, sentence: text };
}

/** For how long and since when ranks wait. The duration goes up to `laterMs` after the report, unless the wait is over.
 * @param {{report: object, status: object}} picture @param {?number} laterMs */
export function since(picture, laterMs) {
  const began = headline(picture)?.since;
  if (!began) return "";
  if (began.age_ms == null) return `since ${clock(began.at_ns)} UTC`;
  const duration = age(Math.max(0, began.age_ms + (began.until === "now" ? laterMs : 0)));
  if (began.until === "written") return `since ${clock(began.at_ns)} UTC, ${duration} before the files were written`;
  return `for ${duration}, since ${clock(began.at_ns)} UTC`;
}

/** What is left of the records of a job that is over. @param {{report: object, status: object}} picture */
export const remains = ({ report, status }) => (report.end && status.sources.find((source) => source.remains)?.remains) || "";

/** For which rank a command is, and for which host. @param {{rank: number, host: string}} look */
const atRank = ({ rank, host }) => `at rank ${rank}${host ? `, on ${host}` : ""}`;

/** The verdict as text for the clipboard. @param {{report: object, status: object}} picture @param {string} job */
export function asText(picture, job) {
  const { report, status } = picture, first = headline(picture);
  const lines = [`${status.word.toUpperCase()} ${status.sentence}`];
  if (job) lines.push(`job: ${job}`);
  const began = since(picture, 0);
  if (began) lines.push(began);
  if (first) lines.push(...doubts(first).map((doubt) => doubt[0].toLowerCase() + doubt.slice(1)));
  if (first?.next) lines.push(`next: ${first.next}`);
  if (status.look) lines.push(`look ${atRank(status.look)}: ${status.look.command}`);
  const left = remains(picture);
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
      text.replaceChildren(make("p", {}, meaning), ...list("Where it usually comes from", causes), ...list("What to do", actions));
    } catch (error) {
      delete details.dataset.filled;
      text.replaceChildren(make("p", {}, error.message));
    }
  });
  return details;
}

/** How sure a finding is: `, 97 % sure`; empty for a note. @param {object} finding */
const confidenceText = ({ severity, confidence }) => (severity === "note" ? "" : `, ${Math.round(confidence * 100)} % sure`);

/** Why a finding may be wrong, and whom the records accuse as well, as in rcomm-fr's report. @param {object} finding */
function doubts({ alternatives = [], culprit_ranks: named, doubts = [] }) {
  const others = alternatives.filter((set) => set.join() !== named.join()).map(ranksInWords).join(", or ");
  const orElse = !others ? [] : named.length === 0 ? [`Or else: the records do not show which side is at fault: ${others}`]
    : [`Or else: the records allow as well: ${others}`];
  return [...orElse, ...doubts.map((doubt) => `Not sure: ${doubt}`)];
}

/** The element of a finding. @param {object} finding @param {boolean} isHeadline whether the headline already shows its sentence
 * @param {(group: object) => string} name names groups
 * @param {?object} look the command that looks further at a rank of the finding, as in a snapshot's status
 * @param {(text: string) => void} copy puts a text on the clipboard */
function article(finding, isHeadline, name, look, copy) {
  const kind = finding.caused_by == null ? "" : " consequence";
  const element = make("article", { class: finding.severity + kind },
    make("p", { class: "code" }, `${finding.severity} ${finding.code} ${finding.name.replaceAll("_", " ")}${confidenceText(finding)}`));
  if (!isHeadline) element.append(make("p", {}, finding.sentence));
  for (const doubt of doubts(finding)) element.append(make("p", { class: "doubt" }, doubt));
  if (finding.next) element.append(make("p", { class: "next" }, `Next: ${finding.next}`));
  if (look) {
    const button = make("button", { onclick: () => copy(look.command), title: "copy the command" }, "Copy");
    element.append(make("p", { class: "look" }, `Look ${atRank(look)}: `, make("code", {}, look.command), " ", button));
  }
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

/** Maximum number of notes that take the place of findings. */
const MAX_NOTES = 2;

/** What takes the place of findings if there are none: the first notes, and a link to the others. @param {object} report */
function calm({ problems }) {
  const link = make("a", { href: "#problems" }, `All ${problems.length} notes on the job and its records`);
  return [
    make("p", { class: "empty" }, "No findings to show.", ...(problems.length > MAX_NOTES ? [" ", link] : [])),
    ...problems.slice(0, MAX_NOTES).map(({ code, sentence }) => make("article", { class: "note" },
      make("p", { class: "code" }, `note ${code}`), make("p", {}, sentence))),
  ];
}

/** Draws the findings that pass the filter, and the problems of the input.
 * @param {{report: object, status: object}} picture @param {(section: string, index: number) => boolean} passes
 * @param {(text: string) => void} copy puts a text on the clipboard */
export function drawFindings(picture, passes, copy) {
  const { report, status: { look } } = picture;
  const shown = report.findings.filter((_, index) => passes("findings", index)).slice(0, 50);
  const before = new Map([...document.querySelectorAll("#findings details")].map((details) => [details.dataset.key, details]));
  const name = namer(report);
  const about = look && shown.find((finding) => [...finding.culprit_ranks, ...finding.cycle ?? []].includes(look.rank));
  const articles = shown.map((finding) => {
    const element = article(finding, finding === headline(picture), name, finding === about ? look : null, copy);
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
  byId("findings").replaceChildren(...(articles.length > 0 ? articles : calm(report)));
  const problems = report.problems.slice(0, 100).map((problem) => make("li", {}, `${problem.code} ${problem.path}: ${problem.sentence}`));
  byId("problems").replaceChildren(...(problems.length > 0
    ? [make("details", {}, make("summary", {}, `Notes on the job and its records (${report.problems.length})`), make("ul", {}, ...problems))]
    : []));
}
