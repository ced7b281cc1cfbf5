// Checks dashboards against Grafana's schema, by its types for TypeScript. Arguments: folder below which
// @grafana/schema and typescript are installed, folder of the dashboards. Prints what the compiler refuses, and exits
// with 1 if there is anything. Each dashboard becomes a literal, so that the compiler also refuses fields that the
// schema does not have. The schema leaves queries and the options of transformations open.
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const [modules, dashboards] = process.argv.slice(2);
// The types of panels that the dashboards use, each with its name in the schema.
const PANELS = { stat: "Stat", timeseries: "TimeSeries", table: "Table", heatmap: "Heatmap" };
const raw = (type) => `@grafana/schema/dist/esm/raw/composable/${type}/panelcfg/x/${PANELS[type]}PanelCfg_types.gen`;

const lines = [`import type * as schema from "@grafana/schema";`];
for (const type of Object.keys(PANELS)) lines.push(`import type * as ${type} from "${raw(type)}";`);
// What JSON holds of a type: the values of an enumeration, and any part of an object, since the rest has defaults.
lines.push(`
type Json<T> = T extends string ? \`\${T}\` : T extends number | boolean | null | undefined ? T
  : T extends readonly (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]?: Json<T[K]> } : T;
type Of<O, F> = Omit<Json<schema.Panel>, "options" | "fieldConfig"> & {
  options?: Json<O>,
  fieldConfig?: { defaults: Json<Omit<schema.FieldConfig, "custom">> & { custom?: Json<F> }, overrides: Json<schema.FieldConfigSource["overrides"]> },
};
type Row = Json<schema.RowPanel>;
type Whole = Omit<Json<schema.Dashboard>, "panels">;
`);
for (const type of Object.keys(PANELS)) {
  const fields = type === "stat" ? "{}" : `${type}.FieldConfig`;
  lines.push(`type Panel_${type} = Of<${type}.Options, ${fields}>;`);
}
const where = [];
const wrong = [];
const state = (what, type, value) => {
  where[lines.join("\n").split("\n").length] = what;
  lines.push(`{ const _: ${type} = ${JSON.stringify(value)}; }`);
};
for (const file of readdirSync(dashboards).filter((name) => name.endsWith(".json")).sort()) {
  const { panels, ...whole } = JSON.parse(readFileSync(join(dashboards, file), "utf8"));
  state(file, "Whole", whole);
  const each = panels.flatMap((panel) => [panel, ...(panel.panels ?? [])]);
  for (const panel of each) {
    const what = `${file}, panel ${panel.title}`;
    if (panel.type === "row") state(what, "Row", { ...panel, panels: [] });
    else if (panel.type in PANELS) state(what, `Panel_${panel.type}`, panel);
    else wrong.push(`${what}: no schema is known for the type ${panel.type}`);
  }
}

const folder = mkdtempSync(join(modules, "dashboards-"));
try {
  writeFileSync(join(folder, "check.ts"), `${lines.join("\n")}\nexport {};\n`);
  const compiler = join(modules, "node_modules/typescript/bin/tsc");
  const options = ["--noEmit", "--strict", "--skipLibCheck", "--noErrorTruncation", "--module", "nodenext", "--target", "es2022", "--pretty", "false"];
  const { status, stdout } = spawnSync(process.execPath, [compiler, ...options, join(folder, "check.ts")], { encoding: "utf8", cwd: folder });
  for (const line of stdout.split("\n").filter((text) => /error TS/.test(text))) {
    const [, row, text] = /check\.ts\((\d+),\d+\): error (.*)/.exec(line) ?? [null, 0, line];
    wrong.push(`${where[row - 1] ?? `line ${row}`}: ${text}`);
  }
  if (status !== 0 && wrong.length === 0) wrong.push(stdout);
} finally {
  rmSync(folder, { recursive: true });
}
process.stdout.write(wrong.length === 0 ? "valid\n" : `${wrong.join("\n")}\n`);
process.exitCode = wrong.length === 0 ? 0 : 1;
