// Uploads dumps that are dropped onto the page or chosen; the server returns the address of the report.

import { byId } from "./format.js";

/** Every file below an entry, with its path. */
async function files(entry, path = "") {
  if (entry.isFile) {
    const file = await new Promise((take, fail) => entry.file(take, fail));
    return [[file, path + entry.name]];
  }
  const reader = entry.createReader();
  const found = [];
  // A reader returns some entries at a time, and an empty list at the end.
  for (;;) {
    const children = await new Promise((take, fail) => reader.readEntries(take, fail));
    if (children.length === 0) return found;
    for (const child of children) found.push(...await files(child, `${path}${entry.name}/`));
  }
}

/** Uploads files, each with its path, and opens the address of their report. @param {[File, string][]} all */
async function send(all) {
  const note = byId("note");
  if (all.length === 0) { note.textContent = "There was no file to upload."; return; }
  note.textContent = `Sending ${all.length} ${all.length === 1 ? "file" : "files"}…`;
  const form = new FormData();
  for (const [file, path] of all) {
    // The server judges by when a dump was written; a form does not carry the time of a file.
    form.append("written_ms", String(Math.max(0, Math.trunc(file.lastModified))));
    form.append("dump", file, path);
  }
  try {
    const answer = await fetch("/api/v1/uploads", { method: "POST", body: form });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error);
    location.assign(body.url);
  } catch (error) {
    note.textContent = `The upload failed: ${error.message}`;
  }
}

/** Makes the page accept dropped and chosen files. */
export function prepareUpload() {
  const over = (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  };
  addEventListener("dragenter", over);
  addEventListener("dragover", over);
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  addEventListener("drop", async (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const found = entries.length > 0
      ? (await Promise.all(entries.map((entry) => files(entry)))).flat()
      : [...event.dataTransfer.files].map((file) => [file, file.name]);
    await send(found);
  });
  for (const id of ["choose-files", "choose-folder"]) {
    byId(id).addEventListener("change", (event) => send([...event.target.files].map((file) => [file, file.webkitRelativePath || file.name])));
  }
}
