// Reducers: the times of the newest step of each reducer on each rank.

import { ask, byId, fillTable, percent, size } from "./format.js";

/** Maximum number of rows. Of more, those with the longest steps are shown. */
const MAX_ROWS = 200;
let asking = false;

/** @param {number} ms */
const millis = (ms) => (ms < 10 ? ms.toFixed(2) : ms.toFixed(1));

/** The bucket of a step whose communication took longest, as text. @param {object} row */
function slowest({ buckets, bucket_count: count }) {
  if (buckets.length === 0) return "";
  const bucket = buckets.reduce((a, b) => (b.communication_ms > a.communication_ms ? b : a));
  return `${bucket.index + 1} of ${count}: ${size(bucket.bytes)} in ${millis(bucket.communication_ms)} ms`;
}

/** Requests and draws the newest steps; hides the section for a past snapshot, of which no steps are kept.
 * @param {{upload: ?string, past: boolean}} query */
export async function refreshReducers({ upload, past }) {
  if (past) { byId("reducers-section").hidden = true; return; }
  if (asking) return;
  asking = true;
  try {
    const { reducers } = await ask("reducers", { upload });
    byId("reducers-section").hidden = reducers.length === 0;
    const shown = reducers.length > MAX_ROWS ? [...reducers].sort((a, b) => b.step_ms - a.step_ms).slice(0, MAX_ROWS) : reducers;
    fillTable(byId("reducers"),
      ["rank", "host", "group", "step number", "step ms", "forward", "backward", "communication", "exposed", "share exposed", "slowest bucket"],
      shown.map((row) => [row.rank, row.host, row.group, row.step, millis(row.step_ms), millis(row.forward_ms), millis(row.backward_ms),
        millis(row.communication_ms), millis(row.exposed_ms), row.step_ms > 0 ? percent(row.exposed_ms / row.step_ms) : "", slowest(row)]),
      "No step has ended.", reducers.length - shown.length);
  } catch {
    // The age of the snapshot shows that the connection is lost; the last table stays.
  } finally {
    asking = false;
  }
}
