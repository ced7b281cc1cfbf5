// Validates a ServiceMonitor against the schema of Prometheus Operator's resource. Arguments: folder below which
// @kubernetes-models/prometheus-operator and yaml are installed, file. Prints the errors, and exits with 1 if there are
// any.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, file] = process.argv.slice(2);
const find = createRequire(join(modules, "x.js"));
const models = join(modules, "node_modules/@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/index.js");
const { ServiceMonitor } = await import(pathToFileURL(models));
const { parse } = find("yaml");
const wrong = [];

// A schema reads every field that it defines, so a field that was never read is unknown.
const unread = new Set();
const watched = (value, path) => {
  if (value === null || typeof value !== "object") return value;
  const inner = Array.isArray(value) ? [] : {};
  for (const [key, field] of Object.entries(value)) {
    inner[key] = watched(field, `${path}.${key}`);
    if (!Array.isArray(value)) unread.add(`${path}.${key}`);
  }
  return new Proxy(inner, { get(fields, key) {
    if (typeof key === "string") unread.delete(`${path}.${key}`);
    return fields[key];
  } });
};

const monitor = new ServiceMonitor();
const manifest = parse(readFileSync(file, "utf8"));
Object.defineProperties(monitor, Object.fromEntries(Object.entries(manifest).map(([key, value]) =>
  [key, { value: watched(value, key), enumerable: true, configurable: true }])));
try {
  monitor.validate();
} catch (error) {
  wrong.push(error.message);
}
for (const path of unread) wrong.push(`${path} is no field of the resource`);
process.stdout.write(wrong.length === 0 ? "valid\n" : `${wrong.join("\n")}\n`);
process.exitCode = wrong.length === 0 ? 0 : 1;
