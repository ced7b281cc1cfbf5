// Formats values and creates elements. Text is set as text, never as markup.

/** Makes an element. @param {string} name @param {object} [attributes] @param {...(Node|string)} children */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") element.addEventListener("click", value);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Makes an SVG element. @param {string} name @param {object} [attributes] @param {...(Node|string)} children */
export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The element with this id. @param {string} id */
export const byId = (id) => document.getElementById(id);

/** Resolves a color of the style sheet for a canvas, since it depends on the theme. */
export function color(name) {
  const probe = byId("probe");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** Formats ranks as the reports and rcomm-top do: `0-3,7,12-15`, at most `most` runs, then a count of the rest.
 * @param {number[]} ranks @param {number} [most] */
export function rankSet(ranks, most = 6) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const words = runs.slice(0, most).map(([from, to]) => (from === to ? `${from}` : `${from}${to === from + 1 ? "," : "-"}${to}`));
  const rest = runs.slice(most).reduce((count, [from, to]) => count + to - from + 1, 0);
  return words.join(",") + (rest > 0 ? `,+${rest}` : "");
}

/** Formats ranks with the noun: `rank 3`, `ranks 0-2`. @param {number[]} ranks */
export const ranksInWords = (ranks) => `${ranks.length === 1 ? "rank" : "ranks"} ${rankSet(ranks)}`;

/** Writes a number with this many digits, none or one, after the point; one in the middle of two gets the even digit, as
 * in reports. @param {number} value @param {number} digits */
function fixed(value, digits) {
  const scaled = value * 10 ** digits;
  // Only a multiple of 1/4, or of 1/2 without digits, is exactly in the middle.
  const middle = scaled % 1 === 0.5 && (value * (digits ? 4 : 2)) % 1 === 0;
  return (middle ? (2 * Math.round(scaled / 2)) / 10 ** digits : value).toFixed(digits);
}

/** The time of day in UTC: `14:03:27`. @param {number} ns since the epoch */
export const clock = (ns) => new Date(ns / 1e6).toISOString().slice(11, 19);

/** Formats a duration as reports do: `4.2 s`, `2 min 5 s`, `1 h 30 min`; empty if it is unknown. @param {?number} ms */
export function age(ms) {
  if (ms == null || Number.isNaN(ms)) return "";
  if (ms < 0) return `-${age(-ms)}`;
  // The bounds are those from which a number would be rounded to one that has the next form.
  if (ms < 9.95) return `${fixed(ms, 1)} ms`;
  if (ms < 999.5) return `${fixed(ms, 0)} ms`;
  if (ms < 119.5e3) return `${fixed(ms / 1e3, ms < 9.95e3 ? 1 : 0)} s`;
  const seconds = Math.round(ms / 1e3);
  const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  if (hours > 0) return minutes > 0 ? `${hours} h ${minutes} min` : `${hours} h`;
  return rest > 0 ? `${minutes} min ${rest} s` : `${minutes} min`;
}

/** Formats the lag of a rank or a group, which is often less than 0.1 ms: then with two digits. @param {?number} ms */
export const lag = (ms) => (ms != null && ms >= 0 && ms < 0.095 ? `${ms.toFixed(2)} ms` : age(ms));

/** Formats a duration as the sentences of findings do: as `age`, without digits after the point of milliseconds.
 * @param {number} ms */
export const timeInSentence = (ms) => (ms < 9.95 ? `${fixed(ms, 0)} ms` : age(ms));

