// The jobs of the node: their list, and a line below the verdict about those that the page does not show.

import { age, ask, byId, fillTable, job as named, make } from "./format.js";

/** Interval between two requests for the list, while the page is visible. */
const ROUND_MS = 5000;

/** The job that this page shows; undefined if it is not in the list. @param {object[]} jobs */
const shownJob = (jobs) => jobs.find((job) => (named ? job.name === named : job.shown));

/** Whether the line counts a job: it has a live process, or is in trouble. */
const counts = (job) => job.alive > 0 || job.in_trouble;

/** The line about the jobs that the page does not show, in parts: `4 other jobs on this node`, `, 1 stuck`, `, 2 over`; empty
 * if there are none. @param {object[]} jobs @returns {(string|Node)[]} */
function others(jobs) {
  const rest = jobs.filter((job) => job !== shownJob(jobs) && counts(job));
  if (rest.length === 0) return [];
  const line = [`${rest.length} other ${rest.length === 1 ? "job" : "jobs"} on this node`];
  // A job without a process hangs no more, whatever its record shows. The list begins with the jobs in trouble.
  const alive = rest.filter((job) => job.alive > 0), worst = alive[0];
  if (worst?.in_trouble) line.push(", ", make("b", { class: worst.word }, `${alive.filter((job) => job.word === worst.word).length} ${worst.word}`));
  if (alive.length < rest.length) line.push(`, ${rest.length - alive.length} over`);
  return line;
}

/** The newest list. @type {object[]} */
let listed = [];
/** The word and the sentence of the verdict on display; null before the first, and while it is not that of the job. */
let own = null;

/** Takes the verdict on display for the job's row. The list has the verdict of the time when it was made, which may be
 * another.
 * @param {?{word: string, sentence: string}} verdict */
export function showOwn(verdict) {
  if (own?.word === verdict?.word && own?.sentence === verdict?.sentence) return;
  own = verdict;
  if (listed.length > 0) drawJobs(listed);
}

/** @param {object[]} jobs */
function drawJobs(jobs) {
  listed = jobs;
  byId("jobs").hidden = byId("jobs-link").hidden = jobs.length === 0;
  const line = others(jobs);
  const link = make("a", { href: "#jobs" }, ...line);
  if (byId("others").textContent !== link.textContent) byId("others").replaceChildren(...(line.length > 0 ? [link] : []));
  fillTable(byId("jobs-table"), ["job", "verdict", "alive", "started", "first line"], jobs.map((job) => {
    const name = job === shownJob(jobs) ? make("b", {}, job.name)
      : make("a", { href: job.shown ? "/" : `/?job=${encodeURIComponent(job.name)}` }, job.name);
    const { word, sentence } = (job === shownJob(jobs) && own) || job;
    const verdict = word ?? (job.alive === 0 ? "gone" : "not judged");
    return [name, make("span", { class: `word ${verdict}` }, verdict), `${job.alive}/${job.ranks}`,
      `${age(Math.max(0, Date.now() - job.created_ns / 1e6))} ago`, sentence];
  }), "No job has rings on this node.");
}

/** Requests and draws the list, now and every ROUND_MS; not while the page is hidden. */
export async function listJobs() {
  try {
    if (!document.hidden) drawJobs((await ask("jobs", { job: null })).jobs);
  } catch {
    // The age of the snapshot shows that the connection is lost; the last list stays.
  }
  setTimeout(listJobs, ROUND_MS);
}
