// The jobs of the node: a line below the headline about the others, and the list.

import { age, ask, at, fillTable, job as named, make } from "./format.js";

/** How often the list is asked for, while the page is seen. */
const ROUND_MS = 5000;

/** @param {{name: string}[]} jobs the one that this page shows, if it is among them */
const own = (jobs) => jobs.find((job) => (named ? job.name === named : job.shown));

/** A job that lives, or is in trouble. */
const counts = (job) => job.alive > 0 || job.in_trouble;

/** `2 other jobs on this node, 1 stuck` @param {object[]} jobs */
function others(jobs) {
  const rest = jobs.filter((job) => job !== own(jobs) && counts(job));
  if (rest.length === 0) return "";
  const line = `${rest.length} other ${rest.length === 1 ? "job" : "jobs"} on this node`;
  // Trouble comes first.
  const { in_trouble: trouble, verdict } = rest[0];
  return trouble ? `${line}, ${rest.filter((job) => job.verdict === verdict).length} ${verdict}` : line;
}

/** @param {object[]} jobs */
function drawJobs(jobs) {
  at("jobs").hidden = jobs.length === 0;
  const line = others(jobs);
  if (at("others").textContent !== line) at("others").replaceChildren(make("a", { href: "#jobs" }, line));
  fillTable(at("jobs-table"), ["job", "verdict", "alive", "started", "first line"], jobs.map((job) => {
    const name = job === own(jobs) ? make("b", {}, job.name)
      : make("a", { href: job.shown ? "/" : `/?job=${encodeURIComponent(job.name)}` }, job.name);
    const verdict = job.verdict ?? (job.alive === 0 ? "gone" : "not judged");
    return [name, make("span", { class: `word ${verdict}` }, verdict), `${job.alive}/${job.ranks}`,
      `${age(Math.max(0, Date.now() - job.created_ns / 1e6))} ago`, job.sentence];
  }), "no job has rings on this node");
}

/** Lists the jobs, again and again. */
export async function listJobs() {
  try {
    if (!document.hidden) drawJobs((await ask("jobs", { job: null })).jobs);
  } catch {
    // The age of the picture shows that the connection is lost; the last list stays.
  }
  setTimeout(listJobs, ROUND_MS);
}
