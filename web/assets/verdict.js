// The top of the page: the verdict in one sentence, then every finding with its evidence.

import { at, label, make } from "./format.js";

/** The finding that the verdict's sentence describes. @param {object} report */
const headline = (report) => report.end && ["ended", "cancelled", "inconclusive"].includes(report.verdict)
  ? undefined : report.findings.find((finding) => finding.severity !== "note");

/** @param {number} n how many operations are in flight while none of them is overdue */
const pending = (n) => n === 1 ? "1 operation is pending and not overdue" : `${n} operations are pending, none of them overdue`;

/** @param {object} report */
export function sentence(report) {
  const first = headline(report);
  if (first) return first.sentence;
  if (report.end) return report.end.sentence;
  const read = `${report.input.ranks_read} of ${report.input.ranks_expected} ranks read`;
  const calm = {
    healthy: `nothing is wrong, nothing is pending; ${read}`,
    running: `${pending(report.in_flight.length)}; ${read}`,
    inconclusive: `no verdict from these records; ${read}`,
  };
  return calm[report.verdict] ?? report.verdict;
}

/** @param {object} report */
export function drawVerdict(report) {
  at("verdict").replaceChildren(make("p", { class: "sentence" },
    make("span", { class: `word ${report.verdict}` }, report.verdict), sentence(report)));
  document.title = `${report.verdict}: rcomm`;
}

/** @param {object} finding @param {boolean} isHeadline whether the headline already shows its sentence */
function article(finding, isHeadline) {
  const kind = finding.caused_by == null ? "" : " consequence";
  const element = make("article", { class: finding.severity + kind },
    make("p", { class: "code" }, `${finding.severity} ${finding.code} ${finding.name.replaceAll("_", " ")}`));
  if (!isHeadline) element.append(make("p", {}, finding.sentence));
  if (finding.next) element.append(make("p", { class: "next" }, `Next: ${finding.next}`));
  const facts = [
    ...finding.evidence.map((e) =>
      `rank ${e.rank}: ${e.op} #${e.seq}${e.group ? ` on ${label(e.group)}` : ""} ${e.state} (record ${e.record_id})`),
    ...finding.ruled_out.map((text) => `ruled out: ${text}`),
    ...finding.frames.map((f) => `rank ${f.rank} ${f.when}: ${f.name} at ${f.filename}:${f.line}`),
  ];
  const programs = finding.diff ?? [];
  if (facts.length + programs.length > 0) {
    element.append(make("details", {}, make("summary", {}, `Evidence (${facts.length + programs.length})`),
      make("ul", {}, ...facts.map((text) => make("li", {}, text))),
      ...(programs.length > 0 ? [make("pre", {}, programs.join("\n"))] : [])));
  }
  return element;
}

/** @param {object} report @param {(section: string, place: number) => boolean} passes */
export function drawFindings(report, passes) {
  const shown = report.findings.filter((_, place) => passes("findings", place)).slice(0, 50);
  const open = new Set([...document.querySelectorAll("#findings details[open]")].map((it) => it.dataset.key));
  const articles = shown.map((finding) => {
    const element = article(finding, finding === headline(report));
    const details = element.querySelector("details");
    if (details) {
      details.dataset.key = `${finding.code} ${finding.culprit_ranks}`;
      details.open = open.has(details.dataset.key);
    }
    return element;
  });
  at("findings").replaceChildren(...articles);
  const problems = report.problems.slice(0, 100).map((it) => make("li", {}, `${it.code} ${it.path}: ${it.sentence}`));
  at("problems").replaceChildren(...(problems.length > 0
    ? [make("details", {}, make("summary", {}, `Problems with the input (${report.problems.length})`), make("ul", {}, ...problems))]
    : []));
}