/** Formats a number of bytes as reports do: `512 B`, `64 KiB`, `1.5 MiB`. @param {number} bytes */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  // The bound is that from which a number would be rounded to one that has the next unit.
  while (bytes >= (unit ? 1023.95 : 1024) && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${fixed(bytes, 1).replace(/\.0$/, "")} ${units[unit]}`;
}

/** Name of a group as in the report's sentences; several groups may have the same one. @param {{name: string, desc: string}} group */
export function label({ name, desc }) {
  if (!desc || desc === "undefined" || name.startsWith(desc)) return name;
  const [described] = desc.split(" (");
  // A name that the library made of a hash says nothing to a reader.
  const alone = described === "default_pg" || !name || described === name || /^([0-9a-f]{32}|nccl-[0-9a-f]{16})/i.test(name);
  return alone ? desc : `${desc}/${name}`;
}

/** Whether two groups are the same one. @param {object} one @param {object} other */
export const sameGroup = (one, other) => one.name === other.name && one.ranks.join() === other.ranks.join();

/** One name for several groups, like `tp_0..7`. @param {string[]} labels */
export function labels(labels) {
  if (labels.every((label) => label === labels[0])) return labels[0];
  const parts = labels.map((label) => /^(.*?)(\d+)$/.exec(label));
  if (parts.some((part) => !part || part[1] !== parts[0][1])) return `${labels[0]} +${labels.length - 1}`;
  const numbers = [...new Set(parts.map((part) => Number(part[2])))].sort((a, b) => a - b);
  return parts[0][1] + rankSet(numbers, 3).replaceAll("-", "..");
}

/** Formats a share from 0 to 1 as a percentage. @param {number} share */
export const percent = (share) => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;

/** Shows a table in `element`; numbers are right-aligned, and cells may be elements. Each cell knows its heading, which is
 * shown in the cell on a phone. Only cells whose content has changed are touched: the scroll position is kept, and an
 * unchanged table causes no layout.
 * @param {HTMLElement} element @param {string[]} heads @param {(string|number|Node)[][]} rows
 * @param {string} empty text for a table without rows @param {number} [more] number of omitted rows */
export function fillTable(element, heads, rows, empty, more = 0) {
  if (rows.length === 0) { element.replaceChildren(make("p", { class: "empty" }, empty)); return; }
  const kinds = heads.map((_, i) => (rows.some((row) => typeof row[i] === "number") ? "number" : ""));
  let body = element.querySelector(":scope > .scroll > table > tbody");
  if (!body) {
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
    body = make("tbody");
    element.replaceChildren(make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), body)),
      make("p", { class: "empty" }));
  }
  [...body.parentElement.tHead.rows[0].cells].forEach((cell, i) => {
    if (cell.className !== kinds[i]) cell.className = kinds[i];
    if (cell.textContent !== heads[i]) cell.textContent = heads[i];
  });
  const lines = [...body.rows];
  for (const line of lines.splice(rows.length)) line.remove();
  rows.forEach((row, i) => {
    const line = lines[i] ?? body.insertRow();
    const cells = line.cells;
    row.forEach((value, j) => {
      const cell = cells[j] ?? line.insertCell();
      if (cell.className !== kinds[j]) cell.className = kinds[j];
      if (cell.dataset.label !== heads[j]) cell.dataset.label = heads[j];
      if (!(value instanceof Node)) {
        const text = String(value);
        if (cell.textContent !== text) cell.textContent = text;
      } else if (!cell.firstChild?.isEqualNode(value)) cell.replaceChildren(value);
    });
  });
  const rest = more > 0 ? `and ${more} more: narrow the filter` : "";
  if (element.lastChild.textContent !== rest) element.lastChild.textContent = rest;
}

/** The job that the page's address names; null if the page shows the server's own job or an upload. */
export const job = location.pathname.startsWith("/reports/") ? null : new URLSearchParams(location.search).get("job");

/** Returns the address of an API path, with the shown job and `query` as its query string.
 * @param {string} path @param {object} [query] */
export function address(path, query = {}) {
  const parameters = Object.entries({ job, ...query }).filter(([, value]) => value != null && value !== "");
  return `/api/v1/${path}${parameters.length ? `?${new URLSearchParams(parameters)}` : ""}`;
}

/** Requests an API path from the server; returns the answer, parsed. Throws the server's error, and if there is no answer
 * or it is not JSON. @param {string} path @param {object} [query] */
export async function ask(path, query = {}) {
  const answer = await fetch(address(path, query));
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `HTTP ${answer.status}`);
  return body;
}
